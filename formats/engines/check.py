"""Would an engine load it? Runs the rules of that engine and version."""

from collections.abc import Sequence
from dataclasses import dataclass

from kizami.formats.engines import (
    rules_config,
    rules_dims,
    rules_experts,
    rules_kernels,
    rules_kv,
    rules_layers,
    rules_schemes,
    rules_shapes,
    rules_special,
)
from kizami.formats.engines.context import Context, Model
from kizami.formats.engines.finding import (
    ENGINES,
    READ,
    EngineName,
    Finding,
    Rule,
    Severity,
    collect,
    version_key,
)
from kizami.formats.engines.served import Served
from kizami.formats.engines.transformers import library_verdict
from kizami.formats.errors import printable

RULES: tuple[Rule, ...] = (
    *rules_config.RULES,
    *rules_schemes.RULES,
    *rules_experts.RULES,
    *rules_special.RULES,
    *rules_layers.RULES,
    *rules_dims.RULES,
    *rules_shapes.RULES,
    *rules_kv.RULES,
    *rules_kernels.RULES,
)
MATRIX_TP = (1, 2, 4, 8, 16, 32)
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the matrix. `why`: the first error, None where there is none."""

    engine: EngineName
    tp: int
    ep: int
    ok: bool
    why: str | None


class Checker:
    """One checkpoint; what does not depend on the engine or on tp is done once."""

    def __init__(self, served: Served) -> None:
        self._model = Model.of(served)
        self._contexts: dict[tuple[EngineName, str], Context] = {}
        self._fixed: dict[tuple[EngineName, str], list[Finding]] = {}

    def find(
        self, engine: EngineName, version: str | None = None, *, tp: int = 1, ep: int = 1, pp: int = 1
    ) -> list[Finding]:
        """Findings, errors first. KizamiError for a config that no reader could use."""
        read = version or READ[engine]
        key = (engine, read)
        context = self._contexts.setdefault(key, Context(self._model, engine, read))
        if key not in self._fixed:
            fixed = [
                finding for rule in rules_for(engine, read) if not rule.per_rank for finding in collect(rule, context)
            ]
            self._fixed[key] = [*_version_findings(engine, read), *fixed]
        here = context.at(tp, ep, pp)
        ranks = [finding for rule in rules_for(engine, read) if rule.per_rank for finding in collect(rule, here)]
        return sorted([*self._fixed[key], *ranks], key=lambda finding: _ORDER[finding.severity])

    def ask_library(self) -> list[Finding]:
        """The verdict of an installed compressed-tensors, whose models transformers validates the config with."""
        quant = self._model.quant
        if quant is None or not quant.is_compressed_tensors:
            return []
        verdict = library_verdict(quant.raw)
        if verdict is None:
            return []
        source = "compressed-tensors quantization/quant_config.py, as installed here"
        advice = "correct the config"
        return [Finding("error", "refused_by_library", "transformers", None, 1, verdict, source, advice)]

    def matrix(self, engines: Sequence[EngineName] = ENGINES, version: str | None = None) -> list[Cell]:
        """Every tp of MATRIX_TP with the ep that make sense: powers of two up to tp, in vLLM 1 and tp."""
        cells = []
        for engine in engines:
            for tp in MATRIX_TP if engine != "transformers" else (1,):
                steps = [ep for ep in MATRIX_TP if ep <= tp]
                for ep in steps if engine == "sglang" else sorted({1, tp}):
                    errors = [found for found in self.find(engine, version, tp=tp, ep=ep) if found.severity == "error"]
                    why = errors[0].message if errors else None
                    cells.append(Cell(engine, tp, ep, not errors, why))
        return cells


def _apply(context: Context, *, per_rank: bool) -> list[Finding]:
    rules = (rule for rule in rules_for(context.engine, context.version) if rule.per_rank == per_rank)
    return [finding for rule in rules for finding in collect(rule, context)]


def rules_for(engine: EngineName, version: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if rule.applies(engine, version))


def _version_findings(engine: EngineName, version: str) -> list[Finding]:
    """Nothing is claimed of a version whose sources nobody read."""
    is_final = version.strip().removeprefix("v").replace(".", "").isdigit()  # not 0.5.23.post1
    if is_final and version_key(version) == version_key(READ[engine]):
        return []
    count = len(rules_for(engine, version))
    total = sum(engine in rule.sources for rule in RULES)
    written = f"the rules were written for {engine} {READ[engine]}"
    message = f"{written}; {count} of {total} are taken to hold for {version}, whose sources were not read"
    if version_key(version) is None:
        message = f"{printable(version, 40)} is no version number; {written}"
    severity: Severity = "note" if count > total // 2 else "warning"
    advice = "a clean result for another version is a guess"
    return [Finding(severity, "version_not_read", engine, None, 1, message, "kizami", advice)]


def find_problems(
    served: Served, engine: EngineName, version: str | None = None, tp: int = 1, ep: int = 1, pp: int = 1
) -> list[Finding]:
    """Findings of one engine, errors first."""
    return Checker(served).find(engine, version, tp=tp, ep=ep, pp=pp)


def engines_that_load(served: Served, tp: int = 1, ep: int = 1, pp: int = 1) -> tuple[EngineName, ...]:
    """Those without an error."""
    checker = Checker(served)
    return tuple(
        engine
        for engine in ENGINES
        if not any(found.severity == "error" for found in checker.find(engine, tp=tp, ep=ep, pp=pp))
    )
