"""Writing STATS: each file whole or absent, the manifest last. See formats/statistics.py for what is in them."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.statistics import (
    EXPERT_DTYPES,
    MANIFEST,
    NUMPY_OF,
    SCHEMA,
    LayerStatistics,
    inputs_file,
    layer_file,
)
from kizami.formats.strict_json import dump_json
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import ShardWriter, WrittenShard, write_file_durably

DTYPE_WORDS = {np.dtype(kind): word for word, kind in NUMPY_OF.items()}


def write_layer(folder: Path, layer: LayerStatistics) -> WrittenShard:
    """layer-NNNNN.safetensors, durably. KizamiError "io_error"."""
    tensors: dict[str, NDArray[Any]] = {}
    if layer.experts is not None:
        for name, word in EXPERT_DTYPES.items():
            tensors[f"experts.{name}"] = np.asarray(getattr(layer.experts, name), NUMPY_OF[word])
    for module, h in sorted(layer.linears.items()):
        tensors[f"linear.{module}"] = np.asarray(h, np.float32)
    for what, kv in sorted(layer.kv.items()):
        channels = np.stack([kv.channel_amax, kv.channel_mean, kv.channel_std])
        tensors[f"kv.{what}.channels"] = channels.astype(np.float32)
        tensors[f"kv.{what}.figures"] = np.array([kv.amax, kv.rms, kv.p9999, kv.first_token_amax])
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # so that every tensor is aligned
    specs = [TensorSpec(name, DTYPE_WORDS[tensors[name].dtype], tensors[name].shape) for name in order]
    with ShardWriter(folder / layer_file(layer.layer), specs) as writer:
        for name in order:
            writer.append(name, np.ascontiguousarray(tensors[name]))
        return writer.finish()


class InputsWriter:
    """inputs-NNNNN.safetensors in runs of tokens. A context manager that removes an unfinished file."""

    def __init__(self, folder: Path, layer: int, tokens: int, hidden: int, top_k: int) -> None:
        """top_k: 0 for a dense layer."""
        specs = [
            TensorSpec("experts", "I32", (tokens, top_k)),
            TensorSpec("gates", "F32", (tokens, top_k)),
            TensorSpec("x", "BF16", (tokens, hidden)),
            TensorSpec("held_out", "U8", (tokens,)),
        ]
        self._writer = ShardWriter(folder / inputs_file(layer), specs)

    def routing(self, experts: NDArray[np.int32], gates: NDArray[np.float32], held_out: NDArray[np.bool_]) -> None:
        """Of all tokens at once, before the first run of x."""
        self._writer.append("experts", np.ascontiguousarray(experts, np.int32))
        self._writer.append("gates", np.ascontiguousarray(gates, np.float32))
        self._writer.append("held_out", np.ascontiguousarray(held_out, np.uint8))

    def append(self, x: NDArray[np.uint16]) -> None:
        """BF16 bits [n, hidden] of the next n tokens."""
        self._writer.append("x", np.ascontiguousarray(x))

    def finish(self) -> WrittenShard:
        return self._writer.finish()

    def __enter__(self) -> "InputsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.abort()


def write_manifest(
    folder: Path,
    source: Mapping[str, Any],
    tokens: Mapping[str, Any],
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    layers: list[int],
    files: Mapping[str, WrittenShard],
    notes: list[str],
) -> None:
    """The manifest, durably. source has "contents" (`fingerprint.sample_contents`), settings has "keep". Nothing here
    may depend on time or on interruptions: equal work gives equal bytes."""
    manifest = {
        "schema": SCHEMA,
        "source": dict(source),
        "tokens": dict(tokens),
        "settings": dict(settings),
        "versions": dict(versions),
        "notes": notes,
        "layers": layers,
        "files": {name: {"bytes": file.nbytes, "sha256": file.sha256} for name, file in sorted(files.items())},
    }
    write_file_durably(folder / MANIFEST, dump_json(manifest))
