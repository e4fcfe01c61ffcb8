"""STATS with random figures for every linear of a checkpoint but its MTP layers', written without a calibration."""

from pathlib import Path
from typing import Any

import numpy as np

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.families import Role
from kizami.formats.fingerprint import config_sha256, sample_contents
from kizami.formats.statistics import ExpertStatistics, LayerStatistics, Statistics, layer_file
from kizami.formats.statistics_writer import write_layer, write_manifest
from kizami.quantize.plan import Step
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

TOKENS = {
    "sha256": "0" * 64, "sequences": 16, "seq_len": 256, "held_out": [3],
    "sources": [{"name": "chat.jsonl"}, {"name": "a.txt"}],
}  # fmt: skip


def make_statistics(source: Path, folder: Path, *, starved: int = 0, seed: int = 0, **changes: Any) -> Statistics:
    """starved: the expert of each layer that no token reached. changes: `tokens`, `keep`, `contents` of the manifest;
    `experts`, how many there are; `hidden`, the width of gate's input; `gates`, a factor of sum_g2; `layers`, those
    that are written."""
    checkpoint = Checkpoint.open(source)
    rng, layers = np.random.default_rng(seed), {}
    for step in build_plan(checkpoint, Policy(), Method()).steps:
        if step.place.layer is not None and not step.place.in_mtp and step.is_linear:
            layers.setdefault(step.place.layer, []).append(step)
    kept = [number for number in sorted(layers) if number in changes.get("layers", layers)]
    folder.mkdir()
    files = {}
    for number in kept:
        plain = [step for step in layers[number] if step.place.role is not Role.ROUTED_EXPERT]
        linears = {step.module: np.exp(rng.standard_normal(step.shape[1])).astype(np.float32) for step in plain}
        experts = _experts(layers[number], rng, starved, changes)
        files[layer_file(number)] = write_layer(folder, LayerStatistics(number, experts, linears))
    contents = changes.get("contents", sample_contents(checkpoint))
    tokens, keep = changes.get("tokens", TOKENS), changes.get("keep", "none")
    source = {"contents": contents, "config": changes.get("config", config_sha256(checkpoint))}
    write_manifest(folder, source, tokens, {"keep": keep}, {"kizami": "0"}, kept, files, [])
    return Statistics.open(folder)


def _experts(
    steps: list[Step], rng: np.random.Generator, starved: int, changes: dict[str, Any]
) -> ExpertStatistics | None:
    routed = [step for step in steps if step.place.role is Role.ROUTED_EXPERT]
    if not routed:
        return None
    widths = {step.place.part: step.shape[1] for step in routed}
    count = changes.get("experts", 1 + max(step.place.expert or 0 for step in routed))
    n = rng.integers(1, 60, count)
    n[starved] = 0
    gates = [rng.uniform(0.1, 1, k) ** 2 for k in n]
    squares = [
        (np.exp(rng.standard_normal((count, width))) * (n > 0)[:, None]).astype(np.float32)
        for width in (changes.get("hidden", widths["gate_proj"]), widths["down_proj"])
    ]
    sums = [np.array([float((g2**power).sum()) for g2 in gates]) for power in (1, 2)]
    sums[0] *= changes.get("gates", 1.0)
    return ExpertStatistics(*squares, *sums, n.astype(np.int64), (n // 10).astype(np.int64))
