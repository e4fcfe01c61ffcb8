"""Rules about quantization_config itself: place, method, values, formats."""

from collections.abc import Iterator, Mapping
from typing import Any

from kizami.formats.engines.context import Context, as_group
from kizami.formats.engines.finding import EngineName, Hit, Rule
from kizami.formats.engines.quantization import COMPRESSED_TENSORS, Group
from kizami.formats.errors import printable
from kizami.formats.foreign import quantization_configs

_CT = {
    "sglang": "SGLang srt/layers/quantization/compressed_tensors/compressed_tensors.py",
    "vllm": "vLLM model_executor/layers/quantization/compressed_tensors/compressed_tensors.py",
    "transformers": "compressed-tensors quantization/quant_args.py, quant_scheme.py",
}
_CT_BOTH: Mapping[EngineName, str] = {"sglang": _CT["sglang"], "vllm": _CT["vllm"]}

# SG: layers/quantization/__init__.py for CUDA, where `gptq` is only there as gptq_marlin;
# VL: model_executor/layers/quantization/__init__.py; transformers: quantizers/auto.py.
_LOADERS: Mapping[EngineName, frozenset[str]] = {
    "sglang": frozenset({
        *COMPRESSED_TENSORS, "fp8", "mxfp8", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4",
        "modelopt_mixed", "w8a8_int8", "w8a8_fp8", "awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin",
        "moe_wna16", "w4afp8", "petit_nvfp4", "quark", "quark_mxfp4", "auto-round", "modelslim", "quark_int4fp8_moe",
        "humming", "mxfp4",
    }),
    "vllm": frozenset({
        *COMPRESSED_TENSORS, "awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4",
        "modelopt_mxfp8", "modelopt_mixed", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", "experts_int8",
        "quark", "moe_wna16", "torchao", "inc", "auto-round", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8",
    }),
    "transformers": frozenset({
        "compressed-tensors", "fp8", "mxfp8", "nvfp4", "gguf", "awq", "gptq", "bitsandbytes", "eetq", "aqlm", "quanto",
        "quark", "fouroversix", "fp_quant", "hqq", "fbgemm_fp8", "higgs", "torchao", "bitnet", "vptq", "spqr",
        "auto-round", "mxfp4", "metal", "sinq", "gemma",
    }),
}  # fmt: skip

_ARGS = frozenset({
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
})  # fmt: skip
_SCHEME = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_STRATEGIES = frozenset({"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"})
_ACTORDERS = frozenset({None, "weight", "static", "group", "dynamic"})
# SG, VL: compressed_tensors/utils.py `is_activation_quantization_format`.
_ACTIVATION_FORMATS = frozenset({"naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"})
PACK = "pack-quantized"


def _missing(context: Context) -> Iterator[Hit]:
    if context.quant is not None:
        return
    forms = {part.form: part.name for part in context.model.parts.values() if part.form not in ("plain", "none")}
    for form, module in forms.items():
        yield Hit(
            f"weights are stored as {form}, but config.json has no quantization_config",
            "take config.json from the publisher of these files",
            module,
        )


def _stale(context: Context) -> Iterator[Hit]:
    """Several places are read, and the first wins; the same text twice is what K2.5's config class makes."""
    copies = list(quantization_configs(context.model.served.config))
    deeper = list(_deeper(context.model.served.config, "", 0))
    for path, copy in [*copies[1:], *deeper]:
        if copy != copies[0][1] if copies else True:
            first = copies[0][0] if copies else "nothing"
            yield Hit(
                f"{path} differs from {first}, which is the one that is read",
                "remove every copy but one: other readers take another",
            )


def _deeper(config: Mapping[str, Any], at: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Copies in places where no engine looks."""
    for key, value in config.items():
        if not isinstance(value, dict) or depth > 8:
            continue
        where = f"{at}{printable(str(key), 40)}"
        if key in ("quantization_config", "compression_config"):
            if at not in ("", "text_config."):
                yield where, value
        else:
            yield from _deeper(value, f"{where}.", depth + 1)


def _method(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None:
        return
    method = quant.method
    if method not in _LOADERS[context.engine]:
        shown = f'"{printable(method, 40)}"' if method else "missing"
        yield Hit(f"quant_method is {shown}: there is no loader for it", "use another engine, or another format")
    elif method == "gptq" and context.engine == "sglang":
        bits, size, sym = quant.whole("bits"), quant.whole("group_size"), quant.raw.get("sym")
        if bits not in (4, 8) or sym is not True or size not in (-1, 32, 64, 128) or "desc_act" not in quant.raw:
            yield Hit(
                f"gptq with bits {bits}, group_size {size}, sym {printable(repr(sym), 10)} does not become "
                "gptq_marlin, and CUDA has no other gptq",
                "bits 4 or 8, symmetric, group size 32, 64 or 128, and desc_act in the config",
            )


def _other_library(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is not None and quant.method in ("gptq", "awq") and context.experts:
        yield Hit(
            f"transformers leaves {quant.method} to GPTQModel, and asks for it when it loads; experts in that form "
            "were not tried there",
            "pip install gptqmodel optimum, and compare logits before you rely on it",
        )


def _gptq(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None or quant.method not in ("gptq", "gptq_marlin"):
        return
    form = quant.raw.get("checkpoint_format", "gptq")
    if form not in ("gptq", ""):
        yield Hit(
            f"checkpoint_format {printable(repr(form), 40)}: the Marlin loaders do not read that key and take "
            "the zero points of format gptq",
            "symmetric weights have no zero points to misread; write asymmetric ones as gptq",
            severity="note" if quant.raw.get("sym") is True else "warning",
        )
    if context.engine == "sglang" and context.experts and context.model.dtype != "F16":
        yield Hit(
            f"scales of GPTQ experts are F16 there, the model is {context.model.dtype}: the MoE kernel wants one dtype",
            "serve with --dtype float16",
            context.experts[0].name,
        )


def _awq(context: Context) -> Iterator[Hit]:
    """Under AWQ the loader joins q_a and kv_a along dimension 1, where packed ones have their rows."""
    quant = context.quant
    if quant is None or quant.method not in ("awq", "awq_marlin", "moe_wna16"):
        return
    for linear in context.linears:
        if linear.leaf == "fused_qkv_a_proj_with_mqa" and any(part.form == "plain" for part in linear.parts):
            yield Hit(
                "q_a_proj and kv_a_proj_with_mqa are plain: under AWQ they are joined along the wrong dimension, and "
                "loading stops",
                "use another layout (pack-quantized), or vLLM",
                linear.parts[0].name,
            )


def _unknown_family(context: Context) -> Iterator[Hit]:
    family = context.family
    if not family.known:
        like = "DeepSeek" if context.model.attention == "mla" else "GLM-4"
        yield Hit(
            f'model_type "{printable(family.name, 40)}": its class was not read, its modules are taken to be named and '
            f"merged as those of {like}",
            "believe errors about shapes and scales more than those about names",
        )


def _not_modelled(context: Context) -> Iterator[Hit]:
    if context.quant is not None and not context.is_modelled and context.quant.method in _LOADERS[context.engine]:
        yield Hit(
            f"how quant_method {context.quant.method} chooses its modules was not modelled",
            "only rules that need no scheme were applied",
        )


def _values(context: Context) -> Iterator[Hit]:
    """What pydantic refuses in QuantizationArgs; QuantizationScheme is validated by transformers alone."""
    quant = context.quant
    if quant is None or not quant.is_compressed_tensors:
        return
    groups = quant.raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        shown = printable(str(name), 40)
        if context.engine == "transformers" and (strange := sorted(set(group) - _SCHEME)):
            yield Hit(f"group {shown} has the unknown keys {_words(strange)}", "remove them")
        for key in ("weights", "input_activations"):
            args = group.get(key)
            if isinstance(args, dict) and (strange := sorted(set(args) - _ARGS)):
                yield Hit(f"{shown}.{key} has the unknown keys {_words(strange)}", "remove them")
    for group in quant.groups:
        for what, args in (("weights", group.weights), ("input_activations", group.inputs)):
            if args is None:
                continue
            if args.strategy not in _STRATEGIES or args.actorder not in _ACTORDERS or args.kind not in ("int", "float"):
                found = f"type {args.kind}, strategy {args.strategy}, actorder {args.actorder}"
                yield Hit(f"{group.name}.{what}: {printable(found, 100)} is no valid choice", "see compressed-tensors")
            elif args.strategy == "group" and (args.group_size or 0) < 1:
                yield Hit(f"{group.name}.{what} has strategy group and no group_size", "write the group size")
            elif args.strategy == "block" and args.block is None:
                yield Hit(f"{group.name}.{what} has strategy block and no block_structure", "write [128, 128]")


def _words(names: list[str]) -> str:
    return ", ".join(printable(name, 30) for name in names[:5])


def _top_format(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None or not quant.is_compressed_tensors or quant.format == PACK:
        return
    for experts in context.experts:
        group = as_group(experts.scheme)
        if group is None or not group.is_packed_int:
            continue
        if context.engine == "sglang":
            yield Hit(
                f'the top-level format is "{printable(str(quant.format), 40)}": the INT4 MoE reads that field, not the '
                "group's, and takes pack-quantized only",
                'write "format": "pack-quantized" at the top level and the real format into each group',
                experts.name,
            )
        elif group.format != PACK:
            yield Hit(
                f"{group.name} has format {printable(str(group.format or quant.format), 40)}, expected pack-quantized",
                'write "format": "pack-quantized" into the group',
                experts.name,
            )


def _linear_format(context: Context) -> Iterator[Hit]:
    quant = context.quant
    if quant is None or not quant.is_compressed_tensors:
        return
    for built in context.modules if context.engine == "transformers" else context.linears:  # _top_format has experts
        group = as_group(built.scheme)
        if group is None or not group.targets:
            continue
        form = group.format or quant.format
        if group.is_weight_only_int and form != PACK:
            yield _wrong_format(group, form, PACK, built.name)
        elif group.is_fp8 and form not in _ACTIVATION_FORMATS and not (form == PACK and context.engine == "sglang"):
            yield _wrong_format(group, form, "float-quantized", built.name)


def _wrong_format(group: Group, found: str | None, expected: str, module: str) -> Hit:
    return Hit(
        f"{group} has format {printable(str(found), 40)}, expected {expected}",
        f'write "format": "{expected}" into the group',
        module,
    )


def _actorder(context: Context) -> Iterator[Hit]:
    for group in context.quant.groups if context.quant else ():
        order = group.weights.actorder
        if order not in ("group", "dynamic"):
            continue
        if context.engine == "vllm":
            yield Hit(f"{group.name} has actorder {order}: refused", "quantize with actorder null, static or weight")
        else:
            yield Hit(
                f"{group.name} has actorder {order}: scales of down_proj are not sharded under tensor parallelism",
                "quantize with actorder null, or serve at tp 1",
                severity="warning",
            )


def _capability(context: Context) -> Iterator[Hit]:
    """Kernels, in one note: it is about the GPU, not the checkpoint."""
    packed = any((group := as_group(experts.scheme)) and group.is_weight_only_int for experts in context.experts)
    packed |= any((group := as_group(linear.scheme)) and group.is_weight_only_int for linear in context.linears)
    if context.quant is not None and context.quant.method == "w4afp8":
        yield Hit("w4afp8 needs compute capability 9.0", "serve on Hopper or later")
    elif packed:
        need = "8.0" if context.engine == "sglang" else "7.5"
        yield Hit(
            f"INT4 needs compute capability {need}; Marlin on SM100 and SM121 was reported to repeat itself with files "
            "that are right on H200",
            "compare answers on such a GPU before you serve on it",
        )


RULES = (
    Rule("no_config", "error", {**_CT_BOTH, "transformers": _CT["transformers"]}, _missing),
    Rule(
        "stale_config",
        "warning",
        {
            "sglang": "SGLang srt/model_loader/checkpoint_quantization.py, srt/configs/kimi_k25.py",
            "vllm": "vLLM transformers_utils/model_arch_config_convertor.py",
            "transformers": "transformers quantizers/auto.py",
        },
        _stale,
    ),
    Rule(
        "no_loader",
        "error",
        {
            "sglang": "SGLang srt/layers/quantization/__init__.py, gptq/gptq.py",
            "vllm": "vLLM model_executor/layers/quantization/__init__.py, auto_gptq.py",
            "transformers": "transformers quantizers/auto.py",
        },
        _method,
    ),
    Rule(
        "other_library",
        "warning",
        {"transformers": "transformers quantizers/quantizer_gptq.py, quantizer_awq.py"},
        _other_library,
    ),
    Rule(
        "gptq",
        "warning",
        {
            "sglang": "SGLang srt/layers/quantization/gptq/schemes/gptq_moe.py, gptq/gptq.py",
            "vllm": "vLLM model_executor/layers/quantization/auto_gptq.py",
        },
        _gptq,
    ),
    Rule(
        "awq_fused_a",
        "error",
        {"sglang": "SGLang srt/models/deepseek_common/deepseek_weight_loader.py (cat_dim)"},
        _awq,
    ),
    Rule("unknown_family", "note", {**_CT_BOTH, "transformers": _CT["transformers"]}, _unknown_family),
    Rule("not_modelled", "note", {**_CT_BOTH, "transformers": "transformers quantizers/auto.py"}, _not_modelled),
    Rule("bad_scheme", "error", {**_CT_BOTH, "transformers": _CT["transformers"]}, _values),
    Rule(
        "top_format",
        "error",
        {
            "sglang": "SGLang srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py",
            "vllm": "vLLM .../compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py",
        },
        _top_format,
    ),
    Rule(
        "group_format",
        "error",
        {**_CT_BOTH, "transformers": "transformers integrations/compressed_tensors.py (get_value_from_registry)"},
        _linear_format,
    ),
    Rule(
        "actorder",
        "error",
        {
            "sglang": "SGLang .../compressed_tensors/schemes/compressed_tensors_wNa16_moe.py (load_full_w2)",
            "vllm": _CT["vllm"],
        },
        _actorder,
    ),
    Rule(
        "hardware",
        "note",
        {
            "sglang": "SGLang .../schemes/compressed_tensors_wNa16.py get_min_capability; sglang #24091, #23264",
            "vllm": "vLLM .../schemes/compressed_tensors_wNa16.py get_min_capability; vllm #40357",
        },
        _capability,
    ),
)
