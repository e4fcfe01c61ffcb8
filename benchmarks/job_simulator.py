"""A conversion on many machines, simulated: shards as fluids that share cores, network and a file system.

Arithmetic only; `job_projection.py` measures what a shard costs and prints the tables.

A shard is read, computed, hashed and written at the same time, as `quantize/shard.py` does it: its pieces are computed
on all cores of a machine, and one thread hashes and writes them in order. So a shard that gets a share x of its rate
takes x of everything that it needs. Machines take the next shard when they have a driver free; what is shared is
shared evenly until something is used up, then among those whom that does not hold back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Limit = Literal["cores", "reading", "writing", "disk or network", "one writer per shard", "whole shards"]
SCALES = 1.25  # twice the machines must be this much faster, or scaling has stopped
EVEN = 1.10  # a wall time this close to a bound is the bound's doing


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one core per byte, as they were measured: `copy_in` per byte read, pack and move per byte of source
    weight, hash and `copy_out` per byte written; `shard`: seconds per shard that no byte explains."""

    copy_in: float
    pack: float
    move: float
    hash: float
    copy_out: float
    shard: float


@dataclass(frozen=True, slots=True)
class Load:
    """One output shard, in bytes: source weights that are packed and moved, all that is read, what is written."""

    packed: int
    moved: int
    read: int
    written: int

    def compute_seconds(self, costs: Costs) -> float:
        """Of one core, in the pool."""
        return self.read * costs.copy_in + self.packed * costs.pack + self.moved * costs.move

    def writer_seconds(self, costs: Costs) -> float:
        """Of the one thread that hashes and writes."""
        return self.written * (costs.hash + costs.copy_out) + costs.shard


@dataclass(frozen=True, slots=True)
class Cluster:
    """nodes machines of `cores`; bytes per second that the file system reads and writes for all of them, and that one
    machine's network (or disk) moves in both directions together. begin: seconds before the first shard."""

    nodes: int
    cores: int
    read: float
    write: float
    network: float
    begin: float = 0.0

    @property
    def drivers(self) -> int:
        """Shards in work on a machine, as `quantize/pipeline.py` has them."""
        return max(2, self.cores // 2) if self.cores > 1 else 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """wall: seconds. bounds: seconds below which no schedule gets, by what sets them. limit: why it takes as long."""

    wall: float
    bounds: Mapping[Limit, float]
    limit: Limit


def simulate(loads: Sequence[Load], costs: Costs, cluster: Cluster) -> Outcome:
    bounds = dict(_bounds(loads, costs, cluster))
    wall = cluster.begin + _run(loads, costs, cluster)
    limit = max(bounds, key=lambda name: bounds[name])
    return Outcome(wall, bounds, limit if wall - cluster.begin <= EVEN * bounds[limit] else "whole shards")


def _bounds(loads: Sequence[Load], costs: Costs, cluster: Cluster) -> Iterator[tuple[Limit, float]]:
    read, written = sum(load.read for load in loads), sum(load.written for load in loads)
    seconds = sum(load.compute_seconds(costs) + load.writer_seconds(costs) for load in loads)
    yield "cores", seconds / (cluster.nodes * cluster.cores)
    yield "reading", read / cluster.read
    yield "writing", written / cluster.write
    yield "disk or network", (read + written) / cluster.network / cluster.nodes
    yield "one writer per shard", max(load.writer_seconds(costs) for load in loads)


@dataclass(slots=True)
class _Active:
    node: int
    needs: dict[str, float]  # of each resource, for the whole shard
    left: float = 1.0


def _run(loads: Sequence[Load], costs: Costs, cluster: Cluster) -> float:
    """Seconds until the last shard is done."""
    capacity = {"read": cluster.read, "write": cluster.write}
    for node in range(cluster.nodes):
        capacity[f"cores {node}"], capacity[f"network {node}"] = float(cluster.cores), cluster.network
    waiting = list(reversed(loads))
    active: list[_Active] = []
    # One shard for each machine before any gets its second: whoever is free first asks first.
    free = [node for _ in range(cluster.drivers) for node in range(cluster.nodes)]
    now = 0.0
    while waiting or active:
        while waiting and free:
            active.append(_begin(waiting.pop(), free.pop(0), costs))
        shares = _shares(active, capacity)
        step = min(one.left / share for one, share in zip(active, shares, strict=True))
        now += step
        for one, share in zip(active, shares, strict=True):
            one.left -= share * step
        free += [one.node for one in active if one.left <= 1e-9]
        active = [one for one in active if one.left > 1e-9]
    return now


def _begin(load: Load, node: int, costs: Costs) -> _Active:
    writer = load.writer_seconds(costs)
    return _Active(
        node,
        {
            "read": float(load.read),
            "write": float(load.written),
            f"cores {node}": load.compute_seconds(costs) + writer,
            f"network {node}": float(load.read + load.written),
            "writer": writer,
        },
    )


def _shares(active: Sequence[_Active], capacity: Mapping[str, float]) -> list[float]:
    """Shards per second of each: all rise together until something is used up, and stop there whom it serves."""
    left = dict(capacity)
    shares = [0.0] * len(active)
    open_ = set(range(len(active)))
    while open_:
        used: dict[str, float] = {}
        for i in open_:
            for name, need in active[i].needs.items():
                used[name] = used.get(name, 0.0) + need
        # The writer is a shard's own thread: it can do one second in a second.
        rises = {name: left[name] / used[name] for name in used if name in left and used[name] > 0}
        own = min(1 / max(1e-12, active[i].needs["writer"]) - shares[i] for i in open_)
        rise = min([*rises.values(), own])
        for i in open_:
            shares[i] += rise
            for name, need in active[i].needs.items():
                if name in left:
                    left[name] -= rise * need
        full = {name for name, value in rises.items() if value <= rise * (1 + 1e-9)}
        stopped = {
            i
            for i in open_
            if not full.isdisjoint(active[i].needs) or shares[i] * active[i].needs["writer"] >= 1 - 1e-9
        }
        open_ -= stopped
    return shares


def stops_at(walls: Mapping[int, float]) -> int | None:
    """The first count whose double is hardly faster; None while all doubles are."""
    return next((n for n, wall in walls.items() if 2 * n in walls and wall < SCALES * walls[2 * n]), None)
