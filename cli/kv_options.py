"""The options that put KV scales into an output, and hold an output to them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kizami.cli.options import RUN, WHAT, option, spelled
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kizami.quantize.kv_scales.merge import KvAsked

KvScalesFile = Annotated[
    Path | None,
    option(
        "--kv-scales",
        panel=WHAT,
        metavar="FILE",
        help="Write the scales of an FP8 KV cache that kizami kv-scales put into FILE; those of the source go. MLA: no "
        "tensors, a statement on the range.",
    ),
]
ForceKvScales = Annotated[
    bool,
    option(
        "--force-kv-scales",
        panel=WHAT,
        flag=True,
        help="Write them also where engines would spoil attention with them, as on MLA.",
    ),
]
HeldKvScales = Annotated[
    Path | None,
    option("--kv-scales", panel=RUN, metavar="FILE", help="Also hold the output's KV scales to those of FILE."),
]


def kv_asked(context: typer.Context, file: Path | None, force: bool) -> "KvAsked | None":
    """What --kv-scales and --force-kv-scales say. KizamiError as `KvScales.read`."""
    if file is None:
        if force:
            given, needs = spelled(context, "force_kv_scales"), spelled(context, "kv_scales")
            raise KizamiError(f"{given} without {needs}: there is nothing to force", code="bad_option")
        return None
    from kizami.formats.kv_scales.neutral import KvScales
    from kizami.quantize.kv_scales.merge import KvAsked

    return KvAsked(KvScales.read(file), force)


def kv_body(manifest: "Mapping[str, Any]") -> dict[str, Any] | None:
    """What convert and report tell under --json of an output's KV scales; the values are in kizami.json."""
    record = manifest.get("kv_scales")
    return record and {key: record[key] for key in ("statement", "forced", "tensors")}
