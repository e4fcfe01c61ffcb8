"""`kizami serve` on the command line: what it prints, its exit codes, hostile configs."""

import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run, process
from serving_models import MISSING, save

GLM, KIMI = "glm-5.2-fp8", "kimi-k2-fp8"


@pytest.fixture
def launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tensors no model is made: what `check` says of them is left out."""
    monkeypatch.setattr("kizami.formats.serving.loading.about_loading", lambda server, served: [])


def test_a_converted_output_and_its_source_are_planned(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    done = kizami("serve", converted, "--prefill", tiny_checkpoint, "--tp", "1")
    assert done.code == 0, done.err
    assert f"--model-path {tiny_checkpoint}" in done.out
    assert f"--model-path {converted}" in done.out
    assert "launch_router" in done.out
    assert re.search(
        r"^[\d,]+ tokens per decode replica of 1 h200 \(INT4 g32; \d+ layers, bf16 rows of \d+ B, .*GiB", done.out, re.M
    )
    for word in ("layers; latent row per layer", "GiB", "GB", "index keys", "dcp 1", "pages", "assumed"):
        assert word in done.out


def test_what_check_refuses_is_no_launch(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    done = kizami("serve", converted, "--prefill", tiny_checkpoint, "--tp", "2", "--ep", "2", "--json")
    assert done.code == 1
    [refused] = [f for f in done.json["findings"] if f["code"] == "does_not_load"]
    assert refused["role"] == "prefill"
    assert "128 columns on 2 ranks is 64, FP8 blocks have 128" in refused["message"]
    assert f"kizami check {shlex.quote(str(tiny_checkpoint))} --engine sglang --tp 2 --ep 2" in refused["advice"]


def whole_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(whole_numbers, value.values()))
    if isinstance(value, list):
        return all(map(whole_numbers, value))
    return not isinstance(value, float)


def test_json_has_everything_as_whole_numbers(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    body = kizami("serve", converted, "--prefill", tiny_checkpoint, "--tp", "2", "--gpus", "16", "--json").json
    assert body["schema"] == "kizami.serve/1"
    assert whole_numbers(body)
    assert [command["role"] for command in body["commands"]] == ["prefill", "decode", "router"]
    assert all(shlex.split(command["shell"].replace("\\\n", "")) for command in body["commands"])
    launched = [row for row in body["capacity"] if row["launched"]]
    assert [(row["role"], row["weights"]) for row in launched] == [("decode", "INT4 g32"), ("prefill", "FP8")]
    plain = launched[0]["plain"]
    assert plain["tokens_of_all_replicas"] == 8 * plain["tokens_per_replica"]
    assert plain["pool_bytes_per_gpu"] // plain["bytes_per_token_per_gpu"] // 64 * 64 == plain["tokens_per_replica"]
    assert {row["weights_computed"] for row in body["capacity"]} == {False}
    computed = kizami("serve", converted, "--tp", "2", "--json").json["capacity"]
    assert {row["weights"]: row["weights_computed"] for row in computed} == {"INT4 g32": False, "FP8": True}


def test_the_published_doubling_comes_with_its_assumptions(kizami: Run, tmp_path: Path) -> None:
    model = save(tmp_path / "kimi", "kimi-k2-thinking")
    done = kizami("serve", model, "--pool-gib", "44.9", "--page-size", "64")
    counts = {
        line.split()[-2]: line.split()[-1] for line in done.out.splitlines() if re.search(r"(70,272|35,136)\s", line)
    }
    assert counts == {"70,272": "686,016", "35,136": "1,372,096"}
    for word in ("61 layers", "bf16 1152 B, fp8 576 B", "no index keys", "dcp 1", "44.9 GiB, as stated", "64 tokens"):
        assert word in done.out
    assert "44.90" in done.out
    assert "48.21" in done.out  # the same in GB
    log = kizami("serve", model, "--pool-gib", "46.80", "--page-size", "64", "--engine", "vllm", "--json").json
    assert log["capacity"][0]["plain"]["tokens_per_replica"] == 715_072


@pytest.mark.usefixtures("launch_alone")
def test_exit_code_1_where_the_launch_would_fail(kizami: Run, tmp_path: Path) -> None:
    model = save(tmp_path / "glm", GLM)
    bf16_prefill = ("--prefill", model, "--kv-cache-dtype", "fp8_e4m3", "--prefill-kv-cache-dtype", "bf16")
    done = kizami("serve", model, *bf16_prefill)
    assert (done.code, done.out.splitlines()[-1]) == (1, "this launch would fail: 1 error")
    assert "no conversion in the transfer" in done.err
    assert kizami("serve", model, *bf16_prefill, "--json").json["ok"] is False
    for options in (("--tp", "3"), ("--ep", "3"), ("--dcp", "3"), ("--page-size", "32"), ("--pool-gib", "0")):
        assert kizami("serve", model, *options).code == 1, options
    assert kizami("serve", model, "--pool-gib", "200").code == 0


def test_a_hub_revision_is_a_flag_of_its_own(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--int4"
    save(repo / "snapshots" / ("b" * 40), GLM)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("b" * 40)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    (command,) = process("serve", "org/int4@main", "--pool-gib", "200", "--json", env=env).json["commands"]
    assert command["argv"][3:7] == ["--model-path", "org/int4", "--revision", "main"]


def test_an_at_sign_in_a_folder_is_no_revision(kizami: Run, tmp_path: Path) -> None:
    folder = str(save(tmp_path / "a@b", GLM))
    (command,) = kizami("serve", folder, "--pool-gib", "200", "--json").json["commands"]
    assert command["argv"][3:6] == ["--model-path", folder, "--tp"]


def test_the_prefill_server_has_options_of_its_own(kizami: Run, tmp_path: Path) -> None:
    model = save(tmp_path / "kimi", KIMI)
    run = ("serve", model, "--prefill", model, "--ep", "8", "--prefill-tp", "4", "--prefill-gpu", "b200", "--json")
    prefill, decode = kizami(*run).json["servers"]
    assert [prefill[key] for key in ("tp", "ep")] == [4, 4]
    assert [decode[key] for key in ("tp", "ep")] == [8, 8]
    assert (prefill["gpu"]["name"], decode["gpu"]["name"]) == ("b200", "h200")


@pytest.mark.usefixtures("launch_alone")
def test_vllm_is_told_to_take_a_shorter_context_where_the_config_has_more_than_fits(
    kizami: Run, tmp_path: Path
) -> None:
    model = save(tmp_path / "glm", GLM)
    short = kizami("serve", model, "--engine", "vllm", "--pool-gib", "80")
    assert (short.code, "--max-model-len auto" in short.out) == (0, True)
    assert "--max-model-len" not in kizami("serve", model, "--engine", "vllm", "--pool-gib", "100").out
    assert "--max-model-len" not in kizami("serve", model, "--pool-gib", "80").out


@pytest.mark.usefixtures("launch_alone")
def test_a_latent_that_is_no_whole_tile_has_no_rows_with_scales(kizami: Run, tmp_path: Path) -> None:
    model = save(tmp_path / "glm", GLM, kv_lora_rank=200)
    done = kizami("serve", model, "--pool-gib", "200", "--json")
    assert (done.code, {row["kv_layout"] for row in done.json["capacity"]}) == (0, {"bf16", "fp8"})
    refused = kizami("serve", model, "--kv-cache-dtype", "fp8_e4m3", "--json")  # flashmla_kv on Hopper
    assert refused.code == 1
    assert [f["code"] for f in refused.json["findings"] if f["severity"] == "error"] == ["no_such_rows"]


def test_a_long_schedule_is_read_in_one_go(kizami: Run, tmp_path: Path) -> None:
    words = ["shared"] * 400_000
    model = save(tmp_path / "glm", GLM, num_hidden_layers=10_000, indexer_types=words, num_nextn_predict_layers=0)
    begin = time.monotonic()
    assert kizami("serve", model, "--json").json["model"]["index_layers"] == 0
    assert time.monotonic() - begin < 5


def test_a_chart_of_tokens_by_weight_format(kizami: Run, converted: Path) -> None:
    lines = kizami("serve", converted, "--tp", "2").out.splitlines()
    bars = {line.split("  ")[0]: line.count("#") for line in lines if re.match(r"(INT4 g32|FP8), ", line)}
    assert bars.keys() == {"INT4 g32, bf16", "INT4 g32, fp8", "FP8, bf16", "FP8, fp8"}
    assert max(bars.values()) == 40
    assert bars["INT4 g32, fp8"] > bars["INT4 g32, bf16"]


def with_tokenizer(folder: Path, name: str = "tokenizer.json", text: str = "{}") -> Path:
    (folder / name).write_text(text)
    return folder


def test_tokenizers_of_a_pair_are_compared(kizami: Run, tmp_path: Path) -> None:
    ours, theirs = (with_tokenizer(save(tmp_path / side, GLM)) for side in "pd")
    run = ("serve", theirs, "--prefill", ours, "--json")
    assert "tokenizer_differs" not in [f["code"] for f in kizami(*run).json["findings"]]
    with_tokenizer(ours, "chat_template.jinja", "a")
    assert [f["severity"] for f in kizami(*run).json["findings"] if f["code"] == "tokenizer_differs"] == ["warning"]
    with_tokenizer(ours, text='{"a": 1}')
    done = kizami(*run)
    assert done.code == 1
    assert "error" in [f["severity"] for f in done.json["findings"] if f["code"] == "tokenizer_differs"]


def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_not_read(kizami: Run, tmp_path: Path) -> None:
    ours, theirs = (with_tokenizer(save(tmp_path / side, GLM)) for side in "pd")
    (ours / "tokenizer.json").unlink()
    (ours / "tokenizer.json").symlink_to("/etc/hostname")
    done = kizami("serve", theirs, "--prefill", ours, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "outside_folder")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0}, {"num_hidden_layers": MISSING}, {"num_attention_heads": 0},
        {"num_attention_heads": "8"},
        {"kv_lora_rank": -1}, {"kv_lora_rank": True}, {"kv_lora_rank": 10**30}, {"qk_rope_head_dim": 0.5},
        {"indexer_types": "full"}, {"indexer_types": [1]}, {"index_topk_freq": 0, "indexer_types": None},
        {"index_topk_pattern": ["S"], "indexer_types": None}, {"index_head_dim": 0}, {"architectures": []},
        {"architectures": {"a": 1}}, {"n_routed_experts": []}, {"moe_intermediate_size": None, "n_routed_experts": -1},
        {"quantization_config": []}, {"quantization_config": {"weight_block_size": 128, "config_groups": 3}},
        {"quantization_config": {"config_groups": {"a": 3}}}, {"max_position_embeddings": "long"}, {"vocab_size": -1},
        {"kv_lora_rank": 0, "hidden_size": 0},
    ],
)  # fmt: skip
def test_a_config_that_no_engine_could_use_is_one_line(kizami: Run, tmp_path: Path, changes: dict[str, Any]) -> None:
    done = kizami("serve", save(tmp_path / "m", GLM, **changes), "--json")
    assert (done.code, done.json["error"]["code"], done.json["error"]["file"]) == (2, "bad_config", "config.json")


def test_wrong_options_are_one_line(kizami: Run, tmp_path: Path, converted: Path) -> None:
    for options, code in (
        (("--prefill-tp", "4"), "usage"), (("--mem-fraction", "nan"), "usage"), (("--gpus", "4"), "bad_option"),
        (("--gpu", "z9"), "usage"), (("--mem-fraction", "1.5"), "usage"), (("--pool-gib", "inf"), "usage"),
    ):  # fmt: skip
        done = kizami("serve", converted, *options, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, code), options
    (shard, *_) = converted.glob("*.safetensors")
    assert kizami("serve", shard, "--json").json["error"]["code"] == "bad_option"
    odd = shutil.copytree(converted, tmp_path / "a\u202eb")
    assert kizami("serve", odd, "--json").json["error"]["code"] == "bad_option"


def test_nothing_is_written_and_no_process_is_started(tmp_path: Path, converted: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in converted.rglob("*")}
    done = process("serve", converted, "--tp", "2", env={"PATH": str(tmp_path)})
    assert done.code == 0
    assert {path: path.stat().st_mtime_ns for path in converted.rglob("*")} == before
