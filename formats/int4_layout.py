"""The INT4 output layout: compressed-tensors `pack-quantized`, 4 bit, symmetric, per group.

Source: compressed-tensors src/compressed_tensors/compressors/pack_quantized/helpers.py (`pack_to_int32`). Its own
compressor writes `weight_shape` as I64; Moonshot's published Kimi-K2-Thinking and K2.5 checkpoints carry I32, readers
take either, and the Kimi form is the one written here.
"""

from kizami.formats.errors import KizamiError
from kizami.formats.tensors import TensorSpec

WEIGHT_PACKED = "weight_packed"
WEIGHT_SCALE = "weight_scale"
WEIGHT_SHAPE = "weight_shape"
VALUES_PER_WORD = 8
"""4-bit values in one I32 word: column 8j+i is nibble i of word j, stored as q + 8."""

_MAX_I32 = 2**31 - 1


def packed_names(module: str) -> tuple[str, str, str]:
    """Names of the three tensors of a packed linear, in the order of `packed_specs`."""
    return f"{module}.{WEIGHT_PACKED}", f"{module}.{WEIGHT_SHAPE}", f"{module}.{WEIGHT_SCALE}"


def packed_specs(module: str, rows: int, cols: int, group_size: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """`weight_packed` I32 [rows, cols/8], `weight_shape` I32 [2], `weight_scale` BF16 [rows, cols/group_size].

    Raises KizamiError `group_does_not_divide` when `cols` is not a multiple of the group size and of 8: padded groups
    would load nowhere, so this must be known before anything is written.
    """
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
    packed, shape, scale = packed_names(module)
    return (
        TensorSpec(packed, "I32", (rows, cols // VALUES_PER_WORD)),
        TensorSpec(shape, "I32", (2,)),
        TensorSpec(scale, "BF16", (rows, cols // group_size)),
    )
