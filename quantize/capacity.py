"""What a plan means on GPUs: bytes per rank, and the tensor-parallel sizes at which no group is cut in two."""

from dataclasses import dataclass

from kizami.formats.families import Role
from kizami.formats.model_card import ROW_PARALLEL, TP_SIZES, tensor_parallel_fits
from kizami.quantize.plan import Plan, Step

# Kept whole on every rank by SGLang and vLLM (ReplicatedLinear, plain parameters; models/deepseek_v2.py in both).
REPLICATED_PARTS = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj"})
REPLICATED_ROLES = frozenset({Role.INDEXER, Role.ROUTER, Role.NORM})


def bytes_per_gpu(plan: Plan, tp: int) -> int:
    """Weight bytes on each of `tp` ranks: a share of the divided tensors and all of the replicated ones."""
    replicated = sum(step.nbytes for step in plan.steps if _is_replicated(step))
    return -(-(plan.output.bytes - replicated) // tp) + replicated


def _is_replicated(step: Step) -> bool:
    return step.place.role in REPLICATED_ROLES or step.place.part in REPLICATED_PARTS


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
    for (part, rows, cols), module in _shapes(plan).items():
        if not tensor_parallel_fits(part, rows, cols, group_size, tp):
            axis, size = ("K", cols) if part in ROW_PARALLEL else ("N", rows)
            findings.append(SplitGroup(module, axis, size, tp, group_size))
    return findings


def tensor_parallel_sizes(plan: Plan) -> list[int]:
    """The usual sizes at which no packed weight has a group cut in two."""
    return [tp for tp in TP_SIZES if not split_groups(plan, tp)]


def _shapes(plan: Plan) -> dict[tuple[str, int, int], str]:
    """(part, N, K) -> the first module that has them."""
    shapes: dict[tuple[str, int, int], str] = {}
    for step in plan.packed:
        rows, cols = step.weight.shape
        shapes.setdefault((step.place.part, rows, cols), step.module)
    return shapes
