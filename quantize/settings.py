"""What the user asked for, frozen: it goes unchanged into plan, journal, manifest, report and card."""

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["minmax", "signed", "search"]
ScaleSign = Literal["signed", "positive"]
Rest = Literal["bf16", "fp8"]
Mtp = Literal["quantize", "keep", "drop"]

GROUP_SIZES = (32, 64, 128)  # what SGLang's and vLLM's Marlin kernels take (marlin_utils.py in both)
BITS = 4


@dataclass(frozen=True, slots=True)
class Method:
    """How scales and codes are chosen.

    clip_allowance: kappa, in steps: |W - q*s| <= kappa*|s| for every weight; None is no constraint. `search` only.
    """

    name: MethodName = "search"
    scale_sign: ScaleSign = "signed"
    clip_allowance: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of each tensor. Decides every output name, shape and byte count; no arithmetic."""

    group_size: int = 32
    rest: Rest = "bf16"
    mtp: Mtp = "quantize"
    targets: tuple[str, ...] = ()  # modules to pack instead of the routed experts: exact names or `re:` + regex
    ignore: tuple[str, ...] = ()  # modules to leave unpacked, same syntax, wins over targets
    max_shard_bytes: int = 5_000_000_000

    @property
    def scheme(self) -> str:
        return f"w{BITS}a16-g{self.group_size}"
