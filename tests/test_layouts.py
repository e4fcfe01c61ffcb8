"""The INT4 layouts: what is written is what each one's specification says, and comes back bit for bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_readers import READERS, Array, random_linear

from kizami.formats.errors import KizamiError
from kizami.formats.int4_layout import FORMATS, Format, layout_names, layout_specs
from kizami.formats.tensors import TensorSpec
from kizami.quantize.arrange import arrange, canonical

HALVES: tuple[Format, ...] = ("gptq", "gptq_v2", "awq")
OTHERS: tuple[Format, ...] = (*HALVES, "w4afp8")
STORED = {"I32": np.int32, "I8": np.int8, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def written(format: Format, packed: Array, scale: Array, group: int) -> dict[str, Array]:
    """The tensors by the last part of their names, each as its spec says."""
    rows, cols = len(packed), packed.shape[1] * 8
    arrays = arrange(format, packed, scale, group, (rows, cols), "m")
    specs = layout_specs(format, "m", rows, cols, group)
    for spec, array in zip(specs, arrays, strict=True):
        assert (array.shape, array.dtype) == (spec.shape, STORED[spec.dtype]), spec
    return {spec.name.removeprefix("m."): array for spec, array in zip(specs, arrays, strict=True)}


@pytest.mark.parametrize(
    ("format", "group"), [(f, g) for f in FORMATS for g in (32, 64, 128) if f != "w4afp8" or g == 128]
)
def test_each_layout_says_the_same_weights(format: Format, group: int) -> None:
    packed, scale, weights = random_linear(24, 384, group, seed=group)
    assert np.array_equal(READERS[format](written(format, packed, scale, group), group), weights)


@given(
    format=st.sampled_from(FORMATS), rows=st.integers(1, 24), groups=st.integers(1, 3),
    group=st.sampled_from([8, 32, 128]), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(derandomize=True, deadline=None, max_examples=100)
def test_repacking_and_back_is_bit_identical(format: Format, rows: int, groups: int, group: int, seed: int) -> None:
    group = 128 if format == "w4afp8" else group
    rows = rows if format in ("pack-quantized", "w4afp8") else rows * 8
    packed, scale, weights = random_linear(rows, group * groups, group, seed)
    tensors = written(format, packed, scale, group)
    assert np.array_equal(READERS[format](tensors, group), weights)
    back = canonical(format, tuple(tensors.values()), group, (rows, group * groups), "m")
    assert [array.dtype for array in back] == [np.int32, np.uint16]
    assert np.array_equal(back[0], packed)
    assert np.array_equal(back[1], scale)


def test_a_tile_of_an_odd_size_at_the_end_is_right() -> None:
    """More rows than are transposed at a time, and not a multiple of them."""
    packed, scale, weights = random_linear(168, 264, 8, seed=1)
    for format in HALVES:
        tensors = written(format, packed, scale, 8)
        assert np.array_equal(READERS[format](tensors, 8), weights)
        back = canonical(format, tuple(tensors.values()), 8, (168, 264), "m")
        assert np.array_equal(back[0], packed)
        assert np.array_equal(back[1], scale)


def test_arrays_of_any_strides_are_read() -> None:
    packed, scale, weights = random_linear(16, 256, 128, seed=2)
    for format in FORMATS:
        tensors = written(format, np.asfortranarray(packed), np.asfortranarray(scale), 128)
        assert np.array_equal(READERS[format](tensors, 128), weights)
        strided = tuple(np.asfortranarray(array) for array in tensors.values())
        assert np.array_equal(canonical(format, strided, 128, (16, 256), "m")[0], packed)


def test_known_words() -> None:
    """Row [-8, -7, -1, 0, 1, 2, 6, 7]: 0xFEA98710 in compressed-tensors' layout, for a scale of -0.0078125."""
    packed = np.full((8, 1), 0xFEA98710 - 2**32, np.int32)
    packed[1:] = 0x77777777  # -1 in the other rows
    scale = np.full((8, 1), 0xBC00, np.uint16)
    v1, v2 = (written(f, packed, scale, 8) for f in ("gptq", "gptq_v2"))
    assert v1["qweight"].view(np.uint32).tolist() == [[0xFEA98710] + [0x77777777] * 7]
    assert v1["qzeros"].view(np.uint32).tolist() == [[0x77777777]]
    assert v2["qzeros"].view(np.uint32).tolist() == [[0x88888888]]
    assert v1["g_idx"].tolist() == [0] * 8
    awq = written("awq", packed, scale, 8)
    assert [f"{word:08X}" for word in awq["qweight"].view(np.uint32)[:, 0]] == [
        "77777770", "77777771", "77777777", "77777778", "77777779", "7777777A", "7777777E", "7777777F",
    ]  # fmt: skip
    assert awq["qzeros"].view(np.uint32).tolist() == [[0x88888888]]
    assert awq["scales"].tolist() == [[-0.0078125] * 8]


def test_awq_deals_eight_rows_out_to_nibbles_in_its_own_order() -> None:
    """Rows 0 to 7 of a column lie in nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    packed = np.array([[0x11111111 * i] for i in range(8)], np.uint32).view(np.int32)
    word = int(written("awq", packed, np.zeros((8, 1), np.uint16), 8)["qweight"][0, 0]) % 2**32
    assert f"{word:08X}" == "75316420"


def test_w4afp8_has_two_complement_nibbles_the_even_column_low() -> None:
    packed = np.full((1, 16), 0xFEA98710 - 2**32, np.int32)
    tensors = written("w4afp8", packed, np.full((1, 1), 0x3C00, np.uint16), 128)
    assert tensors["weight"][0, :4].view(np.uint8).tolist() == [0x98, 0x0F, 0x21, 0x76]
    assert tensors["weight_scale_inv"].tolist() == [[2.0**-7]]


# ---------------------------------------------------------------- what a layout cannot hold


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x4780, 0x3681, 0x0001, 0x8001])
@pytest.mark.parametrize("format", HALVES)
def test_a_scale_that_f16_cannot_hold_is_refused_by_name(format: Format, bits: int) -> None:
    """Infinities, NaN, 65536, 2^-18 * 1.0078125, the smallest of BF16."""
    packed, scale, _ = random_linear(16, 64, 32, seed=3)
    scale[5, 1] = bits
    with pytest.raises(KizamiError, match="1 of its scales") as error:
        arrange(format, packed, scale, 32, (16, 64), "layers.3.down_proj")
    assert (error.value.code, error.value.tensor) == ("inexact_scale", "layers.3.down_proj.scales")
    assert "pack-quantized" in str(error.value.hint)


@pytest.mark.parametrize("format", HALVES)
def test_every_scale_of_bf16_comes_back_or_is_refused(format: Format) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    steps = np.ldexp(values[finite].astype(np.float64), 24)  # multiples of F16's smallest number, up to its largest
    held = np.zeros(2**16, bool)
    held[finite] = (steps == np.rint(steps)) & (np.abs(steps) <= np.ldexp(65504, 24))
    kept = bits[held][: held.sum() // 8 * 8].reshape(-1, 1)
    packed = np.zeros((len(kept), 1), np.int32)
    back = canonical(format, arrange(format, packed, kept, 8, (len(kept), 8), "m"), 8, (len(kept), 8), "m")
    assert np.array_equal(back[1], kept)
    with pytest.raises(KizamiError, match=f"{(~held).sum()} of its scales"):
        arrange(format, np.zeros((2**16, 1), np.int32), bits.reshape(-1, 1), 8, (2**16, 8), "m")


@pytest.mark.parametrize("value", [1.0009765625, np.inf, np.nan])
@pytest.mark.parametrize("format", OTHERS)
def test_a_foreign_scale_that_bf16_cannot_hold_is_refused(format: Format, value: float) -> None:
    packed, scale, _ = random_linear(16, 256, 128, seed=4)
    tensors = written(format, packed, scale, 128)
    name = "weight_scale_inv" if format == "w4afp8" else "scales"
    tensors[name][1, 1] = value
    with pytest.raises(KizamiError, match="by BF16") as error:
        canonical(format, tuple(tensors.values()), 128, (16, 256), "m")
    assert (error.value.code, error.value.tensor) == ("inexact_scale", f"m.{name}")


@pytest.mark.parametrize(
    ("format", "name", "value", "words"),
    [
        ("gptq", "qzeros", 0x77777776, "0x77777776; zero points of symmetric gptq are 0x77777777"),
        ("gptq_v2", "qzeros", 0x77777777, "0x77777777; zero points of symmetric gptq_v2 are 0x88888888"),
        ("awq", "qzeros", 0x08888888, "0x08888888"),
        ("gptq", "g_idx", 1, "desc_act"),
        ("pack-quantized", "weight_shape", 8, r"\[16, 8\], expected \[16, 256\]"),
    ],
)
def test_what_is_not_symmetric_or_in_order_is_refused(format: Format, name: str, value: int, words: str) -> None:
    packed, scale, _ = random_linear(16, 256, 128, seed=5)
    tensors = written(format, packed, scale, 128)
    tensors[name].flat[1] = value
    with pytest.raises(KizamiError, match=words) as error:
        canonical(format, tuple(tensors.values()), 128, (16, 256), "m")
    assert (error.value.code, error.value.tensor) == ("bad_layout", f"m.{name}")


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_of_another_shape_or_dtype_are_refused(format: Format) -> None:
    packed, scale, _ = random_linear(16, 256, 128, seed=6)
    arrays = tuple(written(format, packed, scale, 128).values())
    for i, array in enumerate(arrays):
        for other in (array[:-1], array.astype(np.float64), array[None]):
            with pytest.raises(KizamiError, match="expected") as error:
                canonical(format, (*arrays[:i], other, *arrays[i + 1 :]), 128, (16, 256), "m")
            assert error.value.code == "bad_layout"


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("format", "group", "bits"),
    [("gptq", 32, 4.640625), ("awq", 32, 4.625), ("awq", 128, 4.15625), ("w4afp8", 128, 4.25)],
)
def test_bits_per_weight_of_kimis_experts(format: Format, group: int, bits: float) -> None:
    assert sum(s.nbytes for s in layout_specs(format, "m", 2048, 7168, group)) * 8 == 2048 * 7168 * bits


def test_names_and_shapes_are_those_of_the_readers() -> None:
    assert layout_specs("gptq", "m", 2048, 7168, 32) == (
        TensorSpec("m.qweight", "I32", (896, 2048)),
        TensorSpec("m.qzeros", "I32", (224, 256)),
        TensorSpec("m.g_idx", "I32", (7168,)),
        TensorSpec("m.scales", "F16", (224, 2048)),
    )
    assert layout_specs("gptq_v2", "m", 2048, 7168, 32) == layout_specs("gptq", "m", 2048, 7168, 32)
    assert layout_specs("awq", "m", 2048, 7168, 64) == (
        TensorSpec("m.qweight", "I32", (7168, 256)),
        TensorSpec("m.qzeros", "I32", (112, 256)),
        TensorSpec("m.scales", "F16", (112, 2048)),
    )
    assert layout_specs("w4afp8", "m", 2048, 7168, 128) == (
        TensorSpec("m.weight_scale_inv", "F32", (2048, 56)),
        TensorSpec("m.weight", "I8", (2048, 3584)),
    )
    for format in FORMATS:
        assert layout_names(format, "m") == tuple(spec.name for spec in layout_specs(format, "m", 8, 128, 128))


@pytest.mark.parametrize(
    ("format", "shape", "group", "code"),
    [
        *((f, (12, 128), 32, "unsupported_shape") for f in HALVES),
        *((f, (8, 96), 64, "group_does_not_divide") for f in HALVES),
        *((f, (8, 12), 4, "group_does_not_divide") for f in FORMATS),
        *((f, (0, 128), 32, "empty_tensor") for f in FORMATS),
        ("w4afp8", (8, 128), 32, "unsupported_group_size"),
        ("w4afp8", (8, 192), 128, "group_does_not_divide"),
    ],
)
def test_what_no_layout_holds_is_refused_before_anything_is_written(
    format: Format, shape: tuple[int, int], group: int, code: str
) -> None:
    with pytest.raises(KizamiError) as error:
        layout_specs(format, "x.down_proj", *shape, group)
    assert (error.value.code, error.value.tensor) == (code, "x.down_proj.weight")


def test_rows_that_do_not_fill_words_are_no_matter_where_rows_are_not_packed() -> None:
    assert layout_specs("w4afp8", "m", 3, 128, 128)
    assert layout_specs("pack-quantized", "m", 3, 128, 32)


def test_arrays_that_are_not_of_the_canonical_form_are_a_bug() -> None:
    packed, scale, _ = random_linear(16, 64, 32, seed=7)
    wrong: list[Any] = [(packed.T, scale), (packed, scale[:, :1]), (packed.view(np.uint32), scale)]
    for arrays in wrong:
        with pytest.raises(AssertionError):
            arrange("gptq", *arrays, 32, (16, 64), "m")
