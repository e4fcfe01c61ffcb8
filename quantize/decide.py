"""One action and one reason for every tensor of a checkpoint. Names, dtypes and shapes only; no weight is read."""

from collections.abc import Iterable

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import Dialect, ScaledWeight
from kizami.formats.errors import KizamiError
from kizami.formats.families import EMBEDDINGS, Family, Place, Role
from kizami.formats.int4_layout import layout_specs
from kizami.formats.packed_source import PackedWeight
from kizami.formats.tensors import TensorInfo, TensorSpec
from kizami.quantize.plan import Action, Step
from kizami.quantize.select import Selection, Wish
from kizami.quantize.settings import Form, Policy

FLOAT_DTYPES = ("BF16", "F16", "F32")  # sources without scale that can be rounded
# No linears to the engines, which read the plain weight (VocabParallelEmbedding, ParallelLMHead, MoEGate).
PLAIN_ROLES = (Role.EMBEDDING, Role.HEAD, Role.ROUTER)
# SGLang and vLLM fuse it with the indexer's wk into one BF16 matrix; FP8 is read for wk only (vLLM 0.33
# models/deepseek_v2.py).
PLAIN_PARTS = ("weights_proj",)
FP8_BLOCK = (128, 128)  # the only block of SGLang's and vLLM's block-FP8 GEMMs (w8a8_block_fp8_matmul in both)


def decide(checkpoint: Checkpoint, family: Family, dialect: Dialect, policy: Policy) -> list[Step]:
    """Steps in source order. Raises KizamiError where a tensor cannot become what is asked for."""
    selection = Selection(policy)
    return [
        _step(info, family, dialect, policy, selection)
        for info in checkpoint.tensors.values()
        if info.name not in dialect.scales  # a scale goes with its weight
    ]


def _step(info: TensorInfo, family: Family, dialect: Dialect, policy: Policy, selection: Selection) -> Step:
    place = family.place(info.name)
    module, encoding = dialect.encoding_of(info)

    def step(action: Action, reason: str, outputs: Iterable[TensorSpec]) -> Step:
        return Step(module, action, reason, place, info, encoding, tuple(outputs))

    if place.in_mtp and policy.mtp == "drop":
        return step("drop", "MTP layer, --mtp drop", ())
    if info.name in dialect.stale:
        return step("drop", dialect.stale[info.name], ())
    if encoding is None and not (info.name.endswith(".weight") and len(info.shape) == 2):
        return step("copy", f"{place.role.value.replace('_', ' ')}, {info.dtype} in the source", (info.spec,))
    wish = selection.wish(module, place)
    form = wish.form or _rest(encoding, policy)
    if form in ("fp8", "keep") and _is_plain(module, place):
        form = "bf16"
    action = _action(form, info, encoding, policy)
    outputs = _outputs(action, module, info, encoding, policy)
    return step(action, _reason(action, wish, info, encoding, policy, _is_plain(module, place)), outputs)


def _rest(encoding: ScaledWeight | PackedWeight | None, policy: Policy) -> Form:
    match encoding:
        case ScaledWeight():
            return "keep" if policy.rest == "fp8" else "bf16"
        case PackedWeight():
            return "bf16"
        case None:
            return "keep"


def _is_plain(module: str, place: Place) -> bool:
    is_plain = place.role in PLAIN_ROLES or place.part in PLAIN_PARTS
    return is_plain or module.rpartition(".")[2] in EMBEDDINGS


def _action(form: Form, info: TensorInfo, encoding: ScaledWeight | PackedWeight | None, policy: Policy) -> Action:
    """What makes `form` of what the source has. Raises KizamiError where nothing may."""
    if form in ("int4", "fp8"):
        _check_roundable(form, info, encoding)
    match form, encoding:
        case "int4" | "keep", PackedWeight():
            return _int4_to_int4(info, encoding, policy, keep=form == "keep")
        case "int4", _:
            return "quantize"
        case "keep" | "fp8", ScaledWeight():
            return "keep_fp8"
        case "fp8", _:
            return "to_fp8"
        case "bf16", ScaledWeight() | PackedWeight():
            return "dequantize"
    return "copy"


def _int4_to_int4(info: TensorInfo, packed: PackedWeight, policy: Policy, *, keep: bool) -> Action:
    """Groups may be divided without loss (their scales are repeated), and joined only by rounding once more."""
    if packed.group_size == policy.group_size or (packed.group_size % policy.group_size == 0 and not keep):
        return "repack"
    if keep:
        raise KizamiError(
            f"is INT4 in groups of {packed.group_size} and is to stay so; the output has groups of {policy.group_size}",
            code="group_differs",
            file=info.file,
            tensor=info.name,
            hint=f"use --group-size {packed.group_size}",
        )
    if not policy.allow_requantize:
        raise KizamiError(
            f"is INT4 in groups of {packed.group_size}, to be {policy.group_size}: rounded weights would be rounded "
            "once more",
            code="requantize",
            file=info.file,
            tensor=info.name,
            hint=f"use --group-size {packed.group_size}, or --allow-requantize: the report then has the error of it",
        )
    return "quantize"


def _outputs(
    action: Action, module: str, info: TensorInfo, encoding: ScaledWeight | PackedWeight | None, policy: Policy
) -> tuple[TensorSpec, ...]:
    rows, cols = (encoding.rows, encoding.cols) if isinstance(encoding, PackedWeight) else info.shape
    match action:
        case "quantize" | "repack":
            divides = cols % policy.group_size == 0  # check_groups names all modules where it does not
            return layout_specs(policy.format, module, rows, cols, policy.group_size) if divides else ()
        case "to_fp8":
            return _fp8(module, (rows, cols), (-(-rows // FP8_BLOCK[0]), -(-cols // FP8_BLOCK[1])), policy)
        case "keep_fp8":
            assert isinstance(encoding, ScaledWeight)
            return _fp8(module, (rows, cols), encoding.grid, policy)
        case "dequantize":
            return (TensorSpec(module + ".weight", "BF16", (rows, cols)),)
    return (info.spec,)


def _fp8(module: str, shape: tuple[int, ...], grid: tuple[int, int], policy: Policy) -> tuple[TensorSpec, TensorSpec]:
    """compressed-tensors names the multiplier `weight_scale` (vllm #30823 is the crash from `weight_scale_inv`);
    SGLang's w4afp8 has linears of its fp8 method (layers/quantization/w4afp8.py), and that the other name."""
    scale = "weight_scale_inv" if policy.format == "w4afp8" else "weight_scale"
    return TensorSpec(module + ".weight", "F8_E4M3", shape), TensorSpec(f"{module}.{scale}", "F32", grid)


def _reason(
    action: Action,
    wish: Wish,
    info: TensorInfo,
    encoding: ScaledWeight | PackedWeight | None,
    policy: Policy,
    is_plain: bool,
) -> str:
    if action == "quantize" and not isinstance(encoding, PackedWeight):
        return wish.reason
    kind = {ScaledWeight: "FP8", PackedWeight: "INT4"}.get(type(encoding), info.dtype)
    if action == "keep_fp8" and wish.form is None:
        return f"{wish.reason}, FP8, --rest fp8"
    if action == "dequantize" and is_plain and "fp8" in (policy.rest, wish.form):
        return f"{wish.reason}, {kind} in the source; engines read it as a plain weight"
    return f"{wish.reason}, {kind} in the source"


def _check_roundable(form: Form, info: TensorInfo, encoding: ScaledWeight | PackedWeight | None) -> None:
    asked = form.upper()
    if info.name.rpartition(".")[0].rpartition(".")[2] in EMBEDDINGS:
        raise KizamiError(
            f"selected for {asked}, but embeddings are looked up, not multiplied: engines have {asked} for linears "
            "only",
            code="unsupported_target",
            file=info.file,
            tensor=info.name,
            hint="leave it out with --ignore, or write narrower --targets",
        )
    if encoding is None and info.dtype not in FLOAT_DTYPES:
        raise KizamiError(
            f"selected for {asked}, but its dtype is {info.dtype}; "
            f"expected FP8 with a scale, or one of {', '.join(FLOAT_DTYPES)}",
            code="unsupported_dtype",
            file=info.file,
            tensor=info.name,
            hint="leave it out with --ignore",
        )
