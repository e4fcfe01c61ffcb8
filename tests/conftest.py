"""Checkpoints that several tests share, and the rows of docs/faults.md. All checkpoints are made here or shipped;
nothing is downloaded."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import faults_table
import gptq_fixtures
import make_cases
import pytest
from cli_fixtures import Run, in_this_process, process

THE_LAST = "test_the_table_of_faults_is_that_of_this_run"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-faults-table", action="store_true", help="write docs/faults.md from this run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == THE_LAST)


@pytest.fixture
def fault_row(request: pytest.FixtureRequest) -> Callable[[str, int | str, str], None]:
    """Adds a row (fault, number of points, outcome) to docs/faults.md: see faults_table.py."""

    def add(fault: str, points: int | str, outcome: str) -> None:
        faults_table.ROWS.append(faults_table.Row(fault, str(points), outcome, request.function.__name__))

    return add


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
def demo_stats(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> gptq_fixtures.Made:
    """STATS of random inputs for it, with those of all tokens kept. Read only."""
    return gptq_fixtures.make_stats(demo_checkpoint, tmp_path_factory.mktemp("stats") / "STATS")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3-style FP8 checkpoint of 2.7 MB: dense, MoE and MTP layer, 3 shards. Read only."""
    return make_cases.tiny().save(tmp_path_factory.mktemp("tiny") / "src")


@pytest.fixture(scope="session")
def generic_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose kernels are compiled for the least of CPUs. Kept: that takes 10 seconds."""
    kept = str(tmp_path_factory.mktemp("generic"))
    return {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": kept}


@pytest.fixture(scope="session")
def converted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished output of the tiny checkpoint. Read only."""
    out = tmp_path_factory.mktemp("converted") / "out"
    done = process("convert", tiny_checkpoint, out)
    assert done.code == 0, done.err
    return out


@pytest.fixture
def kizami(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line, in this process."""
    yield from in_this_process(capsys)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[make_cases.Checkpoint], Path]:
    """Saves a made checkpoint into this test's own folder."""
    return lambda checkpoint: checkpoint.save(tmp_path / "src")
