"""What a plan means on GPUs: bytes per rank, and the tensor-parallel sizes at which no group is cut in two."""

from dataclasses import dataclass

from kizami.formats.families import Role
from kizami.quantize.plan import Plan, Step
from kizami.quantize.settings import BITS

# Kept whole on every rank by SGLang and vLLM (ReplicatedLinear, plain parameters; models/deepseek_v2.py in both).
REPLICATED_PARTS = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj"})
REPLICATED_ROLES = frozenset({Role.INDEXER, Role.ROUTER, Role.NORM})
ROW_PARALLEL_PARTS = frozenset({"down_proj", "w2", "o_proj"})  # their columns K are divided among the ranks


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
    found: dict[tuple[str, int, int], SplitGroup] = {}
    for step in plan.packed:
        rows, cols = step.weight.shape
        g = plan.policy.group_size
        if step.place.part in ROW_PARALLEL_PARTS:
            bad = cols % tp or (cols // tp) % g or (cols // tp) % (32 // BITS)
            finding = SplitGroup(step.module, "K", cols, tp, g)
        else:
            bad = rows % tp
            finding = SplitGroup(step.module, "N", rows, tp, g)
        if bad:
            found.setdefault((step.place.part, rows, cols), finding)
    return list(found.values())


def tensor_parallel_sizes(plan: Plan, up_to: int = 64) -> list[int]:
    """Powers of two, and what else divides: every size up to `up_to` at which no group is cut."""
    return [tp for tp in range(1, up_to + 1) if not split_groups(plan, tp)]
