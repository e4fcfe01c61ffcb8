"""What README and docs show runs: every `kizami` line of a shell block, on a tiny model under the names used there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import make_cases
import pytest
from cli_fixtures import files_of
from local_hub import LocalHub
from test_hub_jobs import run

ROOT = Path(__file__).parent.parent
SRC_REPO = "zai-org/GLM-5.2-FP8"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Lines that need what is not here, and where they are run instead.
ELSEWHERE = {
    "kizami demo": "test_cli.py; and README's set-up blocks run in CI",
    "--engine llmcompressor": "an environment of its own: test_llmcompressor_engine.py",
    "moonshotai/Kimi-K2-Thinking": "an INT4 source: test_packed_source.py",
    "GLM-4.7-FP8": "K and V by head: test_kv_scales_convert.py, test_cli_kv_accuracy.py",
    "--evaluation": "figures of an evaluation: test_card_evaluation.py",
    "http://": "two servers: test_small_server.py",
    "--executor ray": "a cluster: test_ray.py",
    "--shards": "a plan of 91 shards: below",
    "smollm2": "a package with weights: test_smollm2_moe.py",
    "docs/kv-cache": "its checkpoint comes with the reference: test_kv_certificate.py",
}


def blocks(text: str) -> Iterator[str]:
    """Of shell, or of no language."""
    block: list[str] | None = None
    for line in text.splitlines():
        if block is None and (fence := re.fullmatch(r" *```(\w*)", line)):
            block, language = [], fence[1]
        elif block is not None and line.strip() == "```":
            if language in ("", "sh", "console"):
                yield "\n".join(block)
            block = None
        elif block is not None:
            block.append(line)


def shown() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        for block in blocks(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r" && ", line.strip().removeprefix("$ ")):
                    if re.match(r"(\S*/)?kizami ", part):
                        yield name, part.partition(" # ")[0].strip()


TESTS = {path.name for path in Path(__file__).parent.glob("test_*.py")}
PAGE_OF = {line: page for page, line in reversed(list(shown()))}  # each line once, by the first page that has it
LINES = sorted((page, line) for line, page in PAGE_OF.items())
HERE = [(page, line) for page, line in LINES if not any(word in f"{page} {line}" for word in ELSEWHERE)]


def test_every_reason_not_to_run_a_line_is_used() -> None:
    assert len(HERE) >= 25
    for word in ELSEWHERE:
        assert any(word in f"{page} {line}" for page, line in LINES), word
    for why in ELSEWHERE.values():
        assert set(re.findall(r"test_\w+\.py", why)) <= TESTS, why


@pytest.fixture(scope="module")
def world(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the lines read. Copied for each line."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(demo_checkpoint, folder / "GLM-5.2-FP8")
    (folder / "GLM-5.2-FP8" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    sample = ROOT / "calibration" / "data" / "sample"
    shutil.copy(sample / "chats.jsonl", folder / "chats.jsonl")
    (folder / "code.txt").write_text((ROOT / "quantize" / "plan.py").read_text())
    for line in (
        "convert GLM-5.2-FP8/ GLM-5.2-INT4/ -q",
        "calibrate GLM-5.2-FP8/ -o stats/ --data chats.jsonl --data code.txt --keep all --samples 8 -q",
        "convert GLM-5.2-FP8/ weighted/ --method weighted --stats stats/ -q",
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kizami.cli", *shlex.split(line)], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for side in ("fp8", "int4", "fp8-again"):
        (folder / "logs" / side).mkdir(parents=True)
        lines = [
            {"doc_id": i, "metrics": ["acc"], "acc": float(i % 3 > 0), "doc_hash": f"{i}", "prompt_hash": f"{i}",
             "target_hash": f"{i}"}
            for i in range(400)
        ]  # fmt: skip
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / "logs" / side / "samples_gsm8k_2026-11-30T10-00-00.jsonl").write_text(text)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("page", "line"), HERE)
def test_a_line_that_is_shown_runs(page: str, line: str, world: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(world, here)
    tiny = line.replace("--tp 8", "--tp 1")  # it has 4 attention heads
    words = shlex.split(re.split(r" [|>] ", tiny)[0])[1:]
    makes = {"convert": words[2:3], "calibrate": [words[words.index("-o") + 1]] if "-o" in words else []}
    for name in makes.get(words[0], []):
        shutil.rmtree(here / name, ignore_errors=True)
    if words[0] in ("verify", "report") and "--stats" in words:
        shutil.rmtree(here / "GLM-5.2-INT4")
        (here / "weighted").rename(here / "GLM-5.2-INT4")
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo(SRC_REPO, {path.name: path for path in (world / "GLM-5.2-FP8").iterdir()})
        done = run(hub.environment(tmp_path / "home"), *words, cwd=here)
    assert done.code == 0, (done.out[-500:], done.err[-1500:])


def source_of_91_shards(folder: Path) -> Path:
    """Of 91 tensors that are written, if each is a shard: three more experts in two layers."""
    made = make_cases.tiny()
    made.config["n_routed_experts"] = 7
    for tensors in list(made.shards.values())[1:]:
        layer = next(re.match(r"model\.layers\.\d\.", name)[0] for name in tensors)
        for name in [name for name in tensors if ".experts.0." in name]:
            for expert in (4, 5, 6):
                tensors[name.replace(".experts.0.", f".experts.{expert}.")] = tensors[name]
        tensors |= make_cases.normal(f"{layer}mlp.gate.weight", 7, 256)
        bias = f"{layer}mlp.gate.e_score_correction_bias"
        tensors[bias] = make_cases.f32(make_cases.rng(bias).uniform(6.8, 7.1, 7))
    return made.save(folder)


@pytest.mark.long
def test_the_lines_of_an_array_of_jobs_run_one_after_the_other(tmp_path: Path) -> None:
    (block,) = [block for block in blocks((ROOT / "docs" / "how-to.md").read_text()) if "--shards" in block]
    lines = block.splitlines()
    assert [len(re.findall("--shards", line)) for line in lines] == [0, 1, 1, 0]
    source_of_91_shards(tmp_path / "GLM-5.2-FP8")
    env = {**os.environ, "KIZAMI_MAX_SHARD_SIZE": "1"}
    plan, *parts, last = [run(env, *shlex.split(line)[1:], cwd=tmp_path) for line in lines]
    assert plan.json["output"]["shards"] == 91
    for number, done in enumerate((*parts, last)):
        assert done.code == 0, (number, done.err[-1500:])
    alone = run(env, "convert", "GLM-5.2-FP8/", "alone/GLM-5.2-INT4/", "-q", cwd=tmp_path)
    assert alone.code == 0, alone.err
    assert files_of(tmp_path / "GLM-5.2-INT4") == files_of(tmp_path / "alone" / "GLM-5.2-INT4")
