"""Running `run_calibration` in tests: what each layer leaves behind, and runs that end in the middle. Needs torch."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_oracle import token_set

from kizami.calibration.data.tokens import TokenSet
from kizami.calibration.forward import journal
from kizami.calibration.forward.run import Event, LayerDone, run_calibration
from kizami.calibration.forward.settings import Settings
from kizami.calibration.forward.state import RowFile
from kizami.formats.checkpoint import Checkpoint

Rows = tuple[torch.Tensor, torch.Tensor]


def random_tokens(folder: Path, sequences: int, seq_len: int, held_out: tuple[int, ...] = (1,)) -> TokenSet:
    config = Checkpoint.open(folder).config
    vocabulary = config.get("text_config", config)["vocab_size"]
    return token_set(np.random.default_rng(1).integers(2, vocabulary, (sequences, seq_len)), held_out)


def calibrate(folder: Path, tokens: TokenSet, out: Path, settings: Settings = Settings()) -> list[Rows]:  # noqa: B008
    """For each layer: hidden states behind it, float32 [tokens, hidden], and expert ids [tokens, top_k]."""
    left: list[Rows] = []

    def look(event: Event) -> None:
        if isinstance(event, LayerDone):
            state = out.with_name(f"{out.name}.partial") / ".kizami"
            raw = np.fromfile(state / "x", np.uint16 if settings.dtype == "bfloat16" else np.float32)
            x = torch.from_numpy(raw).view(torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32)
            ids = torch.from_numpy(np.fromfile(state / "ids", np.int32))
            left.append((x.reshape(tokens.ids.size, -1).float(), ids.reshape(tokens.ids.size, -1)))

    run_calibration(Checkpoint.open(folder), tokens, out, settings, look)
    return left


def hashes(folder: Path) -> dict[str, str]:
    """Of every file, by its name in the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class PowerCut(BaseException):
    """No handler for errors sees it."""


class Cuts:
    """Ends runs after some event, and takes away what was not on the disk by then: every run of rows that was written
    since its file was last synced is overwritten with NaN (0xFF), or, as chance has it, left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
        self._rng, self._left = rng, -1
        self._unsynced: dict[RowFile, list[tuple[int, int]]] = {}
        write, sync = RowFile.write, RowFile.sync

        def noted_write(file: RowFile, first: int, values: Any) -> None:
            write(file, first, values)
            self._unsynced.setdefault(file, []).append((first, np.asarray(values).size // file.width))

        def noted_sync(file: RowFile) -> None:
            sync(file)
            self._unsynced.pop(file, None)

        monkeypatch.setattr(RowFile, "write", noted_write)
        monkeypatch.setattr(RowFile, "sync", noted_sync)

    def after(self, events: int) -> Callable[[Event], None]:
        self._left = events
        self._unsynced.clear()
        return self._event

    def _event(self, _: Event) -> None:
        self._left -= 1
        if self._left:
            return
        for file, writes in self._unsynced.items():
            for first, count in writes:
                if self._rng.random() < 0.7:
                    row = file.width * file.dtype.itemsize
                    os.pwrite(file._fd, b"\xff" * (count * row), first * row)
        raise PowerCut


def with_cuts(
    folder: Path, tokens: TokenSet, out: Path, settings: Settings, cuts: Cuts, rng: np.random.Generator, events: int
) -> int:
    """Runs until the end, however often it is cut off within its `events`. Returns how often it was."""
    ended = 0
    while True:
        try:
            run_calibration(
                Checkpoint.open(folder), tokens, out, settings, cuts.after(int(rng.integers(1, events + 3)))
            )
            return ended
        except PowerCut:
            ended += 1


def count_events(folder: Path, tokens: TokenSet, out: Path, settings: Settings) -> int:
    seen: list[Event] = []
    run_calibration(Checkpoint.open(folder), tokens, out, settings, seen.append)
    return len(seen)


def lines_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(journal, "EVERY", seconds)
