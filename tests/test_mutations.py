"""A few hundred of mutations.py's inputs, and those that once broke a rule."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mutations
import pytest
from bounded_run import Ran, broken_rules
from hostile_json import Pairs, Raw, dumps, nested


@pytest.mark.long
@pytest.mark.slow
def test_hundreds_of_hostile_inputs_end_by_the_rules(fault_row: Callable[[str, int | str, str], None]) -> None:
    """In a process without PyTorch: its children are small and begin quickly. `python mutations.py 10000` runs more."""
    done = subprocess.run(
        [sys.executable, mutations.__file__, "250", "0"], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["ran"] == 250
    usual = {"plan 0", "plan 2", "inspect 2", "convert 0", "convert 2", "verify 1", "report 0", "report 2"}
    assert usual <= summary["codes"].keys()
    fault = "headers, index, config, journal, report or manifest changed at random (`tests/mutations.py`)"
    fault_row(fault, 250, "exit code 0, 1 (`verify` only) or 2, in less than 2 s and 500 MB; no traceback")


@pytest.mark.parametrize(
    ("words", "ran", "rule"),
    [
        (["plan"], Ran(101, "", "kizami: error: x\n", 0, 0), "exit code 101"),
        (["plan"], Ran(-11, "", "", 0, 0), "exit code -11"),
        (["plan"], Ran(1, "", "", 0, 0), "exit code 1"),
        (["plan"], Ran(2, "", "", 0, 0), "0 lines of error"),
        (["plan"], Ran(2, "", "kizami: error: a\nkizami: error: b\n", 0, 0), "2 lines of error"),
        (["plan"], Ran(2, "x", "kizami: error: a\n", 0, 0), "data on stdout beside a refusal"),
        (["plan"], Ran(0, "", "Traceback (most recent call last):\n", 0, 0), "a traceback"),
        (["plan"], Ran(0, "", "", 2.5, 0), "2.5 s"),
        (["plan"], Ran(0, "", "", 0, 501), "501 MiB"),
        (["verify"], Ran(1, "a\x1b[2J", "", 0, 0), "characters"),
        (["verify"], Ran(1, "\u202e", "", 0, 0), "characters"),
        (["verify"], Ran(1, "", "x" * 20_000, 0, 0), "a line without end"),
        (["plan", "--json"], Ran(0, "", "", 0, 0), "not one object"),
        (["plan", "--json"], Ran(0, '{"schema": "kizami.plan/1", "a": NaN}', "", 0, 0), "NaN in --json"),
        (["plan", "--json"], Ran(2, '{"schema": "kizami.plan/1"}', "", 0, 0), "schema kizami.plan/1 with exit code 2"),
    ],
)
def test_a_broken_rule_is_seen(words: list[str], ran: Ran, rule: str) -> None:
    assert any(rule in broken for broken in broken_rules(words, ran))


def test_a_run_by_the_rules_breaks_none() -> None:
    assert list(broken_rules(["plan"], Ran(2, "", "kizami: error: config.json: bad\n", 0.1, 100))) == []
    assert list(broken_rules(["plan", "--json"], Ran(2, '{"schema": "kizami.error/1"}', "", 0.1, 100))) == []


def test_changed_json_may_have_what_no_writer_writes() -> None:
    assert dumps({"a": [nested(2), Raw("1e400")], "b": Pairs([("k", 1), ("k", 2)])}) == (
        '{"a":[[[1]],1e400],"b":{"k":1,"k":2}}'
    )


def test_a_number_is_the_same_case_every_time(tmp_path: Path) -> None:
    source = mutations.load(mutations.good_source().save(tmp_path / "src"))
    good = mutations.Good(source, source, source)
    first, second = (
        [mutations.make_case(good, random.Random(f"3/{number}")) for number in range(60)] for _ in range(2)
    )
    assert first == second
    assert first[1] != first[2]
