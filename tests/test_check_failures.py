"""`check` on public failures: the verdict of the thread on the checkpoint that failed, none on the one it came from."""

import pytest
from engine_checkpoints import BASES, good
from engine_failures import ROWS, Row

from kizami.formats.engines.check import Checker
from kizami.formats.engines.finding import Finding


def _found(row: Row, *, bad: bool) -> list[Finding]:
    made = good(row.base)
    row.before(made)
    if bad:
        row.mutation(made)
    found = Checker(made.served).find(row.engine, row.version, tp=row.tp, ep=row.ep)
    return [finding for finding in found if finding.code != "version_not_read"]


@pytest.mark.parametrize("row", ROWS, ids=[row.number for row in ROWS])
def test_a_public_failure_has_its_verdict_and_the_checkpoint_before_it_has_none(row: Row) -> None:
    before = _found(row, bad=False)
    assert [finding for finding in before if finding.severity != "note" or finding.code == row.code] == []
    found = _found(row, bad=True)
    after = [finding for finding in found if finding.code == row.code and row.words in finding.message]
    assert after, found
    assert {finding.severity for finding in after} == {row.severity}
    assert all(finding.source and finding.advice for finding in after)


def test_the_rows_stand_for_at_least_twenty_threads() -> None:
    assert len({row.number for row in ROWS}) == len(ROWS) >= 20


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("base", BASES)
def test_what_vendors_and_kizami_write_raises_no_alarm_on_eight_gpus(base: str, engine: str) -> None:
    found = Checker(good(base).served).find(engine, tp=8)
    needs_a_flag = {"shared_experts_fusion"} if base in ("glm mixed", "glm4 int4") and engine == "sglang" else set()
    assert {finding.code for finding in found if finding.severity != "note"} == needs_a_flag
