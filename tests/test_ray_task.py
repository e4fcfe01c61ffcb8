"""What a Ray task looks at before it converts a shard, and what `--executor ray` refuses: no Ray is needed for that."""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import faults
import pytest
from cli_fixtures import Run, files_of

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.fingerprint import Contents
from kizami.quantize.plan import PLAN_FORMAT, Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run import ray_task
from kizami.quantize.run.job_folder import attempted
from kizami.quantize.run.journal import Journal, identity_of
from kizami.quantize.run.ray_task import Answer, Parcel, convert_one, journal_begin
from kizami.quantize.settings import Method, Policy

OPTIONS = ("--max-shard-size", "132KB", "--method", "minmax")


class Driver:
    """What the driver sends, as `quantize/run/on_ray.py` does."""

    def __init__(self, source: Path, partial: Path) -> None:
        self.checkpoint = Checkpoint.open(source)
        self.plan: Plan = build_plan(self.checkpoint, Policy(max_shard_bytes=132_000), Method("minmax"))
        self.contents = contents = Contents.of(self.checkpoint).stated
        partial.mkdir(parents=True)
        Journal.open(partial, identity_of(self.plan, contents)).close()
        self.errand: dict[str, Any] = {
            "version": version("kizami"),
            "plan_format": PLAN_FORMAT,
            "source": str(self.checkpoint.root),
            "partial": str(partial),
            "journal": journal_begin(partial),
            "stats": None,
            "workers": 1,
            "max_memory": None,
        }

    def asked(self, number: int, **changed: Any) -> Answer:
        parcel = Parcel.of(self.plan, self.checkpoint, self.plan.shards[number - 1], self.contents)
        return convert_one(self.errand | changed, pickle.dumps(parcel))

    def refused(self, number: int = 1, **changed: Any) -> KizamiError:
        answer = self.asked(number, **changed)
        assert answer.finished is None
        assert answer.refusal is not None
        assert answer.refusal.message.startswith("node here: ")
        return answer.refusal


@pytest.fixture(autouse=True)
def a_process_that_has_done_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray_task, "_here", lambda: "node here")
    ray_task._SEEN.clear()
    yield
    ray_task._SEEN.clear()


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(faults.small().save(tmp_path / "src"), tmp_path / "out.partial")


def test_a_task_leaves_its_shard_under_the_name_of_the_attempt(driver: Driver, tmp_path: Path) -> None:
    answers = [driver.asked(2) for _ in range(2)]
    names = [answer.finished.attempt for answer in answers if answer.finished and answer.finished.attempt]
    assert len(set(names)) == 2
    assert {attempted(name) for name in names} == {"model-00002-of-00003.safetensors"}
    files = files_of(tmp_path / "out.partial")
    assert {name for name in files if "model-" in name} == set(names)
    assert [files[name] for name in names] == [answer.finished.sha256 for answer in answers if answer.finished]


def test_other_times_of_the_source_are_fine(driver: Driver) -> None:
    """Another machine may see other ones."""
    for file in driver.checkpoint.headers:
        path = driver.checkpoint.path(file)
        shutil.copy(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)
    assert driver.asked(1).finished is not None


def test_a_node_without_the_source_says_so(driver: Driver, tmp_path: Path) -> None:
    refusal = driver.refused(source=str(tmp_path / "elsewhere"))
    assert refusal.code == "not_shared"
    assert "does not see SRC" in refusal.message
    assert refusal.file == str(tmp_path / "elsewhere")


def test_a_node_without_out_says_so(driver: Driver, tmp_path: Path) -> None:
    assert "does not see OUT.partial" in driver.refused(partial=str(tmp_path / "elsewhere")).message


def test_a_folder_of_the_same_name_is_not_the_same_folder(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    refusal = driver.refused(partial=str(tmp_path / "local"))
    assert (refusal.code, "without the journal of this job" in refusal.message) == ("not_shared", True)
    assert list((tmp_path / "local").iterdir()) == []


def test_another_file_under_the_same_name_is_seen(driver: Driver) -> None:
    path = driver.checkpoint.path(next(iter(driver.checkpoint.headers)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # among the sampled pages, always
    path.write_bytes(data)
    refusals = [driver.refused(number) for number in range(1, 4) if path.name in sources(driver, number)]
    assert {refusal.code for refusal in refusals} == {"not_shared"}
    assert {refusal.file for refusal in refusals} == {path.name}


def sources(driver: Driver, number: int) -> set[str]:
    return {info.file for step in driver.plan.shards[number - 1].steps for info in step.sources}


def test_another_version_is_refused_before_anything_of_it_is_read(driver: Driver) -> None:
    answer = convert_one(driver.errand | {"version": "0.0.1"}, b"what only that version understands")
    assert answer.refusal is not None
    assert answer.refusal.code == "other_version"
    assert f"has kizami {version('kizami')} (plans of" in answer.refusal.message
    assert "and the driver 0.0.1" in answer.refusal.message


def test_code_that_makes_other_bytes_of_a_plan_is_refused(driver: Driver) -> None:
    assert driver.refused(plan_format=PLAN_FORMAT + 1).code == "other_version"


def test_a_file_that_changes_after_it_was_seen_is_refused(driver: Driver) -> None:
    assert driver.asked(1).finished is not None
    for file in sources(driver, 1):
        driver.checkpoint.path(file).touch()
    assert driver.refused(1).code == "source_changed"


def test_a_parcel_is_of_one_shard(driver: Driver) -> None:
    parcel = Parcel.of(driver.plan, driver.checkpoint, driver.plan.shards[1], driver.contents)
    assert parcel.plan.steps == driver.plan.shards[1].steps
    assert len(pickle.dumps(parcel)) < len(pickle.dumps((driver.plan, driver.checkpoint))) / 2


# ------------------------------------------------------------------------------------------------------- command lines


def test_without_ray_the_error_says_how_to_install_it(
    tmp_path: Path, kizami: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source = faults.small().save(tmp_path / "src")
    done = kizami("convert", source, tmp_path / "out", *OPTIONS, "--executor", "ray")
    assert done.code == 2
    assert "needs Ray, which is not installed. hint: pip install 'kizami[ray]'" in done.err
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--executor", "ray", "--shards", "1/3"), "--shards with --executor"),
        (("--executor", "ray", "--push-to", "me/x", "--delete-pushed"), "--executor with --delete-pushed"),
        (("--executor", "ray", "--engine", "llmcompressor", "--method", "gptq"), "--executor with --engine"),
        (("--ray-address", "auto"), "--ray-address is for --executor ray"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, kizami: Run, words: tuple[str, ...], said: str) -> None:
    done = kizami("convert", tmp_path, tmp_path / "out", *words)
    assert (done.code, said in done.err) == (2, True), done.err


def test_no_option_but_executor_ray_imports_ray() -> None:
    code = "import kizami.cli.convert, kizami.cli.executor_options as x, sys\nx.Where(None, 'local', None, 1).made()\n"
    code += "import kizami.quantize.pipeline, kizami.quantize.run.on_ray\nprint('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
