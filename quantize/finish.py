"""Everything beside the weights, then OUT.partial becomes OUT."""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import all_files, file_sha256, io_error, open_regular, read_exactly, resolve_inside
from kizami.formats.fingerprint import Contents
from kizami.formats.index import INDEX_NAME, encode_index
from kizami.formats.model_card import render_card
from kizami.formats.run_log import FOLDER, JOURNAL, is_identity
from kizami.formats.side_files import copy_side_file, find_side_files
from kizami.formats.strict_json import dump_json
from kizami.formats.writer import AtomicFile, fsync_folder, write_file_durably
from kizami.quantize.card import card_facts, hub_origin
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, REPORT, build_manifest, read_manifest
from kizami.quantize.place import check_no_strangers, written_files
from kizami.quantize.plan import Plan
from kizami.quantize.report import SUMMED, Row, narrowed, parse_row
from kizami.quantize.run.delivery import Delivery
from kizami.quantize.run.job_folder import JOURNAL_FILE, is_regular, read_journal, remove_attempts
from kizami.quantize.run.journal import Journal, identity_of, source_mtimes

MAX_README_BYTES = 1 << 20  # cards have a few dozen kB; a larger one is not read


def finish(
    plan: Plan,
    checkpoint: Checkpoint,
    journal: Journal,
    out: Path,
    side_files: Sequence[str],
    source_contents: dict[str, str],
    delivery: Delivery | None = None,
) -> dict[str, Any]:
    """Writes index, config, side files, report, card and manifest; renames. Returns the manifest.

    side_files: what was found to copy when the run began; one that is gone since is an error, not an omission.
    delivery: everything is on the Hub before OUT appears; where it takes the shards off the disk, OUT does not.
    """
    partial = journal.partial
    _check_shards_are_there(partial, journal, plan, delivery)
    files = {name: copy_side_file(checkpoint, name, partial) for name in side_files}
    # One after the other, and the rows last: each takes a megabyte for every few thousand tensors.
    files[INDEX_NAME] = write_file_durably(partial / INDEX_NAME, _index(plan))
    files[CONFIG] = write_file_durably(partial / CONFIG, dump_json(plan.config))
    files[REPORT], rows, negative = _report(plan, journal)
    files[CARD] = write_file_durably(partial / CARD, _card(plan, checkpoint, rows, negative).encode())
    records = [journal.done[shard.number] for shard in plan.shards]
    shards = [{"file": r.file, "bytes": r.nbytes, "sha256": r.sha256} for r in records]
    manifest = build_manifest(plan, shards, files, negative, source_contents, hub_origin(checkpoint.root))
    stated = write_file_durably(partial / MANIFEST, dump_json(manifest))
    remove_attempts(partial, (shard.file for shard in plan.shards))
    check_no_strangers(partial, written_files(plan, side_files), finished=True)
    if delivery is not None:
        fsync_folder(partial)
        delivery.gate(rows)
        delivery.last({**files, MANIFEST: stated}, records)
    if delivery is None or not delivery.delete:
        _publish(partial, out)
    return manifest


def _report(plan: Plan, journal: Journal) -> tuple[str, list[Row], bool]:
    """Joins the rows of all shards to the report: its SHA-256, what its summaries need of them, and whether a scale is
    negative."""
    rows: list[Row] = []
    negative = False
    with AtomicFile(journal.partial / REPORT) as file:
        for shard in plan.shards:
            with open(journal.rows_path(shard.number), "rb") as lines:
                for line in lines:
                    file.write(line)
                    row = parse_row(line)
                    negative = negative or bool(row.get("negative_scale_fraction"))
                    rows.append(narrowed(row, SUMMED))
        return file.commit(), rows, negative


def _index(plan: Plan) -> bytes:
    weight_map = {spec.name: shard.file for shard in plan.shards for spec in shard.tensors}
    return encode_index(weight_map, plan.output.bytes)


def _check_shards_are_there(partial: Path, journal: Journal, plan: Plan, delivery: Delivery | None) -> None:
    """They were right when they were recorded; a cheap look tells that nobody has removed or cut one since."""
    for shard in plan.shards:
        record, rows = journal.done[shard.number], journal.rows_path(shard.number)
        sent = delivery is not None and delivery.delete and delivery.is_there(record)
        with suppress(FileNotFoundError):
            if is_regular(rows) and (sent or is_regular(partial / shard.file, record.nbytes)):
                continue
        raise KizamiError(
            "was finished, and is gone or another file now (or its report rows are)",
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


def _publish(partial: Path, out: Path) -> None:
    """One rename makes OUT appear, complete. Until then the journal is there, and a rerun only repeats the finish."""
    fsync_folder(partial)
    try:
        os.rename(partial, out)
        _settle(out)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        hint = "see what is mounted on OUT or OUT.partial; then the same command again only repeats the rename"
        raise io_error(f"is complete, but cannot become {out.name}", e, partial.name, hint) from e
    except KizamiError:
        raise
    except BaseException:  # a signal, of which there is one: what is left to do is short
        if (out / FOLDER).is_dir() and not os.path.lexists(partial):
            _settle(out)
        raise


def _settle(out: Path) -> None:
    """Makes OUT's name durable and removes its journal, also where another run of the same plan is doing that. The
    journal's own file goes last: as long as other files are there, it tells whose they are."""
    folder = out / FOLDER
    try:
        fsync_folder(out.absolute().parent)
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(folder) if JOURNAL_FILE.fullmatch(name)]
            for name in sorted(names, key=lambda name: (name == JOURNAL, name == "lock", name)):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        fsync_folder(out)
    except OSError as e:
        hint = f"{out.name} is complete; the same command again removes what is left of the journal"
        raise io_error("cannot remove the journal", e, f"{out.name}/{FOLDER}", hint) from e


def complete_published(
    plan: Plan, checkpoint: Checkpoint, out: Path, contents: Contents | None = None
) -> dict[str, Any] | None:
    """The manifest if a run of this job was killed between the rename and the end of the journal's removal, which is
    then all that was left to do; else None. contents: of a source that is on the Hub."""
    manifest = find_published(plan, checkpoint, out, contents)
    if manifest is not None:
        _settle(out)
    return manifest


def find_published(
    plan: Plan, checkpoint: Checkpoint, out: Path, contents: Contents | None = None
) -> dict[str, Any] | None:
    """As `complete_published`, and changes nothing. Like a resume it builds on bytes: OUT is hashed."""
    folder = out / FOLDER
    try:
        if not all(stat.S_ISDIR(path.lstat().st_mode) for path in (out, folder)):
            return None
        if not all(JOURNAL_FILE.fullmatch(path.name) and is_regular(path) for path in folder.iterdir()):
            return None
        contents = contents or Contents.of(checkpoint)
        manifest = read_manifest(out)
        if (manifest["plan_hash"], manifest["source_contents"]) != (plan.hash, contents.sampled):
            return None
        whole = _is_this_jobs(folder / JOURNAL, plan, checkpoint, contents.stated) and _is_whole(
            manifest, plan, checkpoint, out
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except KizamiError as e:
        if e.code == "io_error":
            raise
        return None
    return manifest if whole else None


def _is_this_jobs(path: Path, plan: Plan, checkpoint: Checkpoint, contents: dict[str, str]) -> bool:
    """What the journal says, if it is still there: it is the last of its files to go."""
    if (found := read_journal(path)) is None:
        return True
    identity, done = found
    mtimes = {number: record.source_mtimes for number, record in done.items()}
    now = {shard.number: source_mtimes(shard, checkpoint) for shard in plan.shards}
    return is_identity(identity, identity_of(plan, contents)) and mtimes == now


def _is_whole(manifest: dict[str, Any], plan: Plan, checkpoint: Checkpoint, out: Path) -> bool:
    """Whether OUT's files are those of the manifest, and the side files among them still those of the source."""
    side_files = find_side_files(checkpoint).copied
    hashes = {shard["file"]: shard["sha256"] for shard in manifest["shards"]} | manifest["files"]
    ours = written_files(plan, side_files)
    if {*hashes, MANIFEST} != ours or {name for name in all_files(out) if not name.startswith(f"{FOLDER}/")} != ours:
        return False
    return all(file_sha256(resolve_inside(checkpoint.root, name), name) == hashes[name] for name in side_files) and all(
        is_regular(out / name) and file_sha256(out / name, name) == wanted for name, wanted in hashes.items()
    )
