"""Public failures that a checkpoint caused, each as the smallest change to a checkpoint that is right.

`ROWS` has one entry per thread; its id is the thread's number.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine_checkpoints import Made, good

from kizami.formats.tensors import TensorSpec

Mutation = Callable[[Made], None]


def ignore(*entries: str, without: tuple[str, ...] = ()) -> Mutation:
    def mutate(made: Made) -> None:
        made.quant["ignore"] = [entry for entry in made.quant["ignore"] if entry not in without] + list(entries)

    return mutate


def chain(*mutations: Mutation) -> Mutation:
    def mutate(made: Made) -> None:
        for mutation in mutations:
            mutation(made)

    return mutate


def set_weights(**values: object) -> Mutation:
    return lambda made: made.weights().update(values)


def set_quant(**values: object) -> Mutation:
    return lambda made: made.quant.update(values)


def pack_all(*endings: str) -> Mutation:
    def mutate(made: Made) -> None:
        for ending in endings:
            made.pack(ending)

    return mutate


def _all_but_attention(*parts: str) -> Mutation:
    """`self_attn` leaves ignore; only these of its projections come back."""
    return ignore(*(f"re:.*self_attn\\.{part}.*" for part in parts), without=("re:.*self_attn.*",))


def become(base: str) -> Mutation:
    """Another form of the same model."""

    def mutate(made: Made) -> None:
        other = good(base)
        made.config, made.tensors = other.config, other.tensors

    return mutate


def _regroup(size: int) -> Mutation:
    def mutate(made: Made) -> None:
        made.weights()["group_size"] = size
        for name, spec in made.tensors.items():
            if name.endswith("weight_scale"):
                made.tensors[name] = TensorSpec(name, "BF16", (spec.shape[0], spec.shape[1] * 32 // size))

    return mutate


def _every_linear(made: Made) -> None:
    made.quant["ignore"] = ["lm_head", "re:.*eh_proj.*", "re:.*shared_head.*", r"re:.*mlp\.gate$"]
    for name in [name for name in made.tensors if name.endswith("_proj.weight") or ".indexer.w" in name]:
        made.pack(name.removesuffix(".weight"))


def awq(made: Made) -> None:
    """The same experts as AWQ stores them."""
    made.config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
        "modules_to_not_convert": ["self_attn", "shared_experts", "layers.0.mlp", "eh_proj"],
    }  # fmt: skip
    for name in [name for name in made.tensors if name.endswith("weight_packed")]:
        rows, words = made.tensors.pop(name).shape
        _awq_module(made, name.removesuffix(".weight_packed"), rows, words * 8)
    made.drop("weight_scale", "weight_shape")


def gptq(**values: object) -> Mutation:
    def mutate(made: Made) -> None:
        made.config["quantization_config"] = {
            "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
            "dynamic": {"-:.*self_attn.*": {}, "-:.*shared_experts.*": {}, "-:.*layers\\.0\\..*": {}},
        } | values  # fmt: skip
        for name in [name for name in made.tensors if name.endswith("weight_packed")]:
            rows, words = made.tensors.pop(name).shape
            module = name.removesuffix(".weight_packed")
            made.add(f"{module}.qweight", "I32", words, rows)
            made.add(f"{module}.qzeros", "I32", words // 4, rows // 8)
            made.add(f"{module}.scales", "BF16", words // 4, rows)
            made.add(f"{module}.g_idx", "I32", words * 8)
        made.drop("weight_scale", "weight_shape")

    return mutate


def to_fp8(*endings: str) -> Mutation:
    def mutate(made: Made) -> None:
        for ending in endings:
            made.retype(f"{ending}.weight", "F8_E4M3")
            for name in [name for name in made.tensors if name.endswith(f"{ending}.weight")]:
                rows, cols = made.tensors[name].shape
                made.add(f"{name}_scale_inv", "F32", -(-rows // 128), -(-cols // 128))

    return mutate


def _awq_module(made: Made, module: str, rows: int, cols: int) -> None:
    made.add(f"{module}.qweight", "I32", cols, rows // 8)
    made.add(f"{module}.qzeros", "I32", cols // 32, rows // 8)
    made.add(f"{module}.scales", "BF16", cols // 32, rows)


def _awq_kv_b(made: Made) -> None:
    skipped = made.quant["modules_to_not_convert"]
    skipped[:1] = [f"self_attn.{part}" for part in ("q_", "fused_qkv", "kv_a_", "o_proj", "indexer")]
    for name in [name for name in made.tensors if name.endswith("kv_b_proj.weight")]:
        rows, cols = made.tensors.pop(name).shape
        _awq_module(made, name.removesuffix(".weight"), rows, cols)


def _int8(made: Made) -> None:
    made.weights()["num_bits"] = 8
    for name, spec in made.tensors.items():
        if name.endswith("weight_packed"):
            made.tensors[name] = TensorSpec(name, "I32", (spec.shape[0], spec.shape[1] * 2))


def _odd_width(made: Made) -> None:
    """A dense layer of GLM-4.5-Air's width in INT4."""
    made.quant["ignore"].remove(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    at = "model.layers.0.mlp."
    hidden = made.config["hidden_size"]
    for part, rows, cols in (("gate_proj", 10944, hidden), ("up_proj", 10944, hidden), ("down_proj", hidden, 10944)):
        made.add(f"{at}{part}.weight", "BF16", rows, cols)
        made.pack(f"{at}{part}")


def _one_expert_plain(made: Made) -> None:
    """Expert 7 of layer 1 was ignored, and stayed BF16."""
    made.quant["ignore"].append(r"re:.*layers\.1\.mlp\.experts\.7\..*")
    for part in ("gate_proj", "up_proj", "down_proj"):
        module = f"model.layers.1.mlp.experts.7.{part}"
        rows, words = made.tensors.pop(f"{module}.weight_packed").shape
        made.drop(f"{module}.weight_scale", f"{module}.weight_shape")
        made.add(f"{module}.weight", "BF16", rows, words * 8)


def _exact_names(prefix: str = "", suffix: str = "") -> Mutation:
    """llm-compressor's way: every BF16 linear by its own name."""

    def mutate(made: Made) -> None:
        names = [name.removesuffix(".weight") for name, spec in made.tensors.items() if _is_plain_linear(name, spec)]
        made.quant["ignore"] = [f"{prefix}{name}{suffix}" for name in names]

    return mutate


def _is_plain_linear(name: str, spec: TensorSpec) -> bool:
    return name.endswith(".weight") and len(spec.shape) == 2 and "embed_tokens" not in name


def _without_bias(made: Made) -> None:
    made.drop("e_score_correction_bias")
    made.config["topk_method"] = "greedy"


def _kv_scales(names: str, value: float = 0.5) -> Mutation:
    def mutate(made: Made) -> None:
        made.quant["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True,
                                         "dynamic": False}  # fmt: skip
        name = f"model.layers.0.self_attn.{names}"
        made.add(name, "F32", 1)
        made.kv_scales = {name: (value,)}

    return mutate


def _no_mtp(*endings: str) -> Mutation:
    def mutate(made: Made) -> None:
        layer = f".layers.{made.config['num_hidden_layers']}."
        for name in [name for name in made.tensors if layer in name and (not endings or name.endswith(endings))]:
            del made.tensors[name]

    return mutate


def scale_inv(made: Made) -> None:
    """FP8 scales keep the name that the source gave them."""
    for name in [name for name in made.tensors if name.endswith("weight_scale") and ".experts." not in name]:
        spec = made.tensors.pop(name)
        made.add(f"{name}_inv", spec.dtype, *spec.shape)


def _fp8_head(made: Made) -> None:
    made.retype("shared_head.head.weight", "F8_E4M3")
    made.add("model.layers.2.shared_head.head.weight_scale", "F32", 151552, 1)


def _own_code(made: Made) -> None:
    """Experts in BF16: no compressed-tensors at all."""
    del made.config["text_config"]["quantization_config"]
    made.tensors = {
        name: spec for name, spec in made.tensors.items() if not name.endswith(("weight_scale", "weight_shape"))
    }
    for name in [name for name in made.tensors if name.endswith("weight_packed")]:
        rows, words = made.tensors.pop(name).shape
        made.add(name.removesuffix("_packed"), "BF16", rows, words * 8)


def _nothing(made: Made) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """`number`: the thread. `before` makes the right checkpoint out of `base`, `mutation` the wrong one out of that."""

    number: str
    engine: str
    base: str
    mutation: Mutation
    code: str
    severity: str = "error"
    words: str = ""
    tp: int = 1
    ep: int = 1
    version: str | None = None
    before: Mutation = _nothing


_KV_B = chain(_all_but_attention("q_a_proj", "q_b_proj", "kv_a_proj", "o_proj", "indexer"), pack_all("kv_b_proj"))
_Q_A = chain(
    _all_but_attention("q_b_proj", "kv_b_proj", "o_proj", "indexer"), pack_all("q_a_proj", "kv_a_proj_with_mqa")
)

ROWS = (
    Row("sglang-19106", "sglang", "glm int4", _KV_B, "mla_int4", words="kv_b_proj"),
    Row("sglang-25331", "sglang", "kimi 2.5", _Q_A, "mla_int4", words="q_a_proj"),
    Row("vllm-34561", "vllm", "glm int4", _awq_kv_b, "mla_int4", "warning", words="#34561", before=awq),
    Row("vllm-13725", "vllm", "deepseek int4", _KV_B, "mla_int4_version", version="0.7.3"),
    Row("vllm-30823", "vllm", "kimi mixed", scale_inv, "fp8_scale_name", words="weight_scale_inv"),
    Row("vllm-41511", "vllm", "glm4 int4", _regroup(128), "expert_shape", words="192", tp=8),
    Row("1Cat-vLLM-642", "vllm", "glm int4", _odd_width, "linear_shape", words="1368", tp=8),
    Row("nlzy-vllm-gfx906-22", "sglang", "glm int4", _odd_width, "linear_shape", words="1368", tp=8),
    Row("vllm-47154", "vllm", "glm int4", _int8, "no_kernel", "warning", words="8-bit"),
    Row("sglang-9248-experts", "sglang", "kimi thinking", _one_expert_plain, "expert_differs"),
    Row("sglang-9248-scales", "sglang", "kimi thinking", lambda m: m.retype("weight_scale", "F16"), "scale_dtype",
        "warning", words="F16"),
    Row("sglang-24929", "sglang", "kimi thinking", _exact_names(suffix=".linear"), "scheme_mismatch"),
    Row("sglang-38443", "sglang", "kimi thinking", _exact_names(prefix="model.language_model."), "scheme_mismatch"),
    Row("ATOM-1078", "sglang", "kimi 2.5", _exact_names(), "scheme_mismatch", words="o_proj"),
    Row("amd-Quark-25", "sglang", "glm int4", ignore(r"re:.*mlp\.(gate|up|down)_proj.*",
        without=(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",)), "scheme_mismatch", words="gate_up_proj"),
    Row("sglang-25261", "sglang", "glm fp8", become("glm mixed"), "shared_experts_fusion", "warning", tp=8,
        words="packed integers"),
    Row("llm-compressor-2512", "vllm", "glm int4", _every_linear, "mla_int4", words="one BF16 matrix"),
    Row("sglang-31213", "sglang", "glm int4", lambda m: m.retype("e_score_correction_bias", "BF16"),
        "router_bias_dtype", words="BF16"),
    Row("vllm-50761", "vllm", "glm fp8", lambda m: m.retype("e_score_correction_bias", "BF16"), "router_bias_dtype"),
    Row("sglang-31001", "sglang", "glm int4", lambda m: m.add("model.layers.1.mlp.gate.e_score_correction_bias", "F32",
        256), "trtllm_router_bias", "note", before=_without_bias),
    Row("compressed-tensors-652", "transformers", "kimi 2.5", become("kimi 2.5"), "run_compressed", "note",
        before=_own_code),
    Row("FreeToken-343", "sglang", "glm mixed", set_quant(format="mixed-precision"), "top_format", ep=8, tp=8,
        words="mixed-precision"),
    Row("llama.cpp-24770", "sglang", "glm int4", lambda m: m.drop("layers.1.self_attn.indexer.wk.weight",
        "layers.1.self_attn.indexer.wq_b.weight", "layers.1.self_attn.indexer.weights_proj.weight",
        "layers.1.self_attn.indexer.k_norm.weight", "layers.1.self_attn.indexer.k_norm.bias"), "indexer_missing",
        words="1 of 2"),
    Row("gpustack-2957", "sglang", "deepseek int4", _no_mtp(), "mtp", "warning", words="not there"),
    Row("llm-compressor-2696", "vllm", "deepseek int4", _no_mtp("eh_proj.weight", "enorm.weight"), "mtp",
        words="eh_proj"),
    Row("sglang-24091", "sglang", "kimi fp8", become("kimi thinking"), "hardware", "note", words="SM100"),
    Row("sglang-18818", "sglang", "glm fp8", lambda m: setattr(m, "files", ("kv_cache_scales.json",)), "kv_json",
        "warning", words="GlmMoeDsaForCausalLM"),
    Row("sglang-39942", "sglang", "glm4 fp8", _kv_scales("k_scale"), "kv_scale_dropped", "warning"),
    Row("vllm-25968", "vllm", "glm int4", _kv_scales("k_proj.k_scale"), "kv_scale_on_mla", "warning"),
    Row("vllm-gaudi-763", "sglang", "glm int4", _kv_scales("k_proj.k_scale"), "kv_scale_on_mla", words="0.5"),
    Row("llm-compressor-2494", "vllm", "glm4 fp8", _kv_scales("qkv_proj.k_scale"), "kv_scale_name", "warning"),
    Row("vllm-31757", "vllm", "glm4 fp8", _fp8_head, "not_plain", words="head"),
)  # fmt: skip
