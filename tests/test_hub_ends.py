"""A server that falls silent, and an upload that takes for ever: kizami waits for neither."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_hub import LocalHub
from local_hub_faults import Fault

from kizami.formats.errors import KizamiError
from kizami.formats.hub import client
from kizami.formats.hub.client import Patience
from kizami.formats.hub.repository import Repository

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


def test_proxies_that_cannot_be_used_are_no_bug_of_ours(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for setting in ({"HTTPS_PROXY": "socks5://127.0.0.1:9"}, {"HF_ENDPOINT": "http://127.0.0.1@[::bad"}):
        env = {**os.environ, "HF_HOME": str(tmp_path / "home"), **setting}
        done = subprocess.run(
            [sys.executable, "-m", "kizami.cli", "inspect", "org/name"], env=env, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert "hint: " in done.stderr
