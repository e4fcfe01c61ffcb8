"""Matrix products in plain torch for the forms that kizami writes, where vLLM's CPU build has no kernel for them.

vLLM's CPU kernels for INT4 experts and block FP8 need AMX, those for INT4 linears AVX-512. `install` puts the classes
below in the place of these kernels, and of nothing else: reading config.json, choosing the scheme of each module,
creating the parameters, finding and cutting the tensors, unpacking the experts (`_process_weights_emulation_gptq`) are
vLLM's own code (0.32; model_executor/layers/quantization/compressed_tensors, model_executor/layers/fused_moe). So a
model that runs right with this plug-in shows that vLLM understands the config and puts every weight where it belongs.
It shows nothing about vLLM's kernels.

All weights are rounded to BF16, as kernels and the dense twin have them; the product is in the activations' dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.experts.int4_emulation_moe as emulation
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_BLOCK_KERNELS,
    _POSSIBLE_FP8_KERNELS,
    _POSSIBLE_KERNELS,
    FP8ScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.platforms.interface import PlatformEnum

no_zeros = {"w13_qzeros": None, "w2_qzeros": None}


def install() -> None:
    """For this process. Raises AttributeError or KeyError if vLLM has another inside than 0.32."""
    for kernels, ours in (
        (_POSSIBLE_KERNELS, TorchInt4Linear),
        (_POSSIBLE_FP8_BLOCK_KERNELS, TorchFp8BlockLinear),
        (_POSSIBLE_FP8_KERNELS, TorchFp8ChannelLinear),
    ):
        assert kernels[PlatformEnum.CPU]
        kernels[PlatformEnum.CPU] = [ours]
    for experts in (compressed_tensors_moe_wna16, auto_gptq, auto_awq):
        assert callable(experts.select_wna16_moe_backend)
        experts.select_wna16_moe_backend = lambda *_, **__: (WNA16MoEBackend.EMULATION, TorchExperts)
    # Zeros of symmetric GPTQ are loaded and then not used, as by vLLM's Marlin backend (AutoGPTQMoEMethod,
    # `use_zp`); EMULATION would take the 7 that GPTQ stores for 8 as it is.
    unpack = auto_gptq.convert_to_wna16_moe_kernel_format
    auto_gptq.convert_to_wna16_moe_kernel_format = lambda **given: unpack(**given | no_zeros)
    for config in (auto_gptq.AutoGPTQConfig, auto_awq.AutoAWQConfig):  # a limit of kernels, too
        dtypes = config.get_supported_act_dtypes()
        config.get_supported_act_dtypes = staticmethod(lambda dtypes=dtypes: [*dtypes, torch.float32])
    assert emulation.Int4EmulationTritonExperts
    emulation.Int4EmulationTritonExperts = TorchExperts  # the only class that the EMULATION backend admits


def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight.to(torch.bfloat16).to(x.dtype), bias)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight numbers in each I32, the lowest bits first."""
    return ((words[..., None] >> (4 * torch.arange(8, dtype=torch.int32))) & 15).flatten(1)


class TorchInt4Linear(MPLinearKernel):
    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        packed, scale, zeros = self._get_weight_params(layer)
        words, steps = (packed.data, scale.data) if packed.input_dim == 1 else (packed.data.t(), scale.data.t())  # GPTQ
        steps = steps.repeat_interleave(self.config.group_size, dim=1)
        if self.config.zero_points:  # AWQ; packed along the rows
            offset = nibbles(zeros.data.t()).t().repeat_interleave(self.config.group_size, dim=1)
        else:
            offset = torch.full_like(steps, 8, dtype=torch.int32)
        return times(x, (nibbles(words) - offset) * steps, bias)


class TorchFp8BlockLinear(Fp8BlockScaledMMLinearKernel):
    """Weights only, like vLLM's own kernel for AMX (CPUFp8BlockScaledMMKernel): activations stay as they are."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:  # fmt: skip
        params = self._get_layer_params(layer)
        rows, cols = (
            torch.arange(size) // step for size, step in zip(params.weight.shape, self.weight_group_shape, strict=True)
        )
        return times(x, params.weight.data.float() * params.block_scale.data[rows][:, cols], bias)

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it all")


class TorchFp8ChannelLinear(FP8ScaledMMLinearKernel):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return c.weight_quant_key.scale.group_shape.is_per_channel(), "is not per channel"

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        weight, scale, _, _ = self._get_layer_params(layer)
        return times(x, weight.data.t().float() * scale.data, bias)  # vLLM has transposed it

    def apply_scaled_mm(self, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it all")


class TorchExperts(CPUUnquantizedExperts):
    """Experts that vLLM has unpacked to BF16, one after the other."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        mk.FusedMoEExpertsModular.__init__(self, moe_config, quant_config)
        quant_config._w1.dtype = quant_config._w2.dtype = None  # as Int4EmulationTritonExperts says it: no longer INT4
        quant_config._w1.scale = quant_config._w2.scale = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        output.zero_()
        for expert in range(len(w1)):
            token, slot = torch.where(topk_ids == expert)
            gate, up = times(hidden_states[token], w1[expert]).chunk(2, dim=-1)
            down = times(F.silu(gate) * up, w2[expert])
            output.index_add_(0, token, down * topk_weights[token, slot, None].to(down.dtype))
