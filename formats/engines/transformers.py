"""transformers 5.24 with compressed-tensors 0.20: every linear under its own name, nothing merged when it is matched.

Source: compressed-tensors src/compressed_tensors/utils/match.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kizami.formats.engines.finding import EngineName
from kizami.formats.engines.matching import Entries, Fused
from kizami.formats.engines.naming import Attention, without_layers_quirk
from kizami.formats.errors import printable
from kizami.formats.families import Family


@dataclass(frozen=True, slots=True)
class Transformers:
    name: EngineName = "transformers"
    moe_class: str = "Linear"  # experts are matched one by one

    def runtime(self, module: str, family: Family) -> str:
        """Kimi-K2.5's parts are moved under `model.` (models/kimi_k25)."""
        if family.name != "kimi_k25":
            return module
        name = without_layers_quirk(module)
        if name.startswith("language_model.model."):
            return "model.language_model." + name.removeprefix("language_model.model.")
        return name.removeprefix("language_model.")

    def fused(self, attention: Attention, extra: Fused) -> Fused:
        return {}

    def entry(self, entry: str) -> str:
        return entry

    def ignores(self, ignore: Entries, name: str, fused: Fused) -> bool:
        return ignore.first(name) is not None or "Linear" in ignore

    def target(self, targets: Entries, name: str, kind: str, fused: Fused) -> str | None:
        return targets.first(name) or ("Linear" if "Linear" in targets else None)


def library_verdict(raw: Mapping[str, Any]) -> str | None:
    """What the installed compressed-tensors says against this config; None if nothing, or if it is not installed.

    Imports torch, which takes seconds: for `kizami check --engine transformers`, not for a plan.
    """
    if find_spec("compressed_tensors") is None:
        return None
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except (ImportError, OSError):  # installed without its torch, or with one that does not load here
        return None
    known = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        QuantizationConfig.model_validate(known)
    except Exception as e:  # KeyError and NotImplementedError among them: whatever it raises, transformers stops at
        words = " ".join(line.strip() for line in str(e).splitlines()[:3])
        return printable(words if isinstance(e, ValueError) else f"{type(e).__name__}: {words}", 300)
    return None
