"""quantize_linear and dequantize_rows: formats, blocks, edges, errors, threads."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kizami.quantize import reference as ref
from kizami.quantize.linear import NonFiniteError, dequantize_rows, quantize_linear
from kizami.quantize.settings import GROUP_SIZES, Method

METHODS = [
    Method("minmax"),
    Method("signed"),
    Method("search"),
    Method("search", "positive"),
    Method("search", "signed", 0.5),
]
MINMAX, SEARCH = METHODS[0], METHODS[2]
ZEROS = -2004318072  # eight codes 0


def random_codes(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def grid(rows: int, columns: int, block: tuple[int, int], seed: int = 0) -> np.ndarray:
    shape = -(-rows // block[0]), -(-columns // block[1])
    return (np.random.default_rng(seed).uniform(0.5, 2, shape) * 2.0**-7).astype(np.float32)


def assert_as_the_oracle_says(
    weight: np.ndarray, scale: np.ndarray | None, block: tuple[int, int] | None, w: np.ndarray, g: int
) -> None:
    """minmax and signed bit for bit; search: nearest codes, and no worse than either."""
    results = {m: quantize_linear(weight, scale, block, g, m) for m in METHODS}
    for method, oracle in ((METHODS[0], ref.minmax), (METHODS[1], ref.signed)):
        codes, s = oracle(w, g)
        np.testing.assert_array_equal(ref.unpack(results[method].packed), codes)
        np.testing.assert_array_equal(ref.from_bf16(results[method].scale), s)
    for method in METHODS[2:]:
        found = results[method]
        s = ref.from_bf16(found.scale)
        np.testing.assert_array_equal(ref.unpack(found.packed), ref.nearest_codes(w, s, g))
        assert found.sums.sum_e2 <= results[MINMAX].sums.sum_e2
    assert results[SEARCH].packed.dtype == np.int32
    assert results[SEARCH].scale.dtype == np.uint16


@pytest.mark.parametrize("g", GROUP_SIZES)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((130, 384), (128, 128)),
        ((587, 384), (128, 128)),  # partial rows of blocks
        ((576, 256), (128, 128)),  # kv_a_proj_with_mqa: 512 + 64 rows
        ((40, 256), (1, 256)),  # per channel
        ((40, 256), (40, 256)),  # per tensor
        ((40, 256), (64, 512)),  # block larger than the tensor
        ((40, 256), (1, 128)),
        ((40, 256), (16, 16)),  # narrower than a group
        ((40, 384), (32, 48)),  # straddles groups
        ((33, 256), (7, 200)),
    ],
)
def test_blocks_of_any_size(shape: tuple[int, int], block: tuple[int, int], g: int) -> None:
    codes, scale = random_codes(*shape), grid(*shape, block)
    assert_as_the_oracle_says(codes, scale, block, ref.dequantize(codes, scale, block), g)


def test_trailing_blocks_may_be_partial_in_both_directions() -> None:
    codes, scale = random_codes(587, 320), grid(587, 320, (128, 128))
    assert_as_the_oracle_says(codes, scale, (128, 128), ref.dequantize(codes, scale, (128, 128)), 32)


@pytest.mark.parametrize("dtype", ["bf16", "float16", "float32"])
def test_sources_without_block_scales(dtype: str) -> None:
    w = (np.random.default_rng(2).standard_t(4.0, (300, 1024)) * 0.02).astype(np.float32)  # more than one tile
    weight = ref.to_bf16(w) if dtype == "bf16" else w.astype(dtype)
    w = ref.from_bf16(weight) if dtype == "bf16" else weight.astype(np.float32)
    assert_as_the_oracle_says(weight, None, None, w, 64)


def test_every_finite_code_decodes_exactly() -> None:
    codes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256, axis=1)
    codes[(codes & 0x7F) == 0x7F] = 0
    ones = np.ones((2, 2), np.float32)
    np.testing.assert_array_equal(ref.from_bf16(dequantize_rows(codes, ones, (128, 128), 0)), ref.decode_e4m3(codes))
    assert_as_the_oracle_says(codes, ones, (128, 128), ref.decode_e4m3(codes), 32)
    s = ref.from_bf16(quantize_linear(codes, ones, (128, 128), 32, MINMAX).scale)[:, 0]
    w = np.abs(ref.decode_e4m3(codes))[:, 0]
    np.testing.assert_allclose(s[w >= 2.0**-6] * 7.5, w[w >= 2.0**-6], rtol=2.0**-8)


def test_known_words_of_a_constant_block() -> None:
    codes = np.full((587, 320), 0x38, np.uint8)
    scale = (1 + np.arange(5)[:, None] + 10 * np.arange(3)).astype(np.float32)
    assert (quantize_linear(codes, scale, (128, 128), 32, MINMAX).packed == -1).all()
    w = ref.from_bf16(dequantize_rows(codes, scale, (128, 128), 0))
    assert w[586, [0, 128, 319]].tolist() == [5, 15, 25]


def test_known_words_of_a_row() -> None:
    codes = np.zeros((8, 64), np.uint8)
    codes[0, :8] = list(bytes.fromhex("EEECD600565E686C"))
    result = quantize_linear(codes, np.ones((1, 1), np.float32), (128, 128), 32, MINMAX)
    assert result.packed[0, 0] == -324434144
    assert ref.from_bf16(result.scale)[0, 0] == 14.9375
    assert (result.packed.ravel()[1:] == ZEROS).all()


def test_known_words_of_rows_that_alternate_in_sign() -> None:
    exponent = np.arange(192) % 8
    codes = np.repeat((0x38 + 8 * exponent)[:, None], 320, axis=1).astype(np.uint8)
    codes[:, 1::2] |= 0x80
    result = quantize_linear(codes, np.ones((2, 3), np.float32), (128, 128), 32, MINMAX)
    assert (result.packed == 0x1F1F1F1F).all()
    expected = ref.to_bf16((2.0**exponent / 7.5).astype(np.float32))
    np.testing.assert_array_equal(result.scale, np.repeat(expected[:, None], 10, axis=1))


@pytest.mark.parametrize(
    ("g", "packed"), [(32, [0x8888880F, 0x88888880, 0x8888888F]), (64, [0x8888880F, 0x88888880, 0x8888888F])]
)
def test_known_words_of_extremes(g: int, packed: list[int]) -> None:
    codes = np.zeros((4, 64), np.uint8)
    codes[0, :2], codes[1, 0], codes[2, 0] = (0x7E, 0xFE), 0xFE, 0x7E
    result = quantize_linear(codes, np.ones((1, 1), np.float32), (128, 128), g, MINMAX)
    assert result.packed[:3, 0].view(np.uint32).tolist() == packed
    assert ref.from_bf16(result.scale)[:3, 0].tolist() == [59.75] * 3


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_zero_groups(method: Method) -> None:
    codes = random_codes(8, 256)
    codes[:3] = 0
    codes[3] = 0x80  # -0.0 is a zero
    codes[5, 64:96] = np.tile([0, 0x80], 16)
    scale = np.ones((1, 2), np.float32)
    result = quantize_linear(codes, scale, (128, 128), 32, method)
    q, s = ref.unpack(result.packed), ref.from_bf16(result.scale)
    assert (result.packed[:4] == ZEROS).all()
    assert not q[5, 64:96].any()
    assert (s[:4] == 2.0**-7).all()
    assert s[5, 2] == 2.0**-7
    assert result.sums.zero_groups == 4 * 8 + 1
    zero_scale = np.zeros((1, 2), np.float32)
    nothing = quantize_linear(codes, zero_scale, (128, 128), 32, method)
    assert (nothing.packed == ZEROS).all()
    assert nothing.sums.figures()["rel_error"] == 0.0


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("power", [-149, -140, -130, -126, -120, -100, 0, 100, 118])
def test_tiny_and_huge_weights_get_a_usable_scale(method: Method, power: int) -> None:
    codes, scale = random_codes(16, 128), np.full((1, 1), np.ldexp(1.0, power), np.float32)
    w = ref.dequantize(codes, scale, (128, 128))
    for given in ((codes, scale, (128, 128)), (w, None, None)):
        result = quantize_linear(*given, 32, method)
        s = ref.from_bf16(result.scale)
        q = ref.unpack(result.packed)
        assert np.isfinite(s).all()
        assert (s != 0).all()
        figures = result.sums.figures()
        assert all(v is None or np.isfinite(v) for v in figures.values())
        if method.name == "minmax":
            codes_, scales_ = ref.minmax(w, 32)
            np.testing.assert_array_equal(q, codes_)
            np.testing.assert_array_equal(s, scales_)
        else:
            assert ref.is_nearest(w, q, s, 32).all()
            if power >= -110:
                assert figures["sqnr_db"] > 18
        if method.clip_allowance is not None:
            assert np.abs(ref.steps_off(w, q, s, 32)).max() <= method.clip_allowance


@pytest.mark.parametrize("block", [(128, 128), (16, 16)])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_are_named_with_their_place(block: tuple[int, int], byte: int) -> None:
    codes, scale = random_codes(300, 256), grid(300, 256, block)
    codes[290, 1] = codes[170, 200] = byte
    codes[171, 3] = 0x7F
    for g in (32, 128):
        with pytest.raises(NonFiniteError) as error:
            quantize_linear(codes, scale, block, g, MINMAX)
        assert (error.value.row, error.value.col) == (170, 200)
        assert f"0x{byte:02X}" in error.value.found
    with pytest.raises(NonFiniteError) as error:
        dequantize_rows(codes[150:], scale, block, 150)
    assert (error.value.row, error.value.col) == (170, 200)
    assert dequantize_rows(codes[:170], scale, block, 0).shape == (170, 256)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_bad_block_scales_are_named_with_the_first_weight_they_spoil(bad: float) -> None:
    codes, scale = random_codes(300, 256), grid(300, 256, (128, 128))
    scale[1, 1] = bad
    codes[200, 5] = 0x7F
    for call in (
        lambda: quantize_linear(codes, scale, (128, 128), 32, SEARCH),
        lambda: dequantize_rows(codes[100:], scale, (128, 128), 100),
    ):
        with pytest.raises(NonFiniteError) as error:
            call()
        assert (error.value.row, error.value.col) == (128, 128)
        assert "scale" in error.value.found
    codes[128, 3] = 0xFF  # earlier in the same row
    with pytest.raises(NonFiniteError) as error:
        quantize_linear(codes, scale, (128, 128), 32, SEARCH)
    assert (error.value.row, error.value.col) == (128, 3)
    assert dequantize_rows(codes[:128], scale, (128, 128), 0).shape == (128, 256)


def test_products_too_large_for_bf16_are_refused() -> None:
    codes = np.full((4, 128), 0x38, np.uint8)
    codes[2, 77] = 0x7E
    scale = np.full((1, 1), 2.0**122, np.float32)
    for call in (
        lambda: quantize_linear(codes, scale, (128, 128), 32, MINMAX),
        lambda: quantize_linear(codes, np.repeat(scale, 8, 1), (4, 16), 32, MINMAX),
        lambda: dequantize_rows(codes, scale, (128, 128), 0),
    ):
        with pytest.raises(NonFiniteError, match="too large") as error:
            call()
        assert (error.value.row, error.value.col) == (2, 77)


@pytest.mark.parametrize("method", [MINMAX, SEARCH], ids=str)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((587, 320), (128, 128)),  # partial blocks both ways
        ((40, 256), (1, 256)),  # per channel
        ((40, 256), (40, 256)),  # per tensor
        ((40, 256), (16, 16)),  # widened
        ((300, 1024), None),  # float32
    ],
)
def test_the_height_of_the_bands_does_not_show(
    shape: tuple[int, int], block: tuple[int, int] | None, method: Method
) -> None:
    weight, scale = random_codes(*shape, seed=4), None if block is None else grid(*shape, block)
    weight[7, :64] = 0
    weight[11] = weight[12]  # more than one weight on the threshold of the top 0.1 %
    if block is None:
        weight = ref.decode_e4m3(weight).astype(np.float32)
    whole = quantize_linear(weight, scale, block, 32, method, band=shape[0])
    for band in (1, 3, 31, 100, 128):
        found = quantize_linear(weight, scale, block, 32, method, band=band)
        np.testing.assert_array_equal(found.packed, whole.packed)
        np.testing.assert_array_equal(found.scale, whole.scale)
        assert found.sums == whole.sums


@pytest.mark.parametrize("band", [1, 100, 300])
def test_errors_name_the_same_place_whatever_the_bands(band: int) -> None:
    codes, scale = random_codes(300, 256), grid(300, 256, (128, 128))
    codes[[170, 290], [200, 1]] = 0x7F
    for given in ((codes, scale, (128, 128)), (codes, grid(300, 256, (16, 16)), (16, 16))):
        with pytest.raises(NonFiniteError) as error:
            quantize_linear(*given, 32, MINMAX, band=band)
        assert (error.value.row, error.value.col) == (170, 200)
    scale[1, 0] = np.nan
    with pytest.raises(NonFiniteError) as error:
        quantize_linear(codes, scale, (128, 128), 32, MINMAX, band=band)
    assert (error.value.row, error.value.col) == (128, 0)


def test_rows_are_asked_for_in_runs_and_each_is_used_before_the_next() -> None:
    codes, scale = random_codes(64, 256), grid(64, 256, (128, 128))

    class Reader:
        shape, dtype = codes.shape, codes.dtype
        memory = np.empty((10, 256), np.uint8)
        asked: list[tuple[int, int]] = []  # noqa: RUF012

        def __getitem__(self, rows: slice) -> np.ndarray:
            self.asked.append((rows.start, rows.stop))
            self.memory[:] = 0x7F
            self.memory[: rows.stop - rows.start] = codes[rows]
            return self.memory[: rows.stop - rows.start]

    found = quantize_linear(Reader(), scale, (128, 128), 32, SEARCH, band=10)
    np.testing.assert_array_equal(found.packed, quantize_linear(codes, scale, (128, 128), 32, SEARCH).packed)
    assert Reader.asked == 2 * [(first, min(first + 10, 64)) for first in range(0, 64, 10)]


@pytest.mark.parametrize("dtype", ["bf16", "float16", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_float_sources_that_are_not_finite_are_named_with_their_place(dtype: str, bad: float) -> None:
    w = np.ones((600, 1024), np.float32)
    w[511, 1000] = w[512, 3] = bad
    weight = ref.to_bf16(w) if dtype == "bf16" else w.astype(dtype)
    with pytest.raises(NonFiniteError) as error:
        quantize_linear(weight, None, None, 32, SEARCH)
    assert (error.value.row, error.value.col) == (511, 1000)
    assert error.value.found == f"{bad:g}"


def test_the_error_survives_a_process_pool() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError(3, 4, "nan")))
    assert (error.row, error.col, error.found) == (3, 4, "nan")
    assert str(error) == "row 3, column 4: found nan, expected a finite weight"


@pytest.mark.parametrize("block", [(128, 128), (1, 320), (300, 320), (16, 16), (7, 33)])
def test_dequantize_rows_rounds_the_float32_product_to_bf16(block: tuple[int, int]) -> None:
    codes, scale = random_codes(300, 320), grid(300, 320, block)
    expected = ref.to_bf16(ref.dequantize(codes, scale, block))
    np.testing.assert_array_equal(dequantize_rows(codes, scale, block, 0), expected)
    for first, last in ((0, 1), (127, 129), (200, 300)):
        np.testing.assert_array_equal(dequantize_rows(codes[first:last], scale, block, first), expected[first:last])


def test_inputs_are_left_alone_and_need_not_be_contiguous_or_writable() -> None:
    wide, scale = random_codes(64, 512), grid(64, 256, (128, 128))
    codes = wide[:, ::2]
    expected = quantize_linear(codes.copy(), scale, (128, 128), 32, SEARCH)
    wide.flags.writeable = scale.flags.writeable = False
    before = codes.copy()
    found = quantize_linear(codes, scale, (128, 128), 32, SEARCH)
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(found.scale, expected.scale)
    np.testing.assert_array_equal(codes, before)
    floats = ref.dequantize(before, scale, (128, 128))
    kept = floats.copy()
    quantize_linear(floats, None, None, 32, SEARCH)
    np.testing.assert_array_equal(floats, kept)


def test_empty_tensors_are_no_error() -> None:
    result = quantize_linear(np.empty((0, 64), np.uint8), np.empty((0, 1), np.float32), (128, 128), 32, SEARCH)
    assert result.packed.shape == (0, 8)
    assert result.scale.shape == (0, 2)
    assert result.sums.figures()["rel_error"] == 0.0
    assert quantize_linear(np.empty((5, 0), np.float32), None, None, 32, SEARCH).packed.shape == (5, 0)


def test_a_weight_that_changes_between_the_passes_leads_nowhere_else() -> None:
    class Changing:
        shape, dtype = (64, 1024), np.dtype(np.float32)
        passes = 0

        def __getitem__(self, rows: slice) -> np.ndarray:
            self.passes += 1
            return np.full((rows.stop - rows.start, 1024), 1.0 if self.passes == 1 else 2.0, np.float32)

    result = quantize_linear(Changing(), None, None, 32, SEARCH)
    assert result.packed.shape == (64, 128)
    assert result.sums.top_n <= 64 * 1024


@pytest.mark.parametrize("method", [MINMAX, SEARCH], ids=str)
def test_threads_give_the_same_bytes_and_figures(method: Method) -> None:
    codes, scale = random_codes(128, 1024), grid(128, 1024, (128, 128))
    floats = ref.dequantize(codes, scale, (128, 128))
    jobs = [(codes, scale, (128, 128)), (floats, None, None)] * 6
    alone = [quantize_linear(*job, 32, method) for job in jobs[:2]]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: quantize_linear(*job, 32, method), jobs))
    for number, found in enumerate(together):
        np.testing.assert_array_equal(found.packed, alone[number % 2].packed)
        np.testing.assert_array_equal(found.scale, alone[number % 2].scale)
        assert found.sums == alone[number % 2].sums


def test_the_largest_finite_bf16_is_decoded_and_the_next_value_is_not() -> None:
    codes = np.array([[0x38, 0xB8]], np.uint8)
    largest = np.float32((2 - 2.0**-7) * 2.0**127)
    assert dequantize_rows(codes, np.full((1, 1), largest), (1, 2), 0).tolist() == [[0x7F7F, 0xFF7F]]
    tie = np.full((1, 1), (2 - 2.0**-8) * 2.0**127, np.float32)
    with pytest.raises(NonFiniteError, match="too large"):
        dequantize_rows(codes, tie, (1, 2), 0)
