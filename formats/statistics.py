"""STATS: what `kizami calibrate` writes and the methods that need calibration read. A folder of one manifest and, per
layer, one small file of statistics and one of the MLP's inputs.

kizami-stats.json            source, tokens, settings, versions, and every other file with its size and SHA-256
layer-00003.safetensors      experts.h_x F32 [E, hidden], experts.h_a F32 [E, intermediate], experts.sum_g2 and sum_g4
                             F64 [E], experts.n and n_held_out I64 [E]; linear.<module> F32 [in_features];
                             kv.<what>.channels F32 [3, C] (amax, mean, std), kv.<what>.figures F64 [4]
inputs-00003.safetensors     x BF16 [tokens, hidden], experts I32 and gates F32 [tokens, top_k], held_out U8 [tokens]

The inputs are the compact form of a layer's Hessians: x of 262,144 tokens of Kimi-K2 has 3.8 GB, the Hessians of its
384 experts have 79 GB, and any of them is a product of the rows of its tokens.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import file_sha256, open_regular, read_exactly, resolve_inside
from kizami.formats.header import read_header
from kizami.formats.strict_json import parse_json_object
from kizami.formats.tensors import TensorInfo

MANIFEST = "kizami-stats.json"
SCHEMA = "kizami.stats/1"
MAX_MANIFEST_BYTES = 4 << 20  # 62 layers take 30 kB
MAX_TOKENS = 1 << 40
STARVED = 32  # fit tokens of an expert, below which its own mean squares, unshrunk, do harm (docs/methods.md)
KV_FIGURES = ("amax", "rms", "p9999", "first_token_amax")

Keep = Literal["none", "held-out", "all"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStatistics:
    """Of the routed experts of a layer, over fit tokens (held-out sequences are only counted). Each token weighs with
    the square of its gate weight g, as it is applied: the loss of the layer's output is then a sum over experts.

    h_x: sum(g^2 x^2) / sum(g^2) of the input that gate and up share, zeros where no token came; h_a: of down's input.
    """

    h_x: NDArray[np.float32]  # [E, hidden]
    h_a: NDArray[np.float32]  # [E, intermediate]
    sum_g2: NDArray[np.float64]  # [E]
    sum_g4: NDArray[np.float64]  # [E]
    n: NDArray[np.int64]  # [E] fit tokens
    n_held_out: NDArray[np.int64]  # [E]

    @property
    def count(self) -> int:
        return len(self.n)

    @property
    def effective_n(self) -> NDArray[np.float64]:
        """[E] how many tokens of equal weight count as much: (sum g^2)^2 / sum g^4."""
        n: NDArray[np.float64] = np.zeros_like(self.sum_g2)
        with np.errstate(over="ignore", invalid="ignore"):
            np.divide(self.sum_g2**2, self.sum_g4, out=n, where=self.sum_g4 > 0)
        return n


@dataclass(frozen=True, slots=True, eq=False)
class KvRange:
    """What a layer writes into the KV cache, over all tokens: `latent` and `k_pe` of MLA (after norm and RoPE), `k`
    (after RoPE) and `v` of GQA, whose channels are head by head.

    p9999: the smallest bound of 1/16 octave resolution that 99.99 % of the magnitudes do not exceed.
    first_token_amax: of position 0 of each sequence alone, the attention sink.
    """

    channel_amax: NDArray[np.float32]  # [C]
    channel_mean: NDArray[np.float32]
    channel_std: NDArray[np.float32]
    amax: float
    rms: float
    p9999: float
    first_token_amax: float

    @property
    def channels(self) -> tuple[NDArray[np.float32], ...]:
        return self.channel_amax, self.channel_mean, self.channel_std


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """linears: module name -> float32 [in_features], mean square of its input over fit tokens."""

    layer: int
    experts: ExpertStatistics | None
    linears: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    kv: Mapping[str, KvRange] = field(default_factory=dict)


class LayerInputs:
    """The kept inputs of a layer's MLP; the rows of x stay on disk. experts and gates have no columns in a dense layer.
    A context manager that closes the file."""

    def __init__(self, fd: int, file: str, x: TensorInfo, experts: Array, gates: Array, held_out: Array) -> None:
        self._fd, self._file, self._x = fd, file, x
        self.experts: NDArray[np.int32] = experts  # [tokens, top_k]
        self.gates: NDArray[np.float32] = gates  # [tokens, top_k]
        self.held_out: NDArray[np.bool_] = held_out  # [tokens]

    @property
    def shape(self) -> tuple[int, int]:
        """tokens, hidden."""
        return self._x.shape[0], self._x.shape[1]

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [len(tokens), hidden], exact: x is BF16."""
        width = self.shape[1] * 2
        raw = np.empty((len(tokens), self.shape[1]), np.uint16)
        for to, token in zip(raw, tokens.tolist(), strict=True):
            to[:] = np.frombuffer(read_exactly(self._fd, self._x.begin + token * width, width, self._file), np.uint16)
        if ((raw & 0x7F80) == 0x7F80).any():
            raise _bad("x has numbers that are not finite", self._file)
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def of_expert(self, expert: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The expert's tokens, ascending, and their gate weights."""
        tokens, slots = np.nonzero(self.experts == expert)
        return tokens, self.gates[tokens, slots]

    def __enter__(self) -> "LayerInputs":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Statistics:
    """An opened STATS folder. sha256: of the manifest, hence of everything in the folder."""

    root: Path
    manifest: Mapping[str, Any]
    sha256: str

    @staticmethod
    def open(root: Path) -> "Statistics":
        """Reads the manifest only; files are compared with it when they are read. KizamiError "bad_statistics",
        "missing_file", "outside_folder", "not_a_file", "bad_json", "io_error"."""
        path = resolve_inside(root, MANIFEST, "`kizami calibrate SRC -o STATS` writes it")
        fd = open_regular(path, MANIFEST)
        try:
            size = os.fstat(fd).st_size
            if size > MAX_MANIFEST_BYTES:
                raise _bad(f"{size} bytes, expected at most {MAX_MANIFEST_BYTES}")
            data = read_exactly(fd, 0, size, MANIFEST)
        finally:
            os.close(fd)
        manifest = parse_json_object(data, MANIFEST, what="manifest")
        _check_manifest(manifest)
        return Statistics(root, manifest, hashlib.sha256(data).hexdigest())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.manifest["layers"])

    @property
    def source_contents(self) -> dict[str, str]:
        """As `fingerprint.sample_contents` gives it."""
        return dict(self.manifest["source"]["contents"])

    @property
    def keep(self) -> Keep:
        """Which tokens' inputs were kept."""
        keep: Keep = self.manifest["settings"]["keep"]
        return keep

    def layer(self, layer: int) -> LayerStatistics:
        """KizamiError "bad_statistics" if the file is not what the manifest says."""
        file = layer_file(layer)
        infos, fd = self._open(file)
        try:
            return _decode_layer(layer, {name: _read(fd, info, file) for name, info in infos.items()}, file)
        finally:
            os.close(fd)

    def inputs(self, layer: int) -> LayerInputs:
        """KizamiError as `layer`; also where none were kept."""
        file = inputs_file(layer)
        infos, fd = self._open(file)
        try:
            _check_shapes(infos, {"x": "BF16", "experts": "I32", "gates": "F32", "held_out": "U8"}, file)
            ndims = {"x": 2, "experts": 2, "gates": 2, "held_out": 1}
            if any(len(info.shape) != ndims[name] for name, info in infos.items()):
                raise _bad(f"has shapes {[list(info.shape) for info in infos.values()]}", file)
            if len({info.shape[0] for info in infos.values()}) != 1 or not infos["x"].shape[1]:
                raise _bad("its tensors are of different numbers of tokens, or x has no width", file)
            experts, gates, held_out = (_read(fd, infos[name], file) for name in ("experts", "gates", "held_out"))
            inputs = LayerInputs(fd, file, infos["x"], experts, gates, held_out.astype(bool))
            self._check_inputs(inputs, self.layer(layer), file)
            return inputs
        except BaseException:
            os.close(fd)
            raise

    def _check_inputs(self, inputs: LayerInputs, layer: LayerStatistics, file: str) -> None:
        """Against the layer's own statistics, which are of the same tokens."""
        experts, gates, held_out, tokens = inputs.experts, inputs.gates, inputs.held_out, self.manifest["tokens"]
        count = 0 if layer.experts is None else layer.experts.count
        if experts.shape != gates.shape or (experts.shape[1] > 0) != (count > 0):
            raise _bad(f"experts {list(experts.shape)}, gates {list(gates.shape)} of {count} experts", file)
        if ((experts < 0) | (experts >= count)).any() or (np.diff(np.sort(experts, axis=1), axis=1) == 0).any():
            raise _bad(f"expert ids of a token are not different numbers from 0 to {count - 1}", file)
        if (gates < 0).any():
            raise _bad("has negative gate weights", file)
        if layer.experts is not None:
            if inputs.shape[1] != layer.experts.h_x.shape[1]:
                raise _bad(f"x is {inputs.shape[1]} wide, the statistics are of {layer.experts.h_x.shape[1]}", file)
            seen = np.bincount(experts[held_out].reshape(-1), minlength=count)
            if (seen < layer.experts.n_held_out).any():
                raise _bad("has fewer held-out tokens of an expert than the layer's statistics", file)
        kept = tokens["seq_len"] * (tokens["sequences"] if self.keep == "all" else len(tokens["held_out"]))
        aside = tokens["seq_len"] * len(tokens["held_out"])
        if (len(held_out), int(held_out.sum())) != (kept, aside):
            found = f"{len(held_out)} tokens, {int(held_out.sum())} of them held out"
            raise _bad(f"has {found}, expected {kept} and {aside}", file)

    def _open(self, file: str) -> tuple[dict[str, TensorInfo], int]:
        record = self.manifest["files"].get(file)
        if record is None:
            raise _bad(f"{file} is not among the files", MANIFEST)
        path = resolve_inside(self.root, file)
        found = file_sha256(path, file)
        if found != record["sha256"]:
            raise _bad(f"its SHA-256 is {found[:16]}..., expected {record['sha256'][:16]}...", file)
        return {info.name: info for info in read_header(path, file).tensors}, open_regular(path, file)


def layer_file(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def inputs_file(layer: int) -> str:
    return f"inputs-{layer:05d}.safetensors"


NUMPY_OF = {"F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64, "U8": np.uint8}


def _read(fd: int, info: TensorInfo, file: str) -> Array:
    if info.dtype not in NUMPY_OF:
        raise _bad(f"{printable(info.name)} has dtype {info.dtype}, expected one of {', '.join(NUMPY_OF)}", file)
    data = read_exactly(fd, info.begin, info.nbytes, file)
    array: Array = np.frombuffer(data, NUMPY_OF[info.dtype]).reshape(info.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _bad(f"{printable(info.name)} has numbers that are not finite", file)
    return array


EXPERT_DTYPES = {"h_x": "F32", "h_a": "F32", "sum_g2": "F64", "sum_g4": "F64", "n": "I64", "n_held_out": "I64"}


def _decode_layer(layer: int, tensors: dict[str, Array], file: str) -> LayerStatistics:
    experts = {name.removeprefix("experts."): t for name, t in tensors.items() if name.startswith("experts.")}
    linears = {name.removeprefix("linear."): t for name, t in tensors.items() if name.startswith("linear.")}
    kv = sorted({name.split(".")[1] for name in tensors if name.startswith("kv.")})
    if experts and experts.keys() != EXPERT_DTYPES.keys():
        raise _bad(f"has {', '.join(map(printable, experts))} of experts, expected {', '.join(EXPERT_DTYPES)}", file)
    ndims = {"h_x": 2, "h_a": 2}
    for name, t in experts.items():
        if t.dtype != NUMPY_OF[EXPERT_DTYPES[name]] or t.ndim != ndims.get(name, 1) or (t < 0).any():
            raise _bad(
                f"experts.{name} is {t.dtype} {list(t.shape)}, expected {EXPERT_DTYPES[name]}, not negative", file
            )
    if len({len(t) for t in experts.values()}) > 1:
        raise _bad("experts' tensors are of different numbers of experts", file)
    for name, t in linears.items():
        if t.dtype != np.float32 or t.ndim != 1 or (t < 0).any():
            raise _bad(f"linear.{printable(name)} is {t.dtype} {list(t.shape)}, expected F32 [K], not negative", file)
    ranges = {}
    for what in kv:
        channels, figures = tensors.get(f"kv.{what}.channels"), tensors.get(f"kv.{what}.figures")
        if channels is None or figures is None or channels.shape[:1] != (3,) or figures.shape != (len(KV_FIGURES),):
            raise _bad(f"kv.{printable(what)} is not channels [3, C] and figures [{len(KV_FIGURES)}]", file)
        ranges[what] = KvRange(*channels, *(float(f) for f in figures))
    made = LayerStatistics(layer, ExpertStatistics(**experts) if experts else None, linears, ranges)
    if (fault := find_fault(made)) is not None:
        raise _bad(fault, file)
    return made


def find_fault(layer: LayerStatistics) -> str | None:
    """What makes the numbers of a layer impossible, if anything does: for the writer before they are written, too."""
    with np.errstate(over="ignore"):  # a sum may be beyond float32, which is what is asked
        for module, h in layer.linears.items():
            if not _is_mean_square(h):
                return f"mean squares of the inputs of {printable(module)} are not finite, or negative"
        for what, kv in layer.kv.items():
            figures = np.array([kv.amax, kv.rms, kv.p9999, kv.first_token_amax])
            if not all(np.isfinite(x).all() for x in (figures, *kv.channels)):
                return f"the range of {printable(what)} is not finite"
            if not _is_range(kv, figures):
                return f"the figures of the range of {printable(what)} contradict each other"
        return None if layer.experts is None else _fault_of_experts(layer.experts)


def _is_range(kv: KvRange, figures: Array) -> bool:
    """Nothing in it is larger than its largest magnitude, but for the rounding of means."""
    largest, (amax, mean, std) = kv.amax * 1.001, (channel.astype(np.float64) for channel in kv.channels)
    of_channels = bool((amax >= 0).all() and (std >= 0).all() and (np.hypot(mean, std) <= amax * 1.001 + 1e-30).all())
    return of_channels and float(amax.max(initial=0)) == kv.amax and bool(((figures >= 0) & (figures <= largest)).all())


def _fault_of_experts(experts: ExpertStatistics) -> str | None:
    for name in ("h_x", "h_a"):
        for expert, h in enumerate(getattr(experts, name)):
            if not _is_mean_square(h):
                return f"{name} of expert {expert} has numbers that are not finite, or negative"
    if (experts.n < 0).any() or (experts.n_held_out < 0).any() or int(experts.n.max(initial=0)) > MAX_TOKENS:
        return f"numbers of tokens are not from 0 to {MAX_TOKENS}"
    silent = (experts.n > 0) & ~experts.h_x.any(axis=1)
    if silent.any():
        e = int(silent.argmax())
        return f"h_x of expert {e} is 0, which no input of {int(experts.n[e])} tokens has"
    # (sum g^2)^2 is between sum g^4 and n times that, whatever the gates g
    least, effective = np.where(experts.n > 0, 1.0, 0.0), experts.effective_n
    odd = ~(np.isfinite(effective) & (effective >= least * (1 - 1e-9)) & (effective <= experts.n * (1 + 1e-9)))
    if odd.any():
        e = int(odd.argmax())
        return (
            f"expert {e} has sums of squared and 4th powers of gate weights {experts.sum_g2[e]:g} and "
            f"{experts.sum_g4[e]:g}, which {int(experts.n[e])} tokens cannot have"
        )
    return None


def _is_mean_square(h: Array) -> bool:
    return bool(np.isfinite(h.astype(np.float32)).all() and (h >= 0).all())


def _check_shapes(infos: Mapping[str, TensorInfo], dtypes: Mapping[str, str], file: str) -> None:
    found = {name: info.dtype for name, info in infos.items()}
    if found != dtypes:
        raise _bad(f"has {printable(str(found))}, expected {dict(dtypes)}", file)


def _check_manifest(manifest: dict[str, Any]) -> None:
    source, settings, files = (manifest.get(key) for key in ("source", "settings", "files"))
    layers = manifest.get("layers")
    if manifest.get("schema") != SCHEMA:
        raise _bad(f"schema is {printable(str(manifest.get('schema')), 60)}, expected {SCHEMA}")
    fits = (
        isinstance(source, dict)
        and isinstance(contents := source.get("contents"), dict)
        and all(isinstance(value, str) for value in contents.values())
        and isinstance(settings, dict)
        and settings.get("keep") in ("none", "held-out", "all")
        and _are_tokens(manifest.get("tokens"))
        and isinstance(layers, list)
        and all(type(layer) is int and 0 <= layer < 100_000 for layer in layers)
        and sorted(set(layers)) == layers
        and isinstance(files, dict)
        and all(
            isinstance(record, dict) and isinstance(record.get("sha256"), str) and _is_count(record.get("bytes"), 0)
            for record in files.values()
        )
    )
    if not fits:
        raise _bad("source, settings, tokens, layers or files are not what kizami writes")


def _are_tokens(tokens: object) -> bool:
    if not isinstance(tokens, dict) or not isinstance(tokens.get("sha256"), str):
        return False
    sequences, held_out, sources = (tokens.get(key) for key in ("sequences", "held_out", "sources"))
    return (
        isinstance(sources, list)
        and all(isinstance(source, dict) and isinstance(source.get("name"), str) for source in sources)
        and _is_count(sequences, 1)
        and _is_count(tokens.get("seq_len"), 1)
        and isinstance(held_out, list)
        and all(_is_count(sequence, 0) and sequence < sequences for sequence in held_out)
        and sorted(set(held_out)) == held_out
    )


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_TOKENS


def _bad(message: str, file: str = MANIFEST) -> KizamiError:
    return KizamiError(
        message, code="bad_statistics", file=file, hint="run kizami calibrate again; STATS is used whole or not at all"
    )
