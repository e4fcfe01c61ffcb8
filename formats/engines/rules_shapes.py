"""Shapes per rank: heads, INT4 groups and tiles, FP8 blocks, experts and pipeline stages."""

from collections.abc import Iterator

from kizami.formats.engines.context import Context, Experts, Linear, as_group
from kizami.formats.engines.finding import Hit, Rule
from kizami.formats.engines.naming import leaf_of
from kizami.formats.engines.parts import Part
from kizami.formats.engines.quantization import Group

_FEWER = "serve at a smaller tp"
_EP = "serve with expert parallelism (SGLang --ep-size, vLLM --enable-expert-parallel), or at a smaller tp"
_MARLIN_GROUPS = (-1, 32, 64, 128)  # marlin_utils.py of both engines, MARLIN_SUPPORTED_GROUP_SIZES
_TILE_N, _TILE_K, _MOE_TILE, _MOE_HIDDEN = 64, 128, 64, 128


def _parallel(context: Context) -> Iterator[Hit]:
    model, tp, ep, pp = context.model, context.tp, context.ep, context.pp
    heads = model.number("num_attention_heads")
    if heads is not None and heads % tp:
        yield Hit(f"{heads} attention heads on {tp} ranks is {heads / tp:g} each", "choose a tp that divides the heads")
    kv_heads = model.number("num_key_value_heads")
    if model.attention == "gqa" and kv_heads and (kv_heads % tp if kv_heads >= tp else tp % kv_heads):
        yield Hit(f"{kv_heads} KV heads on {tp} ranks: neither divides the other", "choose another tp")
    if tp % ep:
        yield Hit(f"ep {ep} does not divide tp {tp}", "choose an ep that divides tp")
    elif context.engine == "vllm" and ep not in (1, tp):
        yield Hit(
            f"ep {ep} at tp {tp}: --enable-expert-parallel spreads experts over all {tp} ranks",
            f"ep is 1 or {tp} there",
        )
    experts = model.number("n_routed_experts", "num_local_experts", "num_experts")
    if context.engine == "sglang" and experts and experts % ep:
        yield Hit(f"{experts} experts on {ep} ranks is {experts / ep:g} each", "choose an ep that divides the experts")
    layers = model.family.num_layers
    if layers is not None and pp > layers:
        yield Hit(f"{layers} layers on {pp} pipeline stages", "choose a smaller pp")


def _kernels(context: Context) -> Iterator[Hit]:
    """Bits and group sizes that have a kernel."""
    bits = (4, 8) if context.engine == "sglang" else tuple(range(2, 9))
    for built in context.modules:
        group = as_group(built.scheme)
        if group is None or not group.is_packed_int:
            continue
        args = group.weights
        size = -1 if args.strategy == "channel" else args.group_size
        if args.bits not in bits:
            yield Hit(
                f"{args.bits}-bit weights: {_engine(context)} has kernels for {bits[0]} to {bits[-1]}",
                "quantize to 4 or 8 bits",
                built.name,
            )
        elif size not in _MARLIN_GROUPS:
            yield Hit(
                f"group size {size}: Marlin has 32, 64, 128 and whole rows",
                "quantize in groups of 32, 64 or 128",
                built.name,
                None if context.engine == "sglang" or isinstance(built, Linear) else "warning",
            )
        elif isinstance(built, Experts) and context.engine == "vllm" and args.bits == 8 and size not in (-1, 128):
            yield Hit(
                f"8-bit experts in groups of {size}: grouped INT8 MoE was reported to be refused (vllm #47154)",
                "use 4 bits",
                built.name,
                "warning",
            )
        if not args.symmetric and isinstance(built, Experts):
            yield Hit(
                "asymmetric weights: Marlin reads zero points, the Triton and MxInt4 MoE kernels do not",
                "do not choose those backends",
                built.name,
                "note",
            )
        if group.format == "w4afp8" and args.group_size != 128:
            yield Hit(f"w4afp8 in groups of {args.group_size}", "the CUTLASS kernel has 128", built.name)


def _engine(context: Context) -> str:
    return "SGLang" if context.engine == "sglang" else "vLLM"


def _experts(context: Context) -> Iterator[Hit]:
    for experts in context.experts:
        group = as_group(experts.scheme)
        shapes = _shapes(experts, group)
        if group is None or shapes is None:
            continue
        hidden, inter = shapes
        ways = context.moe_tp
        if inter % ways:
            yield Hit(f"experts: {inter} rows on {ways} ranks is {inter / ways:g} each", _EP, experts.name)
            continue
        if group.is_packed_int or group.format in ("gptq", "awq", "w4afp8"):
            yield from _int4_experts(context, experts, group, hidden, inter)
        elif group.weights.block is not None:
            high, wide = group.weights.block
            per_rank = inter // ways
            if per_rank % high or (ways > 1 and per_rank % wide):
                yield Hit(
                    f"experts: {inter} on {ways} ranks is {per_rank}, not a multiple of the FP8 block {high}",
                    _EP,
                    experts.name,
                )


def _shapes(experts: Experts, group: Group | None) -> tuple[int, int] | None:
    """(hidden, intermediate) from the tensors of the first expert."""
    bits = group.weights.bits if group else 4
    projections = experts.by_expert[min(experts.by_expert)]
    gate = projections.get("gate_proj") or projections.get("up_proj")
    if gate is None:
        return None
    if gate.form == "qweight":
        packed = gate.leaves["qweight"]
        is_awq = group is not None and group.format == "awq"
        if len(packed.shape) != 2:
            return None
        rows, cols = packed.shape
        return (rows, cols * 32 // bits) if is_awq else (rows * 32 // bits, cols)
    shape = gate.shape(bits)
    if shape is None:
        return None
    return (shape[1] * 2 if gate.form == "int8" else shape[1]), shape[0]


def _int4_experts(context: Context, experts: Experts, group: Group, hidden: int, inter: int) -> Iterator[Hit]:
    ways = context.moe_tp
    per_rank = inter // ways
    size = group.weights.group_size if group.weights.strategy == "group" else None
    silent = "wrong scales without a message" if context.engine == "sglang" else "ValueError"
    if size and per_rank % size:
        yield Hit(
            f"experts: down_proj K = {inter} on {ways} ranks is {per_rank}, no multiple of the group {size}: {silent}",
            _EP if inter % size == 0 else "quantize with a group size that divides the columns",
            experts.name,
        )
    elif context.engine == "sglang" and per_rank % _MOE_TILE:
        yield Hit(
            f"experts: {inter} on {ways} ranks is {per_rank}, no multiple of Marlin's tile {_MOE_TILE}: not refused, "
            "computed wrong",
            _EP,
            experts.name,
        )
    elif per_rank % _MOE_TILE:
        yield Hit(
            f"experts: {inter} on {ways} ranks is {per_rank}, padded to a multiple of {_MOE_TILE}",
            "slower; expert parallelism avoids it",
            experts.name,
            "note",
        )
    if hidden % _MOE_HIDDEN or (size and hidden % size):
        need = f"{_MOE_HIDDEN} and the group {size}" if size else str(_MOE_HIDDEN)
        yield Hit(f"experts: hidden size {hidden} is not a multiple of {need}", "no setting helps", experts.name)


def _linears(context: Context) -> Iterator[Hit]:
    for linear in context.linears:
        group = as_group(linear.scheme)
        if group is None:
            continue
        for part in linear.parts:
            shape = part.shape(group.weights.bits)
            if shape is None:
                continue
            ranks = _ranks(context, part)
            if group.is_packed_int and part.form == "packed":
                yield from _int4_linear(context, linear, part, group, shape, ranks)
            elif group.weights.block is not None and part.form == "fp8":
                yield from _fp8_linear(linear, part, group.weights.block, shape, ranks)
            elif ranks > 1 and (size := _cut(linear, shape)) is not None and size % ranks:
                yield Hit(f"{leaf_of(part)}: {size} on {ranks} ranks is {size / ranks:g}", _FEWER, part.name)


def _ranks(context: Context, part: Part) -> int:
    """Into how many pieces a linear is cut. K and V heads are repeated where there are fewer than ranks."""
    kv_heads = context.model.number("num_key_value_heads")
    if kv_heads and context.model.attention == "gqa" and leaf_of(part) in ("k_proj", "v_proj"):
        return min(context.tp, max(kv_heads, 1))
    return context.tp


def _cut(linear: Linear, shape: tuple[int, int]) -> int | None:
    """The size that tensor parallelism cuts."""
    if linear.split == "whole":
        return None
    return shape[0] if linear.split == "rows" else shape[1]


def _int4_linear(
    context: Context, linear: Linear, part: Part, group: Group, shape: tuple[int, int], tp: int
) -> Iterator[Hit]:
    rows = shape[0] // tp if linear.split == "rows" else shape[0]
    cols = shape[1] // tp if linear.split == "cols" else shape[1]
    leaf = leaf_of(part)
    size = group.weights.group_size if group.weights.strategy == "group" else None
    if (linear.split == "rows" and shape[0] % tp) or (linear.split == "cols" and shape[1] % tp):
        yield Hit(f"{leaf}: {list(shape)} cannot be cut into {tp}", _FEWER, part.name)
    elif size and cols % size:
        yield Hit(f"{leaf}: {cols} columns per rank, not a multiple of the group {size}", _FEWER, part.name)
    elif context.engine == "sglang" and (cols % _TILE_K or (rows * len(linear.parts)) % _TILE_N):
        yield Hit(
            f"{leaf}: [{rows}, {cols}] per rank; Marlin needs rows in multiples of {_TILE_N} and columns of {_TILE_K}",
            _FEWER,
            part.name,
        )


def _fp8_linear(linear: Linear, part: Part, block: tuple[int, int], shape: tuple[int, int], tp: int) -> Iterator[Hit]:
    """`validate_block_quant_shapes` (SGLang), `validate_fp8_block_shape` (vLLM)."""
    (rows, cols), (high, wide) = shape, block
    leaf = leaf_of(part)
    if linear.split == "cols" and tp > 1 and (cols % tp or cols // tp % wide):
        yield Hit(f"{leaf}: {cols} columns on {tp} ranks is {cols / tp:g}, FP8 blocks have {wide}", _FEWER, part.name)
    cut = linear.split == "rows" and (tp > 1 or len(linear.parts) > 1)
    if cut and (rows % tp or rows // tp % high):
        yield Hit(f"{leaf}: {rows} rows on {tp} ranks is {rows / tp:g}, FP8 blocks have {high}", _FEWER, part.name)


RULES = (
    Rule(
        "parallel_sizes",
        "error",
        {
            "sglang": "SGLang srt/models/deepseek_v2.py, srt/layers/moe/fused_moe_triton/layer.py",
            "vllm": "vLLM model_executor/models/deepseek_v2.py, config/parallel.py",
        },
        _parallel,
        per_rank=True,
    ),
    Rule(
        "no_kernel",
        "error",
        {
            "sglang": "SGLang srt/layers/quantization/marlin_utils.py",
            "vllm": "vLLM .../utils/marlin_utils.py, model_executor/layers/fused_moe/oracle/int_wna16.py",
        },
        _kernels,
    ),
    Rule(
        "expert_shape",
        "error",
        {
            "sglang": "SGLang .../schemes/compressed_tensors_wNa16_moe.py (num_groups_w2), fp8.py",
            "vllm": "vLLM .../utils/marlin_utils.py check_moe_marlin_supports_config; vllm #41511, #49949",
        },
        _experts,
        per_rank=True,
    ),
    Rule(
        "linear_shape",
        "error",
        {
            "sglang": "SGLang .../marlin_utils.py verify_marlin_supports_shape, fp8.py validate_block_quant_shapes",
            "vllm": "vLLM distributed/utils.py verify_group_size_divides_partition, .../utils/fp8_utils.py",
        },
        _linears,
        per_rank=True,
    ),
)
