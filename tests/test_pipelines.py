"""examples/pipelines: the script that CI, container and batch jobs run, run here; and that they do run it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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


@pytest.fixture
def told(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The same, where `kizami` does nothing but write down its words: see `calls`. FAIL: the command that fails."""
    script = tmp_path / "bin" / "kizami"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n'
        'case $1 in verify | plan | convert) echo "{}" ;; esac\n'
        '[ "$1" != "${FAIL:-}" ] || exit "${WITH:-1}"\n'
    )
    return env


def calls(tmp_path: Path) -> list[str]:
    """One line for each command that was run, and none of an earlier question."""
    lines = (tmp_path / "calls").read_text().splitlines()
    (tmp_path / "calls").unlink()
    return lines


@pytest.mark.parametrize("words", [(), ("src",), ("", "out"), ("src", ""), ("src", "out", "me/int4", "more")], ids=len)
def test_wrong_words_are_answered_with_the_usage(told: dict[str, str], tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(FOLDER / "pipeline.sh", *words, env=told, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "pipeline.sh: usage: pipeline.sh SRC OUT [REPO]\n")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("name", ["KIZAMI_PUSH_TO", "KIZAMI_DELETE_PUSHED"])
def test_nothing_is_pushed_before_it_is_proven(told: dict[str, str], tmp_path: Path, name: str) -> None:
    done = run(FOLDER / "pipeline.sh", "src", "out", env=told | {name: "me/x"}, cwd=tmp_path)
    assert done.returncode == 2
    assert name in done.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("words", [("--help", "out"), ("src", "--help"), ("src", "out", "--help")])
def test_a_name_like_an_option_is_none(told: dict[str, str], tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(FOLDER / "pipeline.sh", *words, env=told, cwd=tmp_path)
    assert done.returncode == 2
    assert "--help begins like an option" in done.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("limit", ["nan", "inf", "-1", "12%", "1e", ".", "1e400"])
def test_a_limit_that_is_no_number_is_refused_before_the_work(told: dict[str, str], tmp_path: Path, limit: str) -> None:
    done = run(FOLDER / "pipeline.sh", "src", "out", env=told | {"MAX_REL_ERROR": limit}, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "calls").exists()) == (2, False)
    assert f"MAX_REL_ERROR is {limit}" in done.stderr


def test_a_private_repository_is_asked_for_where_it_is_made(told: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "bin" / "kizami"
    script.write_text(script.read_text().replace('echo "$@"', 'echo "$1 ${KIZAMI_PRIVATE:-}"'))
    done = run(FOLDER / "pipeline.sh", "src", "out", "me/x", env=told | {"KIZAMI_PRIVATE": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in calls(tmp_path) if line.endswith("1")] == ["push 1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_ends_the_command_at_work(
    told: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "bin" / "kizami"
    script.write_text(
        f'#!/bin/sh\ntrap "echo ended >> {tmp_path}/calls; exit 143" TERM\n'
        f'echo "$1" >> "{tmp_path}/calls"\ni=0\nwhile [ $i -lt 300 ]; do sleep 0.1; i=$((i + 1)); done\n'
    )
    with subprocess.Popen(
        ["sh", FOLDER / "pipeline.sh", "src", "out"], env=told, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as child:
        while not (tmp_path / "calls").exists():
            time.sleep(0.01)
        child.send_signal(number)
        _, err = child.communicate(timeout=20)
    assert child.returncode == 128 + number
    assert calls(tmp_path) == ["plan", "ended"]
    assert f"plan: interrupted, exit code {128 + number}; the same command goes on" in err


@pytest.mark.parametrize("at", ["plan", "convert", "report", "markdown", "check", "verify"])
def test_a_signal_that_a_command_has_no_more_ears_for_ends_the_script(
    told: dict[str, str], tmp_path: Path, at: str
) -> None:
    """It ends well, and the next one does not begin."""
    script = tmp_path / "bin" / "kizami"
    script.write_text(
        f'#!/bin/sh\ntrap "" TERM\necho "$@" >> "{tmp_path}/calls"\n'
        'case $1 in verify | plan | convert) echo "{}" ;; esac\n'
        'case "$*" in *"$AT"*) sleep 0.5 ;; esac\n'
    )
    with subprocess.Popen(
        ["sh", FOLDER / "pipeline.sh", "src", "out", "me/x"],
        env=told | {"AT": at},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    ) as child:
        while not (tmp_path / "calls").exists() or at not in (tmp_path / "calls").read_text().splitlines()[-1:][0]:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=20)
    assert child.returncode == 143
    assert at in calls(tmp_path)[-1]


def test_a_variable_of_the_script_wins_over_that_of_the_option(told: dict[str, str], tmp_path: Path) -> None:
    def sizes(**variables: str) -> tuple[set[str], set[str]]:
        done = run(FOLDER / "pipeline.sh", "src", "out", env=told | variables, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        made = "\n".join(calls(tmp_path))
        return set(re.findall(r"--tp (\S+)", made)), set(re.findall(r"--max-rel-error (\S+)", made))

    assert sizes() == ({"1"}, {"0.12"})
    options = {"KIZAMI_TP": "8", "KIZAMI_MAX_REL_ERROR": "0.2"}
    assert sizes(**options) == ({"8"}, {"0.2"})
    assert sizes(**options, TP="4", MAX_REL_ERROR="0.3") == ({"4"}, {"0.3"})


def test_the_engine_is_asked_before_anything_is_written(told: dict[str, str], tmp_path: Path) -> None:
    assert run(FOLDER / "pipeline.sh", "src", "out", env=told | {"ENGINE": "vllm"}, cwd=tmp_path).returncode == 0
    made = calls(tmp_path)
    assert made[0].startswith("plan src --finished out --tp 1 --engine vllm")
    assert [line.split()[0] for line in made] == ["plan", "convert", "report", "report", "check", "verify"]
    assert run(FOLDER / "pipeline.sh", "src", "out", env=told | {"KIZAMI_EP": "8"}, cwd=tmp_path).returncode == 0
    assert "--engine" not in calls(tmp_path)[0], "plan knows no expert parallelism"


def test_limits_of_outputs_have_the_source(told: dict[str, str], tmp_path: Path) -> None:
    assert run(FOLDER / "pipeline.sh", "src", "out", env=told | {"KIZAMI_STATS": "stats"}, cwd=tmp_path).returncode == 0
    reports = [line for line in calls(tmp_path) if line.startswith("report")]
    assert len(reports) == 2
    assert all("--against src" in line for line in reports)


@pytest.mark.parametrize("name", ["plan", "convert", "report", "check", "verify", "push"])
def test_a_step_that_fails_is_named_and_is_the_last(told: dict[str, str], tmp_path: Path, name: str) -> None:
    env = told | {"FAIL": name, "WITH": "3"}
    done = run(FOLDER / "pipeline.sh", "src", "out", "me/int4", env=env, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == f"pipeline.sh: FAILED: {name}, exit code 3"
    assert "DONE" not in done.stderr
    assert calls(tmp_path)[-1].startswith(name)
    stopped = run(FOLDER / "pipeline.sh", "src", "out", "me/int4", env=env | {"WITH": "143"}, cwd=tmp_path)
    assert stopped.returncode == 143
    assert f"pipeline.sh: {name}: interrupted, exit code 143" in stopped.stderr


def test_results_of_an_earlier_run_are_not_left(told: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for name in ("verify.json", "report.xml", "summary.md"):
        (results / name).write_text("of an earlier run")
    done = run(FOLDER / "pipeline.sh", "src", "out", env=told | {"FAIL": "plan"}, cwd=tmp_path)
    assert done.returncode == 1
    assert {path.name for path in results.iterdir()} == {"plan.json"}


def test_a_plan_that_fails_says_why_in_a_few_lines(tiny_checkpoint: Path, env: dict[str, str], tmp_path: Path) -> None:
    done = run(FOLDER / "pipeline.sh", tiny_checkpoint, "out", env=env | {"TP": "8"}, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "pipeline.sh: FAILED: plan, exit code 1"
    assert len(lines) < 10
    assert all(line.startswith("kizami: failed: ") for line in lines[:-1])
    assert "K = 128 on 8 ranks" in done.stderr
    assert json.loads((tmp_path / "results" / "plan.json").read_text())["tensor_parallel"]["requested"] == 8
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_slurm_job_hands_its_words_and_cores_on(demo_checkpoint: Path, env: dict[str, str], tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "srun"
    fake.write_text(f'#!/bin/sh\necho "$SRUN_CPUS_PER_TASK" > "{tmp_path}/cores"\nexec "$@"\n')
    fake.chmod(0o755)
    env |= {"KIZAMI_PIPELINE": str(FOLDER / "pipeline.sh"), "SLURM_CPUS_PER_TASK": "16"}
    done = run(FOLDER / "slurm.sh", demo_checkpoint, "out", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "kizami.json").exists()
    assert (tmp_path / "cores").read_text() == "16\n"


@pytest.mark.long
def test_an_output_of_other_settings_is_not_published(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    words = (FOLDER / "pipeline.sh", demo_checkpoint, "out")
    assert run(*words, env=env, cwd=tmp_path).returncode == 0
    done = run(*words, "me/int4", env=env | {"KIZAMI_GROUP_SIZE": "64"}, cwd=tmp_path)
    assert done.returncode == 2
    assert "was made with other settings: " in done.stderr
    assert "--group-size (32 there, 64 here)" in done.stderr
    shutil.rmtree(tmp_path / "results")
    (tmp_path / "out" / ".kizami").mkdir()  # as of a run that was killed between its rename and its end
    again = run(FOLDER / "pipeline.sh", f"{demo_checkpoint}/", "out", env=env, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "out" / ".kizami").exists()
    assert re.search(r"^pipeline.sh: verify: ok, \d+ tensors held to the source$", again.stderr, re.M)
    assert again.stderr.splitlines()[-1].startswith("pipeline.sh: DONE: out: ")


@pytest.mark.long
def test_an_output_that_does_not_verify_has_its_reports_and_is_not_pushed(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    words = (FOLDER / "pipeline.sh", demo_checkpoint, "out")
    assert run(*words, env=env, cwd=tmp_path).returncode == 0
    shard = next((tmp_path / "out").glob("*.safetensors"))
    with shard.open("r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(bytes([last[0] ^ 1]))
    with LocalHub(tmp_path / "hub") as hub:
        done = run(*words, "me/int4", env=env | hub.environment(tmp_path / "home"), cwd=tmp_path)
        assert hub.requests == []
    assert done.returncode == 1
    assert "SHA-256 is" in done.stderr
    assert done.stderr.splitlines()[-1] == "pipeline.sh: FAILED: verify, exit code 1"
    assert ElementTree.parse(tmp_path / "results" / "report.xml").getroot().get("failures") == "0"


@pytest.mark.long
def test_a_limit_that_convert_misses_has_its_reports(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    words = (FOLDER / "pipeline.sh", demo_checkpoint, "out")
    missed = env | {"KIZAMI_MAX_REL_ERROR": "0.001"}
    done = run(*words, env=missed, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "pipeline.sh: FAILED: convert, exit code 1")
    assert re.search(r"^kizami: failed: .*: relative error 0\.\d+, expected at most 0.001$", done.stderr, re.M)
    assert ElementTree.parse(tmp_path / "results" / "report.xml").getroot().get("failures") == "1"
    assert "| role |" in (tmp_path / "results" / "summary.md").read_text()
    again = run(*words, env=missed, cwd=tmp_path)
    assert (again.returncode, again.stderr.splitlines()[-1]) == (1, "pipeline.sh: FAILED: report, exit code 1")
    assert run(*words, env=env, cwd=tmp_path).returncode == 0, "another limit needs no other OUT"


@pytest.mark.long
def test_a_source_that_is_whole_in_the_cache_is_compared(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    source = "zai-org/tiny-fp8"
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo(source, {path.name: path for path in demo_checkpoint.iterdir()})
        env |= hub.environment(tmp_path / "home")
        words = (FOLDER / "pipeline.sh", source, "out")
        fetch = "import huggingface_hub as h, sys; h.snapshot_download(sys.argv[1], allow_patterns=sys.argv[2])"
        for pattern in ("none", "*.json", "*1-of*"):  # what others have left in the cache
            subprocess.run([sys.executable, "-c", fetch, source, pattern], env=env, check=True, capture_output=True)
            alone = run(*words, env=env, cwd=tmp_path)
            assert alone.returncode == 0, alone.stderr
            assert f"no weight compared: {source} is on the Hub alone" in alone.stderr
            assert "kizami.error" not in alone.stderr
        subprocess.run([sys.executable, "-c", fetch, source, "*"], env=env, check=True, capture_output=True)
        cached = run(*words, env=env, cwd=tmp_path)
    assert cached.returncode == 0, cached.stderr
    assert re.search(r"^pipeline.sh: verify: ok, (\d+) tensors held to the source$", cached.stderr, re.M), cached.stderr
    assert json.loads((tmp_path / "results" / "verify.json").read_text())["ok"]


@pytest.mark.long
def test_a_source_on_the_hub_that_has_moved_is_not_taken_for_the_old_one(
    demo_checkpoint: Path, env: dict[str, str], tmp_path: Path
) -> None:
    source = "zai-org/tiny-fp8"
    with LocalHub(tmp_path / "hub") as hub:
        first = hub.add_repo(source, {path.name: path for path in demo_checkpoint.iterdir()})
        env |= hub.environment(tmp_path / "home")
        words = (FOLDER / "pipeline.sh", source, "out", "me/int4")
        done = run(*words, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"no weight compared: {source} is on the Hub" in done.stderr
        shard = next(demo_checkpoint.glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1  # the same headers: the plan's hash is the same
        second = hub.commit(source, {shard.name: bytes(data)})
        sent = len(hub.commits("me/int4"))
        moved = run(*words, env=env, cwd=tmp_path)
        assert len(hub.commits("me/int4")) == sent
        assert moved.returncode == 2
        assert f"was made of {source}@{first}, and {source} is commit {second} now" in moved.stderr
        assert "DONE" not in moved.stderr
        pinned = run(FOLDER / "pipeline.sh", f"{source}@{first}", "out", "me/int4", env=env, cwd=tmp_path)
        assert pinned.returncode == 0, pinned.stderr


def test_a_step_that_is_refused_ends_the_script(env: dict[str, str], tmp_path: Path) -> None:
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
    fake.touch(0o755)
    env |= {"KIZAMI_PIPELINE": str(FOLDER / "pipeline.sh"), "KIZAMI_MAX_SHARD_SIZE": "3MB"}
    fake.write_text(f'#!/bin/sh\necho "$SRUN_CPUS_PER_TASK" >> "{tmp_path}/cores"\nexec "$@"\n')
    env |= {"SLURM_CPUS_PER_TASK": "16"}
    for task in (1, 3):  # the second one failed
        slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "3"}
        done = run(FOLDER / "slurm-array.sh", demo_checkpoint, "out", 4, env=env | slurm, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "out").exists()
    done = run(FOLDER / "slurm.sh", demo_checkpoint, "out", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results" / "verify.json").read_text())["ok"]
    assert (tmp_path / "cores").read_text() == "16\n" * 3


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


def test_the_gitlab_job_takes_the_variables_of_the_file_that_includes_it(told: dict[str, str], tmp_path: Path) -> None:
    """A job's variables win over global ones, which is where its header has the user set them."""
    page = read_yaml(FOLDER / "gitlab.yml", "gitlab.yml")
    shown = re.search(r"variables: \{ (.*) \}", (FOLDER / "gitlab.yml").read_text())
    assert shown is not None
    ours = {name: value.strip('"') for name, value in (pair.split(": ") for pair in shown[1].split(", "))}
    assert {"SOURCE", "REPO", "TP"} <= ours.keys()
    assert page.keys() == {"convert"}
    (_, script) = page["convert"]["script"]
    env = told | ours | page["convert"].get("variables", {})
    subprocess.run(["sh", "-c", script], env=env, cwd=copy_of_the_script(tmp_path), check=True)
    made = calls(tmp_path)
    assert f"check out --engine sglang --tp {ours['TP']}" in made
    assert made[-1] == f"push out {ours['REPO']}"
    env |= {"OUT": "elsewhere", "ENGINE": "vllm", "MAX_REL_ERROR": "0.2"} | page["convert"].get("variables", {})
    subprocess.run(["sh", "-c", script], env=env, cwd=copy_of_the_script(tmp_path), check=True)
    made = calls(tmp_path)
    assert f"check elsewhere --engine vllm --tp {ours['TP']}" in made
    assert any("--max-rel-error 0.2" in line for line in made)


def copy_of_the_script(tmp_path: Path) -> Path:
    """A folder in which it lies where it does in the repository."""
    folder = tmp_path / "checkout"
    (folder / "examples" / "pipelines").mkdir(parents=True, exist_ok=True)
    shutil.copy(FOLDER / "pipeline.sh", folder / "examples" / "pipelines")
    return folder


@pytest.mark.parametrize(
    ("inputs", "variables", "tp", "limit"),
    [
        ({}, {}, "1", "0.12"),
        ({}, {"KIZAMI_TP": "8", "KIZAMI_MAX_REL_ERROR": "0.2"}, "8", "0.2"),
        ({"tp": "4", "max-rel-error": "0.3"}, {"KIZAMI_TP": "8", "KIZAMI_MAX_REL_ERROR": "0.2"}, "4", "0.3"),
    ],
    ids=["defaults", "variables", "inputs"],
)
def test_an_input_of_the_action_that_is_left_out_hides_no_variable(
    told: dict[str, str], tmp_path: Path, inputs: dict[str, str], variables: dict[str, str], tp: str, limit: str
) -> None:
    page = read_yaml(FOLDER / "action.yml", "action.yml")
    given = {name: one.get("default", "") for name, one in page["inputs"].items()} | inputs
    given["source"] = "src"
    (step,) = (one for one in page["runs"]["steps"] if "env" in one)
    filled = {name: re.sub(r"\$\{\{ inputs\.(\S+) \}\}", lambda m: given[m[1]], v) for name, v in step["env"].items()}
    env = told | variables | filled | {"GITHUB_ACTION_PATH": str(FOLDER)}
    subprocess.run(["sh", "-c", step["run"]], env=env, cwd=tmp_path, check=True)
    made = calls(tmp_path)
    assert f"check out --engine sglang --tp {tp}" in made
    assert any(f"--max-rel-error {limit} " in line for line in made)


def test_the_container_has_what_it_runs() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for path in re.findall(r"/src/(examples/\S+)", text):
        assert (FOLDER.parent.parent / path).exists(), path
    assert re.search(r'^ENTRYPOINT \["sh", "/usr/local/bin/pipeline.sh"\]$', text, re.M)


def test_every_variable_of_the_script_is_explained_in_it() -> None:
    text = (FOLDER / "pipeline.sh").read_text()
    used = set(re.findall(r"\$\{([A-Z_]+):-", text)) - {"GITHUB_STEP_SUMMARY"}
    used = {name for name in used if not name.startswith("KIZAMI_")}  # options: the reference has them
    assert {"TP", "ENGINE", "MAX_REL_ERROR", "RESULTS"} <= used
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for name in used:
        assert name in comment, name
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", FOLDER / "pipeline.sh"], check=False).returncode == 0
