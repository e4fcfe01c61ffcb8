"""What a calibration should find, by a whole model in memory: transformers' forward pass in float32, plain hooks.

Independent of the code under test: weights are decoded by `kizami.quantize.reference`, what goes into the KV cache is
taken from transformers' cache, experts are computed from transformers' fused parameters. Needs torch and transformers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from client_fixtures import decoded_fp8, load_tensors, read_config
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kizami.calibration.data.mix import Mix
from kizami.calibration.data.tokens import TokenSet, tokens_sha256

Tensor = torch.Tensor


@dataclass
class Layer:
    """Of all tokens: hidden states behind the layer [tokens, hidden], expert ids ascending and gates [tokens, top_k],
    the MLP's input; of fit tokens: mean squares by module; what went into the cache, [tokens, channels]."""

    hidden: Tensor
    ids: Tensor | None = None
    gates: Tensor | None = None
    mlp_input: Tensor | None = None
    linears: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, Tensor] = field(default_factory=dict)
    kv: dict[str, Tensor] = field(default_factory=dict)


def token_set(ids: np.ndarray, held_out: tuple[int, ...]) -> TokenSet:
    ids = ids.astype(np.int32)
    return TokenSet(ids, held_out, tokens_sha256(ids), (), Mix(0.0, 0.0, 0.0, ()))


def dense_model(folder: Path) -> Any:
    """The checkpoint's language model in float32, every FP8 weight the BF16 value that it stands for."""
    config, tensors = read_config(folder), load_tensors(folder)
    text = config.get("text_config", config)
    prefix = "language_model." if "text_config" in config else ""
    kind = "deepseek_v3" if text["model_type"].startswith("kimi") else text["model_type"]
    stated = {
        k: v for k, v in text.items() if k not in ("model_type", "quantization_config", "auto_map", "torch_dtype")
    }
    with torch.device("meta"):
        built = AutoConfig.for_model(kind, **stated)
        model = AutoModelForCausalLM.from_config(built, attn_implementation="eager", dtype=torch.float32)
    dense = {name.removeprefix(prefix): _decoded(name, tensors).float() for name in tensors if name.startswith(prefix)}
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        layer, fused, part = name.partition(".experts.")
        if not fused:
            state[name] = dense[name]
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        count = built.n_routed_experts
        each = [torch.cat([dense[f"{layer}.experts.{e}.{n}.weight"] for n in names]) for e in range(count)]
        state[name] = torch.stack(each)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(built)
    return model.eval()


def _decoded(name: str, tensors: dict[str, Tensor]) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    scale = next(tensors[f"{name}_{s}"] for s in ("scale_inv", "scale") if f"{name}_{s}" in tensors)
    block = (1, tensor.shape[1]) if scale.shape == (len(tensor), 1) else (128, 128)
    return decoded_fp8(tensor, scale, block)


@torch.inference_mode()
def run(folder: Path, tokens: TokenSet) -> list[Layer]:
    """Every layer of the checkpoint over the tokens."""
    model = dense_model(folder)
    seen: list[dict[str, list[Any]]] = [{} for _ in model.model.layers]
    for index, layer in enumerate(model.model.layers):
        _watch(layer, seen[index])
    for ids in tokens.ids:
        cache = DynamicCache(config=model.config)
        model.model(input_ids=torch.from_numpy(ids)[None].long(), cache=cache, use_cache=True)
        for index, stored in enumerate(cache.layers):
            seen[index].setdefault("cache", []).append((stored.keys[0], stored.values[0]))
    fit = torch.ones(tokens.sequences, dtype=torch.bool)
    fit[list(tokens.held_out)] = False
    rows = fit.repeat_interleave(tokens.seq_len)
    return [_result(layer, found, rows) for layer, found in zip(model.model.layers, seen, strict=True)]


def _watch(layer: Any, seen: dict[str, list[Any]]) -> None:
    def keep(key: str, value: Any) -> None:
        seen.setdefault(key, []).append(value)

    layer.register_forward_hook(lambda _m, _a, out: keep("hidden", (out[0] if isinstance(out, tuple) else out)[0]))
    layer.mlp.register_forward_pre_hook(lambda _m, args: keep("mlp_input", args[0][0]))
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _m, args, name=name: keep(f"linear.{name}", args[0].flatten(0, -2)))
    if hasattr(layer.mlp, "experts"):
        layer.mlp.experts.register_forward_pre_hook(lambda _m, args: keep("routed", (args[1], args[2])))


def _result(layer: Any, seen: dict[str, list[Any]], fit: Tensor) -> Layer:
    found = Layer(torch.cat(seen["hidden"]), mlp_input=torch.cat(seen["mlp_input"]))
    for key, parts in seen.items():
        if key.startswith("linear."):
            found.linears[key.removeprefix("linear.")] = torch.cat(parts)[fit].double().square().mean(dim=0)
    keys, values = (torch.cat([pair[i] for pair in seen["cache"]], dim=1) for i in (0, 1))
    names = ("latent", "k_pe") if hasattr(layer.self_attn, "kv_a_layernorm") else ("k", "v")
    found.kv = {name: t.transpose(0, 1).flatten(1) for name, t in zip(names, (keys, values), strict=True)}
    if "routed" in seen:
        ids, order = torch.cat([pair[0] for pair in seen["routed"]]).sort(dim=1)
        found.ids, found.gates = ids, torch.cat([pair[1] for pair in seen["routed"]]).gather(1, order)
        found.experts = _experts(layer.mlp.experts, found, fit)
    return found


def _experts(experts: Any, found: Layer, fit: Tensor) -> dict[str, Tensor]:
    assert found.ids is not None
    assert found.gates is not None
    assert found.mlp_input is not None
    sums: dict[str, list[Any]] = {}
    for e in range(experts.num_experts):
        token, slot = torch.where(found.ids == e)
        kept = fit[token]
        x, g2 = found.mlp_input[token[kept]], found.gates[token, slot][kept].double().square()
        gate, up = torch.nn.functional.linear(x, experts.gate_up_proj[e]).chunk(2, dim=-1)
        a = experts.act_fn(gate) * up
        total = g2.sum() if len(g2) else torch.ones(())
        sums.setdefault("h_x", []).append((g2[:, None] * x.double().square()).sum(dim=0) / total)
        sums.setdefault("h_a", []).append((g2[:, None] * a.double().square()).sum(dim=0) / total)
        sums.setdefault("sum_g2", []).append(g2.sum())
        sums.setdefault("sum_g4", []).append(g2.square().sum())
        sums.setdefault("n", []).append(kept.sum())
        sums.setdefault("n_held_out", []).append((~kept).sum())
    return {name: torch.stack(values) for name, values in sums.items()}
