"""What any finished output must be for its source, read and computed without a line of kizami's code."""

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from make_cases import E4M3, Tensor, bf16, bf16_to_f32, read_header

INDEX = "model.safetensors.index.json"
REPORT = "kizami-report.jsonl"
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
DTYPES = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1", "U8": "u1"}
BIG = 1 << 24  # weights of this size are left to the checks of their own case


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it: NaN and Infinity are not numbers."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder`, links as such, with its SHA-256; files with more than 16 MiB by size and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            status = path.stat()
            large = status.st_size > BIG
            found[name] = f"{status.st_size} {status.st_mtime_ns}" if large else sha256(path.read_bytes())
        else:
            found[name] = "folder"
    return found


class Folder:
    """A checkpoint's tensors, source or output, through its index where it has one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config: dict[str, Any] = parse_json((root / "config.json").read_bytes())
        self.file_of: dict[str, str] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.metadata: dict[str, Any] = {}
        self.begin: dict[str, int] = {}
        for file in self.files:
            header = read_header(root / file)
            with open(root / file, "rb") as stream:
                self.begin[file] = 8 + int.from_bytes(stream.read(8), "little")
            self.metadata[file] = header.pop("__metadata__", None)
            for name, entry in header.items():
                assert name not in self.entries, f"{name} is in two files"
                self.entries[name], self.file_of[name] = entry, file

    @cached_property
    def index(self) -> dict[str, Any] | None:
        path = self.root / INDEX
        return parse_json(path.read_bytes()) if path.exists() else None

    @property
    def files(self) -> list[str]:
        return ["model.safetensors"] if self.index is None else sorted(set(self.index["weight_map"].values()))

    def dtype(self, name: str) -> str:
        return str(self.entries[name]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def tensor(self, name: str) -> Tensor:
        begin, end = self.entries[name]["data_offsets"]
        with open(self.root / self.file_of[name], "rb") as file:
            file.seek(self.begin[self.file_of[name]] + begin)
            return Tensor(self.dtype(name), self.shape(name), file.read(end - begin))

    def array(self, name: str) -> np.ndarray:
        """The stored numbers; BF16 as its bits."""
        return np.frombuffer(self.tensor(name).data, DTYPES[self.dtype(name)]).reshape(self.shape(name))

    @property
    def packed(self) -> list[str]:
        return [name.removesuffix(PACKED) for name in self.entries if name.endswith(PACKED)]

    @cached_property
    def quantization(self) -> dict[str, Any]:
        return dict(self.config.get("quantization_config") or self.config["text_config"]["quantization_config"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [parse_json(line) for line in (self.root / REPORT).read_text().splitlines()]

    @cached_property
    def report(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.rows}


# ---------------------------------------------------------------- the oracle


def scale_names(folder: Folder) -> dict[str, str]:
    """Each FP8 weight's scale tensor."""
    found = {}
    for name in folder.entries:
        if name.endswith(".weight") and folder.dtype(name) == "F8_E4M3":
            module = name.removesuffix(".weight")
            [found[name]] = [module + suffix for suffix in SCALES if module + suffix in folder.entries]
    return found


def scale_values(folder: Folder, name: str) -> np.ndarray:
    raw = folder.array(name)
    match folder.dtype(name):
        case "F8_E8M0" | "U8":
            return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
        case "BF16":
            return bf16_to_f32(raw)
        case "F16":
            return raw.astype(np.float32)
        case "F32":
            return raw
    raise AssertionError(f"{name}: no rule for a scale of {folder.dtype(name)}")


def decoded(folder: Folder, name: str, scale: str | None) -> np.ndarray:
    """W in float32: the byte's value times the scale of its block, row or tensor."""
    raw = folder.array(name)
    if scale is None:
        return bf16_to_f32(raw) if folder.dtype(name) == "BF16" else raw.astype(np.float32)
    values = scale_values(folder, scale)
    block = folder.quantization.get("weight_block_size")
    if block is None or values.ndim < 2:
        assert values.size in (1, raw.shape[0]), f"{scale}: {values.shape} for {raw.shape} without a block size"
        return E4M3[raw] * values.reshape(-1, 1)
    rows, cols = np.arange(raw.shape[0]) // block[0], np.arange(raw.shape[1]) // block[1]
    return E4M3[raw] * values[rows][:, cols]


def codes_of(packed: np.ndarray) -> np.ndarray:
    nibbles = (packed.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return nibbles.reshape(packed.shape[0], -1).astype(np.int32) - 8


def assert_codes(out: Folder, module: str, w: np.ndarray, manifest: dict[str, Any]) -> None:
    """Each code is the nearest under the stored scale, clipped at the ends. `minmax`: the BF16 chain of minmax(). Of
    GPTQ's codes alone nothing follows: they make good each other's errors."""
    n, k = w.shape
    assert out.array(module + SHAPE).tolist() == [n, k]
    codes, bits = codes_of(out.array(module + PACKED)), out.array(module + SCALE)
    scale = bf16_to_f32(bits)
    assert codes.shape == (n, k)
    assert np.isfinite(scale).all()
    assert (scale != 0).all()
    if out.report[module].get("method") == "gptq":
        assert manifest["method"] == "gptq", module
        return
    group = k // bits.shape[1]
    s = np.repeat(scale, group, axis=1)
    if manifest["method"] == "minmax":
        wb = bf16_to_f32(bf16(w))
        largest = np.abs(wb.reshape(n, -1, group)).max(-1)
        expected_scale = bf16(largest / np.float32(7.5))
        assert np.array_equal(bits, np.where(expected_scale == 0, bf16(np.float32(2**-7)), expected_scale)), module
        quotient = bf16_to_f32(bf16(wb / s))
    else:
        quotient = w / s
    expected = np.rint(np.clip(quotient, -8, 7)).astype(np.int32)
    wrong = np.argwhere(codes != expected)
    assert not len(wrong), f"{module}: {len(wrong)} codes are not the nearest, first at {wrong[:1].tolist()}"
    if (kappa := manifest["clip_allowance"]) is not None:
        assert (np.abs(w - codes * s) <= kappa * np.abs(s)).all(), f"{module}: clipped by more than {kappa} steps"
    zero = (w.reshape(n, -1, group) == 0).all(-1)
    assert (scale[zero] > 0).all()
    assert not codes.reshape(n, -1, group)[zero].any()


def assert_tensors_are_right(out: Folder, source: Folder, dropped: Collection[str] = ()) -> None:
    """Every source tensor but those of `dropped` is in the output in exactly one form, bit for bit what it must be, and
    nothing else is."""
    manifest = parse_json((out.root / "kizami.json").read_bytes())
    scales = scale_names(source)
    asked_for = manifest.get("kv_scales") is not None  # by --kv-scales: whoever asks also looks at them
    left = {name for name in out.entries if not (asked_for and name.endswith((".k_scale", ".v_scale")))}
    for name in source.entries:
        if name in scales.values() or name in dropped:
            continue
        module, scale = name.removesuffix(".weight"), scales.get(name)
        forms = {name} & left, {module + PACKED} & left if module != name else set()
        assert sum(map(bool, forms)) == 1, f"{name} is in the output {sum(map(bool, forms))} times"
        if forms[1]:
            written = {module + PACKED, module + SCALE, module + SHAPE}
            assert len({out.file_of[n] for n in written}) == 1, f"{module} is spread over files"
            if np.prod(source.shape(name)) <= BIG:
                assert_codes(out, module, decoded(source, name, scale), manifest)
        elif scale is not None and out.dtype(name) == "F8_E4M3":
            written = {name, module + SCALE}
            assert out.tensor(name) == source.tensor(name)
            values = scale_values(source, scale)
            values = values if values.ndim == 2 else values.reshape(-1, 1)  # engines want the grid
            assert np.array_equal(out.array(module + SCALE), values), scale
        elif scale is not None:
            written = {name}
            assert out.dtype(name) == "BF16"
            assert np.array_equal(out.array(name), bf16(decoded(source, name, scale))), name
        else:
            written = {name}
            assert out.tensor(name) == source.tensor(name), name
        left -= written
    assert not left, f"tensors from nowhere: {sorted(left)[:3]}"


def form_by_config(quantization: dict[str, Any], module: str) -> str:
    """How an engine reads the rules: `ignore` first, then targets by name, then the class `Linear`."""

    def hit(entries: Iterable[str]) -> bool:
        return any(re.match(e[3:], module) is not None if e.startswith("re:") else e == module for e in entries)

    if hit(quantization["ignore"]):
        return "none"
    groups = list(quantization["config_groups"].values())
    chosen = next((g for g in groups if hit(g["targets"])), None)
    chosen = chosen or next((g for g in groups if "Linear" in g["targets"]), None)
    if chosen is None:
        return "none"
    return f"{chosen['weights']['type']}{chosen['weights']['num_bits']}"


def assert_rules_are_the_tensors(out: Folder) -> None:
    """What config.json says about each linear is what is in the files."""
    for module in out.packed:
        assert form_by_config(out.quantization, module) == "int4", module
        width = out.shape(module + PACKED)[1] * 8 // out.shape(module + SCALE)[1]
        sizes = {g["weights"].get("group_size") for g in out.quantization["config_groups"].values()}
        assert width in sizes, f"{module}: groups of {width}, the config has {sizes}"
    for name in out.entries:
        module = name.removesuffix(".weight")
        if module != name and len(out.shape(name)) == 2 and not module.endswith("embed_tokens"):
            expected = "float8" if out.dtype(name) == "F8_E4M3" else "none"
            assert form_by_config(out.quantization, module) == expected, module


def assert_folder_is_whole(out: Folder) -> None:
    """Regular files only, no leftovers; index, headers, sizes, hashes and report agree."""
    manifest = parse_json((out.root / "kizami.json").read_bytes())
    found = {p.relative_to(out.root).as_posix() for p in out.root.rglob("*") if not p.is_dir() or p.is_symlink()}
    assert not [name for name in found if name.startswith(".") or (out.root / name).is_symlink()]
    hashes = manifest["files"] | {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    assert found == {*hashes, "kizami.json"}
    for name, digest in hashes.items():
        assert sha256((out.root / name).read_bytes()) == digest, name
    assert out.index is not None
    assert {name for name in found if name.endswith(".safetensors")} == set(out.index["weight_map"].values())
    assert out.index["weight_map"] == out.file_of
    nbytes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in out.entries.items()}
    assert out.index["metadata"]["total_size"] == sum(nbytes.values()) == manifest["output"]["bytes"]
    assert all(metadata == {"format": "pt"} for metadata in out.metadata.values())
    for file in out.files:
        spans = sorted(tuple(out.entries[n]["data_offsets"]) for n, f in out.file_of.items() if f == file)
        assert spans, f"{file} is empty"
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert (out.root / file).stat().st_size == out.begin[file] + spans[-1][1]
    written = {n.removesuffix(".weight") for n in out.entries if not n.endswith((PACKED, SCALE, SHAPE))}
    assert set(out.report) == written | set(out.packed)
    checked = [item for row in out.rows for item in row["crc32"].items()]
    assert sorted(checked) == [(name, f"{zlib.crc32(out.tensor(name).data):08x}") for name in sorted(out.entries)]
