"""Which engines would load what a plan writes, asked before anything is written."""

from collections.abc import Iterator
from dataclasses import dataclass

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.engines.check import Checker
from kizami.formats.engines.finding import ENGINES, EngineName, Finding
from kizami.formats.engines.served import Served
from kizami.formats.errors import KizamiError
from kizami.formats.model_card import TP_SIZES
from kizami.quantize.plan import Plan

SERVING: tuple[EngineName, ...] = ("sglang", "vllm")


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
    def advice(self) -> str | None:
        """What to do about `error`."""
        return next((finding.advice for finding in self.findings if finding.severity == "error"), None)

    @property
    def needs(self) -> tuple[str, ...]:
        """What its operator has to do: the advice of warnings."""
        return tuple(dict.fromkeys(finding.advice for finding in self.findings if finding.severity == "warning"))


def find_loading(plan: Plan, tp: int = 1) -> tuple[Loading, ...]:
    """For every engine that kizami knows, at the version that its rules were written for."""
    return _loading(_checker(plan), tp)


def loading_by_size(plan: Plan) -> Iterator[tuple[Loading, tuple[int, ...]]]:
    """What each engine says at tp 1, and the usual tensor-parallel sizes at which it has no error, experts not spread
    over groups of ranks."""
    checker = _checker(plan)
    for found in _loading(checker, 1):
        sizes = TP_SIZES if found.engine in SERVING else ()
        fits = [tp for tp in sizes if Loading(found.engine, tuple(checker.find(found.engine, tp=tp))).error is None]
        yield found, tuple(fits)


def too_many_ranks(plan: Plan, tp: int) -> str | None:
    """Why no serving engine loads the output on `tp` ranks, each expert on all or on one of them, where one does on a
    single rank; else None."""
    checker = _checker(plan)
    alone = {one.engine for one in _loading(checker, 1) if one.engine in SERVING and one.error is None}
    found = [one for one in _loading(checker, tp) if one.engine in alone]
    spread = [one for one in _loading(checker, tp, ep=tp) if one.engine in alone]
    if not found or not all(one.error for one in (*found, *spread)):
        return None
    words = "; ".join(f"{one.engine}: {one.error}" for one in found)
    return f"no serving engine loads it at tp {tp}, with ep 1 or {tp}: {words}"


def not_served(plan: Plan, tp: int | None) -> list[str]:
    """What a run must say where it is not refused: that no engine loads the output, or, at a size that was asked for,
    each serving engine that does not."""
    found = find_loading(plan, tp or 1)
    if all(one.error for one in found):
        return ["no engine would load the output: " + "; ".join(f"{one.engine}: {one.error}" for one in found)]
    asked = [one for one in found if tp is not None and one.engine in SERVING and one.error]
    return [f"{one.engine} at tp {tp}: {one.error}" for one in asked]


def unloadable(plan: Plan, source: Checkpoint) -> KizamiError | None:
    """`no_engine_loads` if there is an error for every engine, and was none for one of them in the source: what is
    wrong with a part of a model, or with names of one's own, was wrong before."""
    found = find_loading(plan)
    if not all(engine.error for engine in found) or all(
        engine.error for engine in _loading(Checker(Served(source.config, source.tensors)), 1)
    ):
        return None
    return KizamiError(
        "no engine would load the output: " + "; ".join(f"{engine.engine}: {engine.error}" for engine in found),
        code="no_engine_loads",
        hint="choose other options (kizami plan shows what each engine says), or go on with --allow-unloadable",
    )


def _checker(plan: Plan) -> Checker:
    tensors = {spec.name: spec for shard in plan.shards for spec in shard.tensors}
    scales = {step.outputs[0].name: step.values for step in plan.steps if step.action == "kv_scale"}
    return Checker(Served(plan.config, tensors, mtp_dropped=plan.policy.mtp == "drop", kv_scales=scales))


def _loading(checker: Checker, tp: int, ep: int = 1) -> tuple[Loading, ...]:
    return tuple(Loading(engine, tuple(checker.find(engine, tp=tp, ep=ep))) for engine in ENGINES)
