"""`run_calibration`: a forward pass over tokens, layer by layer, and the STATS folder that it leaves."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward.checks import source_files
from kizami.calibration.forward.journal import Journal, has_used
from kizami.calibration.forward.layers import DAMAGED, LayerRun, Pass, Piece, embed
from kizami.calibration.forward.memory import Chunks, choose_chunks, sizes_of
from kizami.calibration.forward.model import Model
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.weights import Weights
from kizami.calibration.forward.work import Work, remove_state
from kizami.calibration.machine import give_back_memory
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import io_error, what_is_there
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.places import check_new_folder
from kizami.formats.run_log import FOLDER, JOURNAL, is_identity
from kizami.formats.statistics import Statistics, find_fault
from kizami.formats.statistics_writer import InputsWriter, write_layer, write_manifest
from kizami.formats.writer import WrittenShard, fsync_folder

PHASES = ("embedding", "attention", "routing", "experts", "combining")
COMBINING = PHASES.index("combining")


@dataclass(frozen=True, slots=True)
class Started:
    """layers: of the model; first: the one that is worked on first (a resumed run has done those before); disk: bytes
    of state in STATS.partial until the end; chunks.needed: bytes of memory."""

    layers: int
    first: int
    tokens: int
    chunks: Chunks
    disk: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` pieces of a phase (one of PHASES) of a layer."""

    layer: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LayerDone:
    """tokens_per_expert: of fit tokens, ascending; none in a dense layer. bad: tokens that are not finite behind it."""

    layer: int
    tokens_per_expert: tuple[int, ...]
    bad: int


Event = Started | Progress | LayerDone


def run_calibration(
    checkpoint: Checkpoint,
    tokens: TokenSet,
    out: Path,
    settings: Settings,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    restart: bool = False,
) -> Path:
    """Writes the STATS folder `out`: work is done in `out`.partial, where an interrupted run goes on; `out` appears
    complete. The source is only read.

    KizamiError: "out_exists", "out_in_source", "resume_mismatch", "source_changed", "damaged_journal", "locked",
    "memory", "unsupported_model", "bad_config", "missing_tensor", "shape_mismatch", "unused_tensor", "bad_token",
    "non_finite", "bad_device", "io_error", and those of reading the source.
    """
    device = open_device(settings.device)
    dtype = getattr(torch, settings.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    with torch.inference_mode(), Weights(checkpoint) as weights:
        model = Model(checkpoint, weights)
        check_tokens(tokens.ids, model)
        chunks = choose_chunks(model, tokens.sequences, tokens.seq_len, settings, dtype.itemsize)
        facts = _facts(checkpoint, tokens, settings, chunks, dtype)
        partial = _place(checkpoint, out)
        if not restart and _complete_published(out, facts, source_files(checkpoint.headers)):
            return out
        if (there := _look(out)) is not None:
            raise KizamiError(there, code="out_exists", file=str(out), hint="choose another STATS, or remove it")
        journal = Journal(partial, facts, source_files(checkpoint.headers), restart=restart)
        try:
            fit = np.ones(tokens.sequences, bool)
            fit[list(tokens.held_out)] = False
            sizes = sizes_of(model, tokens.sequences, tokens.seq_len, chunks.tokens)
            disk = sizes.disk(dtype.itemsize)
            on_event(Started(model.layers, len(journal.committed), tokens.ids.size, chunks, disk))
            if len(journal.committed) < model.layers:
                resumed = bool(journal.committed) or journal.cursor is not None
                with Work(journal.folder, sizes, dtype, device, resumed) as work:
                    job = Pass(model, weights, work, tokens.ids, fit, chunks, dtype, device)
                    for layer in range(len(journal.committed), model.layers):
                        _run_layer(job, layer, journal, settings, on_event)
            _finish(journal, out, facts, model)
        finally:
            journal.close()
    return out


def _run_layer(job: Pass, index: int, journal: Journal, settings: Settings, on_event: Callable[[Event], None]) -> None:
    run = LayerRun(job, index)
    cursor = journal.cursor
    sums = cursor.sums if cursor is not None else None
    if sums is not None:
        run.restore(journal.read_sums(sums))
    steps: list[Callable[[], Piece]] = [
        (lambda: embed(job)) if index == 0 else (lambda: (0, lambda number: None)),
        run.attention,
        run.route,
        run.mlps,
        run.combine,
    ]

    def note(phase: int, done: int) -> None:
        nonlocal sums
        job.work.sync()
        if phase == 1 or (phase > 1 and sums is None):
            sums = journal.write_sums(run.measured())
        journal.progress(index, phase, done, sums)
        journal.drop_sums(sums)

    begin = (cursor.phase, cursor.done) if cursor is not None else (0, 0)
    for phase, step in enumerate(steps):
        total, piece = step()
        if phase < begin[0]:
            continue
        if phase == COMBINING and begin < (COMBINING, 0):
            note(phase, 0)  # from here on the layer's input is overwritten
        for number in range(begin[1] if phase == begin[0] else 0, total):
            piece(number)
            give_back_memory()
            on_event(Progress(index, PHASES[phase], number + 1, total))
            if journal.due():
                note(phase, number + 1)
        if phase == 1:
            sums = None  # what is complete now is written with the next line
    _commit(run, journal, settings, on_event)


def _commit(run: LayerRun, journal: Journal, settings: Settings, on_event: Callable[[Event], None]) -> None:
    run.check()
    with np.errstate(all="ignore"):  # what overflows is found here
        statistics = run.statistics()
        fault = find_fault(statistics)
    if fault is not None:
        where = run.job.model.name(run.index).rstrip(".")
        raise KizamiError(f"its statistics cannot be: {fault}", code="non_finite", tensor=where, hint=DAMAGED)
    run.check_behind()
    run.job.weights.check_unchanged()
    files = [write_layer(journal.partial, statistics)]
    if settings.keep != "none":
        files.append(_write_inputs(run, journal.partial, settings.keep == "all"))
    run.job.work.sync()
    journal.commit(run.index, files, run.bad_rows)
    journal.drop_sums(None)
    counts = () if statistics.experts is None else tuple(sorted(statistics.experts.n.tolist()))
    on_event(LayerDone(run.index, counts, run.bad_rows))


def _write_inputs(run: LayerRun, folder: Path, everything: bool) -> WrittenShard:
    job, held_out = run.job, ~run.job.fit_tokens
    kept = np.arange(job.tokens) if everything else np.flatnonzero(held_out)
    top_k = run.mlp.top_k
    with InputsWriter(folder, run.index, len(kept), job.model.hidden, top_k) as writer:
        ids, gates = job.work.ids.gather(kept)[:, :top_k], job.work.gates.gather(kept)[:, :top_k]
        writer.routing(ids, gates, held_out[kept])
        for at in range(0, len(kept), job.chunks.tokens):
            x = run.normed(kept[at : at + job.chunks.tokens])
            x = x.to(torch.bfloat16)
            x[~x.isfinite().all(dim=1)] = 0  # counts for nothing in any sum of products
            writer.append(x.cpu().view(torch.uint16).numpy())
        return writer.finish()


def _facts(
    checkpoint: Checkpoint, tokens: TokenSet, settings: Settings, chunks: Chunks, dtype: torch.dtype
) -> dict[str, Any]:
    """What a resumed run must share with the one that it resumes, and what the manifest says of a run."""
    return {
        "source": {"name": checkpoint.root.resolve().name, "contents": sample_contents(checkpoint),
                   "config": config_sha256(checkpoint)},
        "tokens": {"sha256": tokens.sha256, "sequences": tokens.sequences, "seq_len": tokens.seq_len,
                   "held_out": list(tokens.held_out), "sources": [asdict(source) for source in tokens.sources],
                   "mix": asdict(tokens.mix)},
        "settings": {"keep": settings.keep, "device": settings.device, "dtype": str(dtype).removeprefix("torch."),
                     "token_chunk": chunks.tokens, "query_block": chunks.queries,
                     "threads": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("kizami", "torch", "transformers")},
    }  # fmt: skip


def _finish(journal: Journal, out: Path, facts: dict[str, Any], model: Model) -> None:
    """The manifest, then one rename: OUT is never there half done."""
    files = {file.file: file for files in journal.committed.values() for file in files}
    notes = []
    if model.family.mtp_layers:
        notes.append(f"MTP layers {list(model.family.mtp_layers)} were not run: the model's own forward pass has none")
    for layer, bad in sorted(journal.bad.items()):
        if bad:
            notes.append(f"layer {layer}: {bad} tokens were not finite behind it; they are in no sum")
    write_manifest(
        journal.partial, facts["source"], facts["tokens"], facts["settings"], facts["versions"],
        sorted(journal.committed), files, notes,
    )  # fmt: skip
    try:
        remove_state(journal.partial)
        fsync_folder(journal.partial)
        os.rename(journal.partial, out)
        _settle(out)
    except OSError as e:
        hint = "the same command again only repeats the last step"
        raise io_error(f"is complete, but cannot become {out.name}", e, journal.partial.name, hint) from e


def _settle(out: Path) -> None:
    """Makes OUT's name durable and removes its journal."""
    fsync_folder(out.absolute().parent)
    with suppress(FileNotFoundError):
        for name in ("lock", JOURNAL):
            (out / FOLDER / name).unlink(missing_ok=True)
        (out / FOLDER).rmdir()
    fsync_folder(out)


def _complete_published(out: Path, facts: dict[str, Any], files: dict[str, list[int]]) -> bool:
    """Whether OUT is the result of this very job, killed between the rename and the end of the journal's removal."""
    folder = out / FOLDER
    if out.is_symlink() or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        manifest = Statistics.open(out).manifest
    except KizamiError:
        return False  # no STATS of anybody
    if not is_identity({key: manifest.get(key) for key in facts}, facts) or not has_used(out, files):
        return False
    try:
        _settle(out)
    except OSError as e:
        raise io_error("cannot remove the journal", e, f"{out.name}/{FOLDER}") from e
    return True


def _look(out: Path) -> str | None:
    try:
        return what_is_there(out)
    except OSError as e:
        raise io_error("cannot look into", e, str(out)) from e


def _place(checkpoint: Checkpoint, out: Path) -> Path:
    """OUT.partial, if both may be written to."""
    try:
        return check_new_folder(checkpoint, out, "STATS")
    except OSError as e:
        raise io_error("cannot look up", e, str(out)) from e


def open_device(word: str) -> torch.device:
    """KizamiError "bad_device"."""
    try:
        device = torch.device(word)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:  # torch built without CUDA asserts
        raise KizamiError(
            f'"{word}" cannot be used: {str(e).splitlines()[0][:200]}', code="bad_device", hint="use --device cpu"
        ) from e
    return device


def check_tokens(ids: NDArray[np.int32], model: Model) -> None:
    """ids: [sequences, seq_len]. KizamiError "bad_token"."""
    vocabulary, longest = model.config.vocab_size, model.config.max_position_embeddings
    assert ids.ndim == 2, ids.shape
    assert ids.size
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise KizamiError(
            f"token ids from {ids.min()} to {ids.max()}, expected 0 to {vocabulary - 1}",
            code="bad_token",
            hint="the tokens were made with the tokenizer of another model",
        )
    if ids.shape[1] > longest:
        raise KizamiError(
            f"sequences of {ids.shape[1]} tokens, and the model takes at most {longest} (max_position_embeddings)",
            code="bad_token",
            hint="use a smaller --seq-len",
        )
