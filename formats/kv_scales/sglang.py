"""SGLang's file of KV scales, for --kv-cache-dtype fp8_e4m3 --quantization-param-path FILE.

SGLang 0.5.23 model_loader/weight_utils.py `QuantParamSchema`: one float per rank and layer, used for K and V alike.
Whatever is wrong in the file becomes 1.0 with one line in a log that later says that the scales were loaded.
"""

from collections.abc import Mapping
from typing import Any

from kizami.formats.errors import KizamiError, printable
from kizami.formats.kv_scales.effects import json_refusal
from kizami.formats.kv_scales.neutral import DTYPE, KvScales, float32_scale


def sglang_file(scales: KvScales, tp: int, *, force: bool = False) -> dict[str, Any]:
    """The larger of K and V of each layer, for `tp` ranks. KizamiError "no_kv_json" for a class that cannot read it,
    unless forced."""
    if not force and (why := json_refusal(scales.architecture)) is not None:
        raise KizamiError(
            f"{printable(why)}; it has no use for this file",
            code="no_kv_json",
            hint="--format checkpoint writes tensors"
            if scales.attention == "gqa"
            else "--format json has what is known",
        )
    by_layer = {str(layer.layer): max(layer.values) for layer in scales.layers}
    ranks = {str(rank): dict(by_layer) for rank in range(tp)}
    made = {"model_type": scales.model_type, "kv_cache": {"dtype": DTYPE, "scaling_factor": ranks}}
    problems = find_problems(made, scales.model_type, tp, len(scales.layers))
    assert not problems, problems
    return made


def find_problems(file: Mapping[str, Any], model_type: str, tp: int, layers: int) -> list[str]:
    """What makes SGLang take 1.0 in place of such a file's scales, with `tp` ranks and `layers` hidden layers."""
    problems = []
    if file.get("model_type") != model_type:
        problems.append(f"model_type is {_shown(file.get('model_type'))}, expected {_shown(model_type)}")
    cache = file.get("kv_cache")
    if not isinstance(cache, dict):
        return [*problems, f"kv_cache is {_shown(cache)}, expected an object"]
    if cache.get("dtype") != DTYPE:
        problems.append(f"kv_cache.dtype is {_shown(cache.get('dtype'))}, expected {DTYPE}")
    factors = cache.get("scaling_factor")
    if not isinstance(factors, dict):
        return [*problems, f"kv_cache.scaling_factor is {_shown(factors)}, expected an object"]
    expected = {str(rank) for rank in range(tp)}
    if factors.keys() != expected:
        problems.append(f"scaling_factor has {len(factors)} ranks, expected {tp}: 0 to {tp - 1}")
    for rank in sorted(expected & factors.keys(), key=int):
        problems += _problems_of(rank, factors[rank], layers)
    return problems


def _problems_of(rank: str, factors: Any, layers: int) -> list[str]:
    expected = {str(layer) for layer in range(layers)}
    if not isinstance(factors, dict) or factors.keys() != expected:
        count = len(factors) if isinstance(factors, dict) else 0
        return [f"rank {rank} has {count} layers, expected {layers}: 0 to {layers - 1}, no MTP layer"]
    bad = [layer for layer, value in factors.items() if float32_scale(value) is None]
    return [
        f"rank {rank}, layer {layer}: {_shown(factors[layer])} is not a positive, finite number" for layer in bad[:3]
    ]


def _shown(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value), 60)
