"""A whole model in memory, in BF16, from the files of a checkpoint: for engines that need a transformers model.

Its experts are linears, one by one, under the names that they have on disk: transformers 5 keeps a layer's experts in
two 3-D parameters, which no linear quantizer sees. llm-compressor has a module for that (modeling/moe/linear_experts);
here it is put in place while nothing is in memory yet, so that no expert is ever fused, split or held twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kizami.calibration.forward.weights import Weights
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import find_encoded_weights
from kizami.formats.errors import KizamiError, printable
from kizami.formats.families import Family, Role, find_family
from kizami.formats.fused_experts import split_fused_experts

RUNS_AS = {"kimi_k2": "deepseek_v3"}  # Kimi-K2's own file is DeepSeek-V3's model with another tokenizer
# Of no use here, or naming code: the checkpoint's own (auto_map), or attention kernels on the Hub
NOT_TAKEN = (
    "model_type", "quantization_config", "architectures", "dtype", "torch_dtype", "auto_map", "attn_implementation",
    "experts_implementation",
)  # fmt: skip
BESIDE = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")  # computed by the model, or of no use to it
SHOWN = 3


def dense_model(checkpoint: Checkpoint) -> tuple[PreTrainedModel, str]:
    """The language model of `checkpoint` without its MTP layers, and what its names lack of those on disk.

    Every tensor of the model is one of the checkpoint and the other way round, MTP layers and towers apart: KizamiError
    "model_mismatch". "unsupported_model" for a model type of which this transformers has no class; those of Weights.
    """
    tensors, _ = split_fused_experts(checkpoint.config, checkpoint.tensors)
    family, _ = find_family(checkpoint.config, tensors)
    model = _empty_model(model_config(family.text_config))
    wanted = model.state_dict()
    sources = _sources(model, {*wanted}, replace(checkpoint, tensors=tensors), family)
    state: dict[str, torch.Tensor] = {}
    with Weights(checkpoint) as weights:
        for name, meta in wanted.items():
            source = sources[name]
            if weights.shape(source) != tuple(meta.shape):
                raise KizamiError(
                    f"{list(weights.shape(source))}, and the model's is {list(meta.shape)}",
                    code="model_mismatch",
                    tensor=source,
                    hint="config.json is another model's",
                )
            state[name] = weights.read(source, dtype=meta.dtype)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False), family.prefix


def model_config(text_config: Mapping[str, Any]) -> PretrainedConfig:
    """The config of the language model for this version of transformers, without what belongs to FP8 or names code."""
    stated = {key: v for key, v in text_config.items() if key not in NOT_TAKEN and not key.startswith("_")}
    model_type = text_config.get("model_type")
    kind = RUNS_AS.get(str(model_type), str(model_type))
    # A config that 5.24 wrote lists layer types that 5.17 does not know. Either computes the list itself.
    layer_types = stated.get("layer_types")
    if isinstance(layer_types, list) and not set(map(str, layer_types)) <= set(ALLOWED_LAYER_TYPES):
        del stated["layer_types"]
    try:
        return CONFIG_MAPPING[kind].from_dict(stated)
    except KeyError:
        found = "transformers has no class for it that runs without the checkpoint's own code"
    except Exception as e:  # whatever a config class makes of values that it was not written for
        found = f"{type(e).__name__}: {e}"
    raise KizamiError(
        f"model_type {printable(repr(model_type), 60)}: {printable(found)}",
        code="unsupported_model",
        file="config.json",
        hint="kizami's own methods need no model class: leave --engine out",
    )


def _empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Parameters on the meta device; buffers that are computed (rotary frequencies) are real."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        for name, fused in get_non_linearized_moes(model):
            linear = LinearExperts2D.get_linear_experts_cls(type(fused))
            model.set_submodule(name, linear(getattr(fused, "config", config)))
    return model


def _sources(model: PreTrainedModel, wanted: set[str], checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """The name on disk of each tensor of the model."""
    dialect = find_encoded_weights(checkpoint.config, checkpoint.tensors)
    ours: dict[str, str] = {}
    for info in checkpoint.tensors.values():
        if info.name in dialect.scales or info.name in dialect.stale or not info.name.startswith(family.prefix):
            continue
        module, encoding = dialect.encoding_of(info)
        name = info.name if encoding is None else f"{module}.weight"
        place = family.place(name)
        if not (place.in_mtp or place.role is Role.VISION or name.endswith(BESIDE)):
            ours[name.removeprefix(family.prefix)] = name
    embedding = ours.get("model.embed_tokens.weight")
    if embedding is not None and getattr(model.config, "tie_word_embeddings", False):
        ours.setdefault("lm_head.weight", embedding)
    missing, extra = sorted(wanted - ours.keys()), sorted(ours.keys() - wanted)
    if missing or extra:
        lacks = [f"the checkpoint has no {', '.join(missing[:SHOWN])}"] if missing else []
        lacks += [f"the model has no {', '.join(map(printable, extra[:SHOWN]))}"] if extra else []
        raise KizamiError(
            f"{type(model).__name__} and the checkpoint do not fit: {'; '.join(lacks)} "
            f"({len(missing)} and {len(extra)} tensors)",
            code="model_mismatch",
            file="config.json",
        )
    return ours
