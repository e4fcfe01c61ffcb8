"""`kizami plan --engine` and `--finished`: what fails after hours is told before; an OUT of another source is not taken
for this one's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import Run, process
from local_hub import LocalHub

from kizami.formats.strict_json import dump_json
from kizami.quantize.manifest import self_hash

WRONG = "no multiple of Marlin's tile"


def test_an_engine_that_computes_wrong_is_told_by_the_plan(kizami: Run, demo_checkpoint: Path) -> None:
    words = ("plan", demo_checkpoint, "--tp", "4")
    assert kizami(*words).code == 0, "another engine loads it"
    assert kizami(*words, "--engine", "vllm").code == 0
    done = kizami(*words, "--engine", "vllm", "--engine", "sglang")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("kizami: failed: sglang does not load it at tp 4: ")
    assert WRONG in line
    assert "Do: serve with expert parallelism" in line
    checked = [one for one in done.out.splitlines() if one.startswith("sglang: no: ")]
    assert len(checked) == 1


def test_an_engine_is_asked_without_a_size_too(kizami: Run, tiny_checkpoint: Path) -> None:
    words = ("plan", tiny_checkpoint, "--scheme", "fp8-block")
    assert kizami(*words).code == 0
    done = kizami(*words, "--engine", "transformers", "--json")
    assert done.code == 1
    assert "transformers does not load it at tp 1: " in done.err
    assert [one["loads"] for one in done.json["engines"] if one["engine"] == "transformers"] == [False]


def test_engines_come_from_the_environment_and_are_known(
    kizami: Run, demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_ENGINE", "vllm sglang")
    assert WRONG in kizami("plan", demo_checkpoint, "--tp", "4").err
    monkeypatch.setenv("KIZAMI_ENGINE", "llmcompressor")
    done = kizami("plan", demo_checkpoint, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert "KIZAMI_ENGINE llmcompressor; expected one of sglang, vllm, transformers" in done.json["error"]["message"]


def refusal(kizami: Run, *words: object) -> tuple[str, str]:
    """Code and message."""
    done = kizami("plan", *words, "--json")
    assert done.code == 2, done.out + done.err
    error = done.json["error"]
    return error["code"], error["message"]


def test_an_output_that_is_not_there_or_is_of_this_source_is_fine(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    assert kizami("plan", tiny_checkpoint, "--finished", tmp_path / "absent").code == 0
    assert kizami("plan", tiny_checkpoint, "--finished", tmp_path).code == 0, "convert refuses that"
    assert kizami("plan", tiny_checkpoint, "--finished", converted).code == 0
    assert kizami("plan", f"{tiny_checkpoint}/", "--finished", f"{converted}/").code == 0
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "elsewhere")
    done = kizami("plan", moved, "--finished", converted, "--json")
    assert done.code == 0
    assert (done.json["source"]["repo"], done.json["source"]["commit"]) == (None, None)
    assert refusal(kizami, tiny_checkpoint, "--finished", "") == ("usage", "OUT is empty")


def test_other_settings_are_named(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    words = (tiny_checkpoint, "--finished", converted, "--group-size", "64", "--set", "attention=int4")
    code, message = refusal(kizami, *words)
    assert code == "other_settings"
    assert "--group-size (32 there, 64 here)" in message
    assert '--set ([] there, [["attention","int4"]] here)' in message
    assert "--rest" not in message
    code, message = refusal(kizami, tiny_checkpoint, "--finished", converted, "--method", "minmax")
    assert (code, '--method ("search" there, "minmax" here)' in message) == ("other_settings", True)


def flip_the_last_byte(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 12345.0}))


@pytest.mark.parametrize(
    ("change", "said"),
    [(flip_the_last_byte, "holds other weights"), (other_config, "config.json or the set of files differ")],
    ids=["weights", "config"],
)
def test_another_source_is_told_from_this_one(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    other = shutil.copytree(tiny_checkpoint, tmp_path / "src")
    change(other)
    code, message = refusal(kizami, other, "--finished", converted)
    assert code == "other_source"
    assert message.startswith(f"was made of another source than {other}: ")
    assert said in message


def test_a_commit_of_the_cache_is_told_from_another(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "models--zai-org--tiny" / "snapshots"
    first, second = (shutil.copytree(tiny_checkpoint, snapshots / (letter * 40)) for letter in "ab")
    assert kizami("convert", first, tmp_path / "out", "-q").code == 0
    planned = kizami("plan", first, "--finished", tmp_path / "out", "--json")
    assert planned.json["source"]["repo"] == "zai-org/tiny"
    assert planned.json["source"]["commit"] == "a" * 40
    code, message = refusal(kizami, second, "--finished", tmp_path / "out")
    assert code == "other_source"
    assert f"was made of zai-org/tiny@{'a' * 40}, and " in message
    assert f"is commit {'b' * 40} now" in message
    assert kizami("plan", tiny_checkpoint, "--finished", tmp_path / "out").code == 0, "the same weights in a folder"


@pytest.mark.long
def test_of_a_source_on_the_hub_an_output_must_name_the_commit(
    tiny_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        commit = hub.add_repo("zai-org/tiny", {path.name: path for path in tiny_checkpoint.iterdir()})
        env = hub.environment(tmp_path / "home")
        planned = process("plan", "zai-org/tiny", "--finished", tmp_path / "absent", "--json", env=env)
        assert (planned.code, planned.json["source"]["commit"]) == (0, commit)
        done = process("plan", "zai-org/tiny", "--finished", converted, "--json", env=env)
    assert (done.code, done.json["error"]["code"]) == (2, "other_source")
    assert f"records no commit: whether it was made of zai-org/tiny, commit {commit}" in done.json["error"]["message"]


def forged(out: Path, **values: Any) -> None:
    path = out / "kizami.json"
    manifest = json.loads(path.read_text()) | values
    path.write_bytes(dump_json(manifest | {"self_sha256": self_hash(manifest)}))


def test_a_plan_of_another_version_is_no_plan_of_this_one(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(converted, tmp_path / "out")
    forged(out, plan_hash="0" * 64, kizami_version="0.0.9")
    code, message = refusal(kizami, tiny_checkpoint, "--finished", out)
    assert (code, message.endswith("; kizami 0.0.9 made it")) == ("other_plan", True)
    (out / "kizami.json").write_text("{}")
    assert refusal(kizami, tiny_checkpoint, "--finished", out)[0] == "bad_manifest"


def test_who_serves_is_not_taken_for_who_chooses_the_codes(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_ENGINE", "vllm")
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--dry-run").code == 0
    monkeypatch.setenv("KIZAMI_METHOD_ENGINE", "llmcompressor")
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--method", "minmax", "--json")
    assert done.code == 2
    assert "KIZAMI_METHOD_ENGINE" in done.json["error"]["message"]
