"""Experts fused into one tensor per layer, split into the per-expert weights that checkpoints are published with.

transformers 5 keeps a layer's experts in two parameters (integrations/moe.py, integrations/finegrained_fp8.py), and a
`state_dict` that is saved without its `save_pretrained` has them on disk:

    X.gate_up_proj [E, 2I, H]   rows 0 to I of expert e are X.e.gate_proj.weight, the next I X.e.up_proj.weight
    X.down_proj    [E, H, I]    X.e.down_proj.weight
    X.gate_up_proj_scale_inv, X.down_proj_scale_inv   block scales of the two in FP8

A tensor is stored row by row, so each part is a range of the file's bytes: a split is arithmetic on headers.

Other models fuse their experts in other ways under the same names: transposed ([E, H, 2I], Llama 4), with gate and up
row by row in turns (gpt-oss). So only known families are split, and only where both shapes are those of the config; of
the two, one at least is not its own transpose, since H is not both I and 2I. The rest is left as it is, with a note.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kizami.formats.checkpoint import MAX_ALL_HEADER_BYTES, MAX_TENSORS
from kizami.formats.dialects import declared_block
from kizami.formats.errors import KizamiError
from kizami.formats.families import find_family
from kizami.formats.foreign import shape_text, tensor_error
from kizami.formats.tensors import TensorInfo

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_SCALE = "_scale_inv"
_LEAVES = (GATE_UP, DOWN, GATE_UP + _SCALE, DOWN + _SCALE)
_DTYPES = ("F8_E4M3", "BF16", "F16", "F32")
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
# "123456.gate_proj.weight_scale_inv" behind the layer's name
_LONGEST_LEAF = 40

_MOST_REASONS = 5  # a hostile checkpoint gives one for each layer

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Experts, moe_intermediate_size, hidden_size; None where config.json has no such number."""

    experts: int | None
    inner: int | None
    hidden: int | None

    @property
    def gate_up(self) -> tuple[int | None, ...]:
        return self.experts, None if self.inner is None else 2 * self.inner, self.hidden

    @property
    def down(self) -> tuple[int | None, ...]:
        return self.experts, self.hidden, self.inner


def split_fused_experts(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """`tensors` with each fused tensor replaced, in its place, by those of its experts, in the order of their bytes;
    and notes: what was split, and what was left and why.

    Raises KizamiError for fused experts of the right shape that cannot be read: `missing_scale`, `orphan_scale`,
    `scale_grid`, `missing_block_size`, `unsupported_shape`, `duplicate_tensor`, `too_large`.
    """
    layers = _layers(tensors)
    if not layers:
        return dict(tensors), ()
    family, _ = find_family(config, ())
    sizes = _sizes(family.text_config)
    left: dict[str, list[TensorInfo]] = {}
    split: dict[str, dict[str, TensorInfo]] = {}
    for prefix, found in layers.items():
        why = _why_left(found, sizes) if family.known else "the model type is not one whose layout kizami knows"
        if why is None:
            split[prefix] = found
        else:
            left.setdefault(why, []).append(next(iter(found.values())))
    _check_count(tensors, split)
    block = declared_block(config) if split else None
    parts = {
        info.name: list(_parts(prefix, leaf, info, found, block))
        for prefix, found in split.items()
        for leaf, info in found.items()
    }
    return _replaced(tensors, parts), tuple(_notes(split, left, sizes))


def _layers(tensors: Tensors) -> dict[str, dict[str, TensorInfo]]:
    """Prefix (`model.layers.3.mlp.experts`) -> leaf -> tensor, of all that have a 3-D gate_up_proj or down_proj."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf.startswith((GATE_UP, DOWN)) and prefix.rpartition(".")[2] == "experts":
            found.setdefault(prefix, {})[leaf] = info
    return {
        prefix: of
        for prefix, of in found.items()
        if any(len(of[leaf].shape) == 3 for leaf in (GATE_UP, DOWN) if leaf in of)
    }


def _sizes(text_config: Mapping[str, Any]) -> _Sizes:
    def number(*keys: str) -> int | None:
        return next((v for key in keys if type(v := text_config.get(key)) is int and v > 0), None)

    return _Sizes(number(*_EXPERT_COUNTS), number("moe_intermediate_size"), number("hidden_size"))


def _why_left(found: Mapping[str, TensorInfo], sizes: _Sizes) -> str | None:
    """Why this layer's tensors are not split; None if they are what they seem."""
    if other := next((leaf for leaf in found if leaf not in _LEAVES), None):
        return f"there is a {other} beside it"
    for leaf, shape in ((GATE_UP, sizes.gate_up), (DOWN, sizes.down)):
        info = found.get(leaf)
        if info is None:
            return f"there is no {leaf} beside it"
        if None in shape:
            return f"config.json lacks {', '.join(_EXPERT_COUNTS[:1])}, moe_intermediate_size or hidden_size"
        if info.shape != shape:
            return f"{leaf} is {shape_text(info.shape)}, expected {shape_text([n or 0 for n in shape])} by config.json"
        if info.dtype not in _DTYPES:
            return f"{leaf} is {info.dtype}, expected one of {', '.join(_DTYPES)}"
    return None


def _check_count(tensors: Tensors, split: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Before anything is made: three dimensions in a header cost nothing, a million tensors do."""
    count, nbytes = len(tensors), 0
    for prefix, found in split.items():
        made = sum(info.shape[0] * (2 if leaf.startswith(GATE_UP) else 1) for leaf, info in found.items() if info.shape)
        count += made - len(found)
        nbytes += made * (len(prefix) + _LONGEST_LEAF)
        if count > MAX_TENSORS or nbytes > MAX_ALL_HEADER_BYTES:
            raise tensor_error(
                found[GATE_UP],
                f"with this layer's experts the checkpoint has {count} tensors, whose names take about {nbytes} bytes; "
                f"expected at most {MAX_TENSORS} and {MAX_ALL_HEADER_BYTES}",
                "too_large",
            )


def _parts(
    prefix: str, leaf: str, info: TensorInfo, found: Mapping[str, TensorInfo], block: tuple[int, int] | None
) -> Iterator[TensorInfo]:
    """The tensors of each expert that `info` holds."""
    weight = found[leaf.removesuffix(_SCALE)]
    is_scale = leaf.endswith(_SCALE)
    if is_scale:
        _check_scale(info, weight, block)
    elif info.dtype == "F8_E4M3" and leaf + _SCALE not in found:
        raise tensor_error(
            info,
            f"F8_E4M3 weight has no scale tensor; looked for {info.name}{_SCALE}",
            "missing_scale",
            hint="a shard or an index entry may be missing",
        )
    names = ("gate_proj", "up_proj") if leaf.startswith(GATE_UP) else ("down_proj",)
    suffix = "weight" + _SCALE if is_scale else "weight"
    experts, rows, cols = info.shape
    size, shape = info.nbytes // (experts * len(names)), (rows // len(names), cols)
    for i in range(experts * len(names)):
        name = f"{prefix}.{i // len(names)}.{names[i % len(names)]}.{suffix}"
        begin = info.begin + i * size
        yield TensorInfo(name, info.dtype, shape, info.file, begin, begin + size)


def _check_scale(scale: TensorInfo, weight: TensorInfo, block: tuple[int, int] | None) -> None:
    if weight.dtype != "F8_E4M3":
        raise tensor_error(
            scale, f"scale without an FP8 weight: {weight.name} is {weight.dtype}, not F8_E4M3", "orphan_scale"
        )
    if block is None:
        raise tensor_error(
            scale,
            f"scale grid {shape_text(scale.shape)}, but the config gives no block size",
            "missing_block_size",
            hint="quantization_config.weight_block_size says it, for example [128, 128]",
        )
    experts, rows, cols = weight.shape
    expected = experts, -(-rows // block[0]), -(-cols // block[1])
    if scale.shape != expected:
        raise tensor_error(
            scale,
            f"scale grid {shape_text(scale.shape)}, expected {shape_text(expected)} "
            f"({weight.name} {shape_text(weight.shape)} in blocks of {shape_text(block)})",
            "scale_grid",
        )
    if weight.name.endswith(GATE_UP) and rows // 2 % block[0]:
        raise tensor_error(
            scale,
            f"blocks of {block[0]} rows do not end where gate_proj does, at row {rows // 2}: one scale is for rows of "
            "both projections",
            "unsupported_shape",
            hint="save the checkpoint with one tensor per expert and projection, the published layout",
        )


def _replaced(tensors: Tensors, parts: Mapping[str, Iterable[TensorInfo]]) -> dict[str, TensorInfo]:
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for part in parts.get(name, (info,)):
            other = tensors.get(part.name) if part is not info else None
            if other is not None or part.name in result:
                raise KizamiError(
                    f"is there as a tensor of its own, and as a part of {name}; expected one of them",
                    code="duplicate_tensor",
                    file=info.file if other is None else other.file,
                    tensor=part.name,
                )
            result[part.name] = part
    return result


def _notes(split: Mapping[str, object], left: Mapping[str, list[TensorInfo]], sizes: _Sizes) -> Iterator[str]:
    if split:
        yield (
            f"{len(split)} layers hold all their experts in {GATE_UP} and {DOWN}; they are read as the "
            f"{sizes.experts} experts' own weights (e.g. {next(iter(split))}.0.gate_proj.weight)"
        )
    for why, infos in islice(left.items(), _MOST_REASONS):
        yield f"{len(infos)} layers' fused experts are left as they are (e.g. {infos[0].name}): {why}"
    if len(left) > _MOST_REASONS:
        yield f"fused experts of {sum(map(len, left.values()))} layers in all are left as they are"
