"""One action and one reason for every tensor of a checkpoint. Names, dtypes and shapes only; no weight is read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import Dialect, ScaledWeight
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import EMBEDDINGS, Family, Place, Role
from kizami.formats.int4_layout import packed_specs
from kizami.formats.patterns import runs_away
from kizami.formats.tensors import TensorInfo, TensorSpec
from kizami.quantize.plan import Action, Step
from kizami.quantize.settings import Policy

FLOAT_DTYPES = ("BF16", "F16", "F32")  # sources without scale that can be packed
# SGLang reads `kv_b_proj.weight` itself, concatenates q_a with kv_a, and fuses the indexer's wk with weights_proj into
# one BF16 matrix (sglang 0.5.23, models/deepseek_v2.py): packed forms of these do not load there. Nor do packed routers
# (MoEGate there is a plain parameter).
UNLOADABLE_PACKED = ("kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj")
# No linears to the engines, which read the plain weight (VocabParallelEmbedding, ParallelLMHead, MoEGate).
PLAIN_ROLES = (Role.EMBEDDING, Role.HEAD, Role.ROUTER)


# --targets and --ignore together: each is tried on every module, and `verify` takes them from somebody's kizami.json.
MAX_PATTERNS = 200


@dataclass(frozen=True)
class Selection:
    """Which modules are packed. Patterns have compressed-tensors' syntax: an exact name, or `re:` + re.match."""

    policy: Policy

    def __post_init__(self) -> None:
        patterns = (*self.policy.targets, *self.policy.ignore)
        if len(patterns) > MAX_PATTERNS:
            raise KizamiError(
                f"{len(patterns)} patterns, expected at most {MAX_PATTERNS}",
                code="bad_pattern",
                hint="let one re: pattern stand for many modules",
            )
        for pattern in patterns:
            _compiled(pattern)

    def wants(self, module: str, place: Place) -> tuple[str | None, str | None]:
        """(why this 2-D weight would be packed, why it is not after all); None where there is no such reason."""
        if self.policy.targets:
            hit = next((p for p in self.policy.targets if _matches(p, module)), None)
            wish = f"matches --targets {hit}" if hit else None
        else:
            wish = "routed expert" if place.role is Role.ROUTED_EXPERT else None
        if place.in_mtp and self.policy.mtp != "quantize":
            return wish, "MTP layer, --mtp keep"
        ignored = next((p for p in self.policy.ignore if _matches(p, module)), None)
        return wish, f"matches --ignore {ignored}" if ignored else None


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern.startswith("re:"):
        return None
    try:
        problem: object = runs_away(pattern[3:])  # `verify` tries patterns that stand in somebody's kizami.json
        if problem is None:
            return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as e:
        problem = e
    raise KizamiError(
        f"pattern {printable(pattern, 200)} cannot be used: {problem}",
        code="bad_pattern",
        hint="write an exact module name, or re: and a simple Python regular expression (README, Security)",
    )


def _matches(pattern: str, module: str) -> bool:
    regex = _compiled(pattern)
    return module == pattern if regex is None else regex.match(module) is not None


def decide(checkpoint: Checkpoint, family: Family, dialect: Dialect, policy: Policy) -> list[Step]:
    """Steps in source order. Raises KizamiError where the request cannot be met; nothing is skipped in silence."""
    selection = Selection(policy)
    steps = [
        _step(info, family, dialect, policy, selection)
        for info in checkpoint.tensors.values()
        if info.name not in dialect.scales  # a scale goes with its weight
    ]
    packed = [step for step in steps if step.action == "quantize"]
    _check_something_is_packed(packed, policy)
    _check_groups(packed, policy.group_size)
    _check_fused(steps)
    _check_names(steps)
    return steps


def _step(info: TensorInfo, family: Family, dialect: Dialect, policy: Policy, selection: Selection) -> Step:
    module = info.name.removesuffix(".weight")
    place = family.place(info.name)
    scaled = dialect.weights.get(module) if info.name.endswith(".weight") else None

    def step(action: Action, reason: str, outputs: Iterable[TensorSpec]) -> Step:
        return Step(module, action, reason, place, info, scaled, tuple(outputs))

    if place.in_mtp and policy.mtp == "drop":
        return step("drop", "MTP layer, --mtp drop", ())
    if info.name in dialect.stale:
        return step("drop", dialect.stale[info.name], ())
    is_linear = info.name.endswith(".weight") and len(info.shape) == 2
    wish, spared = selection.wants(module, place) if is_linear else (None, None)
    if wish is not None and spared is None:
        _check_packable(info, scaled)
        rows, cols = info.shape
        divides = cols % policy.group_size == 0  # _check_groups names all modules where it does not
        return step("quantize", wish, packed_specs(module, rows, cols, policy.group_size) if divides else ())
    what = place.role.value.replace("_", " ") + (f", {spared}" if wish is not None else "")
    if scaled is None:
        return step("copy", f"{what}, {info.dtype} in the source", (info.spec,))
    if policy.rest == "fp8" and (place.role in PLAIN_ROLES or module.rpartition(".")[2] in EMBEDDINGS):
        return step("dequantize", f"{what}, FP8 in the source; engines read it as a plain weight", (_bf16(info),))
    if policy.rest == "fp8":
        return step("keep_fp8", f"{what}, FP8, --rest fp8", _kept_fp8(module, scaled))
    return step("dequantize", f"{what}, FP8 in the source", (_bf16(info),))


def _bf16(info: TensorInfo) -> TensorSpec:
    return TensorSpec(info.name, "BF16", info.shape)


def _kept_fp8(module: str, scaled: ScaledWeight) -> tuple[TensorSpec, TensorSpec]:
    """compressed-tensors names the multiplier `weight_scale` (vllm #30823 is the crash from `weight_scale_inv`)."""
    return scaled.weight.spec, TensorSpec(module + ".weight_scale", "F32", scaled.grid)


def _check_packable(info: TensorInfo, scaled: ScaledWeight | None) -> None:
    if info.name.removesuffix(".weight").rpartition(".")[2] in EMBEDDINGS:
        raise KizamiError(
            "selected for INT4, but embeddings are looked up, not multiplied: engines have INT4 for linears only",
            code="unsupported_target",
            file=info.file,
            tensor=info.name,
            hint="leave it out with --ignore, or write narrower --targets",
        )
    if scaled is None and info.dtype not in FLOAT_DTYPES:
        raise KizamiError(
            f"selected for INT4, but its dtype is {info.dtype}; "
            f"expected FP8 with a scale, or one of {', '.join(FLOAT_DTYPES)}",
            code="unsupported_dtype",
            file=info.file,
            tensor=info.name,
            hint="leave it out with --ignore",
        )


def _check_names(steps: list[Step]) -> None:
    """A tensor that passes through may have the name that a packed module needs, in a half converted source."""
    owners: dict[str, Step] = {}
    for step in steps:
        for spec in step.outputs:
            other = owners.setdefault(spec.name, step)
            if other is not step:
                copied, made = (step, other) if step.weight.name == spec.name else (other, step)
                raise KizamiError(
                    f"the output needs this name for {made.module} ({made.reason})",
                    code="name_taken",
                    file=copied.weight.file,
                    tensor=spec.name,
                    hint="the source is half converted; take it from its publisher again",
                )


def _check_something_is_packed(packed: list[Step], policy: Policy) -> None:
    if packed:
        return
    asked = ", ".join(policy.targets) if policy.targets else "routed experts (….experts.<n>.<projection>.weight)"
    raise KizamiError(
        f"0 modules matched: nothing to pack for {asked}",
        code="nothing_matched",
        hint="kizami inspect SRC --tensors '*' lists the names; choose them with --targets, and check --ignore",
    )


def _check_groups(packed: list[Step], group_size: int) -> None:
    bad = [step for step in packed if step.weight.shape[1] % group_size]
    if not bad:
        return
    widths = sorted({step.weight.shape[1] for step in bad})
    raise KizamiError(
        f"{len(bad)} modules have a column count K = {', '.join(map(str, widths))} that {group_size} does not divide: "
        + ", ".join(step.module for step in bad[:3])
        + (", ..." if len(bad) > 3 else ""),
        code="group_does_not_divide",
        file=bad[0].weight.file,
        tensor=bad[0].weight.name,
        hint="choose another --group-size, or leave these modules out with --ignore",
    )


FUSED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))  # engines load each as one matrix


def _check_fused(steps: list[Step]) -> None:
    linears = {step.module: step for step in steps if len(step.weight.shape) == 2}
    for module, step in linears.items():
        parent, _, part = module.rpartition(".")
        for members in FUSED:
            if part not in members:
                continue
            other = next((o for m in members if (o := linears.get(f"{parent}.{m}")) and _form(o) != _form(step)), None)
            if other is not None:
                raise KizamiError(
                    f"{part} is to be {_form(step)} and {other.module.rpartition('.')[2]} {_form(other)}; "
                    f"engines fuse {', '.join(members)} and need one scheme for all of them",
                    code="fused_pair_split",
                    tensor=parent,
                    hint=f"let --ignore or --targets match all, e.g. ({'|'.join(members)})"
                    if "packed" in (_form(step), _form(other))
                    else "the source has only some of them in FP8: use --rest bf16",
                )


def _form(step: Step) -> str:
    return {"quantize": "packed", "keep_fp8": "kept in FP8", "drop": "dropped"}.get(step.action, "left unpacked")


def warn(steps: list[Step], policy: Policy) -> Iterator[str]:
    """What is allowed, but hardly meant; one line per kind."""
    modules = [step.module for step in steps if step.weight.name.endswith(".weight") and len(step.weight.shape) == 2]
    for option, patterns in (("ignore", policy.ignore), ("targets", policy.targets)):
        for pattern in patterns:
            if not any(_matches(pattern, module) for module in modules):
                effect = "left out" if option == "ignore" else "packed"
                yield f"--{option} {pattern} matches no module: nothing is {effect} because of it"
    yield from _partly_packed_layers(steps)
    packed = [step for step in steps if step.action == "quantize"]
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
    layers: dict[tuple[int | None, bool], Mapping[str, list[str]]] = {}
    for step in steps:
        if _is_expert(step) and len(step.weight.shape) == 2 and step.action != "drop":
            kinds = layers.setdefault((step.place.layer, step.place.in_mtp), {"packed": [], "unpacked": []})
            kinds["packed" if step.action == "quantize" else "unpacked"].append(step.module)
    for (layer, _), kinds in layers.items():
        if kinds["packed"] and kinds["unpacked"]:
            yield (
                f"layer {layer}: {len(kinds['packed'])} expert modules are packed and {len(kinds['unpacked'])} are not "
                f"(e.g. {kinds['unpacked'][0]}); engines take one scheme for all experts of a layer, "
                "so they would load garbage"
            )
