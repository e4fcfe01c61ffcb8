"""What a plan may do, but its user hardly meant: one line per kind."""

from collections.abc import Iterator

from kizami.formats.families import Role
from kizami.formats.ignore_rules import WELL_KNOWN
from kizami.quantize.plan import Step
from kizami.quantize.select import matches
from kizami.quantize.settings import WHOLE_MTP, Policy

# SGLang reads `kv_b_proj.weight` itself, concatenates q_a with kv_a, and fuses the indexer's wk with weights_proj into
# one BF16 matrix (sglang 0.5.23, models/deepseek_v2.py): packed forms of these do not load there. Nor do packed routers
# (MoEGate there is a plain parameter).
UNLOADABLE_PACKED = ("kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj")


def warn(steps: list[Step], policy: Policy) -> Iterator[str]:
    linears = [step for step in steps if step.is_linear]
    for option, patterns in (("ignore", policy.ignore), ("targets", policy.targets)):
        for pattern in patterns:
            if pattern not in WELL_KNOWN and not any(matches(pattern, step.module, step.place) for step in linears):
                effect = "left out" if option == "ignore" else "packed"
                yield f"--{option} {pattern} matches no module: nothing is {effect} because of it"
    for role, form in policy.roles:
        if not any(step.place.in_mtp if role == WHOLE_MTP else step.place.role.value == role for step in linears):
            yield f"--set {role}={form} matches no module"
    if policy.rest == "fp8" and policy.to != "fp8" and not any(step.action == "keep_fp8" for step in steps):
        yield "--rest fp8 keeps nothing: the source has no other FP8 linears (--set ROLE=fp8 makes FP8 of others)"
    yield from _partly_packed_layers(steps)
    packed = [step for step in steps if step.form == "int4"]
    for engine, plain in (
        ("SGLang", [s for s in packed if s.place.part in UNLOADABLE_PACKED or s.place.role is Role.ROUTER]),
        ("vLLM", [s for s in packed if s.place.role is Role.HEAD]),
    ):
        if plain:
            parts = ", ".join(sorted({step.place.part for step in plain}))
            yield (
                f"{len(plain)} packed modules ({parts}) are such that {engine} reads as plain weights: "
                "it cannot load INT4"
            )
    fused = [s.module for s in steps if s.action == "copy" and len(s.weight.shape) == 3 and _is_expert(s)]
    if fused:
        yield f"{len(fused)} tensors (e.g. {fused[0]}) hold all experts of a layer in 3-D; they are copied, not packed"


def _is_expert(step: Step) -> bool:
    return step.place.role is Role.ROUTED_EXPERT


def _partly_packed_layers(steps: list[Step]) -> Iterator[str]:
    """vLLM and SGLang take the scheme of expert 0 for the whole layer (serving engines' FusedMoE loaders)."""
    layers: dict[tuple[int | None, bool], dict[str, list[str]]] = {}
    for step in steps:
        if _is_expert(step) and len(step.shape) == 2 and step.action != "drop":
            kinds = layers.setdefault((step.place.layer, step.place.in_mtp), {"packed": [], "unpacked": []})
            kinds["packed" if step.form == "int4" else "unpacked"].append(step.module)
    for (layer, _), kinds in layers.items():
        if kinds["packed"] and kinds["unpacked"]:
            yield (
                f"layer {layer}: {len(kinds['packed'])} expert modules are packed and {len(kinds['unpacked'])} are not "
                f"(e.g. {kinds['unpacked'][0]}); engines take one scheme for all experts of a layer, "
                "so they would load garbage"
            )
