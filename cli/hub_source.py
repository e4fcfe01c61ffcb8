"""SRC on the Hub: its headers for a plan, its files for a conversion, its finished shards for a push."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, duration
from kizami.cli.source import open_source, refuse_nameless
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.client import Patience
    from kizami.formats.hub.mirror import Mirror
    from kizami.formats.hub.repository import Repository
    from kizami.formats.hub.target import Target

FIRST_TRIES = 4  # of the first look: a few seconds, and then the cache
REMOVALS, REMOVAL_PAUSE = 10, 0.1  # tries, and seconds between them
OTHER_KINDS = ("buckets", "datasets", "kernels", "models", "spaces")  # what a name on the Hub may begin with; no orgs
TEMPORARY: list["tempfile.TemporaryDirectory[str]"] = []  # removed when the program ends


def open_headers(ui: Ui, source: str) -> "Checkpoint":
    """The checkpoint in a folder or in the Hub cache; of one on the Hub the headers alone are read, and no weight is on
    the disk. KizamiError as `Repository.look` and Checkpoint.open."""
    repository = _on_hub(ui, source)
    if repository is None:
        return open_source(source)
    return _opened(_temporary_mirror(ui, repository))


def _opened(mirror: "Mirror") -> "Checkpoint":
    with _named(mirror):
        return mirror.open()


@contextmanager
def _named(mirror: "Mirror") -> Iterator[None]:
    """Errors tell of the repository, not of a folder that is gone in a moment."""
    try:
        yield
    except KizamiError as e:
        ours, name = str(mirror.root), f"{mirror.repository.name}@{mirror.repository.commit}"
        file = None if e.file is None else e.file.replace(ours, name)
        raise KizamiError(e.message.replace(ours, name), code=e.code, file=file, tensor=e.tensor, hint=e.hint) from None


def shown(checkpoint: "Checkpoint") -> str:
    """Its folder; of one on the Hub, of which there is none, the repository and commit."""
    from kizami.quantize.card import hub_origin

    origin = hub_origin(checkpoint.root) if checkpoint.remote else None
    return str(checkpoint.root) if origin is None else "@".join(origin)


def open_for_convert(
    ui: Ui, source: str, out: Path, *, dry_run: bool, restart: bool
) -> tuple["Checkpoint", "Mirror | None"]:
    """The same; for a conversion the mirror lies beside OUT, and is the one of an earlier run where there is one."""
    from kizami.formats.hub.mirror import Mirror
    from kizami.formats.places import partial_of

    partial_of(out)  # refuses what is no name
    repository = _on_hub(ui, source, begun=None if dry_run else scratch_of(out))
    if repository is None:
        return open_source(source), None
    if dry_run:
        mirror = _temporary_mirror(ui, repository)
    else:
        refuse_finished(out)
        folder = scratch_of(out)
        _pin(folder, repository, source, restart=restart)
        mirror = Mirror(repository, folder, patience(ui))
    with refusals_leave_nothing(mirror, out):
        return _opened(mirror), mirror


@contextmanager
def refusals_leave_nothing(mirror: "Mirror | None", out: Path) -> Iterator[None]:
    """Where no run has begun, what there is are the headers of the look."""
    from kizami.formats.places import partial_of

    try:
        yield
    except KizamiError:
        if mirror is not None and mirror.folder == scratch_of(out) and not os.path.lexists(partial_of(out)):
            _remove_soon(mirror)
        raise


def _remove_soon(mirror: "Mirror") -> None:
    """Downloads that were not waited for may lay a file between two looks. What stays is used by the next run."""
    for _ in range(REMOVALS):
        with suppress(OSError):
            mirror.remove()
            return
        time.sleep(REMOVAL_PAUSE)


def refuse_finished(out: Path) -> None:
    """Before the Hub is asked for anything. A run that was killed after OUT appeared has left its scratch folder, which
    goes. KizamiError "out_exists", also for OUT.partial of a stranger; "locked" where a run is at work in that
    folder."""
    from kizami.formats.files import what_is_there
    from kizami.formats.hub.mirror import remove_scratch
    from kizami.formats.places import partial_of
    from kizami.formats.run_log import FOLDER, lock_folder
    from kizami.quantize.place import check_absent, check_partial

    if (out / FOLDER).is_dir():
        return
    if what_is_there(out) is not None and is_scratch(scratch_of(out)):
        lock = lock_folder(scratch_of(out), scratch_of(out))
        remove_scratch(scratch_of(out))
        os.close(lock)
    check_absent(out)
    check_partial(partial_of(out))


def fetch_side_files(checkpoint: "Checkpoint", mirror: "Mirror") -> None:
    """What is copied, and the card, before the run looks at them."""
    from kizami.formats.side_files import find_side_files
    from kizami.quantize.manifest import CARD

    cards = [CARD] if CARD in mirror.repository.files else []
    mirror.fetch_all([*find_side_files(checkpoint).copied, *cards])


def refuse_nameless_target(repo: str) -> None:
    """KizamiError "usage" for what is no name of a repository."""
    from kizami.formats.hub.cache import hub_id

    if hub_id(repo) is None or "@" in repo or repo.partition("/")[0] in OTHER_KINDS:
        said = "is a folder here" if os.path.lexists(repo) else "is no name of a repository"
        raise KizamiError(said, code="usage", file=repo, hint="org/name")


def refuse_without_token(repo: str) -> None:
    """KizamiError "hub_error" where a repository would be made by nobody."""
    from huggingface_hub import get_token

    from kizami.formats.hub.target import HINTS

    if get_token() is None:
        raise KizamiError("is to be made, and there is no token", code="hub_error", file=repo, hint=HINTS[401])


def open_target(
    ui: Ui, repo: str, plan_hash: str, names: Iterable[str], begun: Iterable[str], *, private: bool, make: bool = True
) -> tuple["Target", dict[str, Any] | None]:
    """Makes the repository unless it is only looked at, and sees that it can take files of these names; the manifest,
    if a run of this plan has finished it. begun: shards, which come before the rest. KizamiError as `as_refusal`,
    "push_target"."""
    from kizami.formats.hub.target import Target
    from kizami.quantize.run.delivery import refuse_other_model, stake_of

    target = Target(repo, private, patience(ui))
    head = target.begin() if make else target.open()
    finished = refuse_other_model(head, plan_hash, lambda name: _read_there(head, name, target.patience))
    target.check_free(names if finished is None else (), begun, stake_of(plan_hash))
    return target, finished


def _read_there(head: "Repository", name: str, patience: "Patience") -> dict[str, Any]:
    """The JSON object in a file of the repository. KizamiError "bad_json", and as `as_refusal`."""
    from kizami.formats.hub.client import as_refusal, patiently
    from kizami.formats.hub.ranges import read_range
    from kizami.formats.strict_json import parse_json_object
    from kizami.quantize.manifest import MAX_MANIFEST_BYTES

    size = head.files[name].size
    if size > MAX_MANIFEST_BYTES:
        raise KizamiError(f"has {size:,} bytes", code="push_target", file=f"{head.name}/{name}")
    with as_refusal(head.name):
        data = patiently(lambda: read_range(head, name, 0, size), patience)
    return parse_json_object(data, f"{head.name}/{name}", what="file")


def _on_hub(ui: Ui, source: str, begun: Path | None = None) -> "Repository | None":
    """What the Hub has under this id now; None for a folder, for what is whole in the user's cache, and where the Hub
    is not to be asked or not to be reached, and the cache has something. begun: a scratch folder; a run that began with
    files from the Hub goes on with them, whatever the cache has by now."""
    from kizami.formats.hub.cache import cached_snapshot, hub_id
    from kizami.formats.hub.repository import Repository

    refuse_nameless(source, "SRC")
    named = hub_id(source)
    if named is None or _is_offline():
        return None
    name, revision = named
    try:
        repository = Repository.look(name, revision, patience(ui, tries=FIRST_TRIES))
    except KizamiError as e:
        if e.code != "hub_unreachable":
            raise
        try:
            cached_snapshot(name, revision)
        except KizamiError:
            raise e from None
        ui.warn(["the Hub cannot be reached: what was downloaded before is used"])
        return None
    pinned = None if begun is None else _pinned(begun)
    if (pinned is None or pinned["repo"] != repository.name) and _is_cached(repository):
        return None
    ui.progress(f"{name}: commit {repository.commit}")
    return repository


def _is_offline() -> bool:
    from kizami.formats.hub.client import check_endpoint

    check_endpoint()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_cached(repository: "Repository") -> bool:
    from kizami.formats.hub.cache import cached_snapshot

    try:
        folder = cached_snapshot(repository.name, repository.commit)
    except KizamiError:
        return False
    return all((folder / name).exists() for name in repository.files)


def patience(ui: Ui, tries: int | None = None) -> "Patience":
    from kizami.formats.hub.client import Patience, status_of

    def tell(seconds: float, error: BaseException) -> None:
        status = status_of(error) or status_of(error.__cause__)
        said = f"HTTP {status}" if status else type(error).__name__
        ui.progress(f"the Hub gives no answer ({said}): asked again in {duration(seconds)}")

    return Patience(on_wait=tell) if tries is None else Patience(on_wait=tell, tries=tries)


def _temporary_mirror(ui: Ui, repository: "Repository") -> "Mirror":
    from kizami.formats.hub.mirror import Mirror

    folder = tempfile.TemporaryDirectory(prefix="kizami-", ignore_cleanup_errors=True)
    TEMPORARY.append(folder)
    return Mirror(repository, Path(folder.name), patience(ui))


def scratch_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.source")


def is_scratch(folder: Path) -> bool:
    """Whether it is a folder of ours: pinned, or empty but for a lock; files and folders, and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in folder.iterdir()):
        return False
    return _pinned(folder) is not None or not set(os.listdir(folder)) - {"lock"}


def _pinned(folder: Path) -> dict[str, str] | None:
    """Repository and commit; None where nothing says so."""
    from kizami.formats.hub.mirror import PINNED
    from kizami.formats.run_log import read_own

    try:
        found = json.loads(read_own(folder / PINNED) or b"")
    except (KizamiError, OSError, ValueError, RecursionError):
        return None
    is_pin = isinstance(found, dict) and found.keys() == {"repo", "commit"}
    return found if is_pin and all(isinstance(word, str) for word in found.values()) else None


def _pin(folder: Path, repository: "Repository", source: str, *, restart: bool) -> None:
    """Makes the scratch folder, for this commit and no other. KizamiError "hub_moved", "out_exists", "locked"."""
    from kizami.formats.hub.mirror import CONTENTS, DOWNLOAD, PINNED
    from kizami.formats.run_log import lock_folder
    from kizami.formats.writer import write_file_durably

    ours = {"repo": repository.name, "commit": repository.commit}
    pinned = folder / PINNED
    if os.path.lexists(folder) and not is_scratch(folder):
        raise KizamiError(
            "is not what kizami keeps there, the files that come from the Hub",
            code="out_exists",
            file=str(folder),
            hint="move it away, or choose another OUT",
        )
    lock_folder(folder, folder)  # until the program ends
    if (found := _pinned(folder)) is not None:
        if found != ours and not restart:
            then = printable(f"{found['repo']}@{found['commit']}", 200)
            raise KizamiError(
                f"{source} is commit {repository.commit} now, and an unfinished run here is of {then}",
                code="hub_moved",
                file=str(folder),
                hint=f"finish it as {then}, or start over with --restart",
            )
        if restart:
            for path in folder.iterdir():
                if path.is_dir() and (path.name == DOWNLOAD or path.name.startswith("models--")):
                    shutil.rmtree(path)
                elif path.name == CONTENTS:
                    path.unlink()
    write_file_durably(pinned, json.dumps(ours).encode())
