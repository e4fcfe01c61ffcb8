"""benchmarks/suite.py: what it measures, its arithmetic, turns and failures, and a rehearsal of a few MB."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts import script

plan = script("benchmarks", "suite_plan")
figures = script("benchmarks", "suite_figures")
outputs = script("benchmarks", "suite_outputs")
running = script("benchmarks", "suite_run")
suite = script("benchmarks", "suite")
synthetic = script("benchmarks", "synthetic_checkpoint")
Case, Section, Source = plan.Case, plan.Section, plan.Source
Found, Row, Run, Yardsticks = figures.Found, figures.Row, figures.Run, figures.Yardsticks

GB = 10**9
SMALL = synthetic.Widths(hidden=256, intermediate=128)
STICKS = Yardsticks(memcpy=8.0 * GB, disk_read=2.0 * GB, disk_write=1.0 * GB)


def row(label: str = "a", *runs: Any, nbytes: int = GB, **more: Any) -> Any:
    case = Case(label, Source(1), **more)
    return Row(case, nbytes, nbytes // 2, runs or (Run(2.0, 4.0, 200_000_000),))


def found(name: str, *rows: Any) -> Any:
    return Found(Section(name, name, tuple(one.case for one in rows)), STICKS, rows)


# ------------------------------------------------------------------------------------------------ what is measured


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_workers_double_up_to_all_cores(cores: int, counts: list[int]) -> None:
    assert plan.worker_counts(cores) == counts


def test_sizes_are_those_that_are_named() -> None:
    full = plan.FULL
    sizes = [full.small, full.middle, full.large, *full.holes]
    assert [s.nbytes / GB for s in sizes] == pytest.approx([0.25, 1, 4, 4, 16], rel=0.07)
    assert full.bf16.nbytes == pytest.approx(2 * full.middle.nbytes, rel=0.05)
    assert [s.files for s in sizes] == [1, 4, 17, 1, 1]


@pytest.mark.parametrize("source", [plan.FULL.small, plan.FULL.bf16, plan.FULL.holes[-1], plan.QUICK.large])
def test_a_source_is_as_large_as_foretold(source: Any, tmp_path: Path) -> None:
    total = synthetic.write_checkpoint(
        tmp_path, layers=source.layers, experts=source.experts, layers_per_file=source.layers_per_file,
        dtype=source.dtype, sparse=True, widths=synthetic.Widths(source.hidden, source.intermediate),
    )  # fmt: skip
    assert source.nbytes == pytest.approx(total, rel=0.005)
    assert len(list(tmp_path.glob("*.safetensors"))) == source.files
    assert outputs.weight_bytes(tmp_path) > total
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 2_000_000


def test_the_cut_into_files_does_not_change_a_tensor(tmp_path: Path) -> None:
    for name, layers_per_file in (("many", 1), ("one", 3)):
        made = {"layers": 3, "experts": 2, "layers_per_file": layers_per_file, "widths": SMALL}
        synthetic.write_checkpoint(tmp_path / name, **made)
    equal, compared = outputs.equal_tensors(tmp_path / "many", tmp_path / "one")
    assert equal == compared == len(outputs.tensor_places(tmp_path / "one")) > 60
    synthetic.write_checkpoint(tmp_path / "other", layers=3, experts=2, widths=SMALL, seed=1)
    assert outputs.equal_tensors(tmp_path / "one", tmp_path / "other")[0] < compared


def test_a_tensor_that_one_side_lacks_is_not_equal(tmp_path: Path) -> None:
    synthetic.write_checkpoint(tmp_path / "two", layers=2, experts=1, widths=SMALL)
    synthetic.write_checkpoint(tmp_path / "one", layers=1, experts=1, widths=SMALL)
    equal, compared = outputs.equal_tensors(tmp_path / "two", tmp_path / "one")
    assert equal < compared == len(outputs.tensor_places(tmp_path / "two"))


def test_sections_have_the_names_of_only_and_differ_in_one_thing() -> None:
    made = plan.sections(plan.FULL, 2, has_peer=True)
    assert tuple(one.name for one in made) == plan.NAMES
    assert [one.name for one in plan.sections(plan.FULL, 2, has_peer=False)] == list(plan.NAMES[:-2])
    varies = {"size": {"source"}, "workers": {"workers"}, "group-size": {"group_size"}, "method": {"method"}}
    for section in made[:4]:
        fields = ("source", "method", "group_size", "workers", "program")
        assert {f for f in fields if len({getattr(case, f) for case in section.cases}) > 1} == varies[section.name]


def test_what_does_not_fit_is_left_out_and_said_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    holes = Case("holes", plan.FULL.holes[-1])
    assert plan.why_left_out(holes, 20 * GB, 8 * GB) is None
    assert plan.why_left_out(holes, 10 * GB, 8 * GB) == "16 GB of disk needed, 10 GB free"
    large = Case("large", plan.FULL.large)
    assert "page cache of 4 GB" in plan.why_left_out(large, 100 * GB, 4 * GB)
    monkeypatch.setattr(suite.this_machine, "memory_bytes", lambda: 4 * GB)
    monkeypatch.setattr(suite.shutil, "disk_usage", lambda _: _Usage())
    section = Section("size", "Size", (Case("middle", plan.FULL.middle), large), same_bytes=(0, 1))
    rest, left = suite.fitting(section, tmp_path)
    assert [case.label for case in rest.cases] == ["middle"]
    assert rest.same_bytes is None
    assert [(one["section"], one["case"]) for one in left] == [("size", "large")]


class _Usage:
    free = 100 * GB


# ------------------------------------------------------------------------------------------------ arithmetic


def test_a_median_is_of_each_figure_by_itself() -> None:
    runs = [Run(1.0, 9.0, 30), Run(2.0, 7.0, 10), Run(9.0, 8.0, 20)]
    assert figures.median_run(runs) == Run(2.0, 8.0, 20)
    sticks = [Yardsticks(1.0, 3.0, 2.0), Yardsticks(3.0, 1.0, 4.0)]
    assert figures.median_yardsticks(sticks) == Yardsticks(2.0, 2.0, 3.0)


def test_ratios_are_of_memory_of_the_disk_and_of_the_first_row() -> None:
    first, second = row("a", Run(2.0, 4.0, 200)), row("b", Run(1.0, 2.0, 500))
    assert figures.ratios(second, first, STICKS) == {
        "bytes_per_second": GB, "bytes_per_cpu_second": GB / 2, "of_memcpy": 0.5 / 8, "of_disk_read": 0.5,
        "of_disk_write": 0.5, "wall_of_first": 0.5, "cpu_of_first": 0.5, "peak_of_first": 2.5,
    }  # fmt: skip


def test_the_start_of_the_process_is_not_in_the_marginal_rate() -> None:
    small, large = row("a", Run(1.0, 1.5, 1)), row("b", Run(1.0, 3.5, 1), nbytes=5 * GB)
    assert figures.marginal_bytes_per_cpu_second(small, large) == 2 * GB
    assert figures.marginal_bytes_per_cpu_second(large, small) is None  # noise made the larger one cheaper
    assert figures.marginal_bytes_per_cpu_second(row(), row()) is None


def test_targets_are_met_missed_or_not_measured() -> None:
    flat = [row("a", Run(1.0, 0.9, 200 * 10**6)), row("b", Run(1.0, 0.9, 219 * 10**6))]
    steep = [row("a", Run(1.0, 1.0, 100 * 10**6)), row("b", Run(1.0, 1.0, 400 * 10**6))]
    peer = row("peer", Run(9.0, 9.0, 3 * GB), program="llm-compressor")
    met = [one.met for one in figures.targets([found("size", *flat), found("peer", row(), peer)])]
    assert met == [True, None, False, None, None, True, True, None]
    searched = row("s", Run(1.0, 5.0, 200 * 10**6), method="search")
    met = [one.met for one in figures.targets([found("method", row(), searched), found("shards", *steep)])]
    assert met == [None, False, None, None, None, False, None, False]
    assert [one.met for one in figures.targets([])] == [None] * 8
    both = [row("s", Run(1.0, 2.0, 1), method="search"), row("p", Run(9.0, 200.0, 1), program="llm-compressor")]
    measured = [one.measured for one in figures.targets([found("peer", *both), found("peer-mse", *both)])]
    assert measured[2:5] == [None, 100.0, 100.0]


def test_a_table_has_a_cell_for_each_column_and_names_what_failed() -> None:
    broken = replace(row("broken"), runs=(), error="exit 2: no")
    made = replace(found("peer", row("one"), broken, row("two", Run(4.0, 4.0, 10**8))), equal=(3, 4))
    made = replace(made, section=replace(made.section, same_bytes=(0, 2)))
    lines = figures.table(made).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(figures.COLUMNS) + 1}
    assert [line.split(" | ")[0] for line in table[2:]] == ["| one", "| two"]
    assert table[3].split(" | ")[11:14] == ["2.00", "1.00", "0.50"]
    assert "broken: exit 2: no" in lines
    assert lines[-1] == "one and two: 3 of 4 tensors bit-equal."
    rows = figures.as_json(made)["rows"]
    assert (rows[1]["error"], "ratios" in rows[1], rows[2]["ratios"]["wall_of_first"]) == ("exit 2: no", False, 2.0)
    assert json.loads(json.dumps(rows)) == rows


def test_a_target_table_says_yes_no_or_not_measured() -> None:
    some = [figures.Target("fast", 1.0, 0.5, True), figures.Target("flat", 1.1, None, False)]
    lines = figures.target_table(some).splitlines()[-2:]
    assert lines == ["| fast | ≥ 1 | 0.5 | **no** |", "| flat | ≤ 1.1 |  | not measured |"]


# ------------------------------------------------------------------------------------------------ turns


class Fake:
    """A runner that starts nothing and notes what it was asked."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.asked: list[str] = []

    def prepare(self, case: Any) -> None:
        if self.failing == f"prepare {case.label}":
            raise running.Failed("no such thing")

    def yardsticks(self) -> Any:
        self.asked.append("-")
        return STICKS

    def run(self, case: Any, keep: bool) -> Any:
        self.asked.append(case.label + "!" * keep)
        if self.failing == case.label:
            raise running.Failed("exit 1: it broke")
        return running.Made(Run(1.0, 1.0, 1), GB, GB, None)

    def equal(self, one: Any, other: Any) -> tuple[int, int]:
        self.asked.append(f"{one.label}={other.label}")
        return 1, 1


def turns(fake: Fake, *cases: Any, rounds: int = 3, same_bytes: tuple[int, int] | None = None) -> Any:
    return running.run_section(Section("s", "S", cases, same_bytes), rounds, fake, lambda _: None)


A, B, C = (Case(name, Source(i + 1)) for i, name in enumerate("abc"))


def test_cases_take_turns_and_the_slow_ones_fewer() -> None:
    fake = Fake()
    made = turns(fake, A, replace(B, most_rounds=1), C)
    assert "".join(fake.asked) == "-abc-ac-ac"
    assert [len(one.runs) for one in made.rows] == [3, 1, 3]


def test_outputs_to_be_compared_are_kept_and_compared_last() -> None:
    fake = Fake()
    assert turns(fake, A, B, C, rounds=1, same_bytes=(0, 2)).equal == (1, 1)
    assert fake.asked == ["-", "a!", "b", "c!", "a=c"]


@pytest.mark.parametrize(("failing", "asked"), [("b", "-abc-ac"), ("prepare b", "-ac-ac")])
def test_a_case_that_fails_is_named_and_the_others_go_on(failing: str, asked: str) -> None:
    fake = Fake(failing)
    made = turns(fake, A, B, C, rounds=2, same_bytes=None)
    assert "".join(fake.asked) == asked
    assert [bool(one.error) for one in made.rows] == [False, True, False]
    assert [one.case.label for one in made.measured] == ["a", "c"]
    assert turns(Fake(failing), A, B, same_bytes=(0, 1)).equal is None


# ------------------------------------------------------------------------------------------------ processes


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_cost_is_that_of_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIZAMI_GROUP_SIZE", "128")  # would change what is measured
    code = "import os, time; assert 'KIZAMI_GROUP_SIZE' not in os.environ; time.sleep(0.2); x = bytearray(400 << 20)"
    run = running.measure(python(code), 1, tmp_path / "log")
    assert run.wall > 0.2
    assert run.peak > 400 << 20
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert 0.3 <= running.measure(python(busy), 1, tmp_path / "log").cpu < 5


def test_a_failure_has_the_last_words_and_no_path(tmp_path: Path) -> None:
    with pytest.raises(running.Failed, match=r"^exit 3: no room in PATH$") as failed:
        running.measure(
            python(f"import sys; print('first'); print('no room in {tmp_path}/out'); sys.exit(3)"), 1, tmp_path / "log"
        )
    assert failed.value.log == f"first\nno room in {tmp_path}/out"


def test_a_source_stays_what_it_is_when_others_come_and_go(tmp_path: Path) -> None:
    tiny, *others = (Source(n + 1, 1, hidden=256, intermediate=128) for n in range(5))
    processes = running.Processes(tmp_path, None, {"fp8": tiny}, 1 << 20)
    for needed in ([*others[:3]], [others[1]], [others[1], others[3]], [others[0], others[1]]):
        processes.forget(needed)
        for source in (tiny, *needed):
            nbytes = outputs.weight_bytes(processes.source(source))
            assert nbytes == pytest.approx(source.nbytes, rel=0.02)
    assert len(list(tmp_path.iterdir())) == 3


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([], "--out"),
        (["--out", str(tmp_path / "none" / "x.json")], "no such folder"),
        (["--out", str(tmp_path / "x.json"), "--rounds", "-1"], "at least 1"),
        (["--out", str(tmp_path / "x.json"), "--only", "peer"], "--peer PYTHON is missing"),
        (["--out", str(tmp_path / "x.json"), "--peer", str(tmp_path / "none")], "no llm-compressor there"),
    ):
        with pytest.raises(SystemExit) as end:
            suite.main(words)
        assert end.value.code == 2
        assert said in capsys.readouterr().err


def every_word(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from (key, *every_word(one))
    elif isinstance(value, list):
        for one in value:
            yield from every_word(one)
    elif isinstance(value, str):
        yield value


def rehearse(tmp_path: Path, *words: str) -> tuple[dict[str, Any], int]:
    (tmp_path / "work").mkdir()
    code = suite.main(["--out", str(tmp_path / "x.json"), "--quick", "--work", str(tmp_path / "work"), *words])
    assert list((tmp_path / "work").iterdir()) == []
    result: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    paths = (str(tmp_path), str(Path.home()), sys.prefix, str(suite.this_machine.ROOT))
    assert [word for word in every_word(result) if any(path in word for path in paths if path != "/")] == []
    return result, code


@pytest.mark.long
def test_a_rehearsal_of_one_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, code = rehearse(tmp_path, "--only", "workers")
    assert code == 0
    (section,) = result["sections"]
    assert [one["workers"] for one in section["rows"]] == plan.worker_counts(result["machine"]["cores"])
    assert len({one["output_bytes"] for one in section["rows"]}) == 1
    assert min(one["cpu_seconds"] for one in section["rows"]) > 0
    assert (result["schema"], result["targets"]) == ("kizami.benchmark/1", [])
    assert [one["section"] for one in result["left_out"]] == ["peer", "peer-mse"]
    assert "### Workers" in capsys.readouterr().out


@pytest.mark.long
def test_a_rehearsal_of_all_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, code = rehearse(tmp_path)
    assert (code, [one["name"] for one in result["sections"]]) == (0, list(plan.NAMES[:-2]))
    errors = [one["error"] for section in result["sections"] for one in section["rows"]]
    assert set(errors) == {None}
    assert "Left out: peer" in capsys.readouterr().out


@pytest.mark.long
def test_a_program_that_fails_is_in_the_result_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        suite, "sections", lambda *_, **__: [Section("method", "M", (Case("x", plan.QUICK.small, "none"),))]
    )
    result, code = rehearse(tmp_path)
    assert code == 1
    assert result["sections"][0]["rows"][0]["error"].startswith("exit 2: ")
