"""What is on the Hub already, whole or in part, and what a run that was killed at its end has left here."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.mirror import Mirror
    from kizami.formats.hub.target import Target
    from kizami.quantize.plan import Plan


def refuse_another_source(
    repo: str, manifest: dict[str, Any], checkpoint: "Checkpoint", mirror: "Mirror | None"
) -> None:
    """The plan of a fine-tune is that of its model. manifest: of what this plan has finished in `repo`. KizamiError
    "push_target"."""
    from kizami.formats.fingerprint import sample_contents
    from kizami.quantize.card import hub_origin

    origin = hub_origin(checkpoint.root)
    named = None if origin is None else {"repo": origin[0], "revision": origin[1]}
    if mirror is not None and named is not None and manifest.get("origin") == named:
        return  # a commit has one content
    contents = sample_contents(checkpoint) if mirror is None else _sampled(checkpoint, mirror)
    if contents != manifest.get("source_contents"):
        raise KizamiError(
            "holds a conversion of another source by this plan",
            code="push_target",
            file=repo,
            hint="push to a new repository",
        )


def _sampled(checkpoint: "Checkpoint", mirror: "Mirror") -> dict[str, str]:
    """As `sample_contents`; of what is not here the pages are read from the Hub. Nothing proves them, and nothing is
    made of them."""
    from kizami.formats.fingerprint import sample_pages
    from kizami.formats.hub.client import as_refusal, patiently
    from kizami.formats.hub.ranges import read_range

    found = mirror.contents()
    for name, header in checkpoint.headers.items():

        def read(at: int, size: int, name: str = name) -> bytes:
            with as_refusal(mirror.repository.name):
                return patiently(lambda: read_range(mirror.repository, name, at, size), mirror.patience)

        if name not in found:
            found[name] = sample_pages(header.data_begin, header.file_size, read)
    return {name: found[name] for name in checkpoint.headers}


def tell_of_missing(ui: Ui, repo: str, missing: list[str]) -> None:
    if missing:
        lacks = missing[0] if len(missing) == 1 else f"{counted(len(missing), 'file')}, {missing[0]} among them"
        ui.progress(f"{repo} holds this conversion, but for {lacks}: it is made again, and what is missing is sent")


def end_of_a_killed_run(
    ui: Ui,
    target: "Target",
    manifest: dict[str, Any],
    plan: "Plan",
    checkpoint: "Checkpoint",
    mirror: "Mirror | None",
    out: Path,
    max_rel_error: float | None,
) -> None:
    """All is on the Hub already, of this source and by this plan: what is left to do is to tell of it, and to remove
    what a killed run has left. Ends the program as that run would have."""
    from kizami.cli.convert_run import exceeding, fail_over_threshold
    from kizami.quantize.report import threshold_hint

    with tempfile.TemporaryDirectory(prefix="kizami-") as name:
        folder = Path(name)
        _fetch_report(target, manifest, folder)
        body = _body(target, plan, checkpoint, folder)
        over = exceeding(folder, max_rel_error)
    if ui.json:
        hint = threshold_hint(body["method"]) if over else None
        ui.emit("convert", body | {"max_rel_error": max_rel_error, "exceeding": over, "hint": hint})
    else:
        ui.result(f"{target.name} holds this conversion, whole: commit {target.head.commit}")
    clear_going(out)
    if mirror is not None:
        mirror.remove()
    fail_over_threshold(ui, over, max_rel_error, body["method"])
    raise typer.Exit(0)


def _fetch_report(target: "Target", manifest: dict[str, Any], folder: Path) -> None:
    """Manifest and report into `folder`. KizamiError as `as_refusal`; "hub_corrupt"."""
    from kizami.formats.files import file_sha256
    from kizami.formats.hub.client import as_refusal, hub, patiently
    from kizami.formats.strict_json import dump_json
    from kizami.quantize.manifest import MANIFEST, REPORT

    def load() -> str:
        found = hub().hf_hub_download(target.name, REPORT, revision=target.head.commit, local_dir=folder)
        return str(found)

    with as_refusal(target.name):
        path = Path(patiently(load, target.patience))
    if file_sha256(path, REPORT) != manifest["files"].get(REPORT):
        said = "came with other bytes than the manifest states"
        raise KizamiError(said, code="hub_corrupt", file=f"{target.name}/{REPORT}", hint="try again later")
    (folder / MANIFEST).write_bytes(dump_json(manifest))


def _body(target: "Target", plan: "Plan", checkpoint: "Checkpoint", folder: Path) -> dict[str, Any]:
    """As that of a run which has made it now."""
    from kizami.cli.convert_run import convert_body
    from kizami.formats.side_files import find_side_files

    side_files = find_side_files(checkpoint)
    left = [{"name": name, "reason": reason} for name, reason in side_files.left]
    return convert_body(plan, folder, 0.0) | {
        "out": None,
        "pushed": {"repo": target.name, "commit": target.head.commit},
        "side_files": {"copied": list(side_files.copied), "left": left},
    }


# ------------------------------------------------------------------------------------------- OUT.partial on its way out


def going_of(out: Path) -> Path:
    """OUT.partial becomes it at once, and then goes: half of it under its own name would be a run to resume."""
    return out.with_name(f"{out.name}.done")


def is_going(folder: Path) -> bool:
    """Whether it is a folder of ours: what a run leaves whose shards are on the Hub, or the last of it. An unfinished
    run that somebody has moved there is none, and nor is an output."""
    from kizami.formats.run_log import FOLDER, JOURNAL
    from kizami.quantize.manifest import MANIFEST
    from kizami.quantize.run.job_folder import is_journal

    if folder.is_symlink() or not folder.is_dir() or (folder / FOLDER).is_symlink() or not (folder / FOLDER).is_dir():
        return False
    names, ours = set(os.listdir(folder)), is_journal(folder / FOLDER / JOURNAL)
    if names == {FOLDER}:
        return ours is True or (ours is None and set(os.listdir(folder / FOLDER)) <= {"lock"})
    return ours is True and MANIFEST in names and not any(name.endswith(".safetensors") for name in names)


def refuse_going(out: Path) -> None:
    """Before anything is converted. An empty folder loses nothing. KizamiError "out_exists"."""
    folder = going_of(out)
    if os.path.lexists(folder) and not is_going(folder) and not _is_empty(folder):
        raise KizamiError(
            f"is not kizami's, and {out.name}.partial gets this name when all of it is on the Hub",
            code="out_exists",
            file=str(folder),
            hint="move it away, or choose another OUT",
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not os.listdir(folder)


def clear_going(out: Path) -> None:
    """Removes what a run that was killed at its end has left under this name, the empty folder included."""
    folder = going_of(out)
    if is_going(folder):
        remove_going(folder)
    elif _is_empty(folder):
        folder.rmdir()


def remove_going(folder: Path) -> None:
    """What tells that it is ours goes last. What cannot be removed stays: the run has ended well."""
    from kizami.formats.run_log import FOLDER, JOURNAL
    from kizami.quantize.manifest import MANIFEST

    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            if path.name == FOLDER:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in sorted((folder / FOLDER).iterdir(), key=lambda path: path.name == JOURNAL):
            path.unlink()
        (folder / FOLDER).rmdir()
        folder.rmdir()
