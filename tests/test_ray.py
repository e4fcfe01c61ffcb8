"""`--executor ray`: a cluster of two nodes on this machine, each a raylet with workers of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import gptq_fixtures
import pytest
from cli_fixtures import Done, files_of, process
from local_hub import LocalHub

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.pipeline import run
from kizami.quantize.planner import build_plan
from kizami.quantize.run.events import RunEvent, ShardDone, ShardLost, Started
from kizami.quantize.run.on_ray import RayCluster
from kizami.quantize.settings import Method, Policy

pytest.importorskip("ray", reason="needs Ray: pip install 'kizami[ray]'")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow
OPTIONS = ("--max-shard-size", "1MB")
POLICY = Policy(max_shard_bytes=1_000_000)
CORES = 1  # of a node

# Every worker process runs this: who makes a shard durable says so, and takes its time.
SLOW = """
import os, time
real = os.fsync
def fsync(fd):
    try:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        name = ""
    if name.startswith("..model-"):
        with open(os.environ["MADE"], "a") as f:
            f.write(f"{name.split('.')[2]} {os.getppid()}\\n")  # the parent is the node's raylet
        time.sleep(2)
    real(fd)
os.fsync = fsync
"""


def cluster_of(nodes: int) -> Any:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False})
    for _ in range(nodes - 1):
        made.add_node(num_cpus=CORES)
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = cluster_of(2)
    yield made
    made.shutdown()


@pytest.fixture
def slow_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    made = cluster_of(2)
    monkeypatch.delenv("PYTHONPATH")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def clean(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a local run gives."""
    out = tmp_path_factory.mktemp("clean") / "out"
    done = process("convert", demo_checkpoint, out, *OPTIONS, "-q")
    assert done.code == 0, done.err
    return files_of(out)


def convert(cluster: Any, source: Path, out: Path, *words: object) -> Done:
    return process("convert", source, out, *OPTIONS, "--executor", "ray", "--ray-address", cluster.address, *words)


def test_two_nodes_give_the_bytes_and_the_report_of_a_local_run(
    cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    done = convert(cluster, demo_checkpoint, tmp_path / "out", "--json", "--events", events)
    assert done.code == 0, done.err
    assert done.json["output"]["shards"] == len([name for name in clean if name.startswith("model-0")])
    assert files_of(tmp_path / "out") == clean
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    kinds = Counter(line["event"] for line in lines)
    assert kinds["shard"] == done.json["output"]["shards"]
    assert (kinds["started"], kinds["finished"], kinds["lost"]) == (1, 1, 0)
    assert done.err.count("shard ") == kinds["shard"]


def test_a_node_that_is_killed_costs_only_the_shards_it_was_at(
    slow_cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (node,) = slow_cluster.worker_nodes
    raylet = str(node.all_processes["raylet"][0].process.pid)
    made = tmp_path / "made"

    def kill() -> None:  # while it makes a shard durable
        while not made.exists() or raylet not in made.read_text().split():
            time.sleep(0.02)
        slow_cluster.remove_node(node, allow_graceful=False)

    events: list[RunEvent] = []
    checkpoint = Checkpoint.open(demo_checkpoint)
    plan = build_plan(checkpoint, POLICY, Method())
    killer = Thread(target=kill, daemon=True)
    killer.start()
    run(plan, checkpoint, tmp_path / "out", executor=RayCluster(slow_cluster.address), on_event=events.append)
    killer.join(60)
    assert files_of(tmp_path / "out") == clean
    finished = sorted(event.shard.number for event in events if isinstance(event, ShardDone))
    assert finished == [shard.number for shard in plan.shards]
    lost = [event.shard.file.removesuffix(".safetensors") for event in events if isinstance(event, ShardLost)]
    attempts = Counter(made.read_text().split()[::2])
    assert len(lost) == CORES
    assert [name for name, times in attempts.items() if times > 1] == lost
    assert attempts.total() == len(plan.shards) + len(lost)
    assert capsys.readouterr().out == ""  # what Ray has to say of a dead node does not go where the data is


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_cancels_the_tasks_and_the_run_resumes_anywhere(
    slow_cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path, sent: signal.Signals
) -> None:
    words = ["convert", demo_checkpoint, tmp_path / "out", *OPTIONS]
    ray = ["--executor", "ray", "--ray-address", slow_cluster.address]
    command = [sys.executable, "-m", "kizami.cli", *map(str, [*words, *ray])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        next(line for line in child.stderr if line.startswith("shard 2/"))
        child.send_signal(sent)
        rest = child.stderr.read().splitlines()
    assert child.returncode == 128 + sent, rest
    assert rest[-1].startswith("kizami: interrupted: run the same command again to resume; ")
    left = [name for name in os.listdir(tmp_path / "out.partial") if ".model-" in name]
    assert left == []
    done = process(*words)
    assert (done.code, "resumed: " in done.err) == (0, True)
    assert files_of(tmp_path / "out") == clean


def test_what_was_ready_when_a_run_was_stopped_is_kept(
    cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    events: list[RunEvent] = []

    def interrupt(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, ShardDone) and event.done == 1:
            time.sleep(5)  # the other tasks are ready by then
            raise KeyboardInterrupt

    checkpoint = Checkpoint.open(demo_checkpoint)
    plan = build_plan(checkpoint, POLICY, Method())
    with pytest.raises(KeyboardInterrupt):
        run(plan, checkpoint, tmp_path / "out", executor=RayCluster(cluster.address), on_event=interrupt)
    there = sorted(name for name in os.listdir(tmp_path / "out.partial") if "model-" in name)
    assert there == sorted(event.shard.file for event in events if isinstance(event, ShardDone))
    assert len(there) > 1
    run(plan, checkpoint, tmp_path / "out", workers=1, on_event=events.append)
    assert [event.resumed for event in events if isinstance(event, Started)] == [0, len(there)]
    assert files_of(tmp_path / "out") == clean


def test_an_interrupted_local_run_goes_on_in_a_cluster(
    cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    def interrupt(event: RunEvent) -> None:
        if isinstance(event, ShardDone):
            raise KeyboardInterrupt

    checkpoint = Checkpoint.open(demo_checkpoint)
    plan = build_plan(checkpoint, POLICY, Method())
    with pytest.raises(KeyboardInterrupt):
        run(plan, checkpoint, tmp_path / "out", workers=1, on_event=interrupt)
    (tmp_path / "out.partial" / "..model-00009-of-00013.safetensors.0123abcd.tmp").write_bytes(b"half")
    events: list[RunEvent] = []
    run(plan, checkpoint, tmp_path / "out", executor=RayCluster(cluster.address), on_event=events.append)
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.resumed >= 1
    assert files_of(tmp_path / "out") == clean


def test_what_is_wrong_with_the_source_is_said_as_ever_and_by_which_node(
    cluster: Any, demo_checkpoint: Path, tmp_path: Path
) -> None:
    made = Checkpoint.open(shutil.copytree(demo_checkpoint, tmp_path / "src"))
    info = next(info for info in made.tensors.values() if info.name.endswith("experts.0.up_proj.weight"))
    with open(made.path(info.file), "r+b") as f:
        f.seek(info.begin + 3)
        f.write(b"\x7f")  # NaN
    name = info.name
    done = convert(cluster, made.root, tmp_path / "out", "--json")
    assert done.code == 2
    error = done.json["error"]
    assert error["tensor"] == name
    assert error["message"].startswith("node ")
    assert "NaN" in error["message"]
    assert (tmp_path / "out.partial").exists()


def test_a_node_without_kizami_is_named(demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['kizami'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = cluster_of(1)
    monkeypatch.delenv("PYTHONPATH")
    try:
        done = convert(made, demo_checkpoint, tmp_path / "out", "--json")
    finally:
        made.shutdown()
    assert done.code == 2
    error = done.json["error"]
    assert error["code"] == "task_failed"
    assert re.search(r"a task on node [0-9a-f.:]+ failed: ModuleNotFoundError: .*kizami", error["message"])


def test_weighted_works_with_statistics_that_all_nodes_see(
    cluster: Any, demo_checkpoint: Path, demo_stats: gptq_fixtures.Made, tmp_path: Path
) -> None:
    words = ("--method", "weighted", "--stats", demo_stats.folder)
    assert convert(cluster, demo_checkpoint, tmp_path / "out", *words).code == 0
    assert process("convert", demo_checkpoint, tmp_path / "local", *OPTIONS, *words).code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")


def test_gptq_solves_on_the_nodes_and_reads_what_other_shards_have_of_an_expert(
    cluster: Any, demo_checkpoint: Path, demo_stats: gptq_fixtures.Made, tmp_path: Path
) -> None:
    words = ("--method", "gptq", "--stats", demo_stats.folder, "--workers", CORES)
    done = convert(cluster, demo_checkpoint, tmp_path / "out", *words)
    assert done.code == 0, done.err
    assert process("convert", demo_checkpoint, tmp_path / "local", *OPTIONS, *words).code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "local")
    rows = [json.loads(line) for line in (tmp_path / "out/kizami-report.jsonl").read_text().splitlines()]
    shard_of = {row["name"]: row["shard"] for row in rows}
    downs = [row["name"] for row in rows if row.get("method") == "gptq" and row["name"].endswith("down_proj")]
    assert any(shard_of[name] != shard_of[name.replace("down_proj", "gate_proj")] for name in downs)


def test_nodes_on_which_gptq_would_give_other_bytes_are_refused(
    demo_checkpoint: Path, demo_stats: gptq_fixtures.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import os\nos.sched_getaffinity = lambda pid: set(range(99))\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    made = cluster_of(1)
    monkeypatch.delenv("PYTHONPATH")
    words = ("--method", "gptq", "--stats", demo_stats.folder, "--workers", CORES)
    try:
        done = convert(made, demo_checkpoint, tmp_path / "out", *words, "--json")
    finally:
        made.shutdown()
    assert (done.code, done.json["error"]["code"]) == (2, "other_version")
    assert "threads 99, and the driver with torch " in done.json["error"]["message"]


def test_more_cores_for_a_task_than_a_node_has_are_refused(cluster: Any, demo_checkpoint: Path, tmp_path: Path) -> None:
    done = convert(cluster, demo_checkpoint, tmp_path / "out", "--workers", CORES + 1)
    assert done.code == 2
    assert f"--workers {CORES + 1} are the cores of one task, and the largest node has {CORES}" in done.err
    assert not (tmp_path / "out.partial").exists()


def test_finished_shards_are_pushed_as_they_come(
    cluster: Any, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        for key, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(key, value)
        done = convert(cluster, demo_checkpoint, tmp_path / "out", "--push-to", "me/int4")
        assert done.code == 0, done.err
        assert set(clean) <= set(hub.files("me/int4"))
    assert files_of(tmp_path / "out") == clean


def weights(files: dict[str, str]) -> dict[str, str]:
    """Without those that name where the source was."""
    return {name: data for name, data in files.items() if name.startswith("model-")}


@pytest.fixture
def on_hub(demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo("zai-org/tiny-fp8", {path.name: path for path in demo_checkpoint.iterdir()})
        for key, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(key, value)
        yield hub


def test_what_comes_from_the_hub_is_read_by_the_nodes(
    cluster: Any, on_hub: LocalHub, clean: dict[str, str], tmp_path: Path
) -> None:
    """The nodes know neither the Hub nor the token: the command alone fetches."""
    out = tmp_path / "out"
    done = convert(cluster, Path("zai-org/tiny-fp8"), out, "--push-to", "me/int4")
    assert done.code == 0, done.err
    assert weights(files_of(out)) == weights(clean)
    assert set(clean) <= set(on_hub.files("me/int4"))
    local = process("convert", "zai-org/tiny-fp8", tmp_path / "local", *OPTIONS, "-q")
    assert local.code == 0, local.err
    assert files_of(tmp_path / "local") == files_of(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "local", "out"]  # no scratch is left


def test_no_more_of_the_source_is_there_than_the_limit(
    cluster: Any, on_hub: LocalHub, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    """Room for one shard and its source files: the next are fetched when their turn comes."""
    refused = convert(cluster, Path("zai-org/tiny-fp8"), tmp_path / "out", "--scratch-limit", "1MB")
    assert refused.code == 2
    least = re.search(r"one shard with its source files needs ([\d,]+)", refused.err)
    assert least is not None, refused.err
    limit = int(least[1].replace(",", ""))
    assert limit < sum(path.stat().st_size for path in demo_checkpoint.iterdir())
    done = convert(cluster, Path("zai-org/tiny-fp8"), tmp_path / "out", "--scratch-limit", f"{limit}B")
    assert done.code == 0, done.err
    assert weights(files_of(tmp_path / "out")) == weights(clean)


def test_a_killed_node_costs_no_second_download(
    slow_cluster: Any, on_hub: LocalHub, demo_checkpoint: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    (node,) = slow_cluster.worker_nodes
    raylet = str(node.all_processes["raylet"][0].process.pid)
    made = tmp_path / "made"

    def kill() -> None:
        while not made.exists() or raylet not in made.read_text().split():
            time.sleep(0.02)
        slow_cluster.remove_node(node, allow_graceful=False)

    killer = Thread(target=kill)
    killer.start()
    events = tmp_path / "events.jsonl"
    done = convert(slow_cluster, Path("zai-org/tiny-fp8"), tmp_path / "out", "--events", events)
    killer.join()
    assert done.code == 0, done.err
    lost = [line for line in map(json.loads, events.read_text().splitlines()) if line["event"] == "lost"]
    assert len(lost) == CORES
    assert weights(files_of(tmp_path / "out")) == weights(clean)
    fetched = [request.sent for request in on_hub.requests if request.method == "GET" and "/cdn/" in request.path]
    assert sum(fetched) < 1.5 * sum(path.stat().st_size for path in demo_checkpoint.glob("*.safetensors"))


def test_no_cluster_is_said_with_how_to_start_one(demo_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(demo_checkpoint)
    plan = build_plan(checkpoint, POLICY, Method())
    with pytest.raises(KizamiError) as e:
        run(plan, checkpoint, tmp_path / "out", executor=RayCluster("127.0.0.1:9"))
    assert e.value.code == "no_cluster"
    assert "ray start --head" in str(e.value)
    assert not (tmp_path / "out.partial").exists()


def test_the_line_that_how_to_shows_runs(
    cluster: Any, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable by which Ray finds a cluster that was not started in /tmp/ray on this machine."""
    text = (Path(__file__).parent.parent / "docs" / "how-to.md").read_text()
    (line,) = re.findall(r"^kizami (convert .*--executor ray.*)$", text, re.MULTILINE)
    shutil.copytree(demo_checkpoint, tmp_path / "GLM-5.2-FP8")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.chdir(tmp_path)
    assert process("convert", "GLM-5.2-FP8/", "local/GLM-5.2-INT4/", "-q").code == 0
    done = process(*line.split())
    assert done.code == 0, done.err
    assert files_of(tmp_path / "GLM-5.2-INT4") == files_of(tmp_path / "local" / "GLM-5.2-INT4")
