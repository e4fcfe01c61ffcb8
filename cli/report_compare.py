"""`kizami report OUT --compare OTHER`: the same weights of two outputs, error against error."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kizami.cli.output import gib
from kizami.formats.errors import KizamiError

COLUMNS = ("", ">weights", ">error here", ">error there", ">ratio", ">smaller there", ">bytes here", ">bytes there")
NAMED = 5


def comparison_body(out: Path, other: str) -> dict[str, Any]:
    """KizamiError "other_source" where the two were not made of one checkpoint."""
    from kizami.cli.source import finished_output
    from kizami.quantize.comparison import compare_rows
    from kizami.quantize.manifest import read_manifest
    from kizami.quantize.report import read_whole_report

    there = finished_output(other)
    ours, theirs = read_manifest(out), read_manifest(there)
    if ours["source_contents"] != theirs["source_contents"]:
        raise KizamiError(
            "was made of another source than OUT: its errors are of other weights",
            code="other_source",
            file=str(there),
            hint="compare outputs of one checkpoint",
        )
    found = compare_rows(read_whole_report(out, ours), read_whole_report(there, theirs))
    return {
        "other": str(there),
        "here": _label(ours),
        "there": _label(theirs),
        "roles": [asdict(one) | {"ratio": one.ratio} for one in found.roles],
        "layers": [asdict(one) | {"ratio": one.ratio} for one in found.layers],
        "only_here": list(found.only_a),
        "only_there": list(found.only_b),
        "bytes": [ours["output"]["bytes"], theirs["output"]["bytes"]],
    }


def _label(manifest: dict[str, Any]) -> str:
    return f"{manifest['scheme']} {manifest['method']}"


def rows_of(groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            one["name"], f"{one['weights']:,}", f"{one['a_error']:.4f}", f"{one['b_error']:.4f}",
            "" if one["ratio"] is None else f"{one['ratio']:.3f}", f"{one['better']:,}", gib(one["a_bytes"]),
            gib(one["b_bytes"]),
        )
        for one in groups
    ]  # fmt: skip


def title(body: dict[str, Any]) -> str:
    return f"here {body['here']}, there {body['there']} ({Path(body['other']).name})"


def notes(body: dict[str, Any]) -> list[str]:
    lines = [f"all tensors: {gib(body['bytes'][0])} here, {gib(body['bytes'][1])} there"]
    for key, where in (("only_here", "here"), ("only_there", "there")):
        if names := body[key]:
            more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            lines.append(f"packed only {where}: {', '.join(names[:NAMED])}{more}")
    return lines
