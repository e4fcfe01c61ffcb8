"""What a checkpoint's config and names say about its quantization, and refusal of the formats that are not read."""

from collections.abc import Mapping, Sequence
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.tensors import TensorInfo

SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
"""Names of the scale beside `X.weight`: DeepSeek and GLM-5; compressed-tensors; DeepSeek's own later layout."""

_OTHER_F8 = frozenset({"F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
# Leaf names that give a format away.
_FOREIGN_LEAVES = {
    "weight_scale_2": "NVFP4 (Model Optimizer)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "qweight": "AWQ or GPTQ",
    "qzeros": "AWQ or GPTQ",
    "qscale_weight": "Mistral's qscale form",
    "weight_zero_point": "an asymmetric integer format",
    "absmax": "bitsandbytes",
}
_FOREIGN_DTYPES = {"F4": "FP4 (MXFP4 or NVFP4)", "F6_E2M3": "FP6", "F6_E3M2": "FP6"}


def refuse_other_formats(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise KizamiError if `info` shows that the checkpoint is neither FP8, nor INT4 in I32 words, nor a float one.

    Codes: `unsupported_dtype` (another FP8 encoding), `unsupported_format`.
    """
    if info.dtype in _OTHER_F8:
        raise tensor_error(
            info,
            f"dtype {info.dtype} is not supported, expected F8_E4M3 (e4m3fn)",
            "unsupported_dtype",
            hint="its codes mean other numbers than those of e4m3fn; convert the checkpoint to BF16 first",
        )
    module, _, leaf = info.name.rpartition(".")
    kind = _foreign(info, module, leaf, tensors)
    if kind is not None:
        raise tensor_error(
            info,
            f"this is {kind} ({info.dtype} {shape_text(info.shape)}), "
            "expected FP8 (F8_E4M3 with scales), BF16 or symmetric pack-quantized INT4 weights",
            "unsupported_format",
            hint="start from the FP8 or BF16 release of the model",
        )


def _foreign(info: TensorInfo, module: str, leaf: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    if leaf in _FOREIGN_LEAVES:
        return _FOREIGN_LEAVES[leaf]
    if info.dtype in _FOREIGN_DTYPES:
        return _FOREIGN_DTYPES[info.dtype]
    if leaf == "weight_packed" and info.dtype != "I32":  # packed_source judges the I32 ones
        return "NVFP4 or MXFP4 in packed bytes"
    if leaf.endswith("_blocks") and f"{info.name.removesuffix('_blocks')}_scales" in tensors:
        return "MXFP4 (blocks and scales)"
    if leaf.startswith("quant_state") or ".weight.quant_state" in info.name:
        return "bitsandbytes"
    if leaf == "weight" and info.dtype in {"I8", "U8"} and (scale := _scale_beside(module, tensors)):
        return f"{'packed FP4' if info.dtype == 'U8' else 'INT8'} with {scale}"
    return None


def _scale_beside(module: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    return next((f"{module}.{s}" for s in SCALE_SUFFIXES if f"{module}.{s}" in tensors), None)


def quantization_configs(config: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Every quantization config with its key path, in the order in which SGLang and vLLM look for them."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    text = config.get("text_config")
    holders: list[tuple[str, Mapping[str, Any], str]] = [("", config, "quantization_config")]
    if isinstance(text, dict):
        holders.append(("text_config.", text, "quantization_config"))
    holders.append(("", config, "compression_config"))
    if isinstance(text, dict):
        holders.append(("text_config.", text, "compression_config"))
    for prefix, holder, key in holders:
        value = holder.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise bad_config(prefix + key, value, "an object")
        found.append((prefix + key, value))
    return tuple(found)


def refuse_transforms(path: str, quant: Mapping[str, Any]) -> None:
    """compressed-tensors' two ways to make a weight something else than its codes times scales: rotated by a Hadamard
    matrix that engines apply again to inputs and outputs, or half of it left out. KizamiError "unsupported_format"."""
    transforms, sparsity = quant.get("transform_config"), quant.get("sparsity_config")
    found: tuple[str, object, str] | None = None
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        found = f"{path}.transform_config", transforms["config_groups"], "none: the weights are rotated"
    elif isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        found = f"{path}.sparsity_config.format", sparsity["format"], "dense"
    if found is not None:
        raise KizamiError(
            f"{found[0]} is {printable(repr(found[1]), 80)}, expected {found[2]}",
            code="unsupported_format",
            file="config.json",
            hint="start from a release of the model without it",
        )


def group_weights(path: str, quant: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """`weights` of every compressed-tensors config group."""
    groups = quant.get("config_groups")
    if groups is None:
        return []
    if not isinstance(groups, dict):
        raise bad_config(f"{path}.config_groups", groups, "an object")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name, group in groups.items():
        where = f"{path}.config_groups.{name}"
        if not isinstance(group, dict):
            raise bad_config(where, group, "an object")
        weights = group.get("weights")
        if weights is not None and not isinstance(weights, dict):
            raise bad_config(f"{where}.weights", weights, "an object")
        if weights:
            found.append((f"{where}.weights", weights))
    return found


def shape_text(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def tensor_error(info: TensorInfo, message: str, code: str, *, hint: str | None = None) -> KizamiError:
    return KizamiError(message, code=code, file=info.file, tensor=info.name, hint=hint)


def bad_config(where: str, found: object, expected: str) -> KizamiError:
    text = printable(repr(found), 80)
    return KizamiError(f"{where} is {text}, expected {expected}", code="bad_config", file="config.json")
