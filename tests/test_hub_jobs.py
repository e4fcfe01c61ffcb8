"""From the Hub and to it: the same bytes as a local conversion, whatever the network does and however often it dies."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fixtures import Done, files_of
from local_hub import LocalHub
from local_hub_faults import Fault
from safetensors import safe_open
from safetensors.torch import save_file

from kizami.formats.checkpoint import Checkpoint

SHARDS = 12
SRC, DST = "zai-org/tiny-fp8", "me/tiny-int4"
OUT_SHARD = "600KB"
# Three of the source's shards (they have up to 1.24 MB, and one of 2.1 MB), and what lies beside the weights.
LIMIT = 4_000_000


@pytest.fixture(scope="session")
def twelve(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint in 12 files of about a megabyte."""
    folder = tmp_path_factory.mktemp("twelve") / "src"
    folder.mkdir()
    checkpoint = Checkpoint.open(demo_checkpoint)
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    groups: list[dict[str, object]] = [{} for _ in range(SHARDS)]
    done = 0
    for file in checkpoint.headers:
        with safe_open(demo_checkpoint / file, "pt") as opened:
            for info in checkpoint.headers[file].tensors:
                groups[min(SHARDS - 1, done * SHARDS // whole)][info.name] = opened.get_tensor(info.name)
                done += info.nbytes
    names = [f"model-{i:05d}-of-{SHARDS:05d}.safetensors" for i in range(1, SHARDS + 1)]
    for name, group in zip(names, groups, strict=True):
        save_file(group, folder / name, {"format": "pt"})
    index = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
    body = {"metadata": {"total_size": whole}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    for path in demo_checkpoint.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    return folder


@pytest.fixture
def hub(twelve: Path, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as made:
        made.add_repo(SRC, {path.name: path for path in twelve.iterdir()})
        yield made


@pytest.fixture(scope="session")
def local(local_out: Path) -> dict[str, str]:
    return files_of(local_out)


@pytest.fixture(scope="session")
def local_out(twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a local conversion of the same repository gives, by a cache as `hf download` leaves it."""
    folder = tmp_path_factory.mktemp("local")
    with LocalHub(folder / "hub") as made:
        commit = made.add_repo(SRC, {path.name: path for path in twelve.iterdir()})
    snapshot = folder / "models--zai-org--tiny-fp8" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for path in twelve.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())
    done = run({}, "convert", snapshot, folder / "out", "--max-shard-size", OUT_SHARD, "-q")
    assert done.code == 0, done.err
    return folder / "out"


def run(env: dict[str, str], *words: object, kill_after: float | None = None, cwd: Path | None = None) -> Done:
    """In a process of its own; killed after so many seconds."""
    command = [sys.executable, "-m", "kizami.cli", *map(str, words)]
    with subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    ) as child:
        try:
            out, err = child.communicate(timeout=kill_after)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            out, err = child.communicate()
    return Done(child.returncode, out, err)


def on_disk(folder: Path, *names: str) -> int:
    """Bytes that files take on the disk, holes not counted."""
    total = 0
    for name in names:
        for root, _, files in os.walk(folder / name):
            for file in files:
                try:
                    total += os.lstat(os.path.join(root, file)).st_blocks * 512
                except OSError:  # gone meanwhile
                    continue
    return total


class Peak:
    """The most that folders took on the disk, looked at all the time."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(folder, names), daemon=True)

    def _watch(self, folder: Path, names: tuple[str, ...]) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, on_disk(folder, *names))
            time.sleep(0.002)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def remote_files(hub: LocalHub) -> dict[str, str]:
    return {name: sha for name, sha in hub.files(DST).items() if name != ".gitattributes"}


# ------------------------------------------------------------------------------------------------------------- a source


@pytest.mark.long
def test_headers_alone_are_read_for_a_plan(hub: LocalHub, twelve: Path, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    there, here = run(env, "plan", SRC, "--json"), run(env, "plan", twelve, "--json")
    assert (there.code, here.code) == (0, 0), there.err
    a, b = json.loads(there.out), json.loads(here.out)
    assert (a["output"], a["actions"]) == (b["output"], b["actions"])
    sent = sum(request.sent for request in hub.requests)
    assert sent < 5_000_000, "12 MB of weights"
    for command in ("inspect", "check"):
        assert run(env, command, SRC, "-q").code == run(env, command, twelve, "-q").code


@pytest.mark.long
def test_a_conversion_from_the_hub_gives_the_bytes_of_a_local_one(
    hub: LocalHub, local: dict[str, str], tmp_path: Path
) -> None:
    env = hub.environment(tmp_path / "home")
    limit = LIMIT
    with Peak(tmp_path, "out.source") as peak:
        done = run(env, "convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--scratch-limit", f"{limit}B")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == local
    assert not (tmp_path / "out.source").exists()
    assert 1_000_000 < peak.bytes <= limit
    fetched = [request for request in hub.requests if request.method == "GET" and "/cdn/" in request.path]
    assert sum(request.sent for request in fetched) < 2 * 12_800_000, "no shard came twice"


@pytest.mark.long
def test_what_is_in_the_users_cache_is_used_and_not_changed(hub: LocalHub, twelve: Path, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    load = f"from huggingface_hub import snapshot_download; print(snapshot_download({SRC!r}))"
    subprocess.run([sys.executable, "-c", load], env={**os.environ, **env}, check=True, capture_output=True)
    before, asked = files_of(tmp_path / "home"), len(hub.requests)
    assert run(env, "convert", SRC, tmp_path / "out", "-q").code == 0
    assert files_of(tmp_path / "home") == before
    assert [request.path for request in hub.requests[asked:]] == [f"/api/models/{SRC}"]
    offline = run(env | {"HF_HUB_OFFLINE": "1"}, "convert", SRC, tmp_path / "out2", "-q")
    assert (offline.code, files_of(tmp_path / "out2")) == (0, files_of(tmp_path / "out"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("repo", "env", "code", "said"),
    [
        ("zai-org/absent", {}, "hub_not_found", "is not on the Hub"),
        (f"{SRC}@v9", {}, "hub_not_found", "no such branch, tag or commit"),
        ("zai-org/gated", {"HF_TOKEN": ""}, "hub_gated", "is gated"),
        (SRC, {"HF_HUB_OFFLINE": "1"}, "not_in_cache", "no such repository in the local Hub cache"),
        (SRC, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "hub_unreachable", "cannot be reached"),
    ],
)
def test_what_is_not_to_be_had_is_named(
    hub: LocalHub, twelve: Path, tmp_path: Path, repo: str, env: dict[str, str], code: str, said: str
) -> None:
    hub.add_repo("zai-org/gated", {path.name: path for path in twelve.iterdir()}, gated=True)
    done = run(hub.environment(tmp_path / "home") | env, "plan", repo, "--json")
    assert done.code == 2
    error = json.loads(done.out)["error"]
    assert (error["code"], said in error["message"]) == (code, True), error
    assert hub.token not in done.out + done.err


@pytest.mark.long
def test_a_revision_that_moves_between_two_runs_is_refused(hub: LocalHub, tmp_path: Path) -> None:
    env, out = hub.environment(tmp_path / "home"), tmp_path / "out"
    first = hub.commits(SRC)[-1].oid
    hub.faults.add(Fault("status", path="/cdn/.*model-00005", status=500, times=99))
    stopped = run(env | {"KIZAMI_TEST": "1"}, "convert", SRC, out, "--max-shard-size", OUT_SHARD, kill_after=4)
    assert stopped.code != 0
    hub.faults.clear()
    hub.commit(SRC, {"config.json": hub.read(SRC, "config.json") + b"\n"})
    moved = run(env, "convert", SRC, out, "--max-shard-size", OUT_SHARD, "--json")
    assert (moved.code, json.loads(moved.out)["error"]["code"]) == (2, "hub_moved")
    done = run(env, "convert", f"{SRC}@{first}", out, "--max-shard-size", OUT_SHARD, "-q")
    assert done.code == 0, done.err


@pytest.mark.long
def test_bytes_that_are_not_the_hubs_are_fetched_again(hub: LocalHub, local: dict[str, str], tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    hub.faults.add(Fault("corrupt", path="/cdn/.*model-00003", skip=1, times=1))
    hub.faults.add(Fault("cut", path="/cdn/.*model-00004", skip=1, times=1))
    done = run(env, "convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "-q")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == local
    assert len(hub.faults.hits) == 2


# ------------------------------------------------------------------------------------------------------------- a target


@pytest.mark.long
def test_shards_are_pushed_while_the_next_are_converted_and_the_index_last(
    hub: LocalHub, local: dict[str, str], twelve: Path, tmp_path: Path
) -> None:
    env = hub.environment(tmp_path / "home")
    done = run(
        env, "convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--push-to", DST, "--private", "--json"
    )
    assert done.code == 0, done.err
    assert remote_files(hub) == files_of(tmp_path / "out") == local
    commits = hub.commits(DST)[1:]
    assert len(commits) <= 1 + len(local) // 10
    for commit in commits[:-1]:
        assert not {"config.json", "model.safetensors.index.json", "kizami.json"} & commit.tree.keys()
    assert json.loads(done.out)["pushed"] == {"repo": DST, "commit": commits[-1].oid}
    assert hub.token not in done.out + done.err


@pytest.mark.long
def test_a_repository_with_another_model_is_left_alone(hub: LocalHub, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    hub.add_repo(DST, {"config.json": b"{}", "notes.txt": b"mine"})
    before = hub.files(DST)
    done = run(env, "convert", SRC, tmp_path / "out", "--push-to", DST, "--json")
    assert (done.code, json.loads(done.out)["error"]["code"]) == (2, "push_target")
    assert hub.files(DST) == before


@pytest.mark.long
def test_a_strangers_file_stays_and_a_limit_that_is_missed_publishes_no_index(hub: LocalHub, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    hub.add_repo(DST, {"notes.txt": b"mine"})
    words = ("convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--push-to", DST)
    missed = run(env, *words, "--max-rel-error", "0.001", "--json")
    assert (missed.code, json.loads(missed.out)["error"]["code"]) == (1, "over_threshold")
    assert not (tmp_path / "out").exists()
    assert "model.safetensors.index.json" not in hub.files(DST)
    done = run(env, *words, "--max-rel-error", "0.5", "-q")
    assert done.code == 0, done.err
    assert hub.read(DST, "notes.txt") == b"mine"
    assert "model.safetensors.index.json" in hub.files(DST)


@pytest.mark.long
def test_options_of_a_push_that_do_nothing_are_refused(hub: LocalHub, tmp_path: Path) -> None:
    for word in ("--private", "--delete-pushed"):
        done = run(hub.environment(tmp_path / "home"), "convert", SRC, tmp_path / "out", word, "--json")
        assert (done.code, json.loads(done.out)["error"]["code"]) == (2, "usage")


@pytest.mark.long
def test_a_limit_below_one_shard_is_refused_before_anything_is_made(hub: LocalHub, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    done = run(env, "convert", SRC, tmp_path / "out", "--scratch-limit", "1MB", "--push-to", DST, "--json")
    assert (done.code, json.loads(done.out)["error"]["code"]) == (2, "scratch_limit")
    assert "needs" in json.loads(done.out)["error"]["message"]


@pytest.mark.long
def test_a_finished_output_is_pushed_once_and_again_sends_nothing(
    hub: LocalHub, local: dict[str, str], local_out: Path, tmp_path: Path
) -> None:
    """30 files: few commits, with 429, 504 and a reset on the way, and a stranger's file that stays."""
    env = hub.environment(tmp_path / "home")
    hub.add_repo(DST, {"notes.txt": b"mine"})
    hub.faults.add(
        Fault("status", method="POST", path="/commit/", status=429, headers={"Retry-After": "1"}, times=2),
        Fault("status", method="PUT", path=".*", status=504),
        Fault("reset", method="PUT", path=".*", skip=3),
        Fault("lost", method="POST", path="/commit/", skip=1),
    )
    done = run(env, "push", local_out, DST, "--json")
    assert done.code == 0, done.err
    assert hub.faults.left == []
    assert {name: sha for name, sha in remote_files(hub).items() if name != "notes.txt"} == local
    assert hub.read(DST, "notes.txt") == b"mine"
    commits = len(hub.commits(DST))
    assert commits - 1 <= len(local) // 10 + 1
    assert json.loads(done.out)["sent"] == len(local)
    assert hub.token not in done.out + done.err
    assert "\r" not in done.err
    uploads = len([request for request in hub.requests if request.method == "PUT"])
    again = run(env, "push", local_out, DST, "--json")
    assert (again.code, json.loads(again.out)["sent"]) == (0, 0)
    assert len(hub.commits(DST)) == commits
    assert len([request for request in hub.requests if request.method == "PUT"]) == uploads


@pytest.mark.long
def test_a_killed_push_sends_only_what_is_missing(
    hub: LocalHub, local: dict[str, str], local_out: Path, tmp_path: Path
) -> None:
    env = hub.environment(tmp_path / "home")
    hub.faults.add(Fault("status", method="POST", path="/commit/", status=503, skip=1, times=99))
    killed = run(env, "push", local_out, DST, kill_after=6)
    assert killed.code == -signal.SIGKILL, killed.err
    hub.faults.clear()
    before = sum(request.received for request in hub.requests if request.method == "PUT")
    assert 0 < len(remote_files(hub)) < len(local)
    done = run(env, "push", local_out, DST, "-q")
    assert done.code == 0, done.err
    assert remote_files(hub) == local
    sent = sum(request.received for request in hub.requests if request.method == "PUT")
    whole = sum((local_out / name).stat().st_size for name in local)
    assert before > 0
    assert sent < 1.1 * whole, "nothing large was sent twice"


@pytest.mark.long
def test_an_output_that_does_not_verify_is_not_pushed(hub: LocalHub, local_out: Path, tmp_path: Path) -> None:
    out = shutil.copytree(local_out, tmp_path / "out")
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = run(hub.environment(tmp_path / "home"), "push", out, DST, "--json")
    assert (done.code, json.loads(done.out)["error"]["code"]) == (2, "not_verified")
    assert hub.requests == []


@pytest.mark.long
def test_shards_of_a_source_in_a_folder_leave_the_disk_too(hub: LocalHub, twelve: Path, tmp_path: Path) -> None:
    env, limit = hub.environment(tmp_path / "home"), 1_500_000
    out = tmp_path / "out"
    words = ("convert", twelve, out, "--max-shard-size", OUT_SHARD, "--push-to", DST)
    with Peak(tmp_path, "out.partial") as peak:
        done = run(env, *words, "--delete-pushed", "--scratch-limit", f"{limit}B", kill_after=100)
    assert done.code == 0, done.err
    assert peak.bytes <= limit + 700_000, "side files, the report's rows and the card are not within it"
    assert not out.exists()
    again = run(env, *words, "--delete-pushed", "-q")
    assert (again.code, "holds this conversion, whole" in again.out) == (0, True)
    kept = run(env, "convert", twelve, out, "--max-shard-size", OUT_SHARD, "-q")
    assert (kept.code, files_of(out)) == (0, remote_files(hub))


@pytest.mark.long
@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "model-00001-of-00020.safetensors"])
def test_a_file_of_somebody_else_is_never_replaced(hub: LocalHub, local_out: Path, tmp_path: Path, name: str) -> None:
    """A card stays, and it is said; of any other file there cannot be two, and nothing is pushed over it."""
    env = hub.environment(tmp_path / "home")
    assert (local_out / name).exists()
    hub.add_repo(DST, {name: b"mine"})
    for words in (
        ("push", local_out, DST),
        ("convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--push-to", DST),
    ):
        done = run(env, *words, "--json")
        assert hub.read(DST, name) == b"mine"
        if name == "README.md":
            assert done.code == 0, done.err
            assert "has a README.md of its own, which stays" in done.err
        else:
            assert (done.code, json.loads(done.out)["error"]["code"]) == (2, "push_target")
            assert len(hub.commits(DST)) == 1, "refused before anything is converted or pushed"


@pytest.mark.long
def test_two_conversions_do_not_meet_in_one_repository(hub: LocalHub, local_out: Path, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    other = tmp_path / "other"
    made = run(env, "convert", SRC, other, "--max-shard-size", OUT_SHARD, "--group-size", "64", "-q")
    assert made.code == 0, made.err
    hub.faults.add(Fault("status", method="POST", path="/commit/", status=403, skip=1))
    half = run(env, "push", local_out, DST, "--json")
    assert (half.code, json.loads(half.out)["error"]["code"]) == (2, "hub_error")
    assert "kizami-push.json" in hub.files(DST)
    before = hub.files(DST)
    refused = run(env, "push", other, DST, "--json")
    assert (refused.code, json.loads(refused.out)["error"]["code"]) == (2, "push_target")
    assert hub.files(DST) == before
    assert run(env, "push", local_out, DST, "-q").code == 0
    assert remote_files(hub) == files_of(local_out)


@pytest.mark.long
def test_a_header_that_is_not_the_files_is_noticed(hub: LocalHub, local: dict[str, str], tmp_path: Path) -> None:
    """The plan is made from a range that nothing proves; what came whole has the Hub's hash."""
    env = hub.environment(tmp_path / "home")
    name = f"model-00003-of-{SHARDS:05d}.safetensors"
    real = hub.read(SRC, name)
    length = int.from_bytes(real[:8], "little")
    header = json.loads(real[8 : 8 + length])
    first, second = next(
        (a, b)
        for a in header for b in header
        if a < b and "__metadata__" not in (a, b) and header[a]["shape"] == header[b]["shape"]
        and header[a]["dtype"] == header[b]["dtype"]
    )  # fmt: skip
    header[first]["data_offsets"], header[second]["data_offsets"] = (
        header[second]["data_offsets"],
        header[first]["data_offsets"],
    )
    forged = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(forged) == length
    (tmp_path / "lie").write_bytes(real[:8] + forged)
    lying = f"""
import sys
import kizami.formats.hub.mirror as mirror
from kizami.cli.app import main
read, lie = mirror.read_range, open({str(tmp_path / "lie")!r}, "rb").read()
mirror.read_range = lambda repo, name, at, size: (
    (lie + read(repo, name, at, size)[len(lie):])[:size] if name == {name!r} and not at else read(repo, name, at, size)
)
main(sys.argv[1:])
"""
    words = ["convert", SRC, str(tmp_path / "out"), "--max-shard-size", OUT_SHARD, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", lying, *words], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "hub_corrupt"), done.stderr
    again = run(env, "convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--restart", "-q")
    assert again.code == 0, again.err
    assert files_of(tmp_path / "out") == local


@pytest.mark.long
def test_a_scratch_folder_that_is_lost_changes_no_byte(hub: LocalHub, local: dict[str, str], tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    words = ("convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--scratch-limit", f"{LIMIT}B")
    hub.faults.add(Fault("status", path="/cdn/.*model-00009", skip=1, status=403))
    assert run(env, *words).code == 2
    hub.faults.clear()
    shutil.rmtree(tmp_path / "out.source")
    done = run(env, *words, "-q")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == local


@pytest.mark.long
def test_shards_that_left_the_disk_are_made_again_where_they_are_wanted(
    hub: LocalHub, local: dict[str, str], tmp_path: Path
) -> None:
    env = hub.environment(tmp_path / "home")
    words = ("convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--push-to", DST)
    hub.faults.add(Fault("status", path="/cdn/.*model-00009", skip=1, status=403))
    assert run(env, *words, "--delete-pushed", "--scratch-limit", f"{LIMIT}B").code == 2
    hub.faults.clear()
    done = run(env, *words, "-q")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == remote_files(hub) == local


@pytest.mark.parametrize(
    ("words", "env", "code"),
    [
        (("push", "OUT", DST), {"HF_HUB_OFFLINE": "1"}, "hub_offline"),
        (("push", "OUT", "no-slash"), {}, "usage"),
        (("push", "OUT", "datasets/x"), {}, "usage"),
        (("push", "OUT", DST, "--private"), {}, "push_target"),
        (("plan", SRC), {"HF_ENDPOINT": "127.0.0.1:9"}, "bad_environment"),
        (("plan", SRC), {"HF_TOKEN": "schlüssel"}, "bad_environment"),
    ],
)
@pytest.mark.long
def test_what_cannot_work_is_told_at_once(
    hub: LocalHub, local_out: Path, tmp_path: Path, words: tuple[str, ...], env: dict[str, str], code: str
) -> None:
    hub.add_repo(DST, {"notes.txt": b"public"})
    given = [local_out if word == "OUT" else word for word in words]
    began = time.monotonic()
    done = run(hub.environment(tmp_path / "home") | env, *given, "--json", kill_after=60)
    assert (done.code, json.loads(done.out)["error"]["code"]) == (2, code), done.err
    assert time.monotonic() - began < 30


@pytest.mark.long
@pytest.mark.parametrize(("status", "times", "code"), [(404, 99, 2), (503, 3, 0)])
def test_a_file_that_is_refused_ends_the_run_and_one_that_is_busy_is_waited_for(
    hub: LocalHub, tmp_path: Path, status: int, times: int, code: int
) -> None:
    hub.faults.add(Fault("status", method="HEAD", path="resolve/.*model-00006", status=status, times=times))
    began = time.monotonic()
    env = hub.environment(tmp_path / "home")
    done = run(env, "convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "-q", kill_after=60)
    assert done.code == code, done.err
    assert time.monotonic() - began < 40


@pytest.mark.long
def test_a_commit_id_that_is_a_path_is_refused(twelve: Path, tmp_path: Path) -> None:
    from kizami.formats.errors import KizamiError
    from kizami.formats.hub import repository

    class Info:
        sha, siblings, private = "../../../../pwned", (), False

    class Api:
        def model_info(self, *args: object, **more: object) -> Info:
            return Info()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository, "hub", Api)
        with pytest.raises(KizamiError, match="expected 40 hex digits"):
            repository.Repository.look(SRC)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_hub_to_hub_with_a_small_disk_faults_and_twenty_kills(
    hub: LocalHub, local: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """12 shards with room for three, every tenth request failing: killed 20 times, the target is that of a local
    conversion, byte for byte, and no commit is there twice."""
    env, limit = hub.environment(tmp_path / "home"), LIMIT
    hub.faults.random(seed, 0.1, ["status", "reset", "cut", "corrupt", "lost"])
    words = ("convert", SRC, tmp_path / "out", "--max-shard-size", OUT_SHARD, "--scratch-limit", f"{limit}B",
             "--push-to", DST, "--delete-pushed")  # fmt: skip
    said, kills = "", 0
    with Peak(tmp_path, "out.source", "out.partial") as peak:
        dice = random.Random(seed)
        for _ in range(20):
            done = run(env, *words, kill_after=dice.uniform(0.9, 1.6))
            said += done.out + done.err
            kills += done.code == -signal.SIGKILL
            assert done.code in (-signal.SIGKILL, 0), done.err
            if done.code == 0:
                break
        hub.faults.clear()
        if done.code != 0:
            done = run(env, *words)
            said += done.out + done.err
    assert done.code == 0, done.err
    assert kills >= 10, "too fast a machine for this test to mean much"
    assert remote_files(hub) == local
    assert hub.token not in said
    assert peak.bytes <= limit
    trees = [tuple(sorted(commit.tree.items())) for commit in hub.commits(DST)]
    assert len(set(map(str, trees))) == len(trees), "a commit that changes nothing"
    assert not (tmp_path / "out.partial").exists()
    assert not (tmp_path / "out.source").exists()
