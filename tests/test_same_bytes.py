"""The same input gives the same bytes: whoever runs it, where, when, on which CPU, in whatever order threads run."""

import gc
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_cases
import pytest
from case_runner import kizami
from cli_fixtures import on_terminal
from conditions import CONDITIONS, dirty_memory

from kizami.formats.checkpoint import Checkpoint
from kizami.quantize import pipeline, shard, tensor
from kizami.quantize.pipeline import ShardDone
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

SHARDS = ("--max-shard-size", "300KB")  # about ten
NOT_ASCII = "docs/größe ı.txt"
Tree = dict[str, str]  # name -> SHA-256, of a folder ""


def tree(folder: Path) -> Tree:
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        found[name] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def different(found: Tree, wanted: Tree) -> list[str]:
    return sorted(name for name in found | wanted if found.get(name) != wanted.get(name))


def made_checkpoint() -> make_cases.Checkpoint:
    """TINY with an expert that is BF16, letters beyond ASCII, and a folder of side files."""
    made = make_cases.tiny()
    for part, shape in (("gate_proj", (128, 256)), ("up_proj", (128, 256)), ("down_proj", (256, 128))):
        module = f"model.layers.1.mlp.experts.0.{part}"
        shard_of = made.find(f"{module}.weight")
        del shard_of[f"{module}.weight_scale_inv"]
        shard_of |= make_cases.normal(f"{module}.weight", *shape)
    made.rename(lambda name: name.replace("shared_head.norm", "shared_head.größe"))
    made.side |= {NOT_ASCII: b"\xff\x00", "docs/deep/er.txt": b"", "b.txt": b"b\r\n", "a.txt": b"a"}
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_checkpoint().save(tmp_path_factory.mktemp("source") / "Tiny-FP8")


@pytest.fixture(scope="module")
def clean(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """One worker, in line."""
    return converted(source, tmp_path_factory.mktemp("clean") / "out", "--workers", "1")


@pytest.fixture(scope="module")
def planned(source: Path) -> dict[str, Any]:
    return plan_of(source)


def converted(source: Path | str, out: Path, *options: str) -> Tree:
    said = kizami("convert", source, out, *SHARDS, *options)
    assert said.code == 0, said.stderr
    return tree(out)


def plan_of(source: Path | str) -> dict[str, Any]:
    said = kizami("plan", source, *SHARDS, "--json")
    assert said.code == 0, said.stderr
    return without_estimate(json.loads(said.stdout))


def without_estimate(plan: dict[str, Any]) -> dict[str, Any]:
    """Time and memory are those of this machine."""
    return {key: value for key, value in plan.items() if key != "estimate"}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval, thresholds, mask = sys.getswitchinterval(), gc.get_threshold(), os.umask(0o022)
    os.umask(mask)
    yield
    sys.setswitchinterval(interval)
    gc.enable()
    gc.set_threshold(*thresholds)
    os.umask(mask)
    time.tzset()


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_worker_count_changes_no_byte(source: Path, clean: Tree, tmp_path: Path, workers: int) -> None:
    assert different(converted(source, tmp_path / "out", "--workers", str(workers)), clean) == []


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_byte_depends_on(
    source: Path,
    clean: Tree,
    planned: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    condition: str,
) -> None:
    with monkeypatch.context() as patch:
        CONDITIONS[condition](patch)
        found = converted(source, tmp_path / "out", "--workers", "3")
        plan = plan_of(source)
    assert different(found, clean) == []
    assert plan == planned


def test_dirty_memory_would_be_seen(source: Path, clean: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the condition above is worth: a piece that is not filled shows."""
    produce = shard.produce

    def unfilled(piece: tensor.Piece, *others: Any) -> Any:
        made, memory = produce(piece, *others), others[3]
        (name, data), *rest = made.chunks
        return tensor.Produced(((name, memory.empty(data.shape, data.dtype)), *rest), made.sums)

    with monkeypatch.context() as patch:
        dirty_memory(patch)
        patch.setattr(shard, "produce", unfilled)
        found = converted(source, tmp_path / "out", "--workers", "1")
    assert sum(name.endswith(".safetensors") for name in different(found, clean)) > 5


@pytest.mark.parametrize("mask", [0, 0o022, 0o077], ids=oct)
def test_the_umask_changes_modes_and_no_byte(source: Path, clean: Tree, tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    assert different(converted(source, tmp_path / "out"), clean) == []
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.long
def test_no_byte_depends_on_how_paths_are_spelled(
    source: Path, clean: Tree, planned: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "there").symlink_to("elsewhere")
    for folder, src, out in (
        (source.parent, source.name, f"{tmp_path}/elsewhere/a"),
        (source, ".", f"{tmp_path}/elsewhere/b/"),
        (source / "docs", "..", f"{tmp_path}/there/../elsewhere/./c"),
        (tmp_path, f"{source}/", "elsewhere/d"),
        (tmp_path, "link", "there/e"),
        (tmp_path / "there", f"{source}/docs/deep/../..", "f"),
    ):
        monkeypatch.chdir(folder)
        said = kizami("convert", src, out, *SHARDS)
        assert said.code == 0, said.stderr
        assert different(tree(Path(out)), clean) == [], (folder, src, out)
        assert plan_of(src) == planned, (folder, src)


def test_a_hub_snapshot_is_known_however_it_is_spelled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub/models--org--Tiny-FP8/snapshots/c0ffee"
    shutil.copytree(source, snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    usual = converted(snapshot, tmp_path / "usual")
    origin = json.loads((tmp_path / "usual/kizami.json").read_bytes())["origin"]
    assert origin == {"repo": "org/Tiny-FP8", "revision": "c0ffee"}
    monkeypatch.chdir(snapshot)
    for number, src in enumerate((tmp_path / "link", ".", f"{snapshot}/docs/..", f"{tmp_path}/hub/../link/")):
        assert different(converted(src, tmp_path / f"out{number}"), usual) == [], src


def test_a_copy_of_the_source_gives_the_same_bytes(source: Path, clean: Tree, tmp_path: Path) -> None:
    copy = tmp_path / "Tiny-FP8"
    shutil.copytree(source, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert different(converted(copy, tmp_path / "out"), clean) == []
    for path in (copy / "docs", copy / "docs/deep"):
        path.chmod(0o700)


def test_talk_and_variables_change_no_byte(
    source: Path, clean: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("--quiet", "--verbose", "--json", "--debug"):
        assert different(converted(source, tmp_path / option, option), clean) == [], option
    monkeypatch.setenv("KIZAMI_MAX_SHARD_SIZE", SHARDS[1])
    monkeypatch.setenv("KIZAMI_WORKERS", "2")
    monkeypatch.setenv("KIZAMI_METHOD", "search")
    monkeypatch.setenv("KIZAMI_GROUP_SIZE", "32")
    assert kizami("convert", source, tmp_path / "variables").code == 0
    assert different(tree(tmp_path / "variables"), clean) == []


def test_an_interrupted_run_that_is_resumed_gives_the_same_bytes(source: Path, clean: Tree, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=300_000), Method())

    def stop_after(shards: int) -> Callable[[object], None]:
        def listen(event: object) -> None:
            if isinstance(event, ShardDone) and event.done >= shards:
                raise KeyboardInterrupt

        return listen

    for shards, workers in ((2, 1), (5, 3)):
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(plan, checkpoint, tmp_path / "out", workers=workers, on_event=stop_after(shards))
    assert different(converted(source, tmp_path / "out"), clean) == []


def test_the_order_of_keys_in_the_source_changes_no_tensor(source: Path, clean: Tree, tmp_path: Path) -> None:
    copy = tmp_path / "Tiny-FP8"
    shutil.copytree(source, copy)
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_bytes())
    content["weight_map"] = dict(sorted(content["weight_map"].items(), reverse=True))
    make_cases.put_json(index, dict(reversed(content.items())))
    assert different(converted(copy, tmp_path / "index"), clean) == []
    for path in copy.glob("*.safetensors"):
        header = make_cases.read_header(path)
        old = make_cases.header_bytes(header)
        new = make_cases.header_bytes(dict(reversed(header.items())))
        assert path.read_bytes().startswith(old)
        path.write_bytes(new + path.read_bytes()[len(old) :])
    said = different(converted(copy, tmp_path / "header"), clean)
    assert said == ["README.md", "kizami.json"]  # which tell the hashes of the source's headers


# -------------------------------------------------------------------------------------------------- other processes

CONVERT = """
import os, sys
from kizami.cli.app import main
source, out, mask, *options = sys.argv[1:]
os.umask(int(mask, 8))
for words in (["plan", source, "-o", out + ".json"], ["convert", source, out]):
    try:
        main([*words, *options])
    except SystemExit as e:
        if e.code:
            raise
"""


def in_process(
    source: Path, out: Path, environment: dict[str, str], *flags: str, cwd: Path | None = None
) -> tuple[Tree, dict[str, Any]]:
    """OUT and `plan -o`, made by another interpreter."""
    command = [sys.executable, *flags, "-c", CONVERT, str(source), str(out), "022", *SHARDS]
    done = subprocess.run(command, env=os.environ | environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tree(out), without_estimate(json.loads(Path(f"{out}.json").read_bytes()))


@pytest.fixture(scope="module")
def plan_document(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert kizami("plan", source, *SHARDS, "-o", path).code == 0
    return without_estimate(json.loads(path.read_bytes()))


def numpy_features() -> str:
    """What this CPU has beyond the least that NumPy asks for."""
    from numpy._core import _multiarray_umath as umath

    return " ".join(name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name])


THREADS = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_no_byte_depends_on_the_environment(
    source: Path, clean: Tree, plan_document: dict[str, Any], tmp_path: Path, number: int
) -> None:
    for name in ("home", "tmp", "cwd"):
        (tmp_path / name).mkdir()
    kernels = {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR") or str(kernel_root())}
    environment, flags = (
        (
            dict.fromkeys(THREADS, "1")
            | {"PYTHONHASHSEED": "0", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONUTF8": "1"}
            | {"HOME": str(tmp_path / "home"), "USER": "nobody", "LOGNAME": "nobody", "TMPDIR": str(tmp_path / "tmp")}
            | {
                "COLUMNS": "20",
                "NO_COLOR": "1",
                "MALLOC_PERTURB_": "165",
                "NPY_DISABLE_CPU_FEATURES": numpy_features(),
            },
            ["-O"],
        ),
        (
            dict.fromkeys(THREADS, "2")
            | {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONMALLOC": "debug"}
            | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "MALLOC_PERTURB_": "90", "KIZAMI_WORKERS": "3"},
            [],
        ),
    )[number]
    out, plan = in_process(source, tmp_path / "out", kernels | environment, *flags, cwd=tmp_path / "cwd")
    assert different(out, clean) == []
    assert plan == plan_document
    assert not any(list((tmp_path / name).iterdir()) for name in ("home", "tmp", "cwd"))


def kernel_root() -> Path:
    from kizami.quantize.kernels import jit

    root = jit._root()
    assert root is not None
    return root


def test_a_terminal_changes_no_byte(source: Path, clean: Tree, tmp_path: Path) -> None:
    code, said = on_terminal("convert", source, tmp_path / "out", *SHARDS, columns=30)
    assert code == 0, said
    assert different(tree(tmp_path / "out"), clean) == []


@pytest.mark.long
def test_another_cpu_changes_no_byte(
    source: Path, clean: Tree, plan_document: dict[str, Any], tmp_path: Path, generic_cpu: dict[str, str]
) -> None:
    old = generic_cpu | {"NPY_DISABLE_CPU_FEATURES": numpy_features()}
    out, plan = in_process(source, tmp_path / "out", old)
    assert different(out, clean) == []
    assert plan == plan_document


@pytest.mark.slow
def test_without_the_compiler_not_a_byte_is_another(tmp_path: Path) -> None:
    source = make_cases.mini(3, 64).save(tmp_path / "mini")
    compiled = converted(source, tmp_path / "compiled")
    out, _ = in_process(source, tmp_path / "out", {"NUMBA_DISABLE_JIT": "1"})
    assert different(out, compiled) == []


# -------------------------------------------------------------------------------------------------- file names

NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.long
@pytest.mark.slow
def test_file_names_are_never_misread(source: Path, clean: Tree, tmp_path: Path) -> None:
    """Where names are not taken as UTF-8, those beyond ASCII are refused, and nothing else changes."""
    made = made_checkpoint()
    del made.side[NOT_ASCII]
    plain = made.save(tmp_path / "Tiny-FP8")
    out, _ = in_process(plain, tmp_path / "out", NO_UTF8)
    assert different(out, converted(plain, tmp_path / "usual")) == []
    done_before = tmp_path / "done"
    converted(source, done_before)
    for words in (["convert", source, tmp_path / "never"], ["verify", done_before]):
        command = [sys.executable, "-m", "kizami.cli", *map(str, words)]
        said = subprocess.run(command, env=os.environ | NO_UTF8, capture_output=True, text=True, check=False)
        assert said.returncode == 2
        assert "letters beyond ASCII" in said.stderr
        assert "PYTHONUTF8=1" in said.stderr
    assert not (tmp_path / "never").exists()
