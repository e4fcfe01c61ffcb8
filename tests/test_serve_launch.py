"""Commands that a shell runs as they stand, and launch errors told before the launch."""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from serving_models import FP8, INT4, MIXED, model_of, pair_of, server_of

from kizami.formats.errors import KizamiError
from kizami.formats.families import find_family
from kizami.formats.serving.foretell import about_server
from kizami.formats.serving.gpus import GPUS
from kizami.formats.serving.kv_layout import Layout
from kizami.formats.serving.launch import Command, commands
from kizami.formats.serving.pairs import about_pair
from kizami.formats.serving.server import Server
from kizami.formats.serving.stored import StoredForm, read_stored
from kizami.formats.tensors import TensorInfo

GLM, V3, V32, KIMI, K25, GLM4, AIR = (
    "glm-5.2-fp8", "deepseek-v3-fp8", "deepseek-v3.2-fp8", "kimi-k2-fp8", "kimi-k2.5", "glm-4.7-fp8", "glm-4.5-air-fp8",
)  # fmt: skip


def flags(*servers: Server) -> list[dict[str, tuple[str, ...]]]:
    """Of each command: flag -> its values."""
    return [{flag.words[0]: flag.words[1:] for flag in command.flags} for command in commands(list(servers))]


def codes(server: Server) -> dict[str, str]:
    return {finding.code: finding.severity for finding in about_server(server)}


# ------------------------------------------------------------------------------------------------------------ commands


def line(command: Command) -> str:
    return " ".join(command.words)


def test_one_sglang_server_has_no_flag_that_is_not_needed():
    kimi, glm, glm4 = (
        line(commands([server])[0]) for server in (server_of("kimi-k2-thinking"), server_of(GLM), server_of(GLM4, FP8))
    )
    assert kimi == "python -m sglang.launch_server --model-path M --trust-remote-code --tp 8"
    assert glm == "python -m sglang.launch_server --model-path M --tp 8 --page-size 64"
    assert glm4 == "python -m sglang.launch_server --model-path M --tp 8"


def test_a_sglang_pair_and_its_router():
    prefill, decode, router = map(line, commands(list(pair_of(GLM, kv_dtype="fp8_e4m3"))))
    same = "--tp 8 --kv-cache-dtype fp8_e4m3 --page-size 64"
    checked = "--disaggregation-enable-kv-checksum --host 0.0.0.0 --port"
    head = "python -m sglang.launch_server --model-path"
    assert prefill == f"{head} P {same} --disaggregation-mode prefill {checked} 30000"
    assert decode == f"{head} D {same} --disaggregation-mode decode {checked} 30001"
    assert router == (
        "python -m sglang_router.launch_router --pd-disaggregation --prefill http://${PREFILL_HOST:?}:30000 8998 "
        "--decode http://${DECODE_HOST:?}:30001"
    )


def test_one_vllm_server():
    (command,) = commands([server_of(KIMI, engine="vllm", ep=8, dcp=8, kv_dtype="fp8_e4m3", fraction=0.9)])
    assert line(command) == (
        "vllm serve M --trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel "
        "--decode-context-parallel-size 8 --gpu-memory-utilization 0.9 --kv-cache-dtype fp8_e4m3"
    )
    (short,) = flags(server_of(KIMI, engine="vllm", short_of_context=True))
    assert short["--max-model-len"] == ("auto",)


def test_a_vllm_pair_turns_the_handshake_off_only_where_the_paths_differ():
    prefill, decode = pair_of(GLM, engine="vllm", kv_dtype="fp8_ds_mla")
    made = commands([prefill, decode])
    configs = [json.loads(command.words[-1]) for command in made]
    off = {"enforce_handshake_compat": False}
    assert configs == [
        {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": off}
        for role in ("kv_producer", "kv_consumer")
    ]
    assert [dict(command.env) for command in made] == [
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": f"${{{role}_HOST:?}}"} for role in ("PREFILL", "DECODE")
    ]
    same = commands([prefill, replace(decode, path=prefill.path)])
    assert not any("enforce_handshake_compat" in command.words[-1] for command in same)


@pytest.mark.parametrize(
    ("server", "needed"),
    [
        (server_of(GLM, MIXED), True),
        (server_of(V3, MIXED), True),
        (server_of(GLM, INT4), False),  # INT4 on Linear switches fusion off
        (server_of(GLM, FP8), False),  # one format
        (server_of(GLM, MIXED, ep=8), False),
        (server_of(GLM, replace(MIXED, shared_like_routed=True)), False),
        (server_of(V32, MIXED), False),  # another class than the one that fuses
        (server_of(KIMI, MIXED), False),  # 384 experts
        (server_of(GLM4, INT4), True),  # Glm4Moe asks for nothing but w4afp8
        (server_of(GLM4, replace(MIXED, method="w4afp8")), False),
        (server_of(AIR, INT4), True),
        (server_of(GLM, replace(MIXED, method="gptq")), True),
    ],
)
def test_shared_experts_are_kept_out_of_fusion_where_they_are_of_another_format(server, needed):
    (found,) = flags(server)
    assert ("--disable-shared-experts-fusion" in found) is needed
    assert "--disable-shared-experts-fusion" not in flags(replace(server, engine="vllm"))[0]


@pytest.mark.parametrize(
    ("server", "word"),
    [
        (server_of(GLM), None),
        (server_of(GLM, gpu="b200"), "bf16"),  # auto is FP8 there
        (server_of(GLM, gpu="b200", kv_dtype="fp8_e4m3"), None),
        (server_of(KIMI, gpu="b200"), None),
        (server_of(GLM, replace(INT4, kv_scheme=True)), "bf16"),
        (server_of(GLM, replace(INT4, kv_scheme=True), engine="vllm"), None),  # vLLM: not for MLA
        (server_of(GLM4, replace(INT4, kv_scheme=True), engine="vllm"), "bfloat16"),
        (pair_of(KIMI)[1], "bf16"),
        (pair_of(KIMI, engine="vllm")[1], "bfloat16"),
        (server_of(GLM, kv_dtype="fp8_ds_mla"), "fp8_e4m3"),
        (server_of(GLM, kv_dtype="fp8_ds_mla", engine="vllm"), "fp8_ds_mla"),
    ],
)
def test_the_kv_dtype_is_named_where_auto_would_be_another_or_a_pair_must_agree(server, word):
    found = flags(*([server] if server.role == "single" else [replace(server, role="prefill"), server]))[-2:]
    assert found[0].get("--kv-cache-dtype", (None,)) == (word,)


def test_rows_with_scales_are_a_backend_in_sglang():
    (found,) = flags(server_of(GLM, kv_dtype="fp8_ds_mla"))
    assert found["--dsa-prefill-backend"] == ("flashmla_kv", "--dsa-decode-backend", "flashmla_kv")


@pytest.mark.parametrize(
    ("server", "layout"),
    [
        (server_of(GLM, kv_dtype="fp8_e4m3"), Layout.DS_MLA),
        (server_of(GLM, kv_dtype="fp8_e4m3", gpu="b200"), Layout.RAW),
        (server_of(GLM, kv_dtype="fp8_e4m3", dcp=2), Layout.RAW),
        (server_of(GLM, kv_dtype="fp8_e4m3", engine="vllm"), Layout.RAW),
        (server_of(GLM, kv_dtype="fp8_ds_mla", engine="vllm"), Layout.DS_MLA),
        (server_of(KIMI, kv_dtype="fp8_e4m3"), Layout.RAW),
        (server_of(GLM4, kv_dtype="fp8_e4m3"), Layout.RAW),
        (server_of(GLM), Layout.BF16),
    ],
)
def test_one_dtype_word_has_several_layouts(server, layout):
    assert server.layout is layout
    assert server.option_for(layout) is not None


def test_raw_rows_of_sparse_attention_are_not_to_be_had_on_hopper_with_sglang():
    assert server_of(GLM).option_for(Layout.RAW) is None
    assert server_of(GLM, gpu="b200").option_for(Layout.RAW) == "fp8_e4m3"


@pytest.mark.parametrize(
    ("server", "page"),
    [
        (server_of(GLM), 64), (server_of(GLM, engine="vllm"), 64), (server_of(KIMI), 1),
        (server_of(KIMI, gpu="b200"), 64), (pair_of(KIMI)[0], 64), (server_of(KIMI, engine="vllm"), 16),
        (server_of(KIMI, page=128), 128),
        (server_of(KIMI, engine="vllm", kv_dtype="fp8_e4m3"), 64), (server_of(KIMI, engine="vllm", gpu="b200"), 32),
        (server_of(GLM4, engine="vllm"), 16), (server_of(GLM4), 1),
    ],
)  # fmt: skip
def test_pages(server, page):
    assert server.page_size == page


def test_more_gpus_than_a_node_has_are_several_nodes():
    (sglang,), (vllm,) = flags(server_of(KIMI, tp=16)), flags(server_of(KIMI, tp=16, engine="vllm"))
    assert sglang["--nnodes"] == ("2", "--node-rank", "${NODE_RANK:?}", "--dist-init-addr", "${SINGLE_NODE0:?}:20000")
    assert vllm["--nnodes"] == ("2", "--node-rank", "${NODE_RANK:?}", "--master-addr", "${SINGLE_NODE0:?}")
    assert "--nnodes" not in flags(server_of(KIMI, tp=8))[0]


def run_in_bash(command: Command, **variables: str) -> subprocess.CompletedProcess[str]:
    """The printed lines, with the program replaced by one that prints its arguments."""
    program = command.program[0]
    script = f"{program}() {{ printf '%s\\n' \"$@\"; }}\n" + "\n".join(command.lines)
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_shell_runs_the_printed_lines_as_they_are_meant(engine):
    path = 'it\'s $HOME/`x` ${A:?} "q"/日本'
    prefill, decode = pair_of(KIMI, engine=engine, tp=16)
    hosts = {"PREFILL_HOST": "p.example", "DECODE_HOST": "d.example", "NODE_RANK": "1", "PREFILL_NODE0": "p0",
             "DECODE_NODE0": "d0"}  # fmt: skip
    for command in commands([replace(prefill, path=path), replace(decode, path=path)]):
        done = run_in_bash(command, **hosts)
        assert (done.returncode, done.stderr) == (0, "")
        expected = [
            re.sub(r"\$\{(\w+):\?\}", lambda m: hosts[m[1]], word) if word != path else word
            for word in command.words[1:]
        ]
        assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_folder_whose_name_begins_with_a_dash_is_no_option(engine):
    words = commands([server_of(KIMI, engine=engine, path="--tp")])[0].words
    assert words[4 if engine == "sglang" else 2] == "./--tp"


def test_a_shell_stops_where_a_placeholder_is_not_set():
    *_, router = commands(list(pair_of(KIMI)))
    assert router.placeholders == ["DECODE_HOST", "PREFILL_HOST"]
    done = run_in_bash(router, PREFILL_HOST="p")
    assert done.returncode != 0
    assert "DECODE_HOST" in done.stderr


def test_every_flag_but_the_plainest_has_a_reason():
    plain = {"--model-path", "--tp", "--tensor-parallel-size", "M", "P", "D", "--pd-disaggregation", "--decode",
             "--port", "--disaggregation-mode"}  # fmt: skip
    pairs = [pair_of(n, engine=e, ep=8, dcp=8) for n in (GLM, K25) for e in ("sglang", "vllm")]
    for servers in pairs:
        for command in commands(list(servers)):
            assert not [flag for flag in command.flags if not flag.reason and flag.words[0] not in plain]


@pytest.mark.parametrize(
    ("name", "auto_map", "needed"),
    [(KIMI, {}, True), (KIMI, None, True), (K25, None, True), (V3, {"AutoConfig": "a.B"}, True), (V3, None, False),
     (GLM, None, False)],
)  # fmt: skip
def test_remote_code_is_allowed_where_the_checkpoint_has_it(name, auto_map, needed):
    assert model_of(name, auto_map=auto_map).remote_code is needed


# --------------------------------------------------------------------------------------------------------- stored form

ROUTED, SHARED = "model.layers.3.mlp.experts.0.up_proj.", "model.layers.3.mlp.shared_experts.up_proj."
LINEAR, BY_NAME = (
    {"config_groups": {"group_0": {"targets": [target], "weights": {"type": "int", "num_bits": 4}}}}
    for target in ("Linear", "re:.*experts.*")
)


def stored(quant: dict[str, Any], *tensors: tuple[str, str, tuple[int, ...]]) -> StoredForm:
    infos = {name: TensorInfo(name, dtype, shape, "f", 0, 0) for name, dtype, shape in tensors}
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 9, "quantization_config": quant}
    return read_stored(config, infos, find_family(config, infos)[0])


def packed(module: str, group: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(module + "weight_packed", "I32", (8, 32)), (module + "weight_scale", "BF16", (8, 256 // group))]


def test_group_sizes_are_those_of_the_tensors():
    assert stored(LINEAR, *packed(ROUTED, 64)).group_sizes == (64,)
    other = ROUTED.replace("up_proj", "down_proj")
    assert stored(LINEAR, *packed(ROUTED, 64), *packed(other, 32)).label == "INT4 g32/64"
    assert stored(LINEAR, *packed(SHARED, 64)).group_sizes == ()


def test_int4_on_linear_is_told_from_int4_by_name():
    assert stored(LINEAR, *packed(ROUTED, 32)).int4_on_linear
    assert not stored(BY_NAME, *packed(ROUTED, 32)).int4_on_linear


def test_shared_experts_are_like_the_routed_ones_only_if_all_are():
    first = (SHARED + "weight", "BF16", (8, 256))
    assert stored(BY_NAME, *packed(ROUTED, 32), *packed(SHARED, 32)).shared_like_routed
    assert not stored(BY_NAME, *packed(ROUTED, 32), first).shared_like_routed
    assert not stored(
        BY_NAME, *packed(ROUTED, 32), first, *packed(SHARED.replace(".3.", ".4."), 32)
    ).shared_like_routed  # fmt: skip


def test_other_layouts_say_their_group_size_in_the_config():
    weight = (ROUTED + "qweight", "I32", (32, 8))
    assert stored({"quant_method": "gptq", "group_size": 64}, weight).group_sizes == (64,)
    w4afp8 = stored({"quant_method": "w4afp8"}, (ROUTED + "weight", "I8", (8, 128)))
    assert (w4afp8.group_sizes, w4afp8.int4_on_linear, w4afp8.method) == ((128,), True, "w4afp8")
    with pytest.raises(KizamiError, match="group_size"):
        stored({"quant_method": "gptq", "group_size": "64"}, weight)


@pytest.mark.parametrize("shape", [None, (8,), (8, 0), (8, 7)])
def test_a_scale_that_fits_no_group_is_refused(shape):
    weight, scale = packed(ROUTED, 32)
    others = [] if shape is None else [(scale[0], "BF16", shape)]
    with pytest.raises(KizamiError, match="scale"):
        stored(LINEAR, weight, *others)


def test_fp8_blocks_are_those_of_the_config():
    weight = (ROUTED + "weight", "F8_E4M3", (8, 256))
    assert stored({"quant_method": "fp8", "weight_block_size": [128, 64]}, weight).fp8_block == (128, 64)
    assert stored({"quant_method": "compressed-tensors"}, weight).fp8_block is None
    assert stored({"quant_method": "compressed-tensors"}, weight).label == "FP8"


# ------------------------------------------------------------------------------------------------------------ findings


@pytest.mark.parametrize(
    ("server", "code", "severity", "advice"),
    [
        (server_of(AIR, replace(INT4, group_sizes=(32,))), "group_split", "error", "--ep 4"),  # 176; 352 is no tile
        (server_of(AIR, replace(INT4, group_sizes=(128,))), "group_split", "error", "--ep 8"),
        (server_of(GLM4, replace(INT4, group_sizes=(128,))), "group_split", "error", "--ep 2"),  # 192
        (server_of(GLM4, replace(INT4, group_sizes=(128,)), engine="vllm"), "group_split", "error", "--ep 8"),
        (server_of(KIMI, replace(INT4, group_sizes=(128,)), tp=32), "group_split", "error", "--ep 2"),  # 64
        (server_of(GLM4, INT4, tp=16), "marlin_tile", "warning", "--ep 2"),  # 96
        (server_of(KIMI, FP8, tp=32), "block_split", "error", "--ep 2"),
        (server_of(GLM, tp=3), "heads_uneven", "error", "a --tp that divides the heads"),
        (server_of(GLM, tp=3), "experts_uneven", "error", "a smaller --tp"),
        (server_of(GLM, ep=3), "ep_size", "error", "--ep 8"),
        (server_of(GLM, ep=4, engine="vllm"), "ep_size", "error", "--ep 8"),
        (server_of(GLM4, tp=64, ep=64), "experts_per_rank", "error", "an --ep that divides the experts"),
        (server_of(KIMI, dcp=3), "dcp_size", "error", "a --dcp that divides --tp"),
        (pair_of(GLM, dcp=2)[1], "dcp_dsa_pair", "error", "--dcp 1"),
        (server_of(GLM, dcp=2, kv_dtype="fp8_ds_mla"), "dcp_dsa_backend", "warning", "--kv-cache-dtype fp8_e4m3"),
        (server_of(GLM4, dcp=2, engine="vllm"), "dcp_gqa", "error", "--dcp 1"),
        (pair_of(KIMI, dcp=2, engine="vllm")[1], "dcp_nixl", "error", "--dcp 8"),
        (server_of(GLM, dcp=8, engine="vllm"), "dcp_sparse_bf16", "warning", "--kv-cache-dtype fp8_ds_mla"),
        (server_of(GLM, page=32), "dsa_page", "error", "--page-size 64"),
        (server_of(KIMI, kv_dtype="fp8_ds_mla"), "no_such_rows", "error", "--kv-cache-dtype fp8_e4m3"),
        (server_of(KIMI, replace(INT4, kv_scheme=True)), "kv_scheme_mla", "warning", None),
        (server_of(KIMI, kv_dtype="fp8_e4m3"), "no_scale_file", "note", None),
        (server_of(GLM, kv_dtype="fp8_ds_mla", gpu="b200"), "flashmla_blackwell", "warning", None),
        (server_of(GLM, kv_dtype="fp8_e4m3", engine="vllm"), "flashinfer_sm90", "note", None),
    ],
)  # fmt: skip
def test_what_would_go_wrong_with_a_server_is_foretold(server, code, severity, advice):
    finding = next(finding for finding in about_server(server) if finding.code == code)
    assert finding.severity == severity
    assert finding.source
    assert advice is None or finding.advice == advice


def test_following_the_advice_on_expert_parallelism_ends_the_finding():
    for name, tp in ((AIR, 8), (GLM4, 8), (KIMI, 32)):
        for engine in ("sglang", "vllm"):
            server = server_of(name, replace(INT4, group_sizes=(128,)), tp=tp, engine=engine)
            advice = next(f.advice for f in about_server(server) if f.code == "group_split")
            assert codes(replace(server, ep=int(advice.removeprefix("--ep ")))) == {}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", [GLM, "glm-5-fp8", V3, V32, KIMI, K25, GLM4])
def test_the_usual_launches_have_no_finding(name, engine):
    for stored in (INT4, MIXED, FP8 if name != GLM4 else replace(FP8, fp8_block=None)):
        assert codes(server_of(name, stored, engine=engine)) == {}


def test_scales_of_a_kv_cache_by_head_are_used_by_an_fp8_cache_and_left_by_a_bf16_one():
    assert codes(server_of(GLM4, replace(INT4, kv_scheme=True))) == {"kv_scales_unused": "note"}
    assert "kv_scales_unused" not in codes(server_of(GLM4, replace(INT4, kv_scheme=True), kv_dtype="fp8_e4m3"))


def test_context_parallelism_that_works_has_no_finding():
    assert codes(server_of(KIMI, dcp=8)) == codes(server_of(KIMI, dcp=8, engine="vllm")) == {}
    assert codes(server_of(KIMI, dcp=2, engine="vllm")) == {}
    assert codes(server_of(GLM4, dcp=2, tp=16, engine="vllm")) == {}
    assert codes(pair_of(KIMI, dcp=8, engine="vllm")[1]) == {}


def on_prefill(**changes: Any) -> Callable[[Server, Server], tuple[Server, Server]]:
    return lambda prefill, decode: (replace(prefill, **changes), decode)


@pytest.mark.parametrize(
    ("options", "change", "code", "severity"),
    [
        ({"kv_dtype": "fp8_e4m3"}, on_prefill(kv_dtype="bf16"), "kv_dtype_differs", "error"),
        ({"kv_dtype": "fp8_e4m3"}, on_prefill(gpu=GPUS["b200"]), "kv_rows_differ", "error"),
        ({}, on_prefill(page=32), "page_size_differs", "error"),
        ({"engine": "vllm"}, on_prefill(page=32), "page_size_differs", "warning"),
        ({}, on_prefill(stored=replace(FP8, kv_scheme=True)), "kv_scheme_one_side", "warning"),
        ({}, on_prefill(tp=4), "checksum_tp", "warning"),
        ({}, on_prefill(model=server_of("glm-5-fp8").model), "model_differs", "error"),
        ({}, on_prefill(model=server_of(KIMI).model), "model_differs", "error"),
    ],
)
def test_what_would_go_wrong_with_a_pair_is_foretold(options, change, code, severity):
    prefill, decode = change(*pair_of(GLM, **options))
    found = {finding.code: finding.severity for finding in about_pair(prefill, decode)}
    assert found == {code: severity} | ({"vllm_proxy": "note"} if decode.engine == "vllm" else {})


def test_vllm_pairs_may_differ_in_tp():
    assert [f.code for f in about_pair(*on_prefill(tp=4)(*pair_of(GLM, engine="vllm")))] == ["vllm_proxy"]


def test_two_forms_of_one_model_are_a_pair():
    assert about_pair(*pair_of(GLM)) == about_pair(*pair_of(KIMI, kv_dtype="fp8_e4m3")) == []
    same_rows = pair_of(GLM, kv_dtype="fp8_ds_mla")
    assert about_pair(replace(same_rows[0], gpu=GPUS["b200"]), same_rows[1]) == []
