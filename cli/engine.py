"""`kizami convert --engine llmcompressor`: another program chooses the codes, kizami writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kizami.cli import method_options as m
from kizami.cli import options as o
from kizami.cli.output import Ui, counted
from kizami.cli.stop import STOP
from kizami.formats.errors import KizamiError
from kizami.formats.families import Role
from kizami.quantize.settings import Method, MethodName

if TYPE_CHECKING:
    from kizami.calibration.data.tokens import TokenSet
    from kizami.calibration.llmcompressor.limits import EngineMethod
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.writer import WrittenShard
    from kizami.quantize.plan import Plan

PANEL = "Engine"
METHODS: dict[str, tuple["EngineMethod", MethodName]] = {
    "gptq": ("gptq", "llmcompressor-gptq"),
    "awq": ("awq", "llmcompressor-awq"),
}
UNUSED = ("data", "samples", "seq_len", "seed", "tokenizer")  # without an engine
SAMPLES, SEQ_LEN = 128, 2048  # as kizami calibrate

EngineName = Literal["kizami", "llmcompressor"]
Engine = Annotated[
    EngineName,
    # KIZAMI_ENGINE is who serves: of plan, check and serve
    o.option(
        "--engine",
        envvar="KIZAMI_METHOD_ENGINE",
        panel=PANEL,
        help="Who chooses the codes: kizami (default), or llmcompressor with --method gptq or awq: the whole model in "
        "memory, for comparison.",
    ),
]
Data = Annotated[
    list[Path] | None,
    o.option("--data", panel=PANEL, metavar="FILE", help="What the engine sees, as kizami calibrate. Repeatable."),
]
Samples = Annotated[
    int | None,
    o.option("--samples", panel=PANEL, metavar="N", min=1, max=1_000_000, help="The most sequences. Default 128."),
]
SeqLen = Annotated[
    int | None,
    o.option("--seq-len", panel=PANEL, metavar="N", min=8, max=1 << 20, help="Tokens of a sequence. Default 2048."),
]
Seed = Annotated[
    int | None,
    o.option("--seed", panel=PANEL, metavar="N", min=0, max=(1 << 32) - 1, help="Which documents, and in which order."),
]
TokenizerFolder = Annotated[
    str | None,
    o.option("--tokenizer", panel=PANEL, metavar="DIR", help="Take the tokenizer from this folder instead of SRC."),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """As they were written."""

    engine: EngineName
    data: list[Path] | None
    samples: int | None
    seq_len: int | None
    seed: int | None
    tokenizer: str | None


@dataclass(frozen=True, slots=True, eq=False)
class EngineJob:
    """An engine's run that has not begun. name: its method; method: what the plan calls it; facts: for the plan."""

    checkpoint: "Checkpoint"
    name: "EngineMethod"
    method: Method
    facts: dict[str, Any]
    tokens: "TokenSet"

    def check_memory(self, plan: "Plan") -> None:
        """KizamiError "out_of_memory" with the numbers, before anything is loaded; "nothing_to_pack"."""
        from kizami.calibration.llmcompressor.limits import check_memory, needed_memory
        from kizami.quantize.given import given_steps

        steps = given_steps(plan)
        if not steps:
            raise KizamiError(
                "nothing becomes INT4 here for --engine llmcompressor to choose codes for", code="nothing_to_pack"
            )
        seen = [step for step in plan.steps if not step.place.in_mtp and step.place.role is not Role.VISION]
        targets = {step.module: (step.shape[0], step.shape[1]) for step in steps}
        layers = {step.module: step.place.layer for step in steps}
        tokens = self.facts["tokens"]
        check_memory(needed_memory(self.name, sum(step.weights for step in seen), targets, layers, tokens))

    def maker(self, ui: Ui, plan: "Plan", tell: Callable[[str], None]) -> "Callable[[Path], WrittenShard]":
        """What writes the engine's answer to a file. tell: of what is going on."""
        from kizami.quantize.given import given_steps

        def make(path: Path) -> "WrittenShard":
            with STOP.held():
                from kizami.calibration.llmcompressor.limits import load_engine

                run_engine = load_engine()
            ids = fit_tokens(self.tokens)
            tell(
                f"llm-compressor's {self.name.upper()} over {counted(len(ids), 'sequence')} of {ids.shape[1]:,} tokens"
            )
            targets = {step.module: (step.shape[0], step.shape[1]) for step in given_steps(plan)}
            talk = ui.verbose and not ui.json
            done = run_engine(self.checkpoint, targets, self.name, plan.policy.group_size, ids, path, talk=talk)
            ui.warn(
                f"{name}: rounded to nearest by llm-compressor (its Hessian has no inverse)" for name in done.rounded
            )
            written: WrittenShard = done.file
            return written

        return make


def fit_tokens(tokens: "TokenSet") -> Any:
    """int32 [sequences, seq_len] without those held out, which no calibration may see."""
    import numpy as np

    return np.delete(tokens.ids, list(tokens.held_out), axis=0)


def engine_job(
    context: typer.Context,
    ui: Ui,
    src: str,
    told: EngineOptions,
    how: tuple[m.MethodChoice, m.SignName, str, Path | None],
) -> EngineJob | None:
    """None without an engine. how: method, scale sign, clip allowance, STATS. KizamiError "bad_option" for options that
    do not go together, "missing_package", and what is wrong with SRC or the data."""
    method, scale_sign, allowance, stats = how
    if told.engine == "kizami":
        _refuse_unused(context)
        return None
    _check_options(o.spelled(context, "engine"), method, allowance, stats)
    from kizami.calibration.llmcompressor.limits import versions
    from kizami.cli.calibrate import read_data
    from kizami.cli.source import open_source
    from kizami.quantize.given import engine_facts

    libraries = dict(versions())
    checkpoint = open_source(src)
    tokens = read_data(
        ui, checkpoint, told.data, told.tokenizer, told.samples or SAMPLES, told.seq_len or SEQ_LEN, told.seed or 0
    )
    ui.warn(tokens.warnings)
    name, called = METHODS[method]
    count = (tokens.sequences - len(tokens.held_out)) * tokens.seq_len
    names = [source.name for source in tokens.sources]
    facts = engine_facts(tokens.sha256, count, names, libraries, {"held_out": tokens.held_out, "method": called})
    return EngineJob(checkpoint, name, Method(called, scale_sign, stats=facts["sha256"]), facts, tokens)


def _check_options(engine: str, method: m.MethodChoice, allowance: str, stats: Path | None) -> None:
    if method not in METHODS:
        raise KizamiError(
            f"{engine} llmcompressor with --method {method}; expected gptq or awq",
            code="bad_option",
            hint="the other methods are kizami's own: leave --engine out",
        )
    if stats is not None:
        raise KizamiError(
            f"--stats with {engine} llmcompressor, which collects its own statistics",
            code="bad_option",
            hint="--data FILE gives it what kizami calibrate saw",
        )
    if allowance not in ("auto", "none"):
        raise KizamiError(
            f"--clip-allowance {allowance} with {engine} llmcompressor, whose scales are max |W| / 7.5",
            code="bad_option",
        )


def _refuse_unused(context: typer.Context) -> None:
    """A variable may be meant for kizami calibrate."""
    for name in UNUSED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise KizamiError(
                f"{o.spelled(context, name)} is for --engine llmcompressor",
                code="bad_option",
                hint="kizami's own methods take what kizami calibrate SRC --data FILE -o STATS wrote: --stats STATS",
            )
