"""`kizami check`: the command, checkpoints on disk, hostile values, full size."""

import copy
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inventory
import make_cases
import pytest
from cli_fixtures import Run
from engine_checkpoints import good, mixed_quantization

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.engines.check import Checker, engines_that_load
from kizami.formats.engines.finding import ENGINES, READ
from kizami.formats.engines.served import Served
from kizami.formats.engines.transformers import library_verdict
from kizami.formats.errors import KizamiError
from kizami.formats.tensors import TensorSpec
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy


def _copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "out"))


def _edit(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


def test_a_finished_output_loads_in_both_servers(kizami: Run, converted: Path) -> None:
    for engine in ("sglang", "vllm"):
        done = kizami("check", converted, "--engine", engine, "--tp", "2")
        assert done.code == 0
        assert "0 errors, 0 warnings" in done.out.splitlines()[-1]


def test_its_negative_scales_are_known_from_its_manifest(kizami: Run, converted: Path, tmp_path: Path) -> None:
    assert "negative_scales" in kizami("check", converted, "--engine", "vllm").out
    out = _copy(converted, tmp_path)
    (out / "kizami.json").write_text("{}")
    done = kizami("check", out, "--engine", "vllm")
    assert done.code == 0
    assert "negative_scales" not in done.out
    assert "kizami.json" in done.err


def test_an_error_is_exit_code_1_and_names_the_module_and_what_to_do(
    kizami: Run, converted: Path, tmp_path: Path
) -> None:
    out = _copy(converted, tmp_path)
    _edit(out, format="mixed-precision")
    done = kizami("check", out, "--engine", "sglang", "-v")
    assert done.code == 1
    assert "error: top_format" in done.out
    assert "at model.layers.1.mlp.experts and 1 more" in done.out
    assert "rests on: SGLang" in done.out
    assert "does not load as meant: 1 error," in done.out.splitlines()[-1]


def test_quiet_leaves_the_last_line_and_the_errors(kizami: Run, converted: Path) -> None:
    done = kizami("check", converted, "--engine", "vllm", "--tp", "4", "-q")
    assert done.code == 1
    assert len(done.out.splitlines()) == 1
    assert "kizami: failed: vllm: 2 attention heads on 4 ranks is 0.5 each" in done.err


def test_the_object_of_json_has_findings_rules_and_the_matrix(kizami: Run, converted: Path) -> None:
    done = kizami("check", converted, "--json", "--tp", "4", "--matrix")
    assert done.code == 1
    body = done.json
    assert body["schema"] == "kizami.check/1"
    assert body["parallel"] == {"tp": 4, "ep": 1, "pp": 1}
    assert [part["engine"] for part in body["engines"]] == list(ENGINES)
    (sglang, _, transformers) = body["engines"]
    assert (sglang["loads"], transformers["loads"], body["ok"]) == (False, True, False)
    assert {"parallel_sizes", "expert_shape"} <= set(sglang["rules"])
    heads = next(finding for finding in sglang["findings"] if finding["code"] == "parallel_sizes")
    assert "2 attention heads on 4 ranks" in heads["message"]
    assert {"severity", "code", "engine", "module", "count", "message", "source", "advice"} == set(heads)
    assert {(cell["tp"], cell["ok"]) for cell in body["matrix"] if cell["engine"] == "vllm" and cell["ep"] == 1} == {
        (1, True), (2, True), (4, False), (8, False), (16, False), (32, False)
    }  # fmt: skip


def test_the_matrix_says_yes_or_why_not(kizami: Run, converted: Path) -> None:
    lines = kizami("check", converted, "--engine", "vllm", "--matrix").out.splitlines()
    table = lines[lines.index("which sizes load") + 1 :]
    assert table[0].split() == ["engine", "tp", "ep", "loads", "why", "not"]
    assert table[1].split() == ["vllm", "1", "1", "yes"]
    assert any(line.startswith("vllm     4   1  no     2 attention heads") for line in table)


def test_another_version_is_said_and_a_version_needs_an_engine(kizami: Run, converted: Path) -> None:
    done = kizami("check", converted, "--engine", "vllm", "--engine-version", "0.34.1")
    assert done.code == 0
    assert f"written for vllm {READ['vllm']}" in done.out
    far = kizami("check", converted, "--engine", "vllm", "--engine-version", "99")
    assert far.out.splitlines()[-1].startswith("vllm: not known, most rules are not of this version")
    assert kizami("check", converted, "--engine-version", "1.0").code == 2


def test_a_checkpoint_that_cannot_be_opened_is_no_verdict(kizami: Run, converted: Path, tmp_path: Path) -> None:
    """llama.cpp #17064: tensor data beyond the end of the file."""
    out = _copy(converted, tmp_path)
    shard = next(out.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-64])
    done = kizami("check", out, "--engine", "sglang", "--json")
    assert done.code == 2
    assert done.json["error"]["code"] == "wrong_size"


def test_pipeline_stages_are_no_more_than_layers(kizami: Run, converted: Path) -> None:
    assert "2 layers on 3 pipeline stages" in kizami("check", converted, "--engine", "vllm", "--pp", "3").out


def test_the_installed_library_is_asked_where_transformers_is(kizami: Run, converted: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    out = _copy(converted, tmp_path)
    _edit(out, quantization_status="half done")
    done = kizami("check", out, "--engine", "transformers")
    assert done.code == 1
    assert "refused_by_library" in done.out


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"targets": ["Linear"], "weights": {"num_bits": 3, "type": "float"}}, "NotImplementedError"),
        (["Linear"], "KeyError"),  # its name is then taken for a preset's
    ],
)
def test_whatever_the_installed_library_raises_is_its_verdict(group: object, words: str) -> None:
    pytest.importorskip("compressed_tensors")
    verdict = library_verdict({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    assert verdict is not None
    assert verdict.startswith(words)


def test_kv_scales_are_read_from_disk(tmp_path: Path) -> None:
    made = make_cases.tiny()
    made.shards["model-00001-of-00003.safetensors"]["model.layers.0.self_attn.k_proj.k_scale"] = make_cases.f32([0.25])
    served = Served.of(Checkpoint.open(made.save(tmp_path / "kv")))
    assert served.kv_scales == {"model.layers.0.self_attn.k_proj.k_scale": (0.25,)}
    found = Checker(served).find("sglang")
    assert any(finding.code == "kv_scale_on_mla" and "0.25" in finding.message for finding in found)


# ------------------------------------------------------------------------------------------------ our own plans


@pytest.mark.parametrize("mtp", ["quantize", "keep", "drop"])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
@pytest.mark.parametrize("checkpoint", ["tiny_checkpoint", "demo_checkpoint"])
def test_every_plan_loads_everywhere(checkpoint: str, rest: Any, mtp: Any, request: pytest.FixtureRequest) -> None:
    source = Checkpoint.open(request.getfixturevalue(checkpoint))
    plan = build_plan(source, Policy(rest=rest, mtp=mtp), Method("search"))
    specs = {spec.name: spec for shard in plan.shards for spec in shard.tensors}
    served = Served(plan.config, specs, has_negative_scales=True, mtp_dropped=mtp == "drop")
    assert engines_that_load(served) == ENGINES
    for engine in ("sglang", "vllm"):
        assert [found for found in Checker(served).find(engine) if found.severity != "note"] == []


# ------------------------------------------------------------------------------------------------ full size


@pytest.mark.long
def test_what_moonshot_publishes_raises_no_alarm_in_a_few_seconds() -> None:
    name = "kimi-k2.5"  # K2-Thinking, at top level, is in test_check_failures.py with fewer layers
    tensors = {t.name: TensorSpec(t.name, t.dtype, t.shape) for t in inventory.source_tensors(name)}
    begin = time.monotonic()
    checker = Checker(Served(copy.deepcopy(inventory.config(name)), tensors))
    found = [*checker.find("sglang", tp=8), *checker.find("vllm", tp=8)]
    assert time.monotonic() - begin < 20  # 1.2 s where it was measured
    assert [finding for finding in found if finding.severity != "note"] == []
    assert {finding.code for finding in found} == {"hardware", "trtllm_router_bias"}


# ------------------------------------------------------------------------------------------------ hostile values

JUNK: tuple[Any, ...] = (
    None, True, -1, 10**40, 1e308, "\x1b[31m", [[]], ["re:(a+)+"], [1], {"a": {}}, {"a": [None]},
)  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*at, key))


def _replaced(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return result


def _hostile_configs() -> Iterator[tuple[dict[str, Any], dict[str, TensorSpec]]]:
    tensors = make_cases.tiny().tensors()
    tiny = {n: TensorSpec(n, t.dtype, t.shape) for n, t in tensors.items() if ".mlp.experts." not in n or ".0." in n}
    base = make_cases.tiny_config()
    forms: list[dict[str, Any]] = [
        base["quantization_config"] | {"modules_to_not_convert": ["lm_head"]},
        mixed_quantization() | {"kv_cache_scheme": {"type": "float", "num_bits": 8}, "linear_fp8_config": {},
                                "packed_modules_mapping": {"a": ["b"]}},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "dynamic": {}},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["x"]},
    ]  # fmt: skip
    for number, form in enumerate(forms):
        config = base | {"quantization_config": form, "text_config": {}, "indexer_types": ["full"], "index_topk": 1,
                         "index_topk_pattern": "FS", "index_topk_freq": 1, "auto_map": {}}  # fmt: skip
        for path in _paths(config):
            for junk in JUNK if number == 0 or path[0] == "quantization_config" else ():
                yield _replaced(config, path, junk), tiny


@pytest.mark.long
def test_no_value_of_a_config_ends_in_a_traceback() -> None:
    refused = checked = 0
    for config, tensors in _hostile_configs():
        try:
            checker = Checker(Served(config, tensors))
            for engine in ENGINES:
                checker.find(engine, tp=3, ep=2, pp=2)
            checked += 1
        except KizamiError:
            refused += 1
    assert refused > 300
    assert checked > 500


def test_no_shape_or_dtype_of_a_tensor_ends_in_a_traceback() -> None:
    made = good("kimi thinking")
    few = {name: spec for name, spec in made.tensors.items() if ".experts." not in name or ".1.mlp.experts.0." in name}
    for shape in ((), (0, 0), (1,), (1, 2, 3)):
        for dtype in ("I32", "F8_E4M3"):
            for name in few:
                odd = few | {name: TensorSpec(name, dtype, shape)}
                checker = Checker(Served(made.config, odd))
                for engine in ENGINES:
                    checker.find(engine, tp=8)


def test_a_checkpoint_of_nothing_but_odd_names_is_cut_short() -> None:
    odd = {f"model.layers.0.mlp.odd{i}.weight": TensorSpec(f"n{i}", "BF16", (1,)) for i in range(3_000)}
    config = make_cases.tiny_config()
    found = Checker(Served(config, odd)).find("vllm")
    assert len(found) < 500
    assert any(finding.code == "unknown_name" and finding.count > 2_000 for finding in found)
