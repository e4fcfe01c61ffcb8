"""Everything beside the weights, then OUT.partial becomes OUT."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import all_files, io_error, open_regular, read_exactly, resolve_inside
from kizami.formats.index import INDEX_NAME, encode_index
from kizami.formats.model_card import render_card
from kizami.formats.side_files import copy_side_file
from kizami.formats.strict_json import dump_json
from kizami.formats.writer import fsync_folder, write_file_durably
from kizami.quantize.card import card_facts, hub_origin
from kizami.quantize.journal import FOLDER, JOURNAL_FILE, Journal
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, REPORT, build_manifest, read_manifest
from kizami.quantize.plan import Plan
from kizami.quantize.report import Row

MAX_README_BYTES = 1 << 20  # cards have a few dozen kB; a larger one is not read


def finish(
    plan: Plan,
    checkpoint: Checkpoint,
    journal: Journal,
    out: Path,
    side_files: Sequence[str],
    source_contents: dict[str, str],
) -> dict[str, Any]:
    """Writes index, config, side files, report, card and manifest; renames. Returns the manifest.

    side_files: what was found to copy when the run began; one that is gone since is an error, not an omission.
    """
    partial = journal.partial
    _check_shards_are_there(partial, journal, plan)
    files = {name: copy_side_file(checkpoint, name, partial) for name in side_files}
    rows = [json.loads(line) for shard in plan.shards for line in _lines(journal.rows_path(shard.number))]
    weight_map = {spec.name: shard.file for shard in plan.shards for spec in shard.tensors}
    negative = any(row.get("negative_scale_fraction") for row in rows)
    written = {
        INDEX_NAME: encode_index(weight_map, plan.output.bytes),
        CONFIG: dump_json(plan.config),
        REPORT: b"".join(journal.rows_path(shard.number).read_bytes() for shard in plan.shards),
        CARD: _card(plan, checkpoint, rows, negative).encode(),
    }
    for name, data in written.items():
        write_file_durably(partial / name, data)
        files[name] = hashlib.sha256(data).hexdigest()
    records = [journal.done[shard.number] for shard in plan.shards]
    shards = [{"file": r.file, "bytes": r.nbytes, "sha256": r.sha256} for r in records]
    manifest = build_manifest(plan, shards, files, negative, source_contents, hub_origin(checkpoint.root))
    write_file_durably(partial / MANIFEST, dump_json(manifest))
    _check_no_strangers(partial, {MANIFEST, *files, *(r.file for r in records)})
    _publish(partial, out)
    return manifest


def _lines(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as f:
        yield from f


def _check_shards_are_there(partial: Path, journal: Journal, plan: Plan) -> None:
    """They were right when they were recorded; a cheap look tells that nobody has removed or cut one since."""
    for shard in plan.shards:
        record, path = journal.done[shard.number], partial / shard.file
        if not path.is_file() or path.stat().st_size != record.nbytes:
            raise KizamiError(
                "was finished, and is gone or has another size now",
                code="shard_lost",
                file=f"{partial.name}/{shard.file}",
                hint="run the same command again: it is written anew",
            )


def _card(plan: Plan, checkpoint: Checkpoint, rows: list[Row], negative: bool) -> str:
    return render_card(_source_card(checkpoint.root), card_facts(plan, checkpoint.root, rows, negative))


def _source_card(root: Path) -> str | None:
    """The source's README, under the same rules as every other file: no link is followed out of the folder."""
    try:
        fd = open_regular(resolve_inside(root, CARD), CARD)
    except KizamiError as e:
        if e.code == "io_error":  # it may be readable the next time, and then the card would be another one
            raise
        return None  # the card can be made without it
    try:
        size = os.fstat(fd).st_size
        return read_exactly(fd, 0, size, CARD).decode("utf-8", "replace") if size <= MAX_README_BYTES else None
    finally:
        os.close(fd)


def _check_no_strangers(partial: Path, ours: set[str]) -> None:
    """Files that someone else put into OUT.partial would be published as ours."""
    found = set(all_files(partial))
    strange = sorted(name for name in found - ours if not _is_journals(name))
    if strange:
        raise KizamiError(
            f"holds {len(strange)} files that kizami did not write there: {', '.join(strange[:3])}",
            code="strange_file",
            file=partial.name,
            hint="move them away and run the same command again; the finished shards are kept",
        )


def _is_journals(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder == FOLDER and JOURNAL_FILE.fullmatch(file) is not None


def _publish(partial: Path, out: Path) -> None:
    """One rename makes OUT appear, complete. Until then the journal is there, and a rerun only repeats the finish."""
    fsync_folder(partial)
    os.rename(partial, out)
    _settle(out)


def _settle(out: Path) -> None:
    """Makes OUT's name durable and removes its journal, also where another run of the same plan is doing that."""
    try:
        fsync_folder(out.absolute().parent)
        with suppress(FileNotFoundError):
            for path in sorted((out / FOLDER).iterdir()):
                path.unlink(missing_ok=True)
            (out / FOLDER).rmdir()
        fsync_folder(out)
    except OSError as e:
        hint = f"{out.name} is complete; the same command again removes what is left of the journal"
        raise io_error("cannot remove the journal", e, f"{out.name}/{FOLDER}", hint) from e


def complete_published(plan: Plan, out: Path) -> dict[str, Any] | None:
    """The manifest if a run of this plan was killed between the rename and the end of the journal's removal, which is
    then all that was left to do; else None."""
    folder = out / FOLDER
    if out.is_symlink() or folder.is_symlink() or not folder.is_dir():
        return None
    try:
        manifest = read_manifest(out)
    except KizamiError:
        return None
    if manifest["plan_hash"] != plan.hash:
        return None
    _settle(out)
    return manifest
