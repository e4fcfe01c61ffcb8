"""vLLM 0.33: runtime names and matching.

Sources: model_executor/models/deepseek_v2.py, deepseek_mtp.py, kimi_k25.py, glm4_moe.py,
model_executor/layers/quantization/utils/config_utils.py, compressed_tensors/utils.py.
"""

from dataclasses import dataclass

from kizami.formats.engines.finding import EngineName
from kizami.formats.engines.matching import Entries, Fused, vllm_ignores, vllm_target
from kizami.formats.engines.naming import MEMBERS, Attention, next_token_layer, without_layers_quirk
from kizami.formats.families import Family

# deepseek_mtp.py `_rewrite_spec_layer_name`: outside mtp_block.
_OUTSIDE_BLOCK = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")


@dataclass(frozen=True, slots=True)
class Vllm:
    name: EngineName = "vllm"
    moe_class: str = "RoutedExperts"

    def runtime(self, module: str, family: Family) -> str:
        name = without_layers_quirk(module)
        cut = next_token_layer(name, family)
        if cut is None or any(word in cut[1] for word in _OUTSIDE_BLOCK):
            return name
        return f"{cut[0]}mtp_block.{cut[1]}"

    def fused(self, attention: Attention, extra: Fused) -> Fused:
        other = "fused_qkv_a_proj" if attention == "mla" else "qkv_proj"
        return {name: MEMBERS[name] for name in ("gate_up_proj", other)}

    def entry(self, entry: str) -> str:
        """The name mapper takes names with a dot and leaves patterns and classes alone."""
        return entry if entry.startswith("re:") else without_layers_quirk(entry)

    def ignores(self, ignore: Entries, name: str, fused: Fused) -> bool:
        return vllm_ignores(ignore, name, fused)

    def target(self, targets: Entries, name: str, kind: str, fused: Fused) -> str | None:
        return vllm_target(targets, name, kind, fused)
