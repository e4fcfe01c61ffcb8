"""quantize_linear on a device: the same bytes and the same sums, whatever the device and the height of its bands."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kizami.quantize.kernels.lanes import CHUNK
from kizami.quantize.kernels.methods import new_totals
from kizami.quantize.kernels.vectors import SUMS
from kizami.quantize.linear import Block, Codes, Empty, PackedLinear, Rows, bands_of, error_sums
from kizami.quantize.on_device.arithmetic import bf16_bits
from kizami.quantize.on_device.rounding import Counts, Rounded, counts, rounded, row_lanes
from kizami.quantize.on_device.scales import Groups, groups_of, minmax_scales, signed_scales
from kizami.quantize.on_device.search import candidates_on, search_scales
from kizami.quantize.on_device.transfer import KINDS, Lane
from kizami.quantize.on_device.weight import Weight, chunk_peaks, floor_of, is_usable, values
from kizami.quantize.on_device.weighted import (
    Columns,
    columns_on,
    weighted_candidates_on,
    weighted_row_lanes,
    weighted_scales,
)
from kizami.quantize.settings import CALIBRATED, GROUP_SIZES, SEARCHED, Method

BAND_WEIGHTS = 1 << 22  # that are worked on at a time: some 100 bytes of device memory each

Array = NDArray[Any]


class _Job(NamedTuple):
    lane: Lane
    weight: Weight
    method: Method
    group_size: int
    columns: Columns | None
    smallest: float
    floor: torch.Tensor


class _Band(NamedTuple):
    """What a band leaves on the device. found: |W| and error of weights above the floor, at_floor: errors of those at
    it, both in row order."""

    counts: Counts
    found: torch.Tensor
    at_floor: torch.Tensor


def quantize_on(
    lane: Lane,
    weight: Rows,
    scale: NDArray[np.float32] | None,
    block: Block | None,
    group_size: int,
    method: Method,
    empty: Empty = np.empty,
    *,
    smallest_scale: float = 0.0,
    weights: NDArray[np.int64] | None = None,
    h: NDArray[np.float64] | None = None,
    band: int | None = None,
) -> PackedLinear:
    """As quantize_linear, in `lane`; the weight is gone through once, and held on the device. Raises NonFiniteError."""
    assert group_size in GROUP_SIZES, group_size
    assert weight.shape[1] % group_size == 0, (group_size, weight.shape)
    assert (weights is None) == (method.name not in CALIBRATED), method
    (rows, columns), device = weight.shape, lane.device
    height = band or max(1, BAND_WEIGHTS // max(1, columns))
    runs = [(first, min(first + height, rows)) for first in range(0, rows, height)] if columns else []
    on_host = bands_of(weight, scale, block, group_size)
    packed = empty((rows, columns // 8), np.int32)
    scales = empty((rows, columns // group_size), np.uint16)
    if not runs:
        return PackedLinear(packed, scales, error_sums(new_totals(0), None, np.float32(0), 0, 0))
    with lane.entered():
        raw = torch.empty(weight.shape, dtype=KINDS[np.dtype(weight.dtype)], device=device)
        grid = None if on_host.grid is None else lane.sent(on_host.grid)
        held = Weight(raw, grid, on_host.block, isinstance(on_host, Codes))
        floor = _survey(lane, weight, held, runs)
        if floor is None:
            on_host.survey()  # it finds the first weight that cannot be used
            raise AssertionError("a device saw a weight that is not finite, the kernels did not")
        by_column = None if weights is None else columns_on(device, weights, h, group_size)
        job = _Job(lane, held, method, group_size, by_column, smallest_scale, floor)
        lanes = np.empty((rows, (3 if by_column is None else 5) * SUMS), np.float64)
        bands = [_band(job, first, last, packed, scales, lanes) for first, last in runs]
        found, at_floor = _to_host(bands)
        totals = _counted(bands)
        least = np.float32(floor.item())
    totals = totals._replace(sums=_added_rows(lanes[:, : 3 * SUMS]), found=found)
    totals.found_count[0] = found.shape[1]
    totals.at_floor[:] = len(at_floor), _squares(at_floor)
    weighted = None if by_column is None else _added_rows(lanes[:, 3 * SUMS :])
    return PackedLinear(packed, scales, error_sums(totals, weighted, least, rows * columns, scales.size))


def _survey(lane: Lane, weight: Rows, held: Weight, runs: list[tuple[int, int]]) -> torch.Tensor | None:
    """Brings the weight to the device and gives the floor of its largest 0.1 %; None where it has a weight or a scale
    that cannot be used."""
    peaks = torch.empty(weight.shape[0], weight.shape[1] // CHUNK, device=lane.device)
    for first, last in runs:
        lane.send(weight[first:last], held.raw[first:last])
        peaks[first:last] = chunk_peaks(values(held, first, last))
    usable = is_usable(peaks)
    if held.grid is not None and held.block is not None:
        used = held.grid[: -(-weight.shape[0] // held.block[0])]
        usable &= (used.isfinite() & (used >= 0)).all()
    return floor_of(peaks) if usable.item() else None


def _band(job: _Job, first: int, last: int, packed: Array, scales: Array, lanes: Array) -> _Band:
    """Rows first to last, to their places in the results."""
    rows, w = last - first, values(job.weight, first, last)
    groups = groups_of(w, job.weight.raw[first:last] if job.weight.is_code else None, job.group_size)
    step = _raised(_scales(job, groups, first, last), job.smallest)
    made = rounded(groups, step, rows, job.method.name == "minmax")
    take = job.lane.take
    take(made.packed, packed[first:last])
    take(bf16_bits(step).view(rows, -1), scales[first:last])
    take(_lanes(job, w, made, step), lanes[first:last])
    magnitude = w.abs()
    above = magnitude > job.floor
    found = torch.stack((magnitude[above], made.error[above]))
    return _Band(counts(groups, step, made.error), found, made.error[magnitude == job.floor])


def _scales(job: _Job, groups: Groups, first: int, last: int) -> torch.Tensor:
    method, size, device = job.method, job.group_size, job.lane.device
    if method.name not in SEARCHED:
        return minmax_scales(groups) if method.name == "minmax" else signed_scales(groups)
    block_scale = _group_scales(job.weight, first, last, size) if groups.codes is not None else None
    key = method.scale_sign, method.clip_allowance, size, job.columns is None
    if job.columns is None:
        search = job.lane.kept(key, lambda: candidates_on(device, method, size))
        return search_scales(groups, block_scale, search)
    search = job.lane.kept(key, lambda: weighted_candidates_on(device, method, size))
    return weighted_scales(groups, block_scale, job.columns, search)


def _group_scales(weight: Weight, first: int, last: int, group_size: int) -> torch.Tensor:
    """float32 [G]: the block scale of each group of rows first to last."""
    assert weight.grid is not None and weight.block is not None  # noqa: PT018 — one fact
    device = weight.raw.device
    of_rows = torch.arange(first, last, device=device) // weight.block[0]
    of_groups = torch.arange(0, weight.raw.shape[1], group_size, device=device) // weight.block[1]
    return weight.grid.index_select(0, of_rows).index_select(1, of_groups).view(-1)


def _raised(step: torch.Tensor, smallest: float) -> torch.Tensor:
    """Magnitudes to `smallest` at least, as methods.store_scales."""
    raised = torch.where(step < 0, torch.full_like(step, -smallest), torch.full_like(step, smallest))
    return torch.where(step.abs() < smallest, raised, step)


def _lanes(job: _Job, w: torch.Tensor, made: Rounded, step: torch.Tensor) -> torch.Tensor:
    lanes = row_lanes(w, made, step)
    if job.columns is None:
        return lanes
    return torch.cat((lanes, weighted_row_lanes(w, made, job.columns)), 1)


def _to_host(bands: list[_Band]) -> tuple[Array, Array]:
    """found float32 [2, ...] and at_floor float32 of all bands."""
    found = torch.cat([band.found for band in bands], 1).cpu().numpy()
    return found, torch.cat([band.at_floor for band in bands]).cpu().numpy()


def _counted(bands: list[_Band]) -> Any:
    totals = new_totals(0)
    largest = torch.stack([band.counts.largest for band in bands]).amax().cpu()
    totals.largest[0] = int(largest.view(torch.int32).item())
    clipped, zero, negative = (
        int(torch.stack([band.counts[k] for band in bands]).sum().item()) for k in range(1, len(Counts._fields))
    )
    totals.clipped[0] = clipped
    totals.groups[:] = zero, negative
    return totals


def _added_rows(lanes: Array) -> NDArray[np.float64]:
    """float64 [rows, n] to [n], row after row: `accumulate` is defined so, `sum` is not."""
    total: NDArray[np.float64] = np.add.accumulate(lanes, axis=0)[-1]
    return total


def _squares(errors: Array) -> float:
    """One after the other, as methods.collect_top."""
    wide = errors.astype(np.float64)
    return float(np.add.accumulate(wide * wide)[-1]) if wide.size else 0.0
