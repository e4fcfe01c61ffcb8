"""The `checks` of make_cases.py's case.json, each a function that looks at a finished run."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from make_cases import bf16, bf16_to_f32
from output_oracle import PACKED, SCALE, SHAPE, Folder, codes_of, contents, form_by_config, sha256


class ConvertAlike(Protocol):
    def __call__(self, source: Path, *, same_shards: bool) -> Folder: ...


@dataclass
class Ran:
    """A finished run and what its checks look at."""

    out: Folder
    source: Folder
    stdout: str
    stderr: str
    case: Path  # the folder of case.json
    convert_alike: ConvertAlike  # another source with this run's options, `--max-shard-size` only if `same_shards`


CHECKS: dict[str, Callable[..., None]] = {}


def check(f: Callable[..., None]) -> Callable[..., None]:
    CHECKS[f.__name__] = f
    return f


def run_check(ran: Ran, facts: dict[str, Any]) -> None:
    arguments = {("excluded" if key == "except" else key): value for key, value in facts.items() if key != "check"}
    CHECKS[facts["check"]](ran, **arguments)


@check
def kv_scale_tensors(ran: Ran, values: dict[str, float]) -> None:
    """F32, one number each, to the bit, under the names that the class's loader takes."""
    found = {name: ran.out.array(name) for name in ran.out.entries if name.endswith(("k_scale", "v_scale"))}
    assert {ran.out.dtype(name) for name in found} == {"F32"}
    assert {array.size for array in found.values()} == {1}
    plain = {re.sub(r"\.[kv]_proj\.", ".", name): float(array.item()) for name, array in found.items()}
    assert plain == values


@check
def packed_words(ran: Ran, tensor: str, shape: list[int] | None = None, **facts: Any) -> None:
    words = ran.out.array(tensor)
    assert ran.out.dtype(tensor) == "I32"
    assert shape is None or list(words.shape) == shape
    if "row" in facts:
        row, first = words[facts["row"]], facts["first"]
        assert row[: len(first)].tolist() == first
        assert (row[len(first) :] == facts["rest"]).all()
    elif "row_words" in facts:
        assert (words == np.array(facts["row_words"], dtype=np.int32)[:, None]).all()
        assert len(facts["row_words"]) == len(words)
    elif "sha256" in facts:
        assert words[0].tolist() == facts["row0"]
        assert sha256(words.tobytes()) == facts["sha256"]
    else:
        rows, cols = facts.get("rows", [0, words.shape[0]]), facts.get("cols", [0, words.shape[1]])
        part = words[slice(*rows), slice(*cols)]
        assert part.shape == (rows[1] - rows[0], cols[1] - cols[0])
        assert (part == facts["fill"]).all()


@check
def dense_bf16(ran: Ran, tensor: str, shape: list[int], sha256: str, samples: list[list[float]]) -> None:
    got = ran.out.tensor(tensor)
    assert (got.dtype, list(got.shape)) == ("BF16", shape)
    values = bf16_to_f32(ran.out.array(tensor))
    for row, col, value in samples:
        assert values[int(row), int(col)] == bf16_to_f32(bf16(np.float32(value))), (tensor, row, col)
    assert got.sha256 == sha256, tensor
    assert tensor.removesuffix(".weight") + PACKED not in ran.out.entries


@check
def same_bytes(ran: Ran, tensor: str, dtype: str, shape: list[int], sha256: str) -> None:
    got = ran.out.tensor(tensor)
    assert (got.dtype, list(got.shape), got.sha256) == (dtype, shape, sha256), tensor


@check
def same_output_tensors_as(ran: Ran, input: str, excluded: Iterable[str] = ()) -> None:
    other = ran.convert_alike(ran.case / input, same_shards=False)
    assert set(ran.out.entries) - set(excluded) == set(other.entries)
    for name in other.entries:
        assert ran.out.tensor(name) == other.tensor(name), name


@check
def names_absent(ran: Ran, regex: str) -> None:
    assert not [name for name in ran.out.entries if re.search(regex, name)]


@check
def weight_shape(ran: Ran, tensor: str, value: list[int]) -> None:
    assert (ran.out.dtype(tensor), ran.out.shape(tensor), ran.out.array(tensor).tolist()) == ("I32", (2,), value)


@check
def shape(ran: Ran, tensor: str, value: list[int]) -> None:
    assert list(ran.out.shape(tensor)) == value


@check
def scales_finite_and_positive_where_group_is_zero(ran: Ran, tensor: str) -> None:
    values, words = bf16_to_f32(ran.out.array(tensor)), ran.out.array(tensor.removesuffix(SCALE) + PACKED)
    assert ran.out.dtype(tensor) == "BF16"
    assert np.isfinite(values).all()
    zero = (codes_of(words).reshape(*values.shape, -1) == 0).all(-1)
    assert (values[zero] > 0).all()


@check
def row_scales_bf16(ran: Ran, tensor: str, values: list[float | None]) -> None:
    got = bf16_to_f32(ran.out.array(tensor))
    assert len(got) == len(values)
    for row, value in enumerate(values):
        assert value is None or (got[row] == np.float32(value)).all(), (tensor, row)


@check
def report_row(ran: Ran, tensor: str, error_is: float | None = None) -> None:
    row = ran.out.report[tensor]
    errors = {key: row[key] for key in ("rel_error", "max_abs_error", "error_energy")}
    assert all(isinstance(value, int | float) for value in errors.values()), row
    assert error_is is None or set(errors.values()) == {error_is}, row


@check
def dense_or_refused(ran: Ran, modules: list[str]) -> None:
    """Not refused, so: BF16, ignored, and the report says why."""
    for module in modules:
        assert ran.out.dtype(module + ".weight") == "BF16"
        assert form_by_config(ran.out.quantization, module) == "none"
        assert ran.out.report[module]["reason"]
        assert module in ran.stderr


@check
def not_all_zero_codes(ran: Ran, tensor: str, cols: list[int]) -> None:
    words = ran.out.array(tensor)[:, slice(*cols)]
    assert words.shape[1] == cols[1] - cols[0]
    assert codes_of(words).any(axis=1).all(), "a row of the half is all zero"


@check
def weight_args(ran: Ran, value: dict[str, Any]) -> None:
    [group] = ran.out.quantization["config_groups"].values()
    assert {key: group["weights"].get(key) for key in value} == value
    assert "Linear" in group["targets"]


@check
def error_at_most_half_step(ran: Ran, modules: list[str]) -> None:
    """`assert_codes` has proved every code the nearest; here the scheme that it speaks of."""
    weight_args(ran, {"num_bits": 4, "type": "int", "symmetric": True})
    assert set(modules) <= set(ran.out.packed)


@check
def packed_modules_are(ran: Ran, modules: list[str]) -> None:
    assert sorted(ran.out.packed) == sorted(modules)
    assert not [m for m in modules if m + ".weight" in ran.out.entries]


@check
def config_rules(ran: Ran, quantised: list[str], not_quantised: list[str]) -> None:
    assert {form_by_config(ran.out.quantization, module) for module in quantised} == {"int4"}
    wrong = [module for module in not_quantised if form_by_config(ran.out.quantization, module) != "none"]
    assert not wrong


def _at(config: Any, path: list[str]) -> Any:
    for key in path:
        config = config[key]
    return config


@check
def config_equals(ran: Ran, path: list[str], value: Any) -> None:
    assert _at(ran.out.config, path) == value


@check
def config_contains(ran: Ran, path: list[str], value: dict[str, Any]) -> None:
    """Those keys and values; others may stand beside them."""
    assert _at(ran.out.config, path).items() >= value.items()


@check
def config_absent(ran: Ran, path: list[str]) -> None:
    assert path[-1] not in _at(ran.out.config, path[:-1])


@check
def config_equals_source_except(ran: Ran, keys: list[str]) -> None:
    ours, theirs = ([(k, v) for k, v in f.config.items() if k not in keys] for f in (ran.out, ran.source))
    assert ours == theirs


@check
def every_source_module_present(ran: Ran, prefix: str) -> None:
    modules = {n.rpartition(".")[0] for n in ran.source.entries if n.startswith(prefix)}
    assert modules
    assert modules == {n.rpartition(".")[0] for n in ran.out.entries if n.startswith(prefix)}


@check
def index_lists_existing_files(ran: Ran) -> None:
    assert ran.out.index is not None
    assert all((ran.out.root / file).is_file() for file in ran.out.index["weight_map"].values())


@check
def index_total_size_is_sum_of_tensors(ran: Ran) -> None:
    assert ran.out.index is not None
    total = sum(len(ran.out.tensor(name).data) for name in ran.out.entries)
    assert ran.out.index["metadata"]["total_size"] == total


@check
def files_absent(ran: Ran, names: list[str]) -> None:
    assert not [name for name in names if (ran.out.root / name).exists()]


@check
def files_same_bytes(ran: Ran, names: list[str]) -> None:
    for name in names:
        assert (ran.out.root / name).read_bytes() == (ran.source.root / name).read_bytes(), name


@check
def no_file_named(ran: Ran, name: str, under: list[str]) -> None:
    assert under == ["{input}", "{out}"]
    assert not [path for folder in (ran.source.root, ran.out.root) for path in folder.rglob(name)]


@check
def every_shard_metadata(ran: Ran, value: dict[str, str]) -> None:
    assert list(ran.out.metadata.values()) == [value] * len(ran.out.files)


@check
def no_symlinks_in_output(ran: Ran) -> None:
    assert not [path for path in (ran.out.root, *ran.out.root.rglob("*")) if path.is_symlink()]


@check
def stderr_mentions(ran: Ran, strings: list[str]) -> None:
    assert not [text for text in strings if text not in ran.stderr]


@check
def output_shard_names_zero_padded(ran: Ran) -> None:
    files = ran.out.files
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]


@check
def module_in_one_shard(ran: Ran) -> None:
    for module in ran.out.packed:
        assert len({ran.out.file_of[module + suffix] for suffix in (PACKED, SCALE, SHAPE)}) == 1, module


@check
def no_empty_shard(ran: Ran) -> None:
    assert set(ran.out.file_of.values()) == set(ran.out.files)
    assert all((ran.out.root / file).stat().st_size > ran.out.begin[file] for file in ran.out.files)


@check
def folder_equals_clean_run(ran: Ran) -> None:
    clean = ran.convert_alike(ran.source.root, same_shards=True)
    assert clean.root != ran.out.root
    assert contents(ran.out.root) == contents(clean.root)


@check
def no_nan_or_inf(ran: Ran) -> None:
    exponents = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
    for name in ran.out.entries:
        if ran.out.dtype(name) in exponents:
            word, exponent = exponents[ran.out.dtype(name)]
            bits = np.frombuffer(ran.out.tensor(name).data, word)
            assert not ((bits & exponent) == exponent).any(), name


@check
def report_names_fallback(ran: Ran, modules: list[str]) -> None:
    rows = {row["name"]: row for row in ran.out.rows}
    for module in modules:
        assert (rows[module]["method"], rows[module]["tokens"]) == ("search", 0)
        assert rows[module]["fallback"], module
        assert module in ran.stdout, "the summary does not name it"
