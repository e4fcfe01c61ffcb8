"""KV rows are the bytes that engines read, for every value BF16 has; the oracle is tests/kv_cache_oracle.py."""

import re

import kv_cache_oracle as oracle
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kizami.formats.serving import kv_layout
from kizami.formats.serving.kv_layout import Layout
from kizami.formats.serving.model import Attention, ServedModel
from kizami.quantize.kv_cache import e4m3
from kizami.quantize.kv_cache.layouts import Bf16Rows, IndexRows, StaticRows, TiledRows, gqa_rows, mla_rows
from kizami.quantize.kv_cache.store import PageStore

ALL_BITS = np.arange(65536, dtype=np.uint16)
WRITERS = ("sglang", "vllm", "power_of_two")


def bf16_tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def latents(rows: int, seed: int = 0) -> np.ndarray:
    """BF16 values as float32 [rows, 576]: sizes over 60 octaves, zeros, tiles of zeros, subnormals."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, 576)) * 2.0 ** rng.integers(-30, 30, (rows, 1))
    values[rng.random(values.shape) < 0.1] = 0
    values[::5, :128] = 0
    values[1::7, 128:256] *= 1e-38
    values[3::7, 256:384] = np.where(rng.random(128) < 0.5, -0.0, 0.0)
    return oracle.bf16(oracle.bf16_bits(values.astype(np.float32)))


def test_every_bf16_value_becomes_the_nearest_e4m3_code() -> None:
    codes = e4m3.encode(bf16_tensor(ALL_BITS).float()).numpy()
    np.testing.assert_array_equal(codes, oracle.e4m3_code(oracle.bf16(ALL_BITS)))


def test_float32_ties_and_their_neighbours_are_rounded_to_even() -> None:
    ties = np.concatenate([oracle.MIDDLES, -oracle.MIDDLES, [448, 464, 480, -464, 1e30, np.inf, -np.inf, np.nan]])
    ties = ties.astype(np.float32)
    around = np.concatenate([np.nextafter(ties, np.float32(way)) for way in (-1e9, 1e9)] + [ties])
    np.testing.assert_array_equal(e4m3.encode(torch.from_numpy(around)).numpy(), oracle.e4m3_code(around))


def test_every_code_has_its_value_and_comes_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = e4m3.decode(codes)
    np.testing.assert_array_equal(values.numpy(), oracle.TABLE.astype(np.float32))
    back = e4m3.encode(values)
    assert back[values.isnan()].tolist() == [0x7F, 0x7F]
    assert torch.equal(back[~values.isnan()], codes[~values.isnan()])


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.37, 2.0**-126, 2.0**118])
def test_raw_rows_of_every_bf16_value(scale: float) -> None:
    codec = StaticRows(64, (scale,))
    values = oracle.bf16(ALL_BITS)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = oracle.static_row(values, [scale])
    rows = codec.encode(bf16_tensor(ALL_BITS).view(-1, 64))
    np.testing.assert_array_equal(rows.numpy().ravel(), expected)
    np.testing.assert_array_equal(codec.decode(rows).numpy().ravel(), oracle.static_values(expected, [scale]))


def test_bf16_rows_keep_every_bit() -> None:
    codec = Bf16Rows(64)
    tensor = bf16_tensor(ALL_BITS).view(-1, 64)
    rows = codec.encode(tensor)
    np.testing.assert_array_equal(rows.numpy().view("<u2").ravel(), ALL_BITS)
    np.testing.assert_array_equal(codec.as_bf16(rows).view(torch.int16).numpy().view(np.uint16).ravel(), ALL_BITS)
    np.testing.assert_array_equal(codec.decode(rows).numpy().ravel(), oracle.bf16(ALL_BITS))
    values = np.random.default_rng(0).standard_normal(640).astype(np.float32)
    rounded = codec.encode(torch.from_numpy(values).view(-1, 64)).numpy().view("<u2").ravel()
    np.testing.assert_array_equal(rounded, oracle.bf16_bits(values))


@pytest.mark.parametrize("writer", WRITERS)
def test_656_byte_rows_are_those_of_the_formula(writer: str) -> None:
    values = latents(150)
    codec = TiledRows(writer)
    rows = codec.encode(torch.from_numpy(values).bfloat16())
    expected = np.frombuffer(b"".join(oracle.ds_row(v, writer) for v in values), np.uint8).reshape(-1, 656)
    np.testing.assert_array_equal(rows.numpy(), expected)
    decoded = np.stack([oracle.ds_values(row.tobytes()) for row in expected])
    np.testing.assert_array_equal(codec.decode(rows).numpy(), decoded)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("writer", WRITERS)
def test_every_bf16_value_survives_beside_a_tile_of_any_size(writer: str) -> None:
    """All finite BF16 values, in order, so that a tile has values of one size."""
    bits = ALL_BITS[np.isfinite(oracle.bf16(ALL_BITS))]
    values = np.resize(bits, (len(bits) // 512 + 1, 576))
    values[:, 512:] = 0
    rows = TiledRows(writer).encode(bf16_tensor(values))
    expected = b"".join(oracle.ds_row(oracle.bf16(v), writer) for v in values)
    assert rows.numpy().tobytes() == expected


def test_a_tile_of_zeros_has_the_smallest_normal_scale_and_reads_as_zeros() -> None:
    codec = mla_rows(Layout.DS_MLA)
    row = codec.encode(torch.zeros(1, 576))
    assert row[:, 512:528].contiguous().view(torch.float32).tolist() == [[2.0**-126] * 4]
    assert codec.decode(row).abs().max() == 0


@pytest.mark.parametrize("writer", WRITERS)
def test_nan_and_infinity_stay_in_their_place(writer: str) -> None:
    clean = torch.from_numpy(latents(8)).bfloat16()
    clean[:, 0] = 3.0
    dirty = clean.clone()
    dirty[:, 5], dirty[:, 133], dirty[:, 7] = torch.nan, torch.inf, -torch.inf
    codec = TiledRows(writer)
    expected = codec.decode(codec.encode(clean.index_fill(1, torch.tensor([5, 7, 133]), 0)))
    found = codec.decode(codec.encode(dirty))
    assert found[:, 5].isnan().all()
    scale = codec.encode(dirty)[:, 512:520].contiguous().view(torch.float32)
    assert torch.equal(found[:, [7, 133]], 448 * scale * torch.tensor([-1.0, 1.0]))
    others = [i for i in range(576) if i not in (5, 7, 133)]
    assert torch.equal(found[:, others], expected[:, others])
    raw = mla_rows(Layout.RAW)
    back = raw.decode(raw.encode(dirty))
    assert back[:, 5].isnan().all()
    assert back[0, 7] == -448
    assert back[0, 133] == 448


def test_the_two_engines_write_different_codes_for_some_values_and_never_far_apart() -> None:
    values = torch.randn(2000, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    sglang, vllm = (TiledRows(writer).encode(values) for writer in ("sglang", "vllm"))
    different = (sglang != vllm).sum().item() / (2000 * 512)
    assert 0 < different < 1e-3
    assert (sglang.short() - vllm.short()).abs().max() == 1
    assert torch.equal(sglang[:, 512:], vllm[:, 512:])


def test_power_of_two_scales_lose_nothing_to_a_reader_that_keeps_the_exponent() -> None:
    rows = TiledRows("power_of_two").encode(torch.from_numpy(latents(50)))
    bits = rows[:, 512:528].contiguous().view(torch.int32)
    assert (bits & 0x007FFFFF == 0).all()
    assert (
        TiledRows().encode(torch.from_numpy(latents(50)))[:, 512:528].contiguous().view(torch.int32) & 0x007FFFFF
    ).any()


@pytest.mark.parametrize(("k", "v"), [(0.5, 2.0), ([0.5, 1.0, 0.3, 4.0], [1.0, 2.0, 0.125, 0.7])])
def test_gqa_rows_scale_k_and_v_per_tensor_or_per_head(k: float | list[float], v: float | list[float]) -> None:
    codec = gqa_rows(Layout.RAW, 4, 64, k_scale=k, v_scale=v)
    values = latents(20)[:, :512]
    each = [s for scale in (k, v) for s in (scale if isinstance(scale, list) else [scale] * 4)]
    expected = np.stack([oracle.static_row(row, each) for row in values])
    rows = codec.encode(torch.from_numpy(values))
    np.testing.assert_array_equal(rows.numpy(), expected)
    back = np.stack([oracle.static_values(row, each) for row in expected])
    np.testing.assert_array_equal(codec.decode(rows).numpy(), back)


@pytest.mark.parametrize("pages", [1, 3])
def test_an_index_page_is_64_keys_of_codes_then_64_scales(pages: int) -> None:
    keys = latents(64 * pages)[:, :128]
    store = PageStore([IndexRows()], pages=pages, page_size=64)
    slots = torch.randperm(64 * pages, generator=torch.Generator().manual_seed(0))
    store.write(0, slots, torch.from_numpy(keys)[slots])
    expected = [oracle.index_page(page) for page in keys.reshape(pages, 64, 128)]
    assert [page.numpy().tobytes() for page in store.bytes_of(0)] == expected
    assert len(expected[0]) == 8448
    assert torch.equal(
        store.read(0, slots, torch.float32), IndexRows().decode(IndexRows().encode(torch.from_numpy(keys)[slots]))
    )


def test_index_keys_with_power_of_two_scales() -> None:
    rows = IndexRows(power_of_two=True).encode(torch.from_numpy(latents(40)[:, :128]))
    exact = IndexRows().encode(torch.from_numpy(latents(40)[:, :128]))
    found, least = (r[:, 128:].contiguous().view(torch.float32).ravel().tolist() for r in (rows, exact))
    assert found == [oracle.next_power_of_two(x) for x in least]


def served(attention: Attention) -> ServedModel:
    fields = dict.fromkeys(ServedModel.__dataclass_fields__, 0)
    fields |= {"attention": attention, "latent": 512, "rope": 64, "kv_heads": 8, "head_dim": 128, "index_dim": 128}
    return ServedModel(**fields)


def test_row_bytes_are_those_that_capacity_is_counted_with() -> None:
    dsa, gqa = served(Attention.DSA), served(Attention.GQA)
    for layout in Layout:
        assert mla_rows(layout).row_bytes == kv_layout.row_bytes(dsa, layout)
    for layout in (Layout.BF16, Layout.RAW):
        assert gqa_rows(layout, 8, 128).row_bytes == kv_layout.row_bytes(gqa, layout)
    assert IndexRows().row_bytes == kv_layout.index_bytes(dsa)
    assert [mla_rows(layout).row_bytes for layout in Layout] == [1152, 576, 656]


@pytest.mark.parametrize(("layout", "low", "high"), [(Layout.RAW, 31.3, 31.7), (Layout.DS_MLA, 31.3, 32.8)])
def test_gaussian_latents_come_back_with_the_31_dB_of_e4m3(layout: Layout, low: float, high: float) -> None:
    x = torch.randn(1000, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec = mla_rows(layout)
    error = codec.decode(codec.encode(x)) - x
    assert low < 10 * torch.log10(x.double().square().sum() / error.double().square().sum()) < high


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mla_rows(Layout.RAW).encode(torch.zeros(2, 512)), "[2, 512], expected [..., 576]"),
        (lambda: mla_rows(Layout.RAW).encode(torch.zeros(576, dtype=torch.int32)), "torch.int32"),
        (lambda: mla_rows(Layout.RAW).decode(torch.zeros(656, dtype=torch.uint8)), "expected uint8 [..., 576]"),
        (lambda: mla_rows(Layout.DS_MLA, scale=2.0), "only fp8 rows have a static one"),
        (lambda: mla_rows(Layout.RAW, scale=0.0), "scale 0.0"),
        (lambda: mla_rows(Layout.RAW, scale=float("nan")), "scale nan"),
        (lambda: mla_rows(Layout.RAW, scale=float("inf")), "scale inf"),
        (lambda: TiledRows("triton"), "'triton', expected one of"),
        (lambda: StaticRows(10, (1.0, 1.0, 1.0)), "3 scales for 10 values"),
        (lambda: gqa_rows(Layout.RAW, 8, 128, k_scale=[1.0, 2.0]), "k_scale: 2 scales, expected one, or 8"),
        (lambda: gqa_rows(Layout.DS_MLA, 8, 128), "layout of MLA latents"),
        (lambda: gqa_rows(Layout.BF16, 8, 128, v_scale=0.5), "scales for bf16"),
    ],
)
def test_what_no_layout_has_is_refused(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_rows_may_lie_anywhere_in_memory() -> None:
    values = torch.from_numpy(latents(3))
    for layout in Layout:
        codec = mla_rows(layout)
        rows = codec.encode(values)
        odd = torch.zeros(rows.numel() + 1, dtype=torch.uint8)[1:].view_as(rows).copy_(rows)
        wide = torch.zeros(3, rows.shape[1] + 3, dtype=torch.uint8)
        wide[:, 3:] = rows
        for same in (odd, wide[:, 3:]):
            assert torch.equal(codec.decode(same), codec.decode(rows))


@pytest.mark.parametrize("layout", Layout)
def test_a_layout_may_be_given_by_its_name(layout: Layout) -> None:
    assert mla_rows(layout.value) == mla_rows(layout)  # type: ignore[arg-type]
    if layout is not Layout.DS_MLA:
        assert gqa_rows(layout.value, 2, 8) == gqa_rows(layout, 2, 8)  # type: ignore[arg-type]
