"""docs/faults.md: which faults the tests inject, at how many points, and what comes of it. The tests are its source.

A test adds its rows with the fixture `fault_row(fault, points, outcome)`, after its assertions. The last test of its
file holds the file to the rows of the run; `python -m pytest --rewrite-faults-table` writes them instead. Rows of tests
that did not run are kept as they are.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

COUNTED_WITH = (3, 11)
ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "faults.md"
HEAD = """\
# Faults

What happens when something breaks. Every row was produced by the test in its last column, which injects the fault at
each of the points that it counts. In a conversion a point is one call to the operating system (open, read, write,
fsync, rename...), or the moment before it; their number, which depends on Python a little, was counted with 3.11.
After every fault in a conversion the same command runs again, and every byte of `OUT` is compared with an undisturbed
run.

"Resumed" says that it was byte-identical, that no shard which the journal had taken down was written again, and that
`OUT` was at no moment there without being whole. "Refused" is exit code 2 and one line with the system's reason. The
source is never changed by kizami.

`python -m pytest tests --rewrite-faults-table` writes this file; the tests fail while it says something else.

| fault | points | outcome | test |
|---|---:|---|---|
"""


@dataclass(frozen=True)
class Row:
    fault: str
    points: str
    outcome: str
    test: str  # the function's name

    def as_counted(self) -> "Row":
        """Without the number of points, where another Python may count other calls than the file's 3.11."""
        return self if sys.version_info[:2] == COUNTED_WITH else replace(self, points="?")

    def __str__(self) -> str:
        return f"| {self.fault} | {self.points} | {self.outcome} | `{self.test}` |"


ROWS: list[Row] = []  # of this run


def read() -> list[Row]:
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [Row(*row[:3], row[3].strip("`")) for row in cells if row[0] != "fault"]


def functions_of_tests() -> list[str]:
    """Of all files, in order."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    return [name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.M)]


def merged(rows: list[Row], whole: bool) -> list[Row]:
    """What the file has to say after a run that produced `rows`. whole: no part of a test was left out, so that rows
    which a test no longer produces can go."""
    order = functions_of_tests()
    ran = {row.test for row in rows}
    now = {(row.test, row.fault): row for row in rows}
    old = [row for row in read() if row.test in order and not (whole and row.test in ran)]
    table = {(row.test, row.fault): row for row in old} | now
    return sorted(table.values(), key=lambda row: (order.index(row.test), row.fault))


def render(rows: list[Row]) -> str:
    return HEAD + "".join(f"{row}\n" for row in rows)


def hold(options: Any, args: Sequence[str]) -> None:
    """The file against the rows of the tests that this process has run; or written anew."""
    chosen = options.markexpr not in ("", "not long")  # the default leaves out nothing that has a row
    whole = not (options.keyword or chosen or any("::" in argument for argument in args))
    rows = merged(ROWS, whole)
    if options.rewrite_faults_table:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(render(rows), encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8").startswith(HEAD)
    assert [row.as_counted() for row in read()] == [row.as_counted() for row in rows]
