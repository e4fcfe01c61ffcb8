"""The wheel holds every module and the demo checkpoint, and runs without the repository."""

import hashlib
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("quantize", "formats", "calibration", "cli")
ARCHIVE = ROOT / "cli" / "tiny-glm-fp8.tar.xz"


def config() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def code_files() -> set[Path]:
    return {path.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")}


def test_every_code_folder_is_mapped() -> None:
    tool = config()["tool"]["setuptools"]
    assert {path.parent for path in code_files()} == {Path(folder) for folder in tool["package-dir"].values()}
    assert set(tool["packages"]) == set(tool["package-dir"])
    for name, folder in tool["package-dir"].items():
        assert name == "kizami." + folder.replace("/", ".")
        assert (ROOT / folder / "__init__.py").exists()
        assert (ROOT / folder / "py.typed").exists()


def test_version_is_the_one_in_pyproject() -> None:
    assert version("kizami") == config()["project"]["version"]


def test_the_archive_is_small_and_holds_only_plain_files_of_one_folder() -> None:
    assert ARCHIVE.stat().st_size < 10_000_000
    with tarfile.open(ARCHIVE) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert all(member.isreg() or member.isdir() for member in members)
    assert {member.name.split("/")[0] for member in members} == {"tiny-glm-fp8"}
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in members} == {
        (0, 0, "", "", 0)
    }


def test_no_file_of_the_repository_is_too_large_for_git() -> None:
    listed = subprocess.run(["git", "ls-files", "--cached"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert {name for name, size in sizes.items() if size >= 10_000_000} == set()


@pytest.mark.long
def test_wheel_holds_every_file_and_runs_alone(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)  # sdist, then the wheel from it
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    assert {path.relative_to(site / "kizami") for path in site.rglob("*.py")} == code_files()
    assert sha256(site / "kizami" / "cli" / ARCHIVE.name) == sha256(ARCHIVE)
    sample = ROOT / "calibration" / "data" / "sample"
    packed_sample = {
        path.name: sha256(path) for path in (site / "kizami" / "calibration" / "data" / "sample").iterdir()
    }
    assert packed_sample == {path.name: sha256(path) for path in sample.iterdir()}
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import kizami.cli.app as a; print(a.__file__); a.main()"
    out = run(sys.executable, "-I", "-c", code, site, "--help", cwd=tmp_path)
    assert str(site) in out
    assert "inspect" in out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
