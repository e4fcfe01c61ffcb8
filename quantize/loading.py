"""Which engines would load what a plan writes, asked before anything is written."""

from dataclasses import dataclass

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.engines.check import Checker
from kizami.formats.engines.finding import ENGINES, EngineName, Finding
from kizami.formats.engines.served import Served
from kizami.formats.errors import KizamiError
from kizami.quantize.plan import Plan


@dataclass(frozen=True, slots=True)
class Loading:
    """What the rules of `kizami check` say of an engine."""

    engine: EngineName
    findings: tuple[Finding, ...]

    @property
    def error(self) -> str | None:
        """The first reason why it does not load; None if it does, as far as config and headers tell."""
        return next((finding.message for finding in self.findings if finding.severity == "error"), None)

    @property
    def needs(self) -> tuple[str, ...]:
        """What its operator has to do: the advice of warnings."""
        return tuple(dict.fromkeys(finding.advice for finding in self.findings if finding.severity == "warning"))


def find_loading(plan: Plan, tp: int = 1) -> tuple[Loading, ...]:
    """For every engine that kizami knows, at the version that its rules were written for."""
    tensors = {spec.name: spec for shard in plan.shards for spec in shard.tensors}
    return _loading(Served(plan.config, tensors, mtp_dropped=plan.policy.mtp == "drop"), tp)


def unloadable(plan: Plan, source: Checkpoint, tp: int = 1) -> KizamiError | None:
    """`no_engine_loads` if there is an error for every engine, and was none for one of them in the source: what is
    wrong with a part of a model, or with names of one's own, was wrong before."""
    found = find_loading(plan, tp)
    if not all(engine.error for engine in found) or all(
        engine.error for engine in _loading(Served(source.config, source.tensors), tp)
    ):
        return None
    return KizamiError(
        "no engine would load the output: " + "; ".join(f"{engine.engine}: {engine.error}" for engine in found),
        code="no_engine_loads",
        hint="choose other options (kizami plan shows what each engine says), or go on with --allow-unloadable",
    )


def _loading(served: Served, tp: int) -> tuple[Loading, ...]:
    checker = Checker(served)
    return tuple(Loading(engine, tuple(checker.find(engine, tp=tp))) for engine in ENGINES)
