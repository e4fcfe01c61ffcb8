"""benchmarks/job_simulator.py: a fluid of shards takes what its narrowest resource takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import script

from kizami.quantize.settings import Method

simulator = script("benchmarks", "job_simulator")
projection = script("benchmarks", "job_projection")
Cluster, Costs, Load = simulator.Cluster, simulator.Costs, simulator.Load

GB = 10**9
COSTS = Costs(copy_in=0.5 / GB, pack=3.0 / GB, move=1.0 / GB, hash=0.5 / GB, copy_out=0.5 / GB, shard=0.0)
LOAD = Load(packed=4 * GB, moved=1 * GB, read=5 * GB, written=3 * GB)  # 15.5 s of a core in the pool, 3 of its writer
WIDE = Cluster(nodes=1, cores=1, read=1e15, write=1e15, network=1e15)


def wall(loads: list[object], cluster: object, costs: object = COSTS) -> float:
    return simulator.simulate(loads, costs, cluster).wall


def test_one_core_takes_the_sum_of_all_costs() -> None:
    found = simulator.simulate([LOAD] * 10, COSTS, WIDE)
    assert found.wall == pytest.approx(10 * 18.5)
    assert found.limit == "cores"


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_time_divides_by_machines_while_cores_are_the_limit(nodes: int) -> None:
    assert wall([LOAD] * 64, replace(WIDE, nodes=nodes, cores=4)) == pytest.approx(64 * 18.5 / 4 / nodes)


@pytest.mark.parametrize(
    ("change", "seconds", "limit"),
    [
        ({"read": 1.0 * GB}, 64 * 5, "reading"),
        ({"write": 0.5 * GB}, 64 * 6, "writing"),
        ({"network": 0.5 * GB}, 64 * 8 / 0.5 / 8, "disk or network"),
    ],
)
def test_a_narrow_resource_sets_the_time(change: dict[str, float], seconds: float, limit: str) -> None:
    found = simulator.simulate([LOAD] * 64, COSTS, replace(WIDE, nodes=8, cores=64, **change))
    assert (found.wall, found.limit) == (pytest.approx(seconds, rel=0.05), limit)


def test_a_shard_is_not_faster_than_its_writer() -> None:
    found = simulator.simulate([LOAD] * 4, COSTS, replace(WIDE, nodes=64, cores=64))
    assert (found.wall, found.limit) == (pytest.approx(3.0), "one writer per shard")


def test_a_last_wave_of_whole_shards_costs_what_a_wave_costs() -> None:
    cluster = replace(WIDE, nodes=4)  # of one core: 5 shards are 2 waves
    found = simulator.simulate([LOAD] * 5, COSTS, cluster)
    assert (found.wall, found.limit) == (pytest.approx(2 * 18.5), "whole shards")


def test_no_schedule_is_faster_than_a_bound_and_no_order_of_equal_shards_matters() -> None:
    loads = [replace(LOAD, packed=(i % 5) * GB) for i in range(37)]
    for nodes in (1, 3, 16, 64):
        found = simulator.simulate(loads, COSTS, replace(WIDE, nodes=nodes, cores=8, read=9.0 * GB, network=2.0 * GB))
        assert found.wall >= max(found.bounds.values()) * (1 - 1e-6)
    assert wall([LOAD] * 9, WIDE) == wall([replace(LOAD)] * 9, WIDE)


def test_what_comes_before_the_first_shard_is_added() -> None:
    assert wall([LOAD], replace(WIDE, begin=7.0)) == pytest.approx(7.0 + 18.5)


def test_scaling_stops_where_twice_as_many_are_hardly_faster() -> None:
    assert simulator.stops_at({1: 100.0, 2: 50.0, 4: 45.0, 8: 44.0}) == 2
    assert simulator.stops_at({1: 100.0, 2: 50.0, 4: 26.0}) is None


def test_a_projection_says_where_and_why_it_stops() -> None:
    setting = projection.Setting(disk=1.0 * GB, shared_read=4.0 * GB, shared_write=4.0 * GB, network=2.0 * GB)
    made = projection.project([LOAD] * 100, COSTS, setting, begin=5.0)
    assert [row["count"] for row in made["nodes"]["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert (made["cores"]["stops_scaling_at"], made["cores"]["because_of"]) == (2, "disk or network")
    assert made["nodes"]["because_of"] == "reading"
    assert json.loads(json.dumps(made)) == made


@pytest.mark.long
@pytest.mark.slow
def test_the_costs_of_a_shard_are_measured(tmp_path: Path) -> None:
    costs, measured = projection.measure_costs(tmp_path, Method("minmax"), experts=1, rounds=1)
    assert min(costs.copy_in, costs.pack, costs.hash, costs.copy_out) > 0
    assert measured["shard_bytes"] > 44_000_000
    assert not (tmp_path / "out.safetensors").exists()
