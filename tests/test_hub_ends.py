"""A server that falls silent, and an upload that takes for ever: kizami waits for neither."""

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from local_hub import LocalHub
from local_hub_faults import Fault

from kizami.cli import hub_source
from kizami.formats.errors import KizamiError
from kizami.formats.hub import client
from kizami.formats.hub.client import Patience
from kizami.formats.hub.mirror import Mirror
from kizami.formats.hub.repository import RemoteFile, Repository

SMALL = ("--max-shard-size", "300KB")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(client, "SILENCE", 0.3)
    client._bound_silence.cache_clear()
    yield
    client._bound_silence.cache_clear()
    close_session()


@pytest.mark.usefixtures("impatient")
def test_a_server_that_never_answers_is_asked_again_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        patience = Patience(on_wait=lambda seconds, error: waits.append(type(error).__name__), tries=2)
        with pytest.raises(KizamiError) as refused:
            Repository.look("org/name", None, patience)
    assert refused.value.code == "hub_unreachable"
    assert waits == ["ReadTimeout"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_conversion_whose_upload_stalls(
    tiny_checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        hub.faults.add(Fault("slow", "PUT", "", times=100, seconds=4))
        words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", "me/tiny")
        with subprocess.Popen(
            [sys.executable, "-m", "kizami.cli", *map(str, words)],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            while not hub.faults.hits and child.poll() is None:
                time.sleep(0.01)
            started = time.monotonic()
            child.send_signal(number)
            _, err = child.communicate(timeout=60)
            took = time.monotonic() - started
    assert child.returncode == 128 + number, err
    assert took < 3.5, "one piece of the upload takes 4"
    assert "run the same command again to resume" in err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["convert", "push"])
def test_a_signal_ends_the_last_commit_whose_upload_stalls(
    demo_checkpoint: Path, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    """And the events have their last line. Two files of the last commit are large: the other thread would be joined."""
    events, out = tmp_path / "events.jsonl", tmp_path / "out"
    source = shutil.copytree(demo_checkpoint, tmp_path / "src")
    for name in ("LICENSE", "NOTICE"):
        (source / name).write_bytes(os.urandom(11 << 20))
    convert = ("convert", source, out)
    with LocalHub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        if command == "push":
            program = [sys.executable, "-m", "kizami.cli", *map(str, convert)]
            subprocess.run(program, env=environment, capture_output=True, check=True)
        words = (
            ("push", out, "me/tiny") if command == "push" else (*convert, "--push-to", "me/tiny", "--events", events)
        )
        hub.faults.add(Fault("slow", "PUT", "", skip=len(list(source.glob("*.safetensors"))), times=100, seconds=30))
        with subprocess.Popen(
            [sys.executable, "-m", "kizami.cli", *map(str, words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            while not any(hit.startswith("slow") for hit in hub.faults.hits) and child.poll() is None:
                time.sleep(0.01)
            started = time.monotonic()
            child.send_signal(number)
            _, err = child.communicate(timeout=60)
            took = time.monotonic() - started
    assert child.returncode == 128 + number, err
    assert took < 5, "one piece of the upload takes 30, and it was 20 seconds"
    if command == "push":
        assert "kizami: interrupted; the same command again sends what is missing" in err
    if command == "convert":
        last = json.loads(events.read_text().splitlines()[-1])
        assert (last["event"], last["code"]) == ("failed", "interrupted")


@pytest.mark.long
@pytest.mark.parametrize("address", ["user:SECRETX@127.0.0.1:abc", "user:SECRETX"])
@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HTTP_PROXY"])
def test_an_address_that_is_none_is_no_bug_of_ours(
    tiny_checkpoint: Path, tmp_path: Path, name: str, address: str
) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        environment |= {name: f"http://{address}", "NO_PROXY": "", "no_proxy": ""}
        pushes = ["convert", str(tiny_checkpoint), str(tmp_path / "out"), "--push-to", "a/b"]
        for words in (["plan", "org/none"], pushes):
            program = [sys.executable, "-m", "kizami.cli", *words]
            done = subprocess.run(program, env=environment, capture_output=True, text=True)
            assert done.returncode == 2, done.stderr
            assert "SECRETX" not in done.stderr + done.stdout
            assert "bug in kizami" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("PUT", "cdn", {"Retry-After": "9999999999999"}),
        ("POST", "objects/batch", {"RateLimit": '"api";r=0;t=99999'}),
        ("GET|HEAD", "resolve/.*/tokenizer_config.json", {"Retry-After": "3600"}),
        ("GET", "me/tiny/resolve/.*/kizami.json", {"Retry-After": "900"}),
    ],
)
def test_a_server_that_wants_a_year_is_given_ten_minutes_and_that_is_told(
    demo_checkpoint: Path, tmp_path: Path, method: str, path: str, headers: dict[str, str]
) -> None:
    """huggingface_hub would sleep that long, in some of its calls, without a word."""
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo("org/tiny", {file.name: file for file in demo_checkpoint.iterdir()})
        hub.add_repo("me/tiny", {"kizami.json": b"{}"} if "kizami.json" in path else {})
        hub.faults.add(Fault("status", method, path, times=99, status=429, headers=headers))
        words = ("convert", "org/tiny", tmp_path / "out", "--push-to", "me/tiny")
        with subprocess.Popen(
            [sys.executable, "-m", "kizami.cli", *map(str, words)],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stderr is not None
            said = next(line for line in child.stderr if "HTTP 429" in line or "error" in line)
            child.send_signal(signal.SIGTERM)
            rest = child.stderr.read()
    assert said == "the Hub gives no answer (HTTP 429): asked again in 10m00s\n"
    assert child.returncode == 143, rest


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": " 300 ", "RateLimit": '"api";r=0;t=12'}, 300),
        ({"RateLimit": '"api"; r=0; t=55'}, 55),
        ({"RateLimit": '"a-b";r=00;t=3, "api";r=0;t=99999'}, 99999),
        ({"Retry-After": "\xb2"}, client.MAX_WAIT),
        ({"RateLimit": '"api";r=3;t=55'}, 0),  # something is left: another limit was hit
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0),
        ({"Retry-After": "-1"}, 0),
    ],
)
def test_a_busy_server_says_how_long(headers: dict[str, str], seconds: float) -> None:
    assert client.told_wait(headers) == seconds


def unsupported() -> Exception:
    made: Exception = client._http_library().UnsupportedProtocol("Request URL is missing an 'http://' protocol.")
    return made


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "hub_error", "answer is none"),
        (lambda: OverflowError("timestamp out of range"), "hub_error", "answer is none"),
        (lambda: UnicodeError("label empty or too long"), "bad_environment", "the address of the Hub"),
        (lambda: UnicodeEncodeError("idna", "a", 0, 1, "label too long"), "bad_environment", "the address of the Hub"),
        (lambda: UnicodeEncodeError("ascii", "\x80", 0, 1, "ordinal"), "bad_environment", "the token, or another"),
        (
            lambda: ValueError("Unknown scheme for proxy URL URL('ftp://x')"),
            "bad_environment",
            "or of a proxy, is none",
        ),
        (unsupported, "bad_environment", "the address of the Hub"),
    ],
)
def test_what_the_library_stumbles_over_is_called_what_it_is(
    error: Callable[[], Exception], code: str, said: str
) -> None:
    with pytest.raises(KizamiError, match=said) as refused, client.as_refusal("me/x"):
        raise error()
    assert refused.value.code == code


@pytest.mark.parametrize("name", ["hub.json", "contents.jsonl"])
def test_a_pipe_in_the_place_of_what_is_kept_of_the_hub_is_refused(
    demo_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """Reading it would never end."""
    (tmp_path / "out.source").mkdir()
    (tmp_path / "out.source/hub.json").write_text('{"repo": "org/tiny", "commit": "0"}')
    (tmp_path / "out.source" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "out.source" / name)
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo("org/tiny", {file.name: file for file in demo_checkpoint.iterdir()})
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        program = [sys.executable, "-m", "kizami.cli", "convert", "org/tiny", str(tmp_path / "out")]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "is not what kizami keeps there" in done.stderr
    assert [path.name for path in (tmp_path / "out.source").iterdir() if path.is_fifo()] == [name]


def test_a_file_that_this_token_may_not_read_is_no_matter_of_the_network(demo_checkpoint: Path, tmp_path: Path) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo("org/tiny", {file.name: file for file in demo_checkpoint.iterdir()})
        hub.faults.add(Fault("status", "GET|HEAD", "resolve/.*/tokenizer_config.json", status=403, times=99))
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        program = [sys.executable, "-m", "kizami.cli", "convert", "org/tiny", str(tmp_path / "out"), "--json"]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "hub_error")
    assert error["message"].startswith("the Hub answers 403")


def test_a_clean_up_that_fails_hides_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that nobody waits for lays a file into the folder that is being removed."""
    tries: list[Path] = []

    def remove(mirror: Mirror) -> None:
        tries.append(mirror.folder)
        if len(tries) < 3:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Mirror, "remove", remove)
    monkeypatch.setattr(hub_source, "REMOVAL_PAUSE", 0)
    mirror = Mirror(Repository("org/tiny", "0" * 40, {}), tmp_path / "out.source", Patience())
    with pytest.raises(KizamiError, match="refused"), hub_source.refusals_leave_nothing(mirror, tmp_path / "out"):
        raise KizamiError("refused", code="hub_error")
    assert len(tries) == 3


@pytest.mark.long
def test_a_limit_that_is_missed_waits_for_no_upload(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The end was said, and Python would wait for the threads of the upload, deaf to signals."""
    with LocalHub(tmp_path / "hub") as hub:
        hub.faults.add(Fault("slow", "PUT", "", times=100, seconds=4))
        words = ("convert", tiny_checkpoint, tmp_path / "out", *SMALL, "--push-to", "me/tiny")
        with subprocess.Popen(
            [sys.executable, "-m", "kizami.cli", *map(str, words), "--max-rel-error", "0.001"],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stderr is not None
            said = next(line for line in child.stderr if "above --max-rel-error" in line)
            started = time.monotonic()
            code = child.wait(60)
            took = time.monotonic() - started
        assert "config.json" not in hub.files("me/tiny")
    assert code == 1, said
    assert took < 3.5, "one piece of the upload takes 4"


@pytest.mark.long
@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_a_header_that_is_refused_waits_for_none_that_does_not_come(
    demo_checkpoint: Path, tmp_path: Path, order: tuple[int, int]
) -> None:
    """Whichever of the two is waited for first. Nothing of the look is left, and the same command is not in its way."""
    refused, silent = (f"model-{number:05d}-of-" for number in order)
    with LocalHub(tmp_path / "hub") as hub:
        hub.add_repo("org/tiny", {path.name: path for path in demo_checkpoint.iterdir()})
        hub.faults.add(Fault("slow", "GET", f"/(resolve|cdn)/.*{silent}", times=100, seconds=30))
        hub.faults.add(Fault("status", "GET", f"/resolve/.*{refused}", times=100, status=404))
        (tmp_path / "temporary").mkdir()
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
        for words in (("plan", "org/tiny"), ("convert", "org/tiny", str(tmp_path / "out"))):
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "kizami.cli", *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 2, done.stderr
            assert time.monotonic() - started < 20, "the silent one takes 30"
            assert "org/tiny: " in done.stderr
            assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []
            assert list((tmp_path / "temporary").iterdir()) == []


def test_what_comes_after_a_refusal_is_not_laid_down(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was removed is not made again by a thread that was waiting for its server."""
    late, gone, entered = Event(), Event(), Event()

    def first(mirror: Mirror, file: RemoteFile, count: int) -> bytes:
        if file.name.startswith("model-00001"):
            entered.wait(10)
            raise KizamiError("refused", code="hub_error")
        entered.set()
        gone.wait(10)
        late.set()
        return (demo_checkpoint / file.name).read_bytes()[:count]

    files = {}
    for path in demo_checkpoint.iterdir():
        data = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        files[path.name] = RemoteFile(path.name, len(data), hashlib.sha256(data).hexdigest(), git)
    repository = Repository("org/tiny", "0" * 40, files)
    mirror = Mirror(repository, tmp_path / "scratch", Patience())
    monkeypatch.setattr(Mirror, "_first", first)
    monkeypatch.setattr(Mirror, "_arrived", lambda self, file, path: shutil.copy(demo_checkpoint / file.name, path))
    with pytest.raises(KizamiError, match="refused"):
        mirror.open()
    shutil.rmtree(tmp_path / "scratch")
    gone.set()
    assert late.wait(10)
    time.sleep(0.2)
    assert not (tmp_path / "scratch").exists()


def test_a_token_that_no_header_can_hold_is_not_shown(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with LocalHub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": "SECRETSECRETX\x0btail"}
        for words in (
            ["plan", "org/none"],
            ["convert", str(tiny_checkpoint), str(tmp_path / "out"), "--push-to", "a/b"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "kizami.cli", *words, "--debug"], env=environment, capture_output=True, text=True
            )
            assert done.returncode == 2
            assert "the token, or another variable of huggingface_hub, has characters that no header" in done.stderr
            assert "SECRETX" not in done.stderr + done.stdout


def test_proxies_that_cannot_be_used_are_no_bug_of_ours(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for setting in ({"HTTPS_PROXY": "socks5://127.0.0.1:9"}, {"HF_ENDPOINT": "http://127.0.0.1@[::bad"}):
        env = {**os.environ, "HF_HOME": str(tmp_path / "home"), **setting}
        done = subprocess.run(
            [sys.executable, "-m", "kizami.cli", "inspect", "org/name"], env=env, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert "hint: " in done.stderr
