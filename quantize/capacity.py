"""What a plan or a checkpoint means on GPUs: bytes per rank, and the tensor-parallel sizes at which no group is cut."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kizami.formats.families import Family, Place, Role
from kizami.formats.model_card import ROW_PARALLEL, TP_SIZES, tensor_parallel_fits
from kizami.formats.tensors import TensorInfo
from kizami.quantize.plan import Plan

# Kept whole on every rank by SGLang and vLLM (ReplicatedLinear, plain parameters; models/deepseek_v2.py in both).
REPLICATED_PARTS = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj"})
REPLICATED_ROLES = frozenset({Role.INDEXER, Role.ROUTER, Role.NORM})
KV_HEAD_PARTS = frozenset({"k_proj", "v_proj"})


def bytes_per_gpu(plan: Plan, tp: int) -> int:
    """Weight bytes on each of `tp` ranks, MTP layer included."""
    return plan_weights(plan).per_gpu(tp, mtp=True)


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes by what a rank holds of them: its share of the experts, of K and V by head, of the rest, or all."""

    experts: int = 0
    kv_heads: int = 0
    divided: int = 0
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.experts + self.kv_heads + self.divided + self.replicated


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the main model and of its MTP layers, which engines load only to draft with them."""

    model: Share
    mtp: Share

    @property
    def total(self) -> int:
        return self.model.total + self.mtp.total

    def per_gpu(self, tp: int, *, mtp: bool, kv_heads: int = 0) -> int:
        """On each of `tp` ranks. Expert parallelism changes nothing: moe_tp * ep = tp, and an expert on fewer ranks
        comes with fewer experts. kv_heads: a rank holds one whole head at least (0: no K and V by head)."""
        parts = [self.model, self.mtp] if mtp else [self.model]
        by_head = sum(part.kv_heads for part in parts)
        shared = sum(part.experts + part.divided for part in parts)
        if kv_heads and kv_heads < tp:
            return -(-shared // tp) - (-by_head // kv_heads) + sum(part.replicated for part in parts)
        return -(-(shared + by_head) // tp) + sum(part.replicated for part in parts)


def plan_weights(plan: Plan) -> Weights:
    return weights_of((step.place, step.nbytes) for step in plan.steps)


def checkpoint_weights(tensors: Mapping[str, TensorInfo], family: Family) -> Weights:
    return weights_of((family.place(name), info.nbytes) for name, info in tensors.items())


def weights_of(parts: Iterable[tuple[Place, int]]) -> Weights:
    sums: Counter[tuple[bool, str]] = Counter()
    for place, nbytes in parts:
        sums[place.in_mtp, _held(place)] += nbytes
    model, mtp = ({kind: n for (in_mtp, kind), n in sums.items() if in_mtp is which} for which in (False, True))
    return Weights(Share(**model), Share(**mtp))


def _held(place: Place) -> str:
    if place.role in REPLICATED_ROLES or place.part in REPLICATED_PARTS:
        return "replicated"
    if place.role is Role.ROUTED_EXPERT:
        return "experts"
    return "kv_heads" if place.role is Role.ATTENTION and place.part in KV_HEAD_PARTS else "divided"


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """A packed weight that `tp` ranks cannot share: `size` columns (or rows) per rank against `group_size`."""

    module: str
    axis: str  # "K" or "N"
    size: int
    tp: int
    group_size: int

    def __str__(self) -> str:
        share = f"{self.axis} = {self.size} on {self.tp} ranks is {self.size / self.tp:g} per rank"
        need = f"a multiple of the group size {self.group_size}" if self.axis == "K" else "a whole number"
        return f"{self.module}: {share}; expected {need}"


def split_groups(plan: Plan, tp: int) -> list[SplitGroup]:
    """One finding per projection and shape that does not divide, named by its first module."""
    group_size = plan.policy.group_size
    findings = []
    for (part, rows, cols), module in plan.packed_shapes.items():
        if not tensor_parallel_fits(part, rows, cols, group_size, tp):
            axis, size = ("K", cols) if part in ROW_PARALLEL else ("N", rows)
            findings.append(SplitGroup(module, axis, size, tp, group_size))
    return findings


def tensor_parallel_sizes(plan: Plan) -> list[int]:
    """The usual sizes at which no packed weight has a group cut in two."""
    return [tp for tp in TP_SIZES if not split_groups(plan, tp)]


# ------------------------------------------------------------------------------------- the same model in other formats


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of some format as the weight it holds: `rows` x `columns` values of a linear that published FP8
    checkpoints quantize, or (both 0) `nbytes` that are the same in every format."""

    place: Place
    rows: int
    columns: int
    nbytes: int


# DeepSeek, GLM-5 and Kimi keep these in BF16 (their published FP8 checkpoints).
_LINEAR_ROLES = frozenset({
    Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION, Role.INDEXER,
})  # fmt: skip
_NEVER_FP8 = frozenset({"weights_proj"})
_SCALES = (
    ".weight_scale", ".weight_scale_inv", ".weight_shape", ".scales", ".qzeros", ".g_idx", ".input_scale",
)  # fmt: skip
_BLOCK = 128


def as_fp8(tensors: Mapping[str, TensorInfo], family: Family) -> Weights:
    """What the model weighs in block FP8 (F32 scales of 128x128), computed from INT4 or BF16 tensors."""
    return weights_of((part.place, _fp8_bytes(part)) for part in _stored(tensors, family))


def as_int4(tensors: Mapping[str, TensorInfo], family: Family, group_size: int) -> Weights:
    """What it weighs under the default policy: routed experts in INT4 with BF16 scales, the rest in BF16."""
    return weights_of((part.place, _int4_bytes(part, group_size)) for part in _stored(tensors, family))


def _stored(tensors: Mapping[str, TensorInfo], family: Family) -> Iterator[Stored]:
    for name, info in tensors.items():
        if name.endswith(_SCALES):
            continue  # they go with their weights
        place = family.place(name)
        is_weight = name.endswith((".weight", ".weight_packed", ".qweight")) and len(info.shape) == 2
        if is_weight and place.role in _LINEAR_ROLES and place.part not in _NEVER_FP8:
            yield Stored(place, info.shape[0], info.shape[1] * _values_per_element(name, info.dtype), 0)
        else:
            yield Stored(place, 0, 0, info.nbytes)


def _values_per_element(name: str, dtype: str) -> int:
    """8 codes in an I32 of pack-quantized, AutoGPTQ (which turns rows and columns) and AWQ; 2 in an I8 of w4afp8."""
    if name.endswith((".weight_packed", ".qweight")):
        return 8
    return 2 if dtype == "I8" else 1


def _fp8_bytes(part: Stored) -> int:
    blocks = -(-part.rows // _BLOCK) * -(-part.columns // _BLOCK)
    return part.nbytes + part.rows * part.columns + 4 * blocks


def _int4_bytes(part: Stored, group_size: int) -> int:
    if part.place.role is not Role.ROUTED_EXPERT:
        return part.nbytes + 2 * part.rows * part.columns
    codes = part.rows * part.columns // 2
    return part.nbytes + codes + 2 * part.rows * -(-part.columns // group_size) + (8 if part.rows else 0)
