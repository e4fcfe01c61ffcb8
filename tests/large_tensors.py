"""Checkpoints of a few large tensors, and what a `kizami` process of its own took at most."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kizami.formats.header import encode_header
from kizami.formats.tensors import TensorSpec

MIB = 1 << 20
COLUMNS = 8192
CONFIG: dict[str, Any] = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# Not by pytest's own process, whose memory a child's peak begins with: a small one starts the program and waits for it
WAIT = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """peak: bytes."""

    code: int
    out: str
    err: str
    peak: int


def process(*words: object) -> Ran:
    """`kizami WORDS`."""
    program = (sys.executable, "-m", "kizami.cli", *map(str, words))
    done = subprocess.run(
        [sys.executable, "-S", "-c", WAIT, *program], capture_output=True, text=True, check=False, timeout=600
    )
    *err, peak = done.stderr.splitlines()
    return Ran(done.returncode, done.stdout, "\n".join(err), int(peak))


def codes(rows: int) -> np.ndarray:
    """e4m3 bytes [rows, COLUMNS] without NaN. Every chunk of 32 columns of the hot blocks (see `scales`) is full of one
    magnitude, and magnitudes differ: whoever collects the largest weights finds as many as there can be."""
    made = np.random.default_rng(0).integers(0, 126, (rows, COLUMNS), np.uint8)
    ramp = (64 + np.arange(rows)[:, None] * 4 + np.arange(4)[None, :]) % 62 + 64
    made[:, :128] = np.repeat(ramp.astype(np.uint8), 32, axis=1)
    return made


def scales(rows: int) -> np.ndarray:
    grid = np.full((-(-rows // 128), COLUMNS // 128), 1e-3, np.float32)
    grid[::2, 0] = 1.0
    return grid


def specs_of(sizes: dict[str, int], dtype: str) -> Iterator[TensorSpec]:
    for module, rows in sizes.items():
        yield TensorSpec(f"{module}.weight", dtype, (rows, COLUMNS))
        if dtype == "F8_E4M3":
            yield TensorSpec(f"{module}.weight_scale_inv", "F32", (-(-rows // 128), COLUMNS // 128))


def write_large(folder: Path, sizes: dict[str, int], dtype: str = "F8_E4M3", sparse: bool = False) -> Path:
    """One file. sizes: rows of each module, of COLUMNS columns. sparse: holes for weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | ({"quantization_config": FP8} if dtype != "BF16" else {})))
    specs = tuple(specs_of(sizes, dtype))
    head = encode_header(specs, {"format": "pt"})
    block = codes(1024) if dtype != "BF16" else np.full((1024, COLUMNS), 0x3C00, np.uint16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(head)
        for spec in specs:
            if spec.dtype == "F32":
                file.write(scales(spec.shape[0] * 128).tobytes())
                continue
            for first in range(0, 0 if sparse else spec.shape[0], len(block)):
                file.write(block[: spec.shape[0] - first].tobytes())
            if sparse:
                file.seek(spec.nbytes, os.SEEK_CUR)
        file.truncate(len(head) + sum(spec.nbytes for spec in specs))
    return folder


def expert(number: int, part: str = "up_proj") -> str:
    return f"model.layers.1.mlp.experts.{number}.{part}"
