"""What a plan must not be, whoever asked for it: outputs that no engine reads, and requests that match nothing."""

from kizami.formats.dialects import ScaledWeight
from kizami.formats.errors import KizamiError
from kizami.formats.families import Role
from kizami.quantize.decide import FP8_BLOCK
from kizami.quantize.plan import Step
from kizami.quantize.settings import Policy

# Engines load each of these as one matrix; q_a with kv_a as fused_qkv_a_proj (models/deepseek_v2.py in both).
FUSED = (
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def check_steps(steps: list[Step], policy: Policy) -> None:
    """Raises KizamiError for the first of all that is wrong."""
    _check_groups(steps, policy.group_size)
    _check_something_is_done(steps, policy)
    _check_fused(steps)
    _check_fp8(steps)
    _check_names(steps)


def _check_something_is_done(steps: list[Step], policy: Policy) -> None:
    wanted = {"int4": "int4", "fp8": "fp8", "bf16": "none"}[policy.to]
    made = [step for step in steps if step.form == wanted and step.is_linear]
    if made and any(step.outputs != tuple(info.spec for info in step.sources) for step in steps):
        return
    if made and policy.to == "int4":
        raise KizamiError(
            f"the checkpoint is already INT4 ({policy.format}, groups of {policy.group_size})",
            code="already_int4",
            file=made[0].weight.file,
            tensor=made[0].weight.name,
            hint="--scheme fp8-block, --scheme bf16 or --format make something else of it; check, verify and serve "
            "take it as it is",
        )
    if made:
        raise KizamiError(
            f"every tensor has the form that --scheme {policy.scheme} asks for: there is nothing to convert",
            code="nothing_to_do",
            hint="kizami inspect SRC shows what it has",
        )
    moved = [form for role, form in policy.roles if role == Role.ROUTED_EXPERT]
    if moved and not policy.targets:
        raise KizamiError(
            f"--set routed_expert={moved[0]} leaves nothing for --scheme {policy.scheme}",
            code="nothing_matched",
            hint="--scheme fp8-block or bf16 says what the experts become",
        )
    asked = ", ".join(policy.targets) if policy.targets else "routed experts (….experts.<n>.<projection>.weight)"
    raise KizamiError(
        f"0 modules matched: nothing to {'pack' if policy.to == 'int4' else 'convert'} for {asked}",
        code="nothing_matched",
        hint="kizami inspect SRC --tensors '*' lists the names; choose them with --targets, and check --ignore",
    )


def _check_groups(steps: list[Step], group_size: int) -> None:
    bad = [step for step in steps if step.form == "int4" and step.shape[1] % group_size]
    if not bad:
        return
    widths = sorted({step.shape[1] for step in bad})
    raise KizamiError(
        f"{len(bad)} modules have a column count K = {', '.join(map(str, widths))} that {group_size} does not divide: "
        + ", ".join(step.module for step in bad[:3])
        + (", ..." if len(bad) > 3 else ""),
        code="group_does_not_divide",
        file=bad[0].weight.file,
        tensor=bad[0].weight.name,
        hint="choose another --group-size, or leave these modules out with --ignore",
    )


def _check_fused(steps: list[Step]) -> None:
    linears = {step.module: step for step in steps if len(step.shape) == 2}
    for module, step in linears.items():
        parent, _, part = module.rpartition(".")
        for members in FUSED:
            if part not in members:
                continue
            other = next(
                (o for m in members if (o := linears.get(f"{parent}.{m}")) and _words(o) != _words(step)), None
            )
            if other is not None:
                raise KizamiError(
                    f"{part} is to be {_words(step)} and {other.module.rpartition('.')[2]} {_words(other)}; "
                    f"engines fuse {', '.join(members)} and need one scheme for all of them",
                    code="fused_pair_split",
                    tensor=parent,
                    hint=f"let --ignore or --targets match all, e.g. ({'|'.join(members)})"
                    if "packed" in (_words(step), _words(other))
                    else "the source has only some of them in FP8: use --rest bf16",
                )


def _words(step: Step) -> str:
    if step.action == "drop":
        return "dropped"
    return {"int4": "packed", "fp8": "kept in FP8", "none": "left unpacked"}[step.form]


def fp8_block(steps: list[Step]) -> tuple[int, int] | None:
    """The block of the output's FP8 weights; None for one scale per output channel, and where there are none."""
    kept = [step.encoding for step in steps if step.action == "keep_fp8"]
    channel = any(isinstance(scaled, ScaledWeight) and scaled.block == _channel(scaled) for scaled in kept)
    return None if channel else FP8_BLOCK


def _channel(scaled: ScaledWeight) -> tuple[int, int]:
    return 1, scaled.weight.shape[1]


def _check_fp8(steps: list[Step]) -> None:
    """One config group describes all FP8 linears: blocks of 128 x 128, or one scale per output channel."""
    block = fp8_block(steps)
    for step in steps:
        if step.form != "fp8":
            continue
        found = step.encoding.block if isinstance(step.encoding, ScaledWeight) else FP8_BLOCK
        expected = (1, step.shape[1]) if block is None else block
        if found != expected:
            others = " (others have one scale per output channel)" if block is None else ""
            raise KizamiError(
                f"its scale covers blocks of {list(found)}; FP8 can be kept in blocks of [128, 128], or all of it with "
                f"one scale per output channel{others}",
                code="unsupported_block",
                file=step.weight.file,
                tensor=step.weight.name,
                hint="use --rest bf16, or --ignore, --targets and --set to change what is kept",
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
