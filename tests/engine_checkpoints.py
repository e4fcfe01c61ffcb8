"""Checkpoints that are right, as specs: full size in every dimension but the numbers of layers and experts.

`good(base)` gives a copy that a test may change; engine_failures.py has the changes.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import inventory

from kizami.formats.engines.served import Served
from kizami.formats.tensors import TensorSpec

IGNORE_GLM = [*inventory.KIMI_IGNORE, "re:.*eh_proj.*", "re:.*shared_head.*", r"re:.*mlp\.gate$"]


@dataclass
class Made:
    """A checkpoint that may still be changed."""

    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    files: tuple[str, ...] = ()
    kv_scales: dict[str, tuple[float, ...]] = field(default_factory=dict)
    negative: bool | None = None

    @property
    def served(self) -> Served:
        return Served(self.config, self.tensors, self.files, self.negative, None, self.kv_scales)

    @property
    def quant(self) -> dict[str, Any]:
        holder = self.config if "quantization_config" in self.config else self.config["text_config"]
        return holder["quantization_config"]

    def add(self, name: str, dtype: str, *shape: int) -> None:
        self.tensors[name] = TensorSpec(name, dtype, shape)

    def drop(self, *endings: str) -> None:
        for name in [name for name in self.tensors if name.endswith(endings)]:
            del self.tensors[name]

    def retype(self, ending: str, dtype: str) -> None:
        for name, spec in self.tensors.items():
            if name.endswith(ending):
                self.tensors[name] = TensorSpec(name, dtype, spec.shape)

    def pack(self, ending: str, group: int = 32) -> None:
        """Turns the plain weights of the modules with this ending into INT4."""
        for name in [name for name in self.tensors if name.endswith(f"{ending}.weight")]:
            rows, cols = self.tensors.pop(name).shape
            module = name.removesuffix(".weight")
            self.add(f"{module}.weight_packed", "I32", rows, cols // 8)
            self.add(f"{module}.weight_scale", "BF16", rows, cols // group)
            self.add(f"{module}.weight_shape", "I32", 2)

    def weights(self) -> dict[str, Any]:
        return self.quant["config_groups"]["group_0"]["weights"]


# ------------------------------------------------------------------------------------------------ checkpoints


def small(name: str, layers: int = 2, experts: int | None = None) -> inventory.Mla:
    model = inventory.MODELS[name]
    assert isinstance(model, inventory.Mla)
    return replace(model, layers=layers, first_dense=1, experts=experts or model.experts)


def _config(name: str, model: inventory.Mla) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(inventory.config(name))
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": model.layers, "first_k_dense_replace": 1, "n_routed_experts": model.experts}
    if "indexer_types" in text:
        text["indexer_types"] = text["indexer_types"][: model.layers]
    if "mlp_layer_types" in text:
        text["mlp_layer_types"] = ["dense", *["sparse"] * (model.layers - 1)]
    return config


def _specs(tensors: list[inventory.Tensor]) -> dict[str, TensorSpec]:
    return {tensor.name: TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors}


def fp8(name: str, experts: int | None = None) -> Made:
    """The FP8 source."""
    model = small(name, experts=experts)
    linears, plain = inventory.mla_modules(model)
    tensors = [*plain, *(tensor for x in linears for tensor in inventory.fp8_pair(x))]
    config = _config(name, model)
    if "modules_to_not_convert" in config["quantization_config"]:
        config["quantization_config"]["modules_to_not_convert"] = inventory.glm5_not_converted(model)
    return Made(config, _specs(tensors))


def int4(name: str, group: int = 32, experts: int | None = None) -> Made:
    """Kimi's layout: routed experts INT4, the rest BF16. Kimi's own checkpoints are published in it."""
    model = small(name, experts=experts)
    linears, plain = inventory.mla_modules(model)
    tensors = list(plain)
    for x in linears:
        if x.base_role == "routed":
            tensors += inventory.int4_triple(x, group)
        else:
            tensors.append(inventory.Tensor(x.name + ".weight", "BF16", (x.rows, x.cols), x.role))
    if model.vision:
        tensors += inventory.vision_tensors()
    config = _config(name, model)
    holder = config.get("text_config", config)
    quant: dict[str, Any] = copy.deepcopy(inventory.kimi_quantization_config(group))
    if not model.int4:
        quant["ignore"] = list(IGNORE_GLM)
    holder["quantization_config"] = quant
    return Made(config, _specs(tensors))


def mixed(name: str, experts: int | None = None) -> Made:
    """Routed experts INT4, the rest FP8 in blocks: the JSON that both engines read."""
    model = small(name, experts=experts)
    linears, plain = inventory.mla_modules(model)
    tensors = list(plain)
    for x in linears:
        tensors += inventory.int4_triple(x, 32) if x.base_role == "routed" else inventory.fp8_pair(x, "weight_scale")
    config = _config(name, model)
    config["quantization_config"] = mixed_quantization()
    return Made(config, _specs(tensors))


def mixed_quantization() -> dict[str, Any]:
    int4_weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                    "dynamic": False, "actorder": None}  # fmt: skip
    fp8_weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
                   "symmetric": True, "dynamic": False}  # fmt: skip
    activations = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True,
                   "dynamic": True}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"format": "pack-quantized", "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
                        "weights": int4_weights, "input_activations": None, "output_activations": None},
            "group_1": {"format": "float-quantized", "targets": ["Linear"], "weights": fp8_weights,
                        "input_activations": activations, "output_activations": None},
        },
        "ignore": ["lm_head", "re:.*eh_proj.*", "re:.*shared_head.*", r"re:.*mlp\.gate$",
                   r"re:.*indexer\.weights_proj.*"],
        "kv_cache_scheme": None,
    }  # fmt: skip


def glm4(rest: str = "bf16", group: int = 32) -> Made:
    """GLM-4.7 with INT4 experts; rest fp8: the FP8 source itself, with a scale per channel."""
    model = inventory.MODELS["glm-4.7-fp8"]
    assert isinstance(model, inventory.Glm4)
    model = replace(model, layers=2, first_dense=1, experts=16)
    config: dict[str, Any] = copy.deepcopy(inventory.config("glm-4.7-fp8"))
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16}
    tensors = _specs(list(inventory.glm4_tensors(model)))
    if rest == "fp8":
        config["quantization_config"]["ignore"] += ["model.layers.2.eh_proj", "model.layers.2.shared_head.head"]
        return Made(config, tensors)
    made = Made(config, {name: spec for name, spec in tensors.items() if not name.endswith("weight_scale")})
    for name, spec in made.tensors.items():
        made.tensors[name] = TensorSpec(name, "BF16" if spec.dtype == "F8_E4M3" else spec.dtype, spec.shape)
    for part in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(model.experts):
            made.pack(f".mlp.experts.{expert}.{part}", group)
    quant: dict[str, Any] = copy.deepcopy(inventory.kimi_quantization_config(group))
    config["quantization_config"] = quant | {"ignore": list(IGNORE_GLM)}
    return made


# 256 experts where the shared one could be fused with them; fewer elsewhere, to be quick.
BASES: dict[str, Callable[[], Made]] = {
    "glm int4": lambda: int4("glm-5.2-fp8", experts=16),
    "glm int4 g128": lambda: int4("glm-5.2-fp8", 128, experts=256),
    "glm mixed": lambda: mixed("glm-5.2-fp8"),
    "glm fp8": lambda: fp8("glm-5.2-fp8"),
    "deepseek int4": lambda: int4("deepseek-v3-fp8", experts=16),
    "deepseek fp8": lambda: fp8("deepseek-v3.2-fp8", experts=16),
    "kimi mixed": lambda: mixed("kimi-k2-fp8", experts=32),
    "kimi fp8": lambda: fp8("kimi-k2-fp8", experts=32),
    "kimi thinking": lambda: int4("kimi-k2-thinking", experts=32),
    "kimi 2.5": lambda: int4("kimi-k2.5", experts=32),
    "glm4 int4": lambda: glm4(),
    "glm4 fp8": lambda: glm4("fp8"),
}


@cache
def _built(base: str) -> Made:
    return BASES[base]()


def good(base: str) -> Made:
    """A fresh copy of a checkpoint that is right."""
    made = _built(base)
    return replace(made, config=copy.deepcopy(made.config), tensors=dict(made.tensors))
