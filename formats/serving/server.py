"""One server of a launch: the model, how it is stored, and what the engine makes of the options."""

from dataclasses import dataclass, replace
from typing import Literal

from kizami.formats.serving.gpus import Gpu
from kizami.formats.serving.kv_layout import Layout
from kizami.formats.serving.model import Attention, ServedModel
from kizami.formats.serving.stored import StoredForm

Engine = Literal["sglang", "vllm"]
Role = Literal["single", "prefill", "decode"]

SGLANG, VLLM = "SGLang 0.5.23", "vLLM 0.33.0"
DSA_PAGE = 64


@dataclass(frozen=True, slots=True)
class Server:
    """`path`: as the user wrote it, without the `revision` of a Hub id. `kv_dtype`: bf16, fp8_e4m3 or fp8_ds_mla.
    `page` and `fraction`: None for the engine's own. `short_of_context`: the pool is estimated to hold fewer tokens
    than the config's context."""

    engine: Engine
    role: Role
    path: str
    model: ServedModel
    stored: StoredForm
    gpu: Gpu
    tp: int = 8
    ep: int = 1
    dcp: int = 1
    kv_dtype: str = "bf16"
    page: int | None = None
    fraction: float | None = None
    short_of_context: bool = False
    revision: str = ""

    @property
    def is_dsa(self) -> bool:
        return self.model.attention is Attention.DSA

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert."""
        return max(1, self.tp // self.ep)

    @property
    def inter_per_rank(self) -> int:
        return self.model.moe_intermediate // self.moe_tp

    @property
    def page_size(self) -> int:
        """DSA pages hold 64 tokens in both engines. Elsewhere SGLang's own is 1 (64 under its Blackwell MLA backend;
        arg_groups/overrides.py `_page_size_default`, `_mla_backend_page_constraints`); a pair is given 64, because the
        two sides must agree. vLLM takes the smallest from 16 up that its backend has (platforms/interface.py):
        FlashInfer MLA 32, FlashMLA (FP8 on Hopper) 64."""
        if self.page is not None:
            return self.page
        if self.is_dsa:
            return DSA_PAGE
        if self.engine == "vllm":
            return self._vllm_page
        if self.role != "single":
            return DSA_PAGE
        return 64 if self.model.is_mla and self.gpu.capability >= 10 else 1

    @property
    def _vllm_page(self) -> int:
        if not self.model.is_mla:
            return 16
        if self.gpu.capability >= 10:
            return 32
        return 16 if self.kv_dtype == "bf16" else 64

    @property
    def layout(self) -> Layout:
        """The rows that this engine writes under this dtype on this GPU."""
        if self.kv_dtype == "bf16":
            return Layout.BF16
        if self.kv_dtype == "fp8_ds_mla":
            return Layout.DS_MLA
        if not self.is_dsa or self.engine == "vllm":
            # vLLM: FLASHMLA_SPARSE (656 bytes) takes "fp8" and "fp8_ds_mla", not "fp8_e4m3", which goes to FlashInfer's
            # sparse backends and raw rows (platforms/cuda.py, v1/attention/backends/mla/*.py).
            return Layout.RAW
        # SGLang: trtllm (raw rows) on Blackwell and under dcp, flashmla_kv (656 bytes) on Hopper (overrides.py
        # `_dsa_split_backend_resolution`, model_overrides/deepseek_v2.py `_dsa_dcp_overrides`).
        return Layout.RAW if self.gpu.capability >= 10 or self.dcp > 1 else Layout.DS_MLA

    def option_for(self, layout: Layout) -> str | None:
        """The --kv-cache-dtype of `kizami serve` that gives these rows here; None: no backend that is chosen by itself
        (SGLang on Hopper has raw rows for sparse attention with its tilelang backends only)."""
        options = ("bf16", "fp8_e4m3", "fp8_ds_mla")
        return next((word for word in options if replace(self, kv_dtype=word).layout is layout), None)

    @property
    def kv_word(self) -> str:
        """The value of --kv-cache-dtype. SGLang has one FP8 word; its rows depend on the backend."""
        if self.engine == "sglang":
            return "bf16" if self.kv_dtype == "bf16" else "fp8_e4m3"
        return "bfloat16" if self.kv_dtype == "bf16" else self.kv_dtype

    @property
    def kv_word_of_auto(self) -> str:
        """What `auto` would become. SGLang takes DSA to FP8 on Blackwell (`_dsa_kv_cache_dtype_default`); a
        `kv_cache_scheme` turns auto to FP8 in SGLang, and in vLLM for ordinary attention only."""
        scheme = self.stored.kv_scheme and (self.engine == "sglang" or not self.model.is_mla)
        if scheme or (self.engine == "sglang" and self.is_dsa and self.gpu.capability >= 10):
            return "fp8_e4m3"
        return "bf16" if self.engine == "sglang" else "bfloat16"

    @property
    def fuses_shared_experts(self) -> bool:
        """Whether SGLang would put BF16 or FP8 shared experts into the INT4 experts' tensors, where they have no place.

        models/deepseek_v2.py and models/glm4_moe.py `shared_experts_fusion_disable_reason`: 256 experts of
        DeepSeek-V3 or GLM-5 unless INT4 sits on `Linear`; every Glm4Moe model, whatever the quantization.
        """
        model, stored = self.model, self.stored
        if not stored.group_sizes or stored.shared_like_routed or model.shared_experts < 1 or self.ep > 1:
            return False
        if stored.method == "w4afp8":
            return False
        if model.architecture == "Glm4MoeForCausalLM":
            return True
        fusing = model.architecture in ("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM")
        return fusing and model.experts == 256 and model.shared_experts == 1 and not stored.int4_on_linear
