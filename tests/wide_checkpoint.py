"""A checkpoint of Kimi-K2's width and few layers that takes no room: FP8 zeros as holes in the files, scales of ones.

Embeddings, norms, routers and the first rows of attention's projections are real numbers, so that tokens differ, go to
different experts, and no linear of the attention sees zeros only.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import inventory
import numpy as np

from kizami.formats.header import encode_header
from kizami.formats.tensors import TensorSpec

NAME = "kimi-k2-fp8"
REAL_ROWS = 256  # the first head of kv_b_proj: 128 of K, 128 of V


def write_wide(folder: Path, layers: int, token_ids: np.ndarray, experts: int = 384) -> Path:
    """`layers` of NAME's decoder layers, the first of which is dense; embeddings for `token_ids` only."""
    folder.mkdir(parents=True)
    config = inventory.config(NAME) | {"num_hidden_layers": layers, "n_routed_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    total = 0
    for file, specs in _files(layers, experts):
        with open(folder / file, "wb") as out:
            header = encode_header(specs, {"format": "pt"})
            out.write(header)
            at = len(header)
            for spec in specs:
                _fill(out.fileno(), at, spec, rng, token_ids)
                at += spec.nbytes
                weight_map[spec.name] = file
            out.truncate(at)
            total += at - len(header)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _files(layers: int, experts: int) -> Iterator[tuple[str, list[TensorSpec]]]:
    files: dict[str, list[TensorSpec]] = {}
    for name, dtype, shape, _ in inventory.source_tensors(NAME):
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else None
        if "experts" in parts and int(parts[parts.index("experts") + 1]) >= experts:
            continue
        if ".mlp.gate." in name:  # the router: a row per expert
            shape = (experts, *shape[1:])
        if layer is None or layer < layers:
            file = "model-rest.safetensors" if layer is None else f"model-{layer}.safetensors"
            files.setdefault(file, []).append(TensorSpec(name, dtype, shape))
    for file, specs in files.items():
        yield file, sorted(specs, key=lambda spec: inventory.FILE_ORDER[spec.dtype])


def _fill(fd: int, at: int, spec: TensorSpec, rng: np.random.Generator, token_ids: np.ndarray) -> None:
    if spec.name.endswith("embed_tokens.weight"):
        width = spec.shape[1]
        for token in np.unique(token_ids).tolist():
            os.pwrite(fd, _bf16(rng.standard_normal(width, np.float32)), at + token * width * 2)
    elif spec.name.endswith(("layernorm.weight", "norm.weight")):
        os.pwrite(fd, _bf16(np.ones(spec.shape, np.float32)), at)
    elif spec.name.endswith("mlp.gate.weight"):
        os.pwrite(fd, _bf16(rng.standard_normal(spec.shape, np.float32) / 30), at)
    elif (".self_attn." in spec.name and spec.name.endswith("_proj.weight")) or spec.name.endswith("with_mqa.weight"):
        codes = rng.integers(0, 2, (REAL_ROWS, spec.shape[1]), np.uint8) * 0x80 + 0x20  # e4m3: -1/8 or 1/8
        os.pwrite(fd, codes.tobytes(), at)
    elif spec.name.endswith("scale_inv"):
        os.pwrite(fd, np.ones(spec.shape, np.float32).tobytes(), at)


def _bf16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
