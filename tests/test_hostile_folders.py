"""Folders made to do harm: where their links lead, which names they take, how many and how deep they are."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from case_runner import Said, assert_converted, assert_mentions, assert_refused, error_object, kizami
from hostile_checkpoint import ESCAPES, MARKUP, harmful
from make_cases import shard_name, tiny
from output_oracle import contents, parse_json

from kizami.formats import side_files
from kizami.formats.strict_json import dump_json
from kizami.quantize.manifest import self_hash

# ---------------------------------------------------------------- doors out of the folder


def link_to(source: Path, name: str, target: Path | str) -> Path:
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(target)
    return source


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", shard_name(1, 3), shard_name(3, 3)])
@pytest.mark.parametrize(
    "way", ["a file", "through a folder", "twice", "a loop", "a folder itself", "a pipe", "/dev/zero", "/proc"]
)
def test_what_the_checkpoint_is_made_of_never_comes_from_outside(tmp_path: Path, name: str, way: str) -> None:
    """Whatever would have been there, a right file included: refused at once, and nothing is written."""
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    outside = tmp_path / "outside"
    outside.mkdir()
    (source / name).rename(outside / name)
    os.mkfifo(outside / "pipe")
    (source / "door").symlink_to("../outside")
    target = {
        "a file": f"../outside/{name}", "through a folder": f"door/{name}", "twice": "step", "a loop": name,
        "a folder itself": ".", "a pipe": "../outside/pipe", "/dev/zero": "/dev/zero", "/proc": "/proc/self/environ",
    }[way]  # fmt: skip
    (source / "step").symlink_to(outside / name)
    link_to(source, name, target)
    for words in (["inspect", source], ["plan", source], ["convert", source, out]):
        assert_refused(kizami(*words), [name])
    code = error_object(kizami("convert", source, out, "--json"))["code"]
    expected = {"a loop": "dangling_link", "a folder itself": "not_a_file"}.get(way, "outside_folder")
    assert code == expected
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize("way", ["a file", "through a folder", "/proc", "a pipe"])
def test_a_readme_from_outside_is_not_read(tmp_path: Path, way: str) -> None:
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "README.md").write_text("---\nlicense: secret\n---\n")
    os.mkfifo(tmp_path / "pipe")
    (source / "door").symlink_to("../outside")
    targets = {"a file": "../outside/README.md", "through a folder": "door/README.md", "/proc": "/proc/self/environ"}
    link_to(source, "README.md", targets.get(way, "../pipe"))
    assert_converted(kizami("convert", source, out), source, out)
    card = (out / "README.md").read_text()
    assert "secret" not in card
    assert "license" in card.split("add to the lines at the top")[0], "the card says that it is not known"


def test_files_that_a_name_may_share_are_read(tmp_path: Path) -> None:
    """Links inside the folder, and hard links: a second name of a file that its owner has put there."""
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    (source / "data").mkdir()
    for name in ("config.json", "README.md", "tokenizer.json", shard_name(2, 3)):
        (source / name).rename(source / "data" / name)
        (source / name).symlink_to(f"data/../data/{name}")
    os.link(source / shard_name(1, 3), tmp_path / "twin")
    plain = tiny().save(tmp_path / "plain" / "src")
    assert_converted(kizami("convert", source, out), source, out)
    assert kizami("convert", plain, tmp_path / "plain-out").code == 0
    ours, theirs = contents(out), contents(tmp_path / "plain-out")
    assert {n for n in ours if ours[n] != theirs.get(n)} == {"data", "data/README.md", "data/tokenizer.json"} | {
        n for n in ("kizami.json", "data/config.json") if n in ours
    }


# ---------------------------------------------------------------- names that kizami needs itself


@pytest.mark.parametrize(
    "name",
    [
        "Config.json", "KIZAMI.json", "Kizami-Report.jsonl", "readme.md", "Model.Safetensors.Index.json",
        "MODEL-00001-OF-00001.safetensors", "kizami.json", "kizami-report.jsonl", "quantize_config.json",
        "hf_quant_config.json", "recipe.yaml", "model-00001-of-00001.safetensors", ".kizami",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_an_output_has_is_left_whatever_it_is(tmp_path: Path, name: str, kind: str) -> None:
    """In other letters it would be the same file where case does not count; a folder would be in the way at the end."""
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    if kind == "folder":
        (source / name).mkdir()
        (source / name / "x.txt").write_text("x")
    else:
        (source / name).write_text("{}")
    folder = assert_converted(said := kizami("convert", source, out), source, out)
    copied = kind == "folder" and name in ("quantize_config.json", "hf_quant_config.json", "recipe.yaml")
    assert (name in os.listdir(out)) == (copied or name in ("kizami.json", "kizami-report.jsonl", *folder.files))
    assert_mentions(said.stdout + said.stderr, [] if name.lower().endswith(".index.json") else [name])
    assert len({n.lower() for n in os.listdir(out)}) == len(os.listdir(out))


def test_too_many_side_files_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_files, "MAX_FILES", 40)
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    (source / "many").mkdir()
    for i in range(40):
        (source / "many" / f"{i}.txt").touch()
    assert_refused(kizami("convert", source, out), ["40 files"])
    assert not [*tmp_path.glob("out*/*")]
    for i in range(30, 40):
        (source / "many" / f"{i}.txt").unlink()
    assert_converted(kizami("convert", source, out), source, out)
    assert len([*(out / "many").iterdir()]) == 30


@pytest.mark.long
def test_a_thousand_folders_in_each_other_are_left(tmp_path: Path) -> None:
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    here = os.getcwd()
    os.chdir(source)
    try:
        for _ in range(1000):
            os.mkdir("d")
            os.chdir("d")
        Path("x.txt").write_text("deep")
        os.chdir(here)
        copied = kizami("convert", source, out)
        os.rename(source / "d", out / "d")  # verify looks at every file of a stranger's folder
        verified = kizami("verify", out, "--json")
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", source, out], check=False)  # shutil.rmtree calls itself for each level
    assert copied.code == 0, copied.stderr
    assert_mentions(copied.stdout, ["d/d/d/", "folders deep"])
    assert verified.code == 1, verified.stderr
    [problem] = parse_json(verified.stdout)["problems"]
    assert (problem["code"], problem["file"]) == ("stranger", "d/" * 1000 + "x.txt")


def test_a_huge_side_file_is_left_unread(tmp_path: Path) -> None:
    """64 GB of a hole, and a folder's worth of weights under a name that says nothing."""
    source, out = tiny().save(tmp_path / "src"), tmp_path / "out"
    with open(source / "notes.txt", "wb") as file:
        file.truncate(64 << 30)
    assert_converted(said := kizami("convert", source, out), source, out)
    assert_mentions(said.stdout, ["notes.txt", str(64 << 30)])
    assert not (out / "notes.txt").exists()


# ---------------------------------------------------------------- an output from a stranger


@pytest.fixture
def stranger(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    out = tmp_path / "out"
    assert kizami("convert", tiny_checkpoint, out).code == 0
    return out


@pytest.mark.parametrize("name", ["kizami.json", "kizami-report.jsonl", "config.json", "README.md", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["link", "loop", "pipe", "folder", "/dev/zero", "/dev/tty"])
def test_verify_and_report_of_a_strangers_output_end(stranger: Path, name: str, kind: str) -> None:
    """Without waiting for a pipe, reading a device, or a word of the file that a link leads to."""
    (stranger / name).unlink()
    secret = stranger.with_name("secret")
    secret.write_text("SECRET\n")
    if kind == "pipe":
        os.mkfifo(stranger / name)
    elif kind == "folder":
        (stranger / name).mkdir()
    else:
        (stranger / name).symlink_to({"link": secret, "loop": name}.get(kind, kind))
    for words in (["verify", stranger], ["report", stranger], ["verify", stranger, "--json"]):
        said: Said = kizami(*words)
        assert said.code in (0, 1, 2), said.stderr
        assert "SECRET" not in said.stdout + said.stderr
    assert kizami("verify", stranger).code in ((0, 1) if name == "README.md" else (1, 2))


@pytest.mark.parametrize("key", ["family", "dialect", "scheme", "warnings", "counts", "kizami_version", "method"])
@pytest.mark.parametrize("value", [None, {"a": 1}, ESCAPES + MARKUP, ...])
def test_no_value_of_a_manifest_breaks_report_or_verify(stranger: Path, key: str, value: Any) -> None:
    manifest = json.loads((stranger / "kizami.json").read_text())
    manifest[key] = value
    if value is ...:
        del manifest[key]
    manifest["self_sha256"] = self_hash(manifest)
    (stranger / "kizami.json").write_bytes(dump_json(manifest))
    for words in (["report", stranger], ["verify", stranger, "--json"], ["report", stranger, "--format", "markdown"]):
        said = kizami(*words)
        assert said.code in (0, 1, 2), said.stderr
        assert not harmful(said.stdout + said.stderr)
