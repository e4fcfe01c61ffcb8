"""What `kizami plan` is asked beyond the plan: whether an engine loads the result, and whether OUT is it already."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kizami.cli import options as o
from kizami.cli.check import EngineWord
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.plan import Plan

SPELLED = {"to": "--scheme", "roles": "--set", "max_shard_bytes": "--max-shard-size"}  # fields of a policy
SHOWN = 60  # characters of a setting

Engines = Annotated[
    list[str] | None,
    o.option(
        "--engine",
        panel=o.WHAT,
        metavar="NAME",
        help="Exit 1 if it would not load the output at --tp: sglang, vllm or transformers. Repeatable.",
    ),
]
Finished = Annotated[
    str | None,
    o.option(
        "--finished",
        panel=o.RUN,
        metavar="OUT",
        help="Exit 2 if OUT was made of another source, of another commit or with other settings; it need not be there "
        "yet. Reads a few pages of a source that is on the disk.",
    ),
]


def check_engines(context: typer.Context, engines: list[str] | None) -> None:
    """KizamiError "usage" for one that nobody knows."""
    for name in engines or ():
        if name not in get_args(EngineWord):
            given = f"{o.spelled(context, 'engine')} {printable(name, SHOWN)}"
            raise KizamiError(
                f"{given}; expected one of {', '.join(get_args(EngineWord))}",
                code="usage",
                hint="who serves the output; the engine that chooses the codes is an option of convert",
            )


def refused_by(body: dict[str, Any], engines: list[str] | None, tp: int | None) -> list[str]:
    """What those engines say that would not load the output; body: of the plan."""
    return [
        f"{found['engine']} does not load it at tp {tp or 1}: {found['error']}. Do: {found['advice']}"
        for found in body["engines"]
        if found["engine"] in (engines or ()) and found["error"]
    ]


def refuse_other_output(out: str, src: str, plan: "Plan", checkpoint: "Checkpoint") -> None:
    """Where a finished OUT is not what `plan` makes of this source: KizamiError "other_source" (which one, as far as
    OUT says), "other_settings" (which), "other_plan"; as `read_manifest`."""
    from kizami.cli.source import refuse_nameless
    from kizami.quantize.manifest import MANIFEST, read_manifest

    refuse_nameless(out, "OUT")
    if not os.path.lexists(Path(out) / MANIFEST):
        return
    manifest = read_manifest(Path(out))
    _refuse_other_source(out, src, plan, checkpoint, manifest)
    if settings := list(_other_settings(plan, manifest)):
        raise KizamiError(
            f"was made with other settings: {', '.join(settings)}",
            code="other_settings",
            file=out,
            hint="name another OUT, or give the same options",
        )
    if manifest["plan_hash"] != plan.hash:
        raise KizamiError(
            f"is of this source and these settings, and not of this plan; kizami {manifest['kizami_version']} made it",
            code="other_plan",
            file=out,
            hint="name another OUT; kizami env tells this version",
        )


def _refuse_other_source(out: str, src: str, plan: "Plan", checkpoint: "Checkpoint", manifest: dict[str, Any]) -> None:
    from kizami.formats.fingerprint import sample_contents
    from kizami.quantize.card import hub_origin

    recorded, now = manifest.get("origin"), hub_origin(checkpoint.root)
    then = None if recorded is None else (recorded["repo"], recorded["revision"])
    if then is not None and now is not None and then != now:
        raise KizamiError(
            f"was made of {printable('@'.join(then), 200)}, and {src} is commit {now[1]} now",
            code="other_source",
            file=out,
            hint="name another OUT, or that commit as SRC",
        )
    if plan.source != manifest["source"]:
        files = plan.source["files"]
        other = [name for name in files if files[name] != manifest["source"]["files"].get(name)]
        what = f"headers of {', '.join(other[:3])}" if other else "config.json or the set of files"
        raise KizamiError(f"was made of another source than {src}: {what} differ", code="other_source", file=out)
    if checkpoint.remote and then is None:
        raise KizamiError(
            f"records no commit: whether it was made of {src}, commit {now and now[1]}, is not known",
            code="other_source",
            file=out,
            hint="name another OUT, or the folder that it was made of as SRC",
        )
    if not checkpoint.remote:
        contents = sample_contents(checkpoint)
        weights = [name for name, digest in contents.items() if digest != manifest["source_contents"].get(name)]
        if weights:
            raise KizamiError(
                f"was made of another source than {src}: {weights[0]} holds other weights",
                code="other_source",
                file=out,
            )


def _other_settings(plan: "Plan", manifest: dict[str, Any]) -> Iterator[str]:
    """`--group-size (32 there, 64 here)`."""
    from kizami.formats.run_log import canonical

    merged = manifest.get("kv_scales")
    here = {SPELLED.get(name, _option(name)): value for name, value in asdict(plan.policy).items()}
    there = {SPELLED.get(name, _option(name)): value for name, value in manifest["policy"].items()}
    here |= {
        "--method": plan.method.name,
        "--scale-sign": plan.method.scale_sign,
        "--clip-allowance": plan.method.clip_allowance,
        "--stats": plan.method.stats,
        "--kv-scales": None if plan.kv_scales is None else plan.kv_scales.document,
    }
    there |= {
        "--method": manifest["method"],
        "--scale-sign": manifest["scale_sign"],
        "--clip-allowance": manifest["clip_allowance"],
        "--stats": manifest.get("calibration", {}).get("sha256"),
        "--kv-scales": None if merged is None else merged["document"],
    }
    for option in sorted(here.keys() | there.keys()):
        then, now = (canonical(side.get(option)) for side in (there, here))
        if then != now:
            yield f"{option} ({printable(then, SHOWN)} there, {printable(now, SHOWN)} here)"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
