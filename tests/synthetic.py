"""The frozen synthetic weights on which the targets of the scale search were measured."""

import numpy as np
from numpy.typing import NDArray

from kizami.quantize import reference as ref

KINDS = ("gauss", "t5", "t3")
BLOCK = (128, 128)


def to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest finite e4m3 byte, ties to even."""
    magnitudes = ref.decode_e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    a = np.abs(x).astype(np.float64)
    code = np.searchsorted(middles, a, side="left")
    tie = (code < 126) & (a == middles[np.minimum(code, 125)]) & (code % 2 == 1)
    return ((code + tie) | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def weights(kind: str, seed: int = 1) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(e4m3 bytes [512, 1024], block scales [4, 8]) of 0.02 * standard normal or Student t variates."""
    rng = np.random.RandomState(seed)
    z = rng.standard_normal((512, 1024)) if kind == "gauss" else rng.standard_t(float(kind[1:]), (512, 1024))
    blocks = np.float32(0.02 * z).reshape(4, 128, 8, 128)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)
    return to_e4m3((blocks / scale[:, None, :, None]).reshape(512, 1024)), scale
