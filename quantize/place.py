"""Where a conversion may work: OUT, OUT.partial beside it, and nothing of anybody else's in either. Makes nothing."""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import kind_of, listed, what_is_there
from kizami.formats.index import INDEX_NAME
from kizami.formats.places import check_new_folder
from kizami.formats.run_log import FOLDER, JOURNAL
from kizami.quantize.given import given_bytes
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, REPORT
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.run.job_folder import JOURNAL_FILE, KEPT, attempted, is_journal, is_lock, part_range

ROW_BYTES = 1000  # a report line, generously
STRANGERS_SHOWN = 3


def check_place(checkpoint: Checkpoint, out: Path) -> Path:
    """Checks OUT and gives OUT.partial. The source is never written to, and nothing of a stranger is removed."""
    partial = check_new_folder(checkpoint, out)
    check_absent(out)
    check_partial(partial)
    return partial


def check_absent(out: Path) -> None:
    """KizamiError "out_exists"."""
    if (there := what_is_there(out)) is not None:
        raise KizamiError(
            f"{there}; kizami writes complete new folders only",
            code="out_exists",
            file=str(out),
            hint="choose another OUT, or remove it yourself (kizami verify OUT tells whether it is complete)",
        )


def check_partial(partial: Path) -> None:
    """KizamiError "out_exists" for what is there and not kizami's."""
    with suppress(FileNotFoundError, NotADirectoryError):  # another run that finishes just now renames it
        _refuse_strangers(partial)


def _refuse_strangers(partial: Path) -> None:
    mode = partial.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise KizamiError(
            f"is {kind_of(mode)}, and kizami keeps its unfinished work in a folder of this name",
            code="out_exists",
            file=str(partial),
            hint="remove it, or choose another OUT",
        )
    others = set(os.listdir(partial)) - {FOLDER}  # first: a part of this job may just be writing the journal
    found = is_journal(partial / FOLDER / JOURNAL)
    if found is False or (found is None and others):
        what = (
            "is not empty and has no journal of kizami"
            if found is None
            else f"{FOLDER}/{JOURNAL} in it is not kizami's"
        )
        raise KizamiError(
            what,
            code="out_exists",
            file=str(partial),
            hint=f"move {partial.name} away: kizami keeps its unfinished work under this name",
        )


def check_still_absent(out: Path, partial: Path) -> None:
    """Another run may have finished between the first look and the lock; its folder went with its name, and the one
    that is there now is new. Nothing but that is taken away."""
    if out.exists() and any(out.iterdir()):
        with suppress(FileNotFoundError):
            names = os.listdir(partial / FOLDER)
            if os.listdir(partial) == [FOLDER] and all(name == JOURNAL or is_lock(name) for name in names):
                for name in names:
                    (partial / FOLDER / name).unlink(missing_ok=True)
                (partial / FOLDER).rmdir()
                partial.rmdir()
        raise KizamiError("another kizami has just finished it", code="out_exists", file=str(out))


def written_files(plan: Plan, side_files: Iterable[str]) -> set[str]:
    """Everything that OUT has in the end."""
    return {*(shard.file for shard in plan.shards), INDEX_NAME, CONFIG, REPORT, CARD, MANIFEST, *side_files}


def check_no_strangers(partial: Path, ours: set[str], *, finished: bool) -> None:
    """What someone else put into OUT.partial would be published as ours, empty folders too. Not `finished`: temporaries
    may be there, and links in place of files, which are written anew."""
    temporaries = set() if finished else {_temporary(name) for name in ours}
    strange = _strangers(partial, ours | temporaries, finished)
    if strange:
        shown = ", ".join(strange[:STRANGERS_SHOWN])
        raise KizamiError(
            f"holds {len(strange)} files or folders that kizami did not write there: {shown}",
            code="strange_file",
            file=partial.name,
            hint="move them away and run the same command again; the finished shards are kept",
        )


def _temporary(name: str) -> str:
    """As `AtomicFile` names it."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}.tmp"


def _strangers(partial: Path, ours: set[str], finished: bool) -> list[str]:
    """Sorted names; a folder has a final slash, and is not looked into."""
    folders = {f"{FOLDER}/", *(name[: i + 1] for name in ours for i, letter in enumerate(name) if letter == "/")}
    strange: list[str] = []
    waiting = [""]
    while waiting:
        at = waiting.pop()
        for entry in listed(partial, at):
            name = at + entry.name
            is_file = entry.is_file(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                (waiting if f"{name}/" in folders else strange).append(f"{name}/")
            elif at == f"{FOLDER}/":
                kept = entry.name in KEPT or is_lock(entry.name) or part_range(entry.name) is not None
                becomes_file = is_file or not (finished or kept)
                if not (becomes_file and JOURNAL_FILE.fullmatch(entry.name)):
                    strange.append(name)
            elif (name not in ours or (finished and not is_file)) and (finished or attempted(name) not in ours):
                strange.append(name)
    return sorted(strange)


def needed_bytes(plan: Plan, todo: Iterable[Shard], side_bytes: int) -> int:
    """What is still to be written. Rows count twice: those of every shard lie beside the report until OUT is there."""
    shards = sum(shard.file_nbytes + ROW_BYTES * len(shard.steps) for shard in todo)
    rows = ROW_BYTES * sum(len(shard.steps) for shard in plan.shards)
    return shards + rows + side_bytes + given_bytes(plan)
