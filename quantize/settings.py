"""What the user asked for, frozen: it goes unchanged into plan, journal, manifest, report and card."""

from dataclasses import dataclass
from typing import Literal

from kizami.formats.families import Role
from kizami.formats.int4_layout import Format

MethodName = Literal["minmax", "signed", "search", "weighted", "gptq", "llmcompressor-gptq", "llmcompressor-awq"]
ScaleSign = Literal["signed", "positive"]
Form = Literal["int4", "fp8", "bf16", "keep"]
Rest = Literal["bf16", "fp8"]
Mtp = Literal["quantize", "keep", "drop"]

GROUP_SIZES = (32, 64, 128)  # what SGLang's and vLLM's Marlin kernels take (marlin_utils.py in both)
BITS = 4
CALIBRATED: tuple[MethodName, ...] = ("weighted", "gptq")  # which need statistics of the inputs
SEARCHED: tuple[MethodName, ...] = ("search", *CALIBRATED)  # whose scales are the best of candidates
GIVEN: tuple[MethodName, ...] = ("llmcompressor-gptq", "llmcompressor-awq")  # codes and scales come from an engine
METHOD_NOTES: dict[MethodName, str] = {  # what a reader of the error figures has to know
    "llmcompressor-awq": "AWQ divides the rows of up_proj by factors and multiplies the columns of down_proj by them: "
    "each pair is right together, and its weight errors against the source count the factors as errors"
}
WHOLE_MTP = "mtp"  # as a role of --set: every linear of the next-token layers, not their eh_proj alone
# Roles whose linears may be given a form. Engines read embeddings, heads and routers as plain weights.
SETTABLE_ROLES = (
    Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION, Role.INDEXER, Role.MTP, Role.VISION,
    Role.OTHER,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Method:
    """How scales and codes are chosen.

    clip_allowance: kappa, in steps: |W - q*s| <= kappa*|s| for every weight; None is no constraint. Of SEARCHED only;
    `gptq` chooses its scales with it, its codes may clip more.
    stats: SHA-256 of the manifest of the statistics, of CALIBRATED; of all that decides the engine's answer, of GIVEN.
    """

    name: MethodName = "search"
    scale_sign: ScaleSign = "signed"
    clip_allowance: float | None = None
    stats: str | None = None


def default_allowance(name: MethodName, group_size: int) -> float | None:
    """The clip allowance with the least KL divergence from FP8, measured on real weights (docs/methods.md): a free
    search by weights alone gives up the largest ones where groups are large; inputs say which of them matter."""
    return {64: 2.0, 128: 0.5}.get(group_size) if name == "search" else None


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of each tensor. Decides every output name, shape and byte count; no arithmetic."""

    to: Literal["int4", "fp8", "bf16"] = "int4"  # what the targets become
    group_size: int = 32
    format: Format = "pack-quantized"  # how INT4 weights lie in the output
    rest: Rest = "bf16"
    mtp: Mtp = "quantize"
    targets: tuple[str, ...] = ()  # modules instead of the routed experts: exact names, `re:` + regex, or `Linear`
    ignore: tuple[str, ...] = ()  # modules that are no targets after all, same syntax
    roles: tuple[tuple[str, Form], ...] = ()  # (role, form): what becomes of the linears of a role; targets go first
    allow_requantize: bool = False  # INT4 to INT4 of larger groups: rounds weights that are rounded already
    max_shard_bytes: int = 5_000_000_000

    @property
    def scheme(self) -> str:
        return {"int4": f"w{BITS}a16-g{self.group_size}", "fp8": "fp8-block", "bf16": "bf16"}[self.to]
