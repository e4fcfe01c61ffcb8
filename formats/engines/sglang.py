"""SGLang 0.5.23: runtime names and matching.

Sources: srt/models/deepseek_v2.py, deepseek_nextn.py, kimi_k25.py, glm4_moe.py,
srt/layers/quantization/compressed_tensors/utils.py.
"""

from dataclasses import dataclass

from kizami.formats.engines.finding import EngineName
from kizami.formats.engines.matching import Entries, Fused, sglang_ignores, sglang_target
from kizami.formats.engines.naming import MEMBERS, Attention, next_token_layer, without_layers_quirk
from kizami.formats.families import Family

# deepseek_common/deepseek_weight_loader.py `nextn_spec_weight_names`: outside the decoder block.
_OUTSIDE_DECODER = ("shared_head.norm", "eh_proj", "enorm", "hnorm")


@dataclass(frozen=True, slots=True)
class Sglang:
    name: EngineName = "sglang"
    moe_class: str = "FusedMoE"

    def runtime(self, module: str, family: Family) -> str:
        """K2.5's language model is built with an empty prefix; the next-token layer is `model.decoder`."""
        name = without_layers_quirk(module).removeprefix("language_model.")
        cut = next_token_layer(name, family)
        if cut is None:
            return name
        return f"model.{cut[1]}" if any(word in cut[1] for word in _OUTSIDE_DECODER) else f"model.decoder.{cut[1]}"

    def fused(self, attention: Attention, extra: Fused) -> Fused:
        """DeepSeek's classes replace the map that a config may bring; Glm4Moe has none of its own."""
        if attention == "mla":
            return {"fused_qkv_a_proj_with_mqa": MEMBERS["fused_qkv_a_proj_with_mqa"]}
        return extra

    def entry(self, entry: str) -> str:
        return without_layers_quirk(entry)

    def ignores(self, ignore: Entries, name: str, fused: Fused) -> bool:
        return sglang_ignores(ignore, name, fused)

    def target(self, targets: Entries, name: str, kind: str, fused: Fused) -> str | None:
        return sglang_target(targets, name, kind, fused)
