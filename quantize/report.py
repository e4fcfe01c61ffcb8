"""kizami-report.jsonl: one row per step of the plan; and views on it, what each role and tensor cost in accuracy."""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import fsum, log10, prod, sqrt
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.files import resolve_inside
from kizami.formats.run_log import canonical
from kizami.formats.statistics import STARVED
from kizami.quantize.manifest import REPORT
from kizami.quantize.settings import CALIBRATED, GIVEN

Row = dict[str, Any]
# What role_summaries, worst_tensors, over_threshold and the summaries of methods look at.
SUMMED = frozenset({
    "name", "role", "action", "shape", "bytes", "source_bytes", "rel_error", "error_energy", "weight_energy", "method",
    "fallback", "gptq_reason", "loss_gptq", "loss_weighted", "weighted_rel_error", "tokens",
})  # fmt: skip
MAX_REPORT_BYTES = 256 << 20  # Kimi-K2's has 70 MB; it is held in memory
MAX_LINE_BYTES = 1 << 16  # a row takes 1 kB, with the longest names that a header may have 6 kB; longer lines are cut
ROW_CRC32 = "row_crc32"  # of the row's own line, without this key: tells which row is damaged
_UNIQUE = ("name", ROW_CRC32)  # no two rows have the same


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """Tensors of one role and action. Error figures are None where nothing was rounded to INT4.

    rel_error: sqrt(sum e^2 / sum W^2) over all weights of the role; sqnr_db: the same in dB; worst: name of max.
    """

    role: str
    action: str
    tensors: int
    weights: int
    source_bytes: int
    bytes: int
    rel_error: float | None
    max_rel_error: float | None
    sqnr_db: float | None
    worst: str | None


@dataclass(frozen=True, slots=True)
class GptqSummary:
    """modules: with statistics. chosen: how many have GPTQ's codes. loss_ratio: sum of their squared output errors on
    held-out tokens over that of weighted's codes for them; None if nothing was chosen."""

    modules: int
    chosen: int
    loss_ratio: float | None


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """Packed tensors of one layer, pooled as in RoleSummary."""

    layer: int | None
    tensors: int
    rel_error: float
    max_rel_error: float
    worst: str


def encode_row(row: Row) -> bytes:
    """A line of the report."""
    return (canonical(row | {ROW_CRC32: _row_crc32(row)}) + "\n").encode()


def _row_crc32(row: Row) -> str:
    return f"{zlib.crc32(canonical(row).encode()):08x}"


def read_report(out: Path, keys: Collection[str] | None = None) -> list[Row]:
    """The rows of a finished output, in file order, with these keys of each (default: all). KizamiError names the line
    that is not a row, or not as it was written."""
    rows: list[Row] = []
    for number, line, row in _lines(out):
        if row is None or not _is_row(row):
            raise KizamiError(f"line {number} is not a report row", code="bad_report", file=REPORT)
        if not _is_whole(line, row):
            raise KizamiError(
                f"line {number} is not as it was written", code="bad_report", file=REPORT, tensor=row["name"]
            )
        rows.append(row if keys is None else narrowed(row, keys))
    return rows


def narrowed(row: Row, keys: Collection[str]) -> Row:
    """A long report takes a quarter of the memory with the keys that its summaries need."""
    return {key: value for key, value in row.items() if key in keys}


def read_whole_report(out: Path, manifest: Mapping[str, Any]) -> list[Row]:
    """The same, if no row is missing: a limit that half of the tensors are not held to would be kept in silence. What
    was dropped is in no shard and has none. KizamiError "bad_report"."""
    rows = read_report(out)
    found, counted = Counter(row["action"] for row in rows), {**manifest["counts"], "drop": 0}
    for action in sorted(found.keys() | counted.keys()):
        if found[action] != counted.get(action, 0):
            said = f"{found[action]} rows say {action}, and kizami.json counts {counted.get(action, 0)}"
            raise KizamiError(f"is not whole: {said}", code="bad_report", file=REPORT)
    for row in rows:
        if row["action"] == "quantize" and row.get("rel_error") is None:
            said = "was rounded, and its row has no error"
            raise KizamiError(said, code="bad_report", file=REPORT, tensor=row["name"])
    return rows


def whole_rows(out: Path) -> Iterator[Row]:
    """The rows that are as they were written, of a report that may be damaged; none if there is no readable
    report."""
    with suppress(KizamiError):
        yield from (row for _, line, row in _lines(out) if row is not None and _is_whole(line, row))


def damaged_lines(out: Path) -> Iterator[tuple[int, str | None]]:
    """The numbers, from 1, of lines that are not as they were written, with the name that they now give; none if there
    is no readable report."""
    with suppress(KizamiError):
        for number, line, row in _lines(out):
            if row is None or not _is_whole(line, row):
                name = None if row is None else row.get("name")
                yield number, name if isinstance(name, str) else None


def _lines(out: Path) -> Iterator[tuple[int, bytes, Row | None]]:
    """Number, bytes and object of each line; None where it is none."""
    path = resolve_inside(out, REPORT, f"is {out.name} an output of kizami convert?")
    if (size := path.stat().st_size) > MAX_REPORT_BYTES:
        raise KizamiError(f"{size} bytes, expected at most {MAX_REPORT_BYTES}", code="bad_report", file=REPORT)
    with open(path, "rb") as f:
        for number, line in enumerate(iter(lambda: f.readline(MAX_LINE_BYTES), b""), 1):
            try:
                row = parse_row(line)
            except (ValueError, RecursionError):
                row = None
            yield number, line, row if isinstance(row, dict) else None


def parse_row(line: bytes) -> Any:
    """As json.loads. Words that many rows have, keys above all, are kept once: half of the memory of a long report."""
    row = json.loads(line)
    if not isinstance(row, dict):
        return row
    return {
        sys.intern(key): sys.intern(value) if type(value) is str and key not in _UNIQUE else value
        for key, value in row.items()
    }


def _is_whole(line: bytes, row: Row) -> bool:
    return _is_row(row) and line == encode_row({key: value for key, value in row.items() if key != ROW_CRC32})


_COUNTS, _FIGURES = ("bytes", "source_bytes"), ("rel_error", "error_energy", "weight_energy")


def _is_row(row: Row) -> bool:
    """What the views below read has the types that kizami writes; the file may come from anyone."""
    words = all(isinstance(row.get(key), str) for key in ("name", "role", "action", "shard"))
    digests = row.get("crc32")
    words = words and isinstance(digests, dict) and all(isinstance(digest, str) for digest in digests.values())
    shape = row.get("shape")
    sizes = [*(row.get(key) for key in _COUNTS), *(shape if isinstance(shape, list) else [None]), row.get("layer") or 0]
    counts = (
        "layer" in row and len(sizes) <= _MAX_SIZES and all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    )
    figures = [row.get(key) for key in _FIGURES]
    measured = all(map(_is_figure, figures)) or figures == [None] * len(figures)
    shown = all(row.get(key) is None or not isinstance(row[key], str) for key in _SHOWN)
    words = words and all(isinstance(row.get(key), str | None) for key in ("method", "fallback", "gptq_reason"))
    measured = measured and _is_figure(row.get("weighted_rel_error", 0))
    measured = measured and all(row.get(key) is None or _is_figure(row[key]) for key in ("loss_gptq", "loss_weighted"))
    measured = measured and all(row.get(key) is None or type(row[key]) is int for key in ("tokens", "zero_groups"))
    counts = counts and prod(shape or []) < 2**63
    plain = all(key in ("crc32", "shape") or _is_plain(value) for key, value in row.items())
    return words and counts and measured and shown and plain


_SHOWN = ("sqnr_db", "sqnr_top_db", "max_abs_error", "clipped_fraction", "negative_scale_fraction")
_MAX_SIZES = 36  # a tensor has up to 32 dimensions
_LARGEST, _SMALLEST = 1e120, 1e-120  # beyond any sum of squares of float32 values; ratios and sums of these are finite


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and (value == 0 or _SMALLEST <= value <= _LARGEST)


def _is_plain(value: Any) -> bool:
    """A word, or a number that can be formatted and be written as JSON again."""
    return isinstance(value, str | None) or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with error figures: of weights that were rounded."""
    return [row for row in rows if row.get("rel_error") is not None]


def packed(rows: Iterable[Row]) -> list[Row]:
    """The same, and rows of INT4 weights whose codes are the source's: they have no error."""
    return [row for row in rows if row.get("rel_error") is not None or row.get("dtype") == "INT4"]


def fallbacks(rows: Iterable[Row]) -> list[Row]:
    """Rows of modules for which another method took the place of the calibrated one."""
    return [row for row in rows if fallback_reason(row) is not None]


def fallback_reason(row: Row) -> str | None:
    """Why `search` took the place of a calibrated method, or `weighted` that of gptq."""
    reason: str | None = row.get("fallback")
    return row.get("gptq_reason") if reason is None and row.get("method") == "weighted" else reason


def weighted_error(rows: Iterable[Row]) -> float | None:
    """Root mean square of the modules' weighted_rel_error, whose weights have no common unit; None without any."""
    squares = [row["weighted_rel_error"] ** 2 for row in rows if "weighted_rel_error" in row]
    return sqrt(fsum(squares) / len(squares)) if squares else None


def gptq_summary(rows: Iterable[Row]) -> GptqSummary | None:
    """None without a module that GPTQ was tried on, or could not be."""
    decided = [row for row in rows if "gptq_reason" in row]
    chosen = [row for row in decided if row.get("method") == "gptq"]
    ours, theirs = (fsum(row.get(key) or 0 for row in chosen) for key in ("loss_gptq", "loss_weighted"))
    return GptqSummary(len(decided), len(chosen), ours / theirs if theirs else None) if decided else None


def experts_of_few_tokens(rows: Iterable[Row]) -> dict[str, int]:
    """Name -> fit tokens of the experts whose statistics are shrunk most; those that no token reached have none."""
    experts = (row for row in rows if row["role"] == "routed_expert")
    return {row["name"].rpartition(".")[0]: row["tokens"] for row in experts if 0 < (row.get("tokens") or 0) < STARVED}


def threshold_hint(method: str) -> str | None:
    """What a limit on the errors of weights has to do with methods that look at outputs."""
    if method not in (*CALIBRATED, *GIVEN):
        return None
    return (
        f"{method} makes outputs more exact and weights less, on purpose: kizami report OUT --stats STATS --against "
        "SRC --max-output-error X holds the outputs to a limit"
    )


def role_summaries(rows: Sequence[Row]) -> list[RoleSummary]:
    """One line per role and action, the largest output first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["action"]), []).append(row)
    lines = [_role(role, action, members) for (role, action), members in groups.items()]
    return sorted(lines, key=lambda line: (-line.bytes, line.role, line.action))


def _role(role: str, action: str, rows: list[Row]) -> RoleSummary:
    figures = measured(rows)
    worst = worst_tensors(figures, 1)
    error = pooled_error(figures)
    return RoleSummary(
        role=role,
        action=action,
        tensors=len(rows),
        weights=sum(prod(row["shape"]) for row in rows),
        source_bytes=sum(row["source_bytes"] for row in rows),
        bytes=sum(row["bytes"] for row in rows),
        rel_error=error,
        max_rel_error=worst[0]["rel_error"] if worst else None,
        sqnr_db=-20 * log10(error) if error else None,
        worst=worst[0]["name"] if worst else None,
    )


def layer_summaries(rows: Sequence[Row]) -> list[LayerSummary]:
    layers: dict[int | None, list[Row]] = {}
    for row in measured(rows):
        layers.setdefault(row["layer"], []).append(row)
    lines = []
    for layer, members in sorted(layers.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        worst = worst_tensors(members, 1)[0]
        lines.append(LayerSummary(layer, len(members), pooled_error(members) or 0.0, worst["rel_error"], worst["name"]))
    return lines


def pooled_error(rows: Iterable[Row]) -> float | None:
    """sqrt(sum e^2 / sum W^2); None without rows; 0 for all-zero weights."""
    energy = [(row["error_energy"], row["weight_energy"]) for row in rows]
    if not energy:
        return None
    error, weight = sum(e for e, _ in energy), sum(w for _, w in energy)
    return sqrt(error / weight) if weight else 0.0


def worst_tensors(rows: Iterable[Row], top: int) -> list[Row]:
    return sorted(measured(rows), key=lambda row: (-row["rel_error"], row["name"]))[:top]


def over_threshold(rows: Iterable[Row], max_rel_error: float) -> list[Row]:
    """Packed tensors whose relative error is above the threshold, the worst first."""
    over = [row for row in measured(rows) if row["rel_error"] > max_rel_error]
    return worst_tensors(over, len(over))
