"""Weights on each GPU and tokens in the KV cache, against published figures and engines' logs.

docs: serving-engines sections 6.1 to 6.3 and checkpoints 7.3 of the project's references; the log of 715,072 and of
5,721,088 tokens is in vllm-project/recipes #115.
"""

import gc
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import inventory
import pytest
from serving_models import model_of, server_of

from kizami.formats.families import find_family
from kizami.formats.serving.gpus import GIB, GPUS, MIB
from kizami.formats.serving.kv_layout import KvCost, Layout, kv_cost, layouts_of
from kizami.formats.serving.pool import default_fraction, measured_pool, sglang_pool, vllm_pool
from kizami.formats.tensors import TensorInfo
from kizami.quantize.capacity import as_fp8, as_int4, checkpoint_weights
from kizami.quantize.serving import WeightSet, about_capacity, rows_of

# ------------------------------------------------------------------------------------------------------------- weights


def as_infos(tensors: Iterable[inventory.Tensor]) -> dict[str, TensorInfo]:
    return {t.name: TensorInfo(t.name, t.dtype, t.shape, "f", 0, t.nbytes) for t in tensors}


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection() -> Iterator[None]:
    """A collection per 700 of the 500,000 tensors made here takes as long as all the rest."""
    gc.disable()
    yield
    gc.enable()
    published.cache_clear()


@cache
def published(name: str) -> tuple[dict[str, TensorInfo], Any]:
    infos = as_infos(inventory.source_tensors(name))
    return infos, find_family(inventory.config(name), infos)[0]


def gib(nbytes: int) -> float:
    return round(nbytes / GIB, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fp8", "fp8_without_mtp", "int4", "total"),
    [("glm-5.2-fp8", 89.50, 88.18, 55.22, 450_903_738_368), ("kimi-k2-fp8", 120.84, 120.84, 70.95, 594_205_911_728)],
)
def test_weights_on_each_of_8_gpus_with_what_engines_replicate(name, fp8, fp8_without_mtp, int4, total):
    infos, family = published(name)
    weights = checkpoint_weights(infos, family)
    assert gib(weights.per_gpu(8, mtp=True)) == fp8
    assert gib(weights.per_gpu(8, mtp=False)) == fp8_without_mtp
    computed = as_int4(infos, family, 32)
    assert gib(computed.per_gpu(8, mtp=True)) == int4
    assert computed.total == total


@pytest.mark.parametrize(
    ("name", "int4", "total"), [("deepseek-v3-fp8", 49.93, 412_779_435_008), ("glm-5-fp8", 56.22, 451_972_135_424)]
)
def test_int4_weights_on_each_of_8_gpus(name, int4, total):
    computed = as_int4(*published(name), 32)
    assert (gib(computed.per_gpu(8, mtp=True)), computed.total) == (int4, total)


@pytest.mark.long
def test_each_format_is_computed_from_the_other_to_the_byte():
    infos, family = published("glm-5.2-fp8")
    int4 = as_infos(inventory.converted_tensors("glm-5.2-fp8", inventory.Policy()))
    assert checkpoint_weights(int4, family) == as_int4(infos, family, 32)
    assert as_fp8(int4, family) == checkpoint_weights(infos, family)


@pytest.mark.parametrize(
    ("names", "dtype", "shape"),
    [
        ("weight_packed weight_scale weight_shape", "I32", (2048, 7168 // 8)),
        ("qweight scales qzeros g_idx", "I32", (7168 // 8, 2048)),  # AutoGPTQ
        ("qweight scales qzeros", "I32", (7168, 2048 // 8)),  # AWQ
        ("weight weight_scale_inv input_scale", "I8", (2048, 7168 // 2)),  # w4afp8
        ("weight weight_scale_inv", "F8_E4M3", (2048, 7168)),
        ("weight", "BF16", (2048, 7168)),
    ],
)
def test_every_layout_is_known_by_the_weight_it_holds(names, dtype, shape):
    weight, *others = (f"model.layers.3.mlp.experts.0.up_proj.{name}" for name in names.split())
    infos = {weight: TensorInfo(weight, dtype, shape, "f", 0, 1)}
    infos |= {name: TensorInfo(name, "F32", (9, 9), "f", 0, 324) for name in others}
    family = find_family(inventory.config("kimi-k2-fp8"), infos)[0]
    assert as_fp8(infos, family).total == 2048 * 7168 + 4 * 16 * 56


def test_a_rank_holds_one_whole_kv_head_at_least():
    infos, family = published("glm-4.5-air-fp8")
    weights = checkpoint_weights(infos, family)
    by_head = weights.model.kv_heads
    assert by_head > 0
    at_8 = weights.per_gpu(8, mtp=False, kv_heads=8)
    at_16 = weights.per_gpu(16, mtp=False, kv_heads=8)
    replicated = weights.model.replicated
    assert at_8 - replicated == pytest.approx((weights.model.total - replicated) / 8, abs=1)
    assert at_16 - replicated == pytest.approx((weights.model.total - replicated - by_head) / 16 + by_head / 8, abs=2)


# ------------------------------------------------------------------------------------------------ bytes per token, 6.1

KIMI, V3, V32, GLM5, GLM52 = "kimi-k2-fp8", "deepseek-v3-fp8", "deepseek-v3.2-fp8", "glm-5-fp8", "glm-5.2-fp8"
CELLS = [
    (KIMI, Layout.BF16, 70_272, None), (KIMI, Layout.RAW, 35_136, None),
    (V3, Layout.BF16, 70_272, 71_424), (V3, Layout.RAW, 35_136, 35_712),
    (V32, Layout.BF16, 78_324, 79_608), (V32, Layout.DS_MLA, 48_068, 48_856), (V32, Layout.RAW, 43_188, 43_896),
    (GLM5, Layout.BF16, 100_152, 101_436), (GLM5, Layout.DS_MLA, 61_464, 62_252), (GLM5, Layout.RAW, 55_224, 55_932),
    ("glm-5.1-fp8", Layout.BF16, 100_152, 101_436),
    (GLM52, Layout.BF16, 92_628, 93_912), (GLM52, Layout.DS_MLA, 53_940, 54_728), (GLM52, Layout.RAW, 47_700, 48_408),
    ("glm-5.3-fp8", Layout.RAW, 47_700, 48_408),
    ("kimi-k2-thinking", Layout.BF16, 70_272, None), ("kimi-k2.5", Layout.RAW, 35_136, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "plain", "with_mtp"), CELLS)
def test_bytes_per_token(name, layout, plain, with_mtp):
    model = model_of(name)
    assert kv_cost(model, layout).bytes_per_token == plain
    assert model.mtp_layers == (0 if with_mtp is None else 1)
    if with_mtp is not None:
        assert kv_cost(model, layout, draft_layers=1).bytes_per_token == with_mtp


def test_index_keys_of_every_layer_where_no_schedule_says_otherwise():
    shared = {"index_topk_freq": 1, "indexer_types": None, "index_skip_topk_offset": None}
    assert kv_cost(model_of(GLM52, **shared), Layout.BF16).bytes_per_token == 100_152


def test_the_schedule_of_index_layers_has_three_spellings():
    assert model_of(GLM52).index_layers == 21
    by_frequency = model_of(GLM52, indexer_types=None)
    by_pattern = model_of(GLM52, indexer_types=None, index_topk_pattern="F" + "S" * 76 + "F")
    assert (by_frequency.index_layers, by_pattern.index_layers) == (21, 2)


def test_dense_latents_have_no_rows_with_scales():
    assert layouts_of(model_of(KIMI)) == (Layout.BF16, Layout.RAW)
    assert layouts_of(model_of(GLM52)) == tuple(Layout)


@pytest.mark.parametrize(
    ("tp", "dcp", "layout", "row"),
    [
        (1, 1, Layout.BF16, 4096), (8, 1, Layout.BF16, 512), (8, 1, Layout.RAW, 256), (16, 1, Layout.BF16, 512),
        (8, 2, Layout.BF16, 1024), (16, 2, Layout.BF16, 512),
    ],
)  # fmt: skip
def test_k_and_v_of_whole_heads(tp, dcp, layout, row):
    cost = kv_cost(model_of("glm-4.7-fp8"), layout, tp=tp, dcp=dcp)
    assert (cost.layers, cost.row, cost.index) == (92, row, 0)
    assert cost.bytes_per_token == 92 * row // dcp


# ----------------------------------------------------------------------------------------------------- tokens, 6.1-6.3


def tokens(name: str, layout: Layout, pool_gib: float, page: int = 64, dcp: int = 1, **changes: object) -> int:
    return kv_cost(model_of(name, **changes), layout, dcp=dcp).tokens(measured_pool(pool_gib, 0, 0).nbytes, page)


def test_the_public_log_of_kimi_k2_thinking_on_8_h200():
    assert tokens("kimi-k2-thinking", Layout.BF16, 46.80) == 715_072
    assert tokens("kimi-k2-thinking", Layout.BF16, 46.80, page=1) == 715_094
    # the log rounds to two decimals; 46.803 GiB is 46.80, too
    assert tokens("kimi-k2-thinking", Layout.BF16, 46.803, dcp=8) == 5_721_088


def test_fp8_rows_double_the_tokens_of_kimi_and_of_no_model_with_an_index_cache():
    bf16, raw = (tokens(KIMI, layout, 44.9) for layout in layouts_of(model_of(KIMI)))
    assert (round(bf16, -3), round(raw, -4)) == (686_000, 1_370_000)
    assert raw / bf16 == pytest.approx(2, abs=1e-3)
    for name, most in ((GLM5, 1.82), (GLM52, 1.95), (V32, 1.82)):
        whole, *smaller = (tokens(name, layout, 44.9) for layout in Layout)
        assert max(smaller) / whole < most < 2


@pytest.mark.parametrize(
    ("name", "layout", "dcp", "thousands"),
    [
        (GLM5, Layout.DS_MLA, 1, 629),
        (GLM52, Layout.DS_MLA, 1, 717),
        (KIMI, Layout.RAW, 1, 1100),
        (GLM5, Layout.RAW, 2, 1180),
    ],
)
def test_what_36_gib_hold(name, layout, dcp, thousands):
    """ "88 -> 52 GB per GPU frees 1.18M tokens" holds for one reading only."""
    assert tokens(name, layout, 36, dcp=dcp) / 1000 == pytest.approx(thousands, abs=0.005 * thousands)


def test_context_parallelism_shards_rows_and_replicates_index_keys_and_drafts():
    assert kv_cost(model_of(GLM5), Layout.RAW, dcp=2).bytes_per_token == 32_760
    with_draft = kv_cost(model_of(GLM5), Layout.RAW, dcp=2, draft_layers=1)
    assert with_draft.bytes_per_token == 32_760 + 576 + 132


def test_a_pool_holds_whole_pages_and_never_less_than_none():
    cost = KvCost(Layout.BF16, layers=1, row=10, index_layers=0, index=0, draft_layers=0, dcp=2)
    assert cost.tokens(10 * 127, 64) == 128
    assert cost.tokens(10 * 63, 64) == cost.tokens(-1, 64) == 0


# ---------------------------------------------------------------------------------------------------------- pools, 6.2


@pytest.mark.parametrize(
    ("gpu", "role", "mla", "fraction"),
    [  # by hand: (MiB - reserved) / MiB; reserved = 512 + 1.5 * tokens + tp / 8 * 1024 + graphs, 10 GiB at least
        ("h200", "single", True, 0.886),  # 512 + 12288 + 1024 + 1024 + 1536 = 16384
        ("h200", "prefill", True, 0.893),  # without the decode graphs: 15360
        ("h200", "decode", True, 0.929),  # 512 + 3072 + 1024 + 1024 = 5632, so 10240
        ("h200", "single", False, 0.893),  # 58 prefill graphs of 8 MiB in place of 1536: 15312
        ("h100", "single", True, 0.799),
        ("b200", "single", True, 0.844),  # 16384 tokens: 28672
    ],
)
def test_sglangs_default_memory_fraction(gpu, role, mla, fraction):
    assert default_fraction(GPUS[gpu], role, 8, mla=mla, vision=False) == fraction


def test_a_vision_tower_takes_5_percent_except_on_the_decode_side():
    plain, vision = (default_fraction(GPUS["h200"], "prefill", 8, mla=True, vision=v) for v in (False, True))
    assert vision == pytest.approx(0.95 * default_fraction(GPUS["h200"], "prefill", 8, mla=True, vision=False, dcp=2))
    assert vision < plain
    assert default_fraction(GPUS["h200"], "decode", 8, mla=True, vision=True) == 0.929


def test_pools_are_what_the_weights_leave():
    gpu, weights = GPUS["h200"], 55 * GIB
    assert sglang_pool(gpu, weights, 0.9, given=True, vision=False).nbytes == gpu.mib * MIB * 9 // 10 - weights
    with_vision = sglang_pool(gpu, weights, 0.9, given=True, vision=True)
    assert with_vision.nbytes == gpu.mib * MIB * 9 // 10 - weights - 100 * MIB
    assert "upper bound" in with_vision.assumptions[0]


def test_vllms_other_memory_is_what_the_public_log_leaves():
    """0.9 was the default of the time; 70.95 GiB are the weights of Kimi-K2-Thinking on each of 8 GPUs."""
    pool = vllm_pool(GPUS["h200"], round(70.95 * GIB), 0.9)
    assert round(pool.nbytes / GIB, 2) == 46.80
    assert "#115" in pool.assumptions[0]


def weight_set(nbytes: int, label: str = "INT4 g32") -> WeightSet:
    from kizami.quantize.capacity import Share, Weights

    return WeightSet(label, Weights(Share(replicated=nbytes), Share(replicated=GIB)))


def test_a_stated_pool_is_that_of_the_weights_it_was_measured_with():
    server = server_of(GLM52)
    rows = rows_of(server, [weight_set(50 * GIB), weight_set(80 * GIB, "FP8")], 40.0)
    pools = {row.label: row.pool.nbytes for row in rows}
    assert pools == {"INT4 g32": 40 * GIB, "FP8": 10 * GIB}
    first = next(row for row in rows if row.chosen)
    assert first.pool_mtp is not None
    assert first.pool_mtp.nbytes == 39 * GIB
    assert first.tokens_mtp == kv_cost(server.model, Layout.BF16, draft_layers=1).tokens(39 * GIB, 64)


def test_no_room_is_an_error_where_it_is_certain():
    for engine, nbytes, severity in (
        ("sglang", 130 * GIB, "error"), ("vllm", 130 * GIB, "error"), ("vllm", 125 * GIB, "warning"),
    ):  # fmt: skip
        server = server_of(KIMI, engine=engine)
        found = about_capacity(server, rows_of(server, [weight_set(nbytes)], None))
        assert [(f.code, f.severity) for f in found] == [("no_memory", severity)]


def test_a_pool_shorter_than_the_context_is_told():
    server = server_of(GLM52)
    assert [f.code for f in about_capacity(server, rows_of(server, [weight_set(50 * GIB)], 80.0))] == [
        "short_of_context"
    ]
    assert about_capacity(server, rows_of(server, [weight_set(50 * GIB)], 100.0)) == []
