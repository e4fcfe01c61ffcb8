"""How long GLM-5.2 (704 GiB) and Kimi-K2 (958 GiB) take on 1 to 64 cores, and on 1 to 64 machines.

    python benchmarks/job_projection.py [WORK] [--method search] [--json]

What a shard costs is measured in this run, on a shard of `synthetic_checkpoint.py` (460 MB): reading it from the page
cache, computing, hashing, writing, and what remains per file. The loads are those of the real plans, made from headers
alone (`tests/inventory.py`, holes for weights). The rest is `job_simulator.py`. Needs 1.2 GB of disk in WORK.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import this_machine
from job_simulator import Cluster, Costs, Load, Outcome, simulate, stops_at
from synthetic_checkpoint import write_checkpoint
from zlib_ng import zlib_ng

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.reader import TensorReader
from kizami.quantize.buffers import Buffers
from kizami.quantize.plan import Plan, Shard
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy
from kizami.quantize.tensor import pieces, produce
from kizami.quantize.warm_up import warm_up

ROOT = Path(__file__).parents[1]
JOBS = {"GLM-5.2": "glm-5.2-fp8", "Kimi-K2": "kimi-k2-fp8"}
COUNTS = (1, 2, 4, 8, 16, 32, 64)
GB = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """Bandwidths in bytes per second. disk: of one machine that works alone; shared_read, shared_write: of the file
    system of many; network: of one of them; node_cores: what each has."""

    disk: float = 3 * GB
    shared_read: float = 10 * GB
    shared_write: float = 10 * GB
    network: float = 3 * GB
    node_cores: int = 16


@dataclass(slots=True)
class Clock:
    """CPU seconds of this thread by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, work: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = work()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.thread_time() - begin
        return result


def loads_of(plan: Plan) -> list[Load]:
    return [_load(shard) for shard in plan.shards]


def _load(shard: Shard) -> Load:
    packed = sum(step.weight.nbytes for step in shard.steps if step.action == "quantize")
    weights = sum(step.weight.nbytes for step in shard.steps)
    return Load(packed, weights - packed, sum(step.source_nbytes for step in shard.steps), shard.file_nbytes)


def measure_costs(work: Path, method: Method, *, experts: int = 9, rounds: int = 3) -> tuple[Costs, dict[str, Any]]:
    """Costs per byte: the median of `rounds` conversions of one shard, phase by phase; and what they come from."""
    source = work / "fp8"
    nbytes = write_checkpoint(source, layers=1, experts=experts)
    checkpoint = Checkpoint.open(source)
    plan = build_plan(checkpoint, Policy(), method)
    warm_up(plan)
    found = [_costs(plan, checkpoint, work / "out.safetensors") for _ in range(rounds)]
    costs = Costs(*(statistics.median(getattr(one, name) for one in found) for name in Costs.__slots__))
    return costs, {"shard_bytes": nbytes, "rounds": rounds, "method": method.name}


def _costs(plan: Plan, checkpoint: Checkpoint, out: Path) -> Costs:
    (shard,) = plan.shards
    clock, buffers, load = Clock(), Buffers(2), _load(shard)
    digest = hashlib.sha256()
    with TensorReader(checkpoint) as reader, out.open("wb", buffering=0) as file:
        for step in shard.steps:
            for info in step.sources:
                clock.add("copy_in", lambda info=info: buffers.give(reader.read(info, empty=buffers.empty)))
            kind = "pack" if step.action == "quantize" else "move"
            for piece in pieces(step):
                produced = clock.add(kind, lambda p=piece: produce(p, reader, plan.policy, plan.method, buffers))
                for _, data in produced.chunks:
                    view = data.reshape(-1).view(np.uint8).data
                    clock.add("hash", lambda view=view: (digest.update(view), zlib_ng.crc32(view)))
                    clock.add("copy_out", lambda view=view: file.write(view))
                    buffers.give(data)
        clock.add("shard", lambda: os.fsync(file.fileno()))
    out.unlink()
    spent = clock.seconds
    copy_in = spent["copy_in"] / load.read
    # `produce` reads, too: what it takes beyond the reading is the computing.
    pack = max(0.0, spent["pack"] / load.packed - copy_in)
    move = max(0.0, spent["move"] / load.moved - copy_in)
    return Costs(copy_in, pack, move, spent["hash"] / load.written, spent["copy_out"] / load.written, spent["shard"])


def plan_of(name: str, work: Path, method: Method) -> tuple[Plan, float]:
    """The plan of a published checkpoint, and the seconds that it took."""
    sys.path.insert(0, str(ROOT / "tests"))
    import inventory  # beside the tests, which check it against published sizes

    inventory.write_sparse(work / name, name)
    begin = time.perf_counter()
    plan = build_plan(Checkpoint.open(work / name), Policy(), method)
    return plan, time.perf_counter() - begin


def rows(loads: list[Load], costs: Costs, clusters: dict[int, Cluster]) -> list[dict[str, Any]]:
    return [_row(n, simulate(loads, costs, cluster)) for n, cluster in clusters.items()]


def _row(count: int, found: Outcome) -> dict[str, Any]:
    bounds = {f"{name.replace(' ', '_')}_seconds": seconds for name, seconds in found.bounds.items()}
    return {"count": count, "wall_seconds": found.wall, "limit": found.limit, "bounds": bounds}


def project(loads: list[Load], costs: Costs, setting: Setting, begin: float) -> dict[str, Any]:
    """Both tables of one job: cores of one machine, and machines."""
    one = {n: Cluster(1, n, setting.disk, setting.disk, setting.disk, begin) for n in COUNTS}
    many = {
        n: Cluster(n, setting.node_cores, setting.shared_read, setting.shared_write, setting.network, begin)
        for n in COUNTS
    }
    made: dict[str, Any] = {"shards": len(loads), "begin_seconds": begin}
    for key, clusters in (("cores", one), ("nodes", many)):
        table = rows(loads, costs, clusters)
        stop = stops_at({row["count"]: row["wall_seconds"] for row in table})
        why = None if stop is None else next(row["limit"] for row in table if row["count"] == 2 * stop)
        made[key] = {"rows": table, "stops_scaling_at": stop, "because_of": why}
    return made


def show(result: dict[str, Any]) -> None:
    costs = result["costs"]
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores; --method {result['measured']['method']}")
    for name in ("copy_in", "pack", "move", "hash", "copy_out"):
        print(f"  {name:<9}{1 / costs[name] / GB if costs[name] else float('inf'):8.2f} GB/s of one core")
    for job, made in result["jobs"].items():
        for key in ("cores", "nodes"):
            print(f"\n{job}, {made['shards']} shards, by {key}")
            for row in made[key]["rows"]:
                print(f"{row['count']:>4} {row['wall_seconds'] / 60:9.1f} min   {row['limit']}")
            stop = made[key]["stops_scaling_at"]
            print("scales to the end" if stop is None else f"stops at {stop}: {made[key]['because_of']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path, nargs="?", help="a folder for 1.2 GB (default: a temporary one)")
    parser.add_argument("--method", choices=("search", "minmax", "signed"), default="search")
    default = Setting()
    parser.add_argument("--disk", type=float, default=default.disk / GB, help="GB/s of one machine's disk")
    parser.add_argument("--shared", type=float, default=default.shared_read / GB, help="GB/s of the shared file system")
    parser.add_argument("--network", type=float, default=default.network / GB, help="GB/s of one machine's network")
    parser.add_argument("--node-cores", type=int, default=default.node_cores)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shared = args.shared * GB
    setting = Setting(args.disk * GB, shared, shared, args.network * GB, args.node_cores)
    method = Method(args.method)
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kizami-", dir=args.work) as folder:
        work = Path(folder)
        costs, measured = measure_costs(work, method)
        result: dict[str, Any] = {
            "machine": this_machine.describe(), "measured": measured, "costs": asdict(costs),
            "setting": asdict(setting), "jobs": {},
        }  # fmt: skip
        for job, name in JOBS.items():
            plan, seconds = plan_of(name, work, method)
            result["jobs"][job] = project(loads_of(plan), costs, setting, seconds)
    print(json.dumps(result, indent=2)) if args.json else show(result)


if __name__ == "__main__":
    main()
