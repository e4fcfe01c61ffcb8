"""Checkpoints that several tests share. All are made here or shipped; nothing is downloaded."""

import signal
from collections.abc import Callable
from pathlib import Path

import make_cases
import pytest


@pytest.fixture(autouse=True)
def interruptible() -> None:
    """Children inherit ignored signals: from a shell's background job, and from a test that ran `main` in this process
    (which ignores them at its very end). Tests of Ctrl-C need them as they are in a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped tiny trained GLM-5-style FP8 checkpoint, unpacked. Tests must not write into it."""
    from kizami.cli.demo import unpack

    return unpack(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3-style FP8 checkpoint of 2.7 MB: dense, MoE and MTP layer, 3 shards. Read only."""
    return make_cases.tiny().save(tmp_path_factory.mktemp("tiny") / "src")


@pytest.fixture
def save(tmp_path: Path) -> Callable[[make_cases.Checkpoint], Path]:
    """Saves a made checkpoint into this test's own folder."""
    return lambda checkpoint: checkpoint.save(tmp_path / "src")
