"""SRC on the Hub: what a server, a signal, a second process or a kill does to a conversion, and what they do not."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_hub
import make_cases
import pytest
from cli_fixtures import Done
from local_hub import LocalHub
from local_hub_faults import Answer, Call, Fault
from safetensors import safe_open
from safetensors.torch import save_file

from kizami.cli.hub_source import is_scratch
from kizami.formats.hidden import without_secret
from kizami.formats.hub.mirror import remove_scratch
from kizami.formats.hub.repository import path_problem

SRC = "zai-org/tiny-fp8"
TOKENS = ("hf_" + "s3cr3t" * 5, "api_org_" + "s3cr3t" * 5, "s3cr3tTOKENofAmirror0123456789")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-hub") / "src"
    make_cases.tiny().save(folder)
    return folder


@pytest.fixture
def hub(tiny: Path, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as made:
        made.add_repo(SRC, {path.name: path for path in tiny.iterdir()})
        yield made


@pytest.fixture
def env(hub: LocalHub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home")


def begun(env: dict[str, str], *words: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kizami.cli", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True)


def run(env: dict[str, str], *words: object) -> Done:
    with begun(env, *words) as child:
        out, err = child.communicate(timeout=120)
    return Done(child.returncode, out, err)


# ------------------------------------------------------------------------------------------------ what a server may say


@pytest.mark.long
@pytest.mark.parametrize("token", TOKENS)
def test_a_token_that_the_server_sends_back_is_not_shown(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    def echo(hub: LocalHub, call: Call) -> Answer:
        said = call.headers.get("Authorization", "")
        assert token in said
        body = json.dumps({"error": f"Invalid {said}, '{token}', x-{token}-y"}).encode()
        return Answer(400, {"Content-Type": "application/json", "X-Error-Message": f"Invalid {token}"}, body)

    with LocalHub(tmp_path / "hub", token=token) as made:
        made.add_repo(SRC, {path.name: path for path in tiny.iterdir()})
        env = made.environment(tmp_path / "home")
        monkeypatch.setattr(local_hub, "ROUTES", (("GET|HEAD|POST", ".*", echo),))
        events = tmp_path / "events.jsonl"
        for words in (("--json",), ("--debug",)):
            done = run(env, "convert", SRC, tmp_path / "out", "--events", events, *words)
            assert done.code == 2
            assert "Invalid" in done.out + done.err
            assert token not in done.out + done.err + events.read_text()


def test_a_word_of_a_hundred_thousand_characters_takes_no_time() -> None:
    began, secret = time.monotonic(), "s3cr3t" * 20_000
    assert without_secret(f"no {secret}.", secret) == "no ...."
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (302, {"Location": "/api/models/zai-org/tiny-fp8"}, "TooManyRedirects"),
        (200, {"Content-Encoding": "gzip"}, "DecodingError"),
    ],
)
def test_an_answer_that_leads_nowhere_or_cannot_be_unpacked_is_no_bug(
    hub: LocalHub, env: dict[str, str], status: int, headers: dict[str, str], said: str
) -> None:
    hub.faults.add(Fault("status", path="/api/models/", times=99, status=status, headers=headers))
    done = run(env, "plan", SRC, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "hub_unreachable"), done
    assert said in done.json["error"]["message"]


def test_names_too_deep_for_a_folder_are_refused() -> None:
    assert path_problem("a/" * 31 + "b") is None
    assert path_problem("a/" * 1500 + "b") == "a name of more than 32 folders"


@pytest.mark.long
def test_errors_and_findings_name_the_repository_and_no_folder_that_is_gone(hub: LocalHub, env: dict[str, str]) -> None:
    commit = hub.commits(SRC)[-1].oid
    assert run(env, "check", SRC, "--json").json["checkpoint"] == f"{SRC}@{commit}"
    assert run(env, "inspect", SRC, "--json").json["root"] == f"{SRC}@{commit}"
    hub.add_repo("zai-org/empty", {"notes.txt": b"x"})
    refused = run(env, "plan", "zai-org/empty")
    assert refused.code == 2
    assert "models--" not in refused.err


@pytest.mark.long
def test_check_reads_the_manifest_of_an_output_on_the_hub(
    hub: LocalHub, env: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    assert run(env, "convert", tiny, tmp_path / "out", "-q").code == 0
    hub.add_repo("me/tiny-int4", {path.name: path for path in (tmp_path / "out").iterdir()})
    there, here = (run(env, "check", place, "--json").json for place in ("me/tiny-int4", tmp_path / "out"))
    assert there["engines"] == here["engines"]
    assert "is left out" not in run(env, "check", "me/tiny-int4").err


# ------------------------------------------------------------------------------------------------ what arrives is whole


@pytest.mark.parametrize(  # requests: of the header, of sampled pages, of the whole
    "skip", [0, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 5, 20, 33))]
)
def test_a_file_that_no_shard_needs_is_held_against_its_hash_before_it_is_recorded(
    hub: LocalHub, env: dict[str, str], tiny: Path, tmp_path: Path, skip: int
) -> None:
    """The next-token layer in a file of its own, and dropped: the manifest has a hash of its pages all the same."""
    source, words = with_mtp_alone(tiny, tmp_path / "src"), ("--mtp", "drop", "-q")
    hub.add_repo("me/two", {path.name: path for path in source.iterdir()})
    assert run(env, "convert", source, tmp_path / "here", *words).code == 0
    hub.faults.add(Fault("corrupt", path="/cdn/.*filename=mtp", skip=skip))
    done = run(env, "convert", "me/two", tmp_path / "there", *words, "--json")
    assert len(hub.faults.hits) == 1
    if done.code:  # of the header: it fits no more
        assert (skip, done.json["error"]["code"]) == (0, "bad_header"), done
        return
    recorded = [
        json.loads((tmp_path / out / "kizami.json").read_text())["source_contents"] for out in ("here", "there")
    ]
    assert recorded[0] == recorded[1]


def with_mtp_alone(tiny: Path, folder: Path) -> Path:
    shutil.copytree(tiny, folder)
    mixed = folder / "model-00003-of-00003.safetensors"
    with safe_open(mixed, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.2.")}
    save_file(tensors, mixed, {"format": "pt"})
    save_file(mtp, folder / "mtp.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(mtp, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --------------------------------------------------------------------------------------------- signals, locks and kills


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting_for_a_download(
    hub: LocalHub, env: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    hub.faults.add(Fault("slow", path="/cdn/|/resolve/.*safetensors$", times=999, skip=6, seconds=5))
    with begun(env, "convert", SRC, tmp_path / "out") as child:
        while not (tmp_path / "out.partial").exists():
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        child.send_signal(number)
        sent = time.monotonic()
        child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert time.monotonic() - sent < 10


@pytest.mark.long
def test_the_scratch_folder_of_a_run_at_work_is_left_alone(env: dict[str, str], tmp_path: Path) -> None:
    scratch, out = tmp_path / "out.source", tmp_path / "out"
    for folder in (scratch, out):
        folder.mkdir()
    (out / "mine").write_text("x")
    (scratch / "hub.json").write_text(json.dumps({"repo": SRC, "commit": "0" * 40}))
    (scratch / "contents.jsonl").write_text("")
    with open(scratch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(env, "convert", SRC, out, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "locked")
        assert sorted(os.listdir(scratch)) == ["contents.jsonl", "hub.json", "lock"]
    done = run(env, "convert", SRC, out, "--json")  # that run was killed: what it has left goes
    assert (done.json["error"]["code"], scratch.exists()) == ("out_exists", False)


def test_a_scratch_folder_that_is_half_removed_is_still_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("contents.jsonl", "hub.json", "lock")
    for killed_after in range(4):
        folder = tmp_path / str(killed_after)
        (folder / "models--a--b").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(json.dumps({"repo": "a/b", "commit": "0" * 40}) if name == "hub.json" else "")
        left = [killed_after]

        def counted(path: str, *, dir_fd: int | None = None, left: list[int] = left, unlink: Any = os.unlink) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            unlink(path, dir_fd=dir_fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", counted)
            if killed_after < len(names):
                with pytest.raises(KeyboardInterrupt):
                    remove_scratch(folder)
                assert is_scratch(folder), os.listdir(folder)
            else:
                remove_scratch(folder)
                assert not folder.exists()


@pytest.mark.long
def test_a_refusal_leaves_no_scratch_folder(env: dict[str, str], tmp_path: Path) -> None:
    for words in (("--scratch-limit", "10kB"), ("--set", "routed_experts=int8"), ("--tp", "7")):
        done = run(env, "convert", SRC, tmp_path / "out", *words, "--json")
        assert done.code == 2, words
        assert os.listdir(tmp_path) == ["hub"] or "out.source" not in os.listdir(tmp_path), words


@pytest.mark.parametrize("out", [".", "/", ""])
def test_what_is_no_name_of_a_folder_is_refused_before_the_hub_is_asked(
    hub: LocalHub, env: dict[str, str], out: str
) -> None:
    asked = len(hub.faults.hits)
    done = run(env, "convert", SRC, out, "--json")
    assert done.code == 2, done
    assert done.json["error"]["code"] in ("bad_out", "usage")
    assert len(hub.faults.hits) == asked


@pytest.mark.long
def test_a_run_that_began_from_the_hub_goes_on_whatever_the_cache_has_by_now(
    hub: LocalHub, env: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    words = ("convert", SRC, tmp_path / "out", "--max-shard-size", "100kB", "-q")
    with begun(env, *words) as child:
        while not any((tmp_path / "out.partial").glob("*.safetensors")):
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        child.kill()
    assert not (tmp_path / "out").exists()
    commit = hub.commits(SRC)[-1].oid
    repo = Path(env["HF_HOME"]) / "hub" / "models--zai-org--tiny-fp8"
    shutil.copytree(tiny, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    done = run(env, *words)
    assert (done.code, (tmp_path / "out").exists()) == (0, True), done.err
    assert not (tmp_path / "out.source").exists()
