"""examples/pipelines: the script that CI, container and batch jobs run, run here; and that they do run it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from local_hub import LocalHub

from kizami.formats.strict_yaml import read_yaml

FOLDER = Path(__file__).parent.parent / "examples" / "pipelines"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """`kizami` on the path, as after an installation."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "kizami"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kizami.cli "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "NO_COLOR": "1"}


def run(script: Path, *words: object, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", script, *map(str, words)], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_the_script_converts_proves_judges_and_publishes(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    summary = tmp_path / "step.md"
    with LocalHub(tmp_path / "hub") as hub:
        env |= hub.environment(tmp_path / "home") | {"GITHUB_STEP_SUMMARY": str(summary)}
        words = (FOLDER / "pipeline.sh", demo_checkpoint, "out", "me/int4")
        first = run(*words, env=env, cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        sent = len(hub.commits("me/int4"))
        again = run(*words, env=env, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert len(hub.commits("me/int4")) == sent
        assert "model.safetensors.index.json" in hub.files("me/int4")
        assert hub.token not in first.stdout + first.stderr
    results = tmp_path / "results"
    assert json.loads((results / "verify.json").read_text())["ok"]
    assert ElementTree.parse(results / "report.xml").getroot().get("failures") == "0"
    assert summary.read_text().count("| role |") == 2
    assert [json.loads(line)["event"] for line in (results / "events.jsonl").read_text().splitlines()][-1] == "finished"


@pytest.mark.long
def test_a_limit_that_is_missed_ends_it_and_nothing_is_pushed(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        env |= hub.environment(tmp_path / "home") | {"MAX_REL_ERROR": "0.001"}
        done = run(FOLDER / "pipeline.sh", demo_checkpoint, "out", "me/int4", env=env, cwd=tmp_path)
        assert done.returncode == 1
        assert hub.requests == []
    report = ElementTree.parse(tmp_path / "results" / "report.xml").getroot()
    assert report.get("failures") == "1"


@pytest.mark.long
def test_the_slurm_job_hands_its_words_on(demo_checkpoint: Path, env: dict[str, str], tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "srun"
    fake.write_text('#!/bin/sh\nexec "$@"\n')
    fake.chmod(0o755)
    env |= {"KIZAMI_PIPELINE": str(FOLDER / "pipeline.sh")}
    done = run(FOLDER / "slurm.sh", demo_checkpoint, "out", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "kizami.json").exists()


@pytest.mark.long
def test_an_output_of_other_settings_is_not_published(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    words = (FOLDER / "pipeline.sh", demo_checkpoint, "out")
    assert run(*words, env=env, cwd=tmp_path).returncode == 0
    done = run(*words, "me/int4", env=env | {"KIZAMI_GROUP_SIZE": "64"}, cwd=tmp_path)
    assert done.returncode == 2
    assert "out was not made from" in done.stderr
    shutil.rmtree(tmp_path / "results")
    assert run(*words, env=env, cwd=tmp_path).returncode == 2


def test_a_step_that_fails_ends_the_script(env: dict[str, str], tmp_path: Path) -> None:
    done = run(FOLDER / "pipeline.sh", tmp_path / "absent", "out", "me/int4", env=env, cwd=tmp_path)
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert not (tmp_path / "out").exists()


def commands_of(script: list[object], tasks: int, env: dict[str, str], cwd: Path) -> list[str]:
    """What the jobs of an array would run: a `kizami` and an `srun` that only say it."""
    said: list[str] = []
    for name in ("kizami", "srun"):
        program = cwd / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    for task in range(tasks):
        slurm = {
            "SLURM_ARRAY_TASK_ID": str(task + 1),
            "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_COUNT": str(tasks),
        }
        mine = env | slurm | {"JOB_COMPLETION_INDEX": str(task), "JOBS": str(tasks)}
        done = subprocess.run(list(map(str, script)), env=mine, cwd=cwd, capture_output=True, text=True, check=True)
        said += done.stdout.splitlines()
    return said


def shards_of(commands: list[str], number: int) -> list[int]:
    """The shards that they name, one after the other."""
    found = [re.search(rf"kizami convert /src /out --shards (\d+)-(\d+)/{number}$", line) for line in commands]
    return [shard for match in found if match for shard in range(int(match[1]), int(match[2]) + 1)]


@pytest.mark.parametrize(("tasks", "number"), [(8, 96), (8, 13), (3, 2), (1, 5)])
def test_the_jobs_of_an_array_have_every_shard_once(
    env: dict[str, str], tmp_path: Path, tasks: int, number: int
) -> None:
    slurm = ["sh", FOLDER / "slurm-array.sh", "/src", "/out", number]
    assert shards_of(commands_of(slurm, tasks, env, tmp_path), number) == list(range(1, number + 1))
    job, _ = read_yaml(FOLDER / "kubernetes.yaml", "kubernetes.yaml")["items"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    kubernetes = [*container["command"], *container["args"]]
    named = env | {"SRC": "/src", "OUT": "/out", "SHARDS": str(number)}
    assert shards_of(commands_of(kubernetes, tasks, named, tmp_path), number) == list(range(1, number + 1))


def test_the_jobs_of_kubernetes_agree_with_each_other() -> None:
    shards, finish = read_yaml(FOLDER / "kubernetes.yaml", "kubernetes.yaml")["items"]
    (first,), (second,) = (job["spec"]["template"]["spec"]["containers"] for job in (shards, finish))
    given = {one["name"]: one["value"] for one in first["env"]}
    assert second["args"] == [given["SRC"], given["OUT"]]
    assert shards["spec"]["completions"] == shards["spec"]["parallelism"] == int(given["JOBS"])
    assert shards["spec"]["completionMode"] == "Indexed"
    assert finish["spec"]["suspend"] is True


@pytest.mark.long
def test_an_array_and_the_job_after_it_convert_and_prove(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    fake = tmp_path / "bin" / "srun"
    fake.write_text('#!/bin/sh\nexec "$@"\n')
    fake.chmod(0o755)
    env |= {"KIZAMI_PIPELINE": str(FOLDER / "pipeline.sh"), "KIZAMI_MAX_SHARD_SIZE": "3MB"}
    for task in (1, 3):  # the second one failed
        slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "3"}
        done = run(FOLDER / "slurm-array.sh", demo_checkpoint, "out", 4, env=env | slurm, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "out").exists()
    done = run(FOLDER / "slurm.sh", demo_checkpoint, "out", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results" / "verify.json").read_text())["ok"]


def steps(value: Any) -> list[str]:
    """Every `run` and `script` of a YAML file."""
    if isinstance(value, dict):
        own = value.get("run", value.get("script"))
        here = [own] if isinstance(own, str) else own if isinstance(own, list) else []
        return [*here, *(step for one in value.values() if not isinstance(one, str) for step in steps(one))]
    return [step for one in value for step in steps(one)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", ["action.yml", "gitlab.yml"])
def test_the_wrappers_are_yaml_that_runs_the_script(name: str) -> None:
    found = [step for step in steps(read_yaml(FOLDER / name, name)) if isinstance(step, str)]
    assert any("pipeline.sh" in step for step in found)
    assert any("pip install" in step for step in found)
    for step in found:
        assert subprocess.run(["sh", "-n", "-c", step], check=False).returncode == 0, step
        assert "${{" not in step, "an input in a script is a way in for whoever sets it"


def test_the_container_has_what_it_runs() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for path in re.findall(r"/src/(examples/\S+)", text):
        assert (FOLDER.parent.parent / path).exists(), path
    assert re.search(r'^ENTRYPOINT \["sh", "/usr/local/bin/pipeline.sh"\]$', text, re.M)


def test_every_variable_of_the_script_is_explained_in_it() -> None:
    text = (FOLDER / "pipeline.sh").read_text()
    used = set(re.findall(r"\$\{([A-Z_]+):-", text)) - {"GITHUB_STEP_SUMMARY"}
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for name in used:
        assert name in comment, name
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", FOLDER / "pipeline.sh"], check=False).returncode == 0
