"""The options that put KV scales into an output, and hold an output to them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kizami.cli.options import RUN, WHAT, option, spelled
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.kv_scales.merge import KvAsked

KvScalesFile = Annotated[
    Path | None,
    option(
        "--kv-scales",
        panel=WHAT,
        metavar="FILE",
        help="Write the scales of an FP8 KV cache in FILE, of kizami kv-scales or a .safetensors of k_scale and "
        "v_scale; those of the source go. MLA: no tensors, a statement on the range.",
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


def check_force(context: typer.Context, file: Path | None, force: bool) -> None:
    """KizamiError "bad_option" for --force-kv-scales alone."""
    if force and file is None:
        given, needs = spelled(context, "force_kv_scales"), spelled(context, "kv_scales")
        raise KizamiError(f"{given} without {needs}: there is nothing to force", code="bad_option")


def kv_asked(file: Path | None, force: bool, checkpoint: "Checkpoint") -> "KvAsked | None":
    """What --kv-scales and --force-kv-scales say. KizamiError as `read_kv_scales` and `check_claims`."""
    if file is None:
        return None
    from kizami.quantize.kv_scales.assess import check_claims
    from kizami.quantize.kv_scales.merge import KvAsked
    from kizami.quantize.kv_scales.scale_file import read_kv_scales

    scales = read_kv_scales(file, checkpoint)
    check_claims(checkpoint, scales)
    return KvAsked(scales, force)


def kv_body(manifest: "Mapping[str, Any]") -> dict[str, Any] | None:
    """What convert and report tell under --json of an output's KV scales; the values are in kizami.json."""
    record = manifest.get("kv_scales")
    return record and {key: record[key] for key in ("statement", "forced", "tensors")}
