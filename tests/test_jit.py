"""Compiled or not, on this CPU or another: the same results; and where compiled code is kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kizami.quantize.kernels import jit

SCRIPT = """
import hashlib, sys
import numpy as np
from kizami.quantize.calibrated.column_weights import integer_weights
from kizami.quantize.fp8 import to_fp8_blocks
from kizami.quantize.kernels.unpack import unpack_rows
from kizami.quantize.linear import quantize_linear, dequantize_rows
from kizami.quantize.settings import Method
from kizami.quantize.unpack import to_bf16
codes = np.random.default_rng(5).integers(0, 0x7F, (3, 128)).astype(np.uint8)
codes[1, 32:64] = 0x80
scale = np.array([[1.5], [0.3]], np.float32)
digest = hashlib.sha256()
h = np.exp(2 * np.random.default_rng(8).standard_normal(128))
h[64:80] = 0
for method in (
    Method("minmax"), Method("search"), Method("search", "positive", 0.5), Method("weighted"),
    Method("weighted", "positive", 0.5),
):
    weights = integer_weights(h, 32) if method.name == "weighted" else None
    for source in ((codes, scale, (2, 128)), (codes.astype(np.float32) / 7, None, None)):
        made = quantize_linear(*source, 32, method, weights=weights, h=None if weights is None else h)
        digest.update(made.packed.tobytes() + made.scale.tobytes() + repr(made.sums).encode())
digest.update(dequantize_rows(codes, scale, (2, 128), 0).tobytes())
values = np.random.default_rng(6).standard_normal((3, 141)).astype(np.float32)
values[1] *= np.float32(1e-4)
made = to_fp8_blocks(values)
digest.update(made.codes.tobytes() + made.scale.tobytes() + repr(made.sums).encode() + to_bf16(values).tobytes())
unpacked = np.empty((3, 128), np.float32)
unpack_rows(np.random.default_rng(7).integers(0, 2**32, (3, 16), np.uint32), values[:, :4].copy(), unpacked)
digest.update(unpacked.tobytes())
print(digest.hexdigest())
"""


def run(**environment: str) -> str:
    drop = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def usual() -> str:
    return run(NUMBA_CACHE_DIR=str(jit._root()), NUMBA_DISABLE_JIT="0")


def test_without_the_compiler_results_are_the_same(usual: str) -> None:
    assert run(NUMBA_DISABLE_JIT="1") == usual


@pytest.mark.long
def test_another_cpu_gives_the_same_bytes_and_figures(usual: str, generic_cpu: dict[str, str]) -> None:
    assert run(**generic_cpu) == usual


def folder_seen(**environment: str) -> str:
    drop = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    code = (
        "from kizami.quantize.kernels import jit, rows; import numpy as np; from numba import config\n"
        "before = config.CACHE_DIR\n"
        "assert rows.round_bf16(np.float32(1.0)) == 1 and config.CACHE_DIR == before\n"
        "print(jit.cache_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.long
def test_compiled_code_goes_to_the_users_cache_and_nowhere_else(tmp_path: Path) -> None:
    home, xdg, numba_dir, blocked = (tmp_path / name for name in ("home", "xdg", "numba", "blocked"))
    home.mkdir()
    blocked.write_text("a file, not a folder")
    assert folder_seen(HOME=str(home)).startswith(str(home / ".cache" / "kizami" / "numba-"))
    assert folder_seen(HOME=str(home), XDG_CACHE_HOME=str(xdg)).startswith(str(xdg / "kizami" / "numba-"))
    assert folder_seen(XDG_CACHE_HOME=str(xdg), NUMBA_CACHE_DIR=str(numba_dir)).startswith(str(numba_dir / "kizami"))
    for folder in (home / ".cache", xdg, numba_dir):
        assert list(folder.rglob("rows.round_bf16*.nbi"))
    assert folder_seen(HOME=str(blocked)) == "None"  # as in a read-only container: compiled, not kept
    package = Path(jit.__file__).parent
    assert not [*package.rglob("*.nbi"), *package.rglob("*.nbc")]


@pytest.mark.long
def test_a_damaged_cache_is_compiled_anew(tmp_path: Path) -> None:
    first = folder_seen(NUMBA_CACHE_DIR=str(tmp_path))
    entries = list(Path(first).rglob("*.nb?"))
    assert entries
    for keep in (20, 0):
        for entry in entries:
            entry.write_bytes(entry.read_bytes()[:keep])
        assert folder_seen(NUMBA_CACHE_DIR=str(tmp_path)) == first
        assert all(entry.stat().st_size > 20 for entry in entries)  # and is whole again


READ_ONLY = """
import errno, os, tempfile
def refuse(*args, **options):
    raise OSError(errno.EROFS, "Read-only file system")
tempfile.TemporaryFile = os.utime = refuse  # for root, permissions are no obstacle
from kizami.quantize.kernels import jit, rows
import numpy as np
assert rows.round_bf16(np.float32(1.0)) == 1
print(jit.cache_folder(), sum(rows.round_bf16.stats.cache_hits.values()))
"""


@pytest.mark.long
def test_a_filled_cache_that_cannot_be_written_to_is_used(tmp_path: Path) -> None:
    filled = folder_seen(NUMBA_CACHE_DIR=str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def read_only() -> list[str]:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", READ_ONLY]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert read_only() == [filled, "1"]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in tmp_path.rglob("*.nb?"):
        path.unlink()
    assert read_only() == ["None", "0"]


def test_a_new_cache_replaces_those_of_versions_long_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_root", lambda: tmp_path)
    long_ago = time.time() - jit.UNUSED_SECONDS - 60
    unused, used, strange = (
        tmp_path / "kizami" / name for name in ("numba-" + 16 * "0", "numba-" + 16 * "1", "numba-x")
    )
    link, elsewhere = tmp_path / "kizami" / ("numba-" + 16 * "2"), tmp_path / "elsewhere"
    for folder in (unused, used, strange, elsewhere):
        folder.mkdir(parents=True)
        (folder / "kernel.nbi").write_bytes(b"")
    link.symlink_to(elsewhere)
    for path in (unused, strange, elsewhere, link):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    ours = jit.cache_folder()
    assert ours is not None
    assert not unused.exists()
    assert all((folder / "kernel.nbi").exists() for folder in (used, strange, elsewhere))
    for path in (ours, used):
        os.utime(path, (long_ago, long_ago))
    assert jit.cache_folder() == ours
    assert used.exists()  # nothing is removed but for a new one
    assert ours.stat().st_mtime > long_ago  # and every use is seen


WARM = """
import numpy as np
from kizami.quantize.kernels import methods, rows, scales, survey, weighted
from kizami.quantize.linear import dequantize_rows, quantize_linear, warm_up
from kizami.quantize.settings import Method
def compiled():
    modules = (methods, rows, scales, survey, weighted)
    return {name: len(f.signatures) for m in modules for name, f in vars(m).items() if hasattr(f, "signatures")}
warm_up(Method("weighted"), 32)
warm_up(Method("minmax"), 32)
before = compiled()
codes = np.full((70, 256), 0x38, np.uint8)
weights = np.ones(256, np.int64)
for method in (
    Method("minmax"), Method("signed"), Method(), Method("search", "positive", 0.5), Method("weighted"),
    Method("weighted", "positive", 0.5),
):
    more = {"weights": weights} if method.name == "weighted" else {}
    for g in (32, 128):
        quantize_linear(codes, np.ones((1, 2), np.float32), (128, 128), g, method, **more)
        quantize_linear(codes, np.ones((70, 1), np.float32), (1, 256), g, method, **more)
        quantize_linear(codes, np.ones((5, 16), np.float32), (16, 16), g, method, **more)
        quantize_linear(codes.astype(np.uint16), None, None, g, method, **more)
        quantize_linear(codes.astype(np.float16), None, None, g, method, **more)
        quantize_linear(codes.astype(np.float32), None, None, g, method, **more)
dequantize_rows(codes[3:], np.ones((5, 16), np.float32), (16, 16), 3)
assert before == compiled(), {k: v for k, v in compiled().items() if v != before.get(k)}
assert before["search_rows"] == before["weighted_rows"] == 1
"""


def test_warm_up_leaves_nothing_to_compile() -> None:
    done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
