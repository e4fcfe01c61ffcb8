"""How an INT4 linear lies in the output: names, dtypes and shapes of its tensors, by `--format`.

All are 4 bit, symmetric, one scale per group of columns of a row; quantize/arrange.py makes the bytes.

pack-quantized  compressed-tensors src/compressed_tensors/compressors/pack_quantized/helpers.py (`pack_to_int32`). Its
                own compressor writes `weight_shape` as I64; Moonshot's published Kimi-K2-Thinking and K2.5 checkpoints
                carry I32, readers take either, and the Kimi form is the one written here.
gptq, gptq_v2   vLLM 0.33 model_executor/layers/quantization/auto_gptq.py:376-429 (linears) and :513-581 (experts),
                SGLang 0.5.23 srt/layers/quantization/gptq/schemes/gptq_marlin.py:88-150 and gptq_moe.py:210-299:
                qweight I32 [K/8, N], qzeros I32 [K/g, N/8], scales [K/g, N], g_idx I32 [K]. vLLM drops g_idx
                (base_config.py:255-259) and SGLang empties it without desc_act (gptq_kernels.py:248-267); GPTQModel 7.7
                multiplies by scales[g_idx] (nn_modules/qlinear/__init__.py:1104), so it is written.
awq             vLLM auto_awq.py:835-876, SGLang srt/layers/quantization/awq/schemes/awq_marlin.py:56-97, version
                "gemm": qweight I32 [K, N/8], qzeros I32 [K/g, N/8], scales [K/g, N].
w4afp8          SGLang srt/layers/quantization/w4afp8.py:146-196: weight I8 [N, K/2], weight_scale_inv F32 [N, K/128].
                The names are those of its experts' mapping (moe/fused_moe_triton/layer.py:1797-1822), which keeps what
                comes after `experts.<i>.gate_proj.`. `experts.<i>.w1.input_scale` (layer.py:1870-1885, called in
                models/deepseek_common/deepseek_weight_loader.py:271-277) is not written: the parameter is made as 1.0
                (w4afp8.py:199-212), which is what an uncalibrated checkpoint would say.

GPTQ and AWQ scales are F16, as every other writer's are: SGLang's GPTQ experts have F16 parameters whatever the model's
dtype (gptq_moe.py:234-250), so BF16 beyond F16's range would be changed there without a word.
"""

from typing import Literal, get_args

from kizami.formats.errors import KizamiError
from kizami.formats.tensors import TensorInfo, TensorSpec, one_shape

Format = Literal["pack-quantized", "gptq", "gptq_v2", "awq", "w4afp8"]
FORMATS: tuple[Format, ...] = get_args(Format)

WEIGHT_PACKED = "weight_packed"
WEIGHT_SCALE = "weight_scale"
WEIGHT_SHAPE = "weight_shape"
VALUES_PER_WORD = 8
"""4-bit values in one I32 word: column 8j+i is nibble i of word j, stored as q + 8."""
W4AFP8_GROUP = 128
"""The one group size of SGLang's kernel (sgl-kernel csrc/moe/cutlass_moe/w4a8/w4a8_grouped_mm_c3x.cuh, `GroupSize`),
and of its reader, which takes none from the config (w4afp8.py:82-94)."""

_MAX_I32 = 2**31 - 1


def packed_names(module: str) -> tuple[str, str, str]:
    """Names of the three tensors of a packed linear, in the order of `packed_specs`."""
    return f"{module}.{WEIGHT_PACKED}", f"{module}.{WEIGHT_SHAPE}", f"{module}.{WEIGHT_SCALE}"


def packed_specs(module: str, rows: int, cols: int, group_size: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """`weight_packed` I32 [rows, cols/8], `weight_shape` I32 [2], `weight_scale` BF16 [rows, cols/group_size].

    Raises KizamiError `group_does_not_divide` when `cols` is not a multiple of the group size and of 8: padded groups
    would load nowhere, so this must be known before anything is written.
    """
    _check_shape(module, rows, cols, group_size)
    packed, shape, scale = packed_names(module)
    return (
        TensorSpec(packed, "I32", one_shape((rows, cols // VALUES_PER_WORD))),
        TensorSpec(shape, "I32", (2,)),
        TensorSpec(scale, "BF16", one_shape((rows, cols // group_size))),
    )


def layout_names(format: Format, module: str) -> tuple[str, ...]:
    """Names of the tensors of an INT4 linear, in the order of `layout_specs`."""
    match format:
        case "pack-quantized":
            return packed_names(module)
        case "gptq" | "gptq_v2":
            return tuple(f"{module}.{name}" for name in ("qweight", "qzeros", "g_idx", "scales"))
        case "awq":
            return tuple(f"{module}.{name}" for name in ("qweight", "qzeros", "scales"))
        case "w4afp8":
            return f"{module}.weight_scale_inv", f"{module}.weight"


def layout_specs(format: Format, module: str, rows: int, cols: int, group_size: int) -> tuple[TensorSpec, ...]:
    """The tensors of an INT4 linear [rows, cols], the widest dtype first. Raises KizamiError for what the layout cannot
    hold: `group_does_not_divide`, `unsupported_shape`, `unsupported_group_size`."""
    if format == "pack-quantized":
        return packed_specs(module, rows, cols, group_size)
    _check_shape(module, rows, cols, group_size)
    names = layout_names(format, module)
    if format == "w4afp8":
        if group_size != W4AFP8_GROUP:
            raise KizamiError(
                f"w4afp8 has groups of {W4AFP8_GROUP} only, not {group_size}",
                code="unsupported_group_size",
                tensor=f"{module}.weight",
                hint=f"use --group-size {W4AFP8_GROUP}",
            )
        return TensorSpec(names[0], "F32", (rows, cols // group_size)), TensorSpec(names[1], "I8", (rows, cols // 2))
    if rows % VALUES_PER_WORD:
        raise KizamiError(
            f"{rows} rows are not a multiple of {VALUES_PER_WORD}: {format} packs {VALUES_PER_WORD} rows into an I32",
            code="unsupported_shape",
            tensor=f"{module}.weight",
            hint="use --format pack-quantized, or leave the module out with --ignore",
        )
    words, groups = rows // VALUES_PER_WORD, cols // group_size
    zeros, scales = ("I32", (groups, words)), ("F16", (groups, rows))
    qweight = ("I32", (cols, words) if format == "awq" else (cols // VALUES_PER_WORD, rows))
    forms = (qweight, zeros, scales) if format == "awq" else (qweight, zeros, ("I32", (cols,)), scales)
    return tuple(TensorSpec(name, *form) for name, form in zip(names, forms, strict=True))


def _check_shape(module: str, rows: int, cols: int, group_size: int) -> None:
    if min(rows, cols) < 1:
        raise KizamiError(
            f"is an empty weight [{rows}, {cols}]; expected at least one row and one group of columns",
            code="empty_tensor",
            tensor=f"{module}.weight",
            hint="leave the module out with --ignore",
        )
    if cols % group_size or cols % VALUES_PER_WORD:
        raise KizamiError(
            f"{cols} columns are not a multiple of "
            + (f"the group size {group_size}" if cols % group_size else f"{VALUES_PER_WORD} values per I32 word")
            + f" ({module}: K = {cols}, g = {group_size}, {cols / group_size:.4g} groups)",
            code="group_does_not_divide",
            tensor=f"{module}.weight",
            hint="choose a group size that divides K, or leave the module out with --ignore",
        )
    if max(rows, cols) > _MAX_I32:
        raise KizamiError(
            f"[{rows}, {cols}] does not fit into the I32 of weight_shape",
            code="unsupported_shape",
            tensor=f"{module}.weight",
        )


def smallest_scale(format: Format) -> float:
    """The least magnitude of a BF16 scale that the layout holds exactly; 0 where it holds all of them. Multiples of
    2^-24, F16's subnormals, have the 8 bits of a BF16 from 2^-17 on."""
    return 2.0**-17 if format in ("gptq", "gptq_v2", "awq") else 0.0


def is_int4_weight(format: Format, info: TensorInfo) -> bool:
    """Whether a tensor is the one that an INT4 linear of this layout keeps its codes in."""
    leaf = info.name.rpartition(".")[2]
    match format:
        case "pack-quantized":
            return leaf == WEIGHT_PACKED
        case "w4afp8":
            return leaf == "weight" and info.dtype == "I8"
    return leaf == "qweight"


def shape_of(format: Format, info: TensorInfo) -> tuple[int, int]:
    """(rows, columns) of the linear whose codes are in `info`; (0, 0) for a tensor that is not 2-D."""
    if len(info.shape) != 2:
        return 0, 0
    first, second = info.shape
    match format:
        case "pack-quantized":
            return first, second * VALUES_PER_WORD
        case "w4afp8":
            return first, second * 2
        case "awq":
            return second * VALUES_PER_WORD, first
    return second, first * VALUES_PER_WORD
