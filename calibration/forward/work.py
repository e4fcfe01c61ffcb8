"""What a run has open while it works on layers: the files of its state, all reserved before the first number."""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from kizami.calibration.forward.memory import COUNTS, Sizes
from kizami.calibration.forward.state import RowFile, TensorFile
from kizami.formats.run_log import FOLDER, JOURNAL


class Work:
    """x: hidden states that enter a layer, [tokens, hidden]; attended: after its attention; products: of the units of
    its MLP, [tokens * slots, hidden]; ids, gates: [tokens, top_k]; unit_x, unit_a: the units' sums; unit_counts: sum
    g^2, sum g^4, n, n_held_out, overflown; chosen: keys that the last indexer picked, [tokens, index_topk], if there
    is one to share. A context manager that closes the files."""

    def __init__(
        self,
        folder: Path,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        resumed: bool,
    ) -> None:
        self._files: list[RowFile] = []
        total = sizes.disk(dtype.itemsize)

        def rows(name: str, count: int, width: int, kind: Any) -> RowFile:
            file = RowFile(folder / name, count, width, kind, resumed, total)
            self._files.append(file)
            return file

        def tensors(name: str, count: int) -> TensorFile:
            file = TensorFile(folder / name, count, sizes.hidden, dtype, resumed, device, total)
            self._files.append(file)
            return file

        try:
            self.x = tensors("x", sizes.tokens)
            self.attended = tensors("attended", sizes.tokens)
            self.products = tensors("products", sizes.tokens * sizes.slots)
            self.ids = rows("ids", sizes.tokens, max(sizes.top_k, 1), np.int32)
            self.gates = rows("gates", sizes.tokens, max(sizes.top_k, 1), np.float32)
            self.unit_x = rows("unit_x", sizes.units, sizes.hidden, np.float64)
            self.unit_a = rows("unit_a", sizes.units, sizes.inner, np.float64)
            self.unit_counts = rows("unit_counts", sizes.units, COUNTS, np.float64)
            self.bad = rows("bad", sizes.chunks, 1, np.int64)
            self.chosen = rows("chosen", sizes.tokens, sizes.chosen, np.int32) if sizes.chosen else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Work":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sync(self) -> None:
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()


def remove_state(partial: Path) -> None:
    """All but the journal and its lock."""
    for path in sorted((partial / FOLDER).iterdir()):
        if path.name not in ("lock", JOURNAL):
            path.unlink()
