"""Whole conversions of small odd checkpoints from seeds: each is converted exactly, or refused for a reason it has."""

import json
import shutil
from pathlib import Path

import make_cases
import pytest
from case_runner import assert_converted, error_object, kizami
from random_checkpoints import DTYPES, random_case

pytestmark = pytest.mark.long

SEEDS = range(40)


def check(seed: int, folder: Path) -> str:
    """Converts case `seed`; gives the code of the refusal, or "" for an output that is right."""
    case = random_case(seed)
    source, out = case.checkpoint.save(folder / "src"), folder / "out"
    said = kizami("convert", source, out, *case.options, "--json")
    if case.refusals:
        assert said.code == 2, (case.refusals, said)
        code = str(error_object(said)["code"])
        assert code in case.refusals, (said.stdout, case.refusals)
        assert not out.exists()
        return code
    result = assert_converted(said, source, out, case.dropped)
    assert set(result.packed) == case.packed
    assert json.loads(said.stdout)["schema"] == "kizami.convert/1"
    return ""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_odd_checkpoint_is_converted_exactly_or_refused_for_a_reason_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(make_cases, "SIZES", DTYPES)
    check(seed, tmp_path)
    shutil.rmtree(tmp_path)


def test_the_seeds_have_both_ends_and_most_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [random_case(seed) for seed in SEEDS]
    converted = [case for case in cases if not case.refusals]
    assert len(converted) >= len(cases) // 2
    assert {code for case in cases for code in case.refusals} >= {
        "nothing_matched",
        "group_does_not_divide",
        "unsupported_block",
        "fused_pair_split",
        "non_finite",
    }
