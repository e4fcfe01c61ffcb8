"""`kizami inspect`: what a checkpoint is, from its config and headers."""

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import typer

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui, counted, exact, gib, show_error
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.families import Family


def inspect(
    src: o.Source,
    tensors: o.Tensors = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show family, layers, dtypes, FP8 dialect, sizes and problems of a checkpoint.

    Reads config.json, the index and the headers; no weight. The last line says whether it can be converted. Exit code 2
    if not; 0 also where it takes options.
    """
    from kizami.cli.hub_source import open_headers

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    checkpoint = open_headers(ui, src)
    problems: list[KizamiError] = []
    body = inspect_body(checkpoint, problems)
    if tensors is not None or verbose:
        body["matching"] = matching(checkpoint, tensors or "*")
        if not body["matching"]:
            body["warnings"].append(f"no tensor matches --tensors {tensors}")
    if json:
        ui.emit("inspect", body)
    else:
        ui.warn(body["warnings"])
        for problem in problems:
            show_error(problem, as_json=False)
        if tensors is None:
            show_inspect(ui, body)
        else:
            show_matching(ui, body)
    if problems:
        raise typer.Exit(2)


def inspect_body(checkpoint: "Checkpoint", problems: list[KizamiError]) -> dict[str, Any]:
    """The object of --json; refusals of the later steps are collected in `problems`, not raised."""
    from kizami.cli.hub_source import shown
    from kizami.formats.dialects import find_encoded_weights
    from kizami.formats.families import find_family
    from kizami.formats.fused_experts import split_fused_experts

    family, dialect = None, None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        family, warnings = find_family(checkpoint.config, checkpoint.tensors)
    except KizamiError as e:
        problems.append(e)
    try:
        tensors, notes = split_fused_experts(checkpoint.config, checkpoint.tensors)
        dialect = find_encoded_weights(checkpoint.config, tensors)
    except KizamiError as e:
        if str(e) not in map(str, problems):  # the family is looked for once more
            problems.append(e)
    obstacle = problems[0] if problems else _obstacle(checkpoint)
    infos = checkpoint.tensors.values()
    return {
        "root": shown(checkpoint),
        "convertible": obstacle is None,
        "obstacle": None if obstacle is None else obstacle.message,
        "family": None if family is None else {"name": family.name, "known": family.known},
        "layers": None if family is None else family.num_layers,
        "mtp_layers": [] if family is None else list(family.mtp_layers),
        "dialect": None if dialect is None else dialect.label,
        "fp8_weights": None if dialect is None else len(dialect.weights),
        "int4_weights": None if dialect is None else len(dialect.packed),
        "files": [{"name": head.file, "bytes": head.file_size} for head in checkpoint.headers.values()],
        "tensors": len(checkpoint.tensors),
        "bytes": sum(info.nbytes for info in infos),
        "dtypes": _sums((info.dtype, info.nbytes) for info in infos),
        "roles": [] if family is None else _roles(checkpoint, family),
        "warnings": [*warnings, *checkpoint.notes, *notes],
        "problems": [
            {key: getattr(problem, key) for key in ("code", "message", "file", "tensor", "hint")}
            for problem in problems
        ],
    }


def _obstacle(checkpoint: "Checkpoint") -> KizamiError | None:
    """Why `convert` without options would refuse it."""
    from kizami.quantize.planner import build_plan
    from kizami.quantize.settings import Method, Policy

    try:
        build_plan(checkpoint, Policy(), Method())
    except KizamiError as e:
        return e
    return None


def _sums(pairs: Any) -> dict[str, dict[str, int]]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for key, size in pairs:
        count[key] += 1
        nbytes[key] += size
    return {key: {"tensors": count[key], "bytes": nbytes[key]} for key in sorted(count, key=lambda k: -nbytes[k])}


def _roles(checkpoint: "Checkpoint", family: "Family") -> list[dict[str, Any]]:
    places = {name: family.place(name) for name in checkpoint.tensors}
    sums = _sums((places[name].role.value, info.nbytes) for name, info in checkpoint.tensors.items())
    layers: dict[str, set[int]] = {}
    experts: dict[str, set[int]] = {}
    for place in places.values():
        if place.layer is not None:
            layers.setdefault(place.role.value, set()).add(place.layer)
        if place.expert is not None:
            experts.setdefault(place.role.value, set()).add(place.expert)
    return [
        {"role": role, **sizes, "layers": len(layers.get(role, ())), "experts": len(experts.get(role, ()))}
        for role, sizes in sums.items()
    ]


def matching(checkpoint: "Checkpoint", glob: str) -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "bytes": info.nbytes,
            "file": info.file,
        }
        for info in checkpoint.tensors.values()
        if fnmatchcase(info.name, glob)
    ]


def show_inspect(ui: Ui, body: dict[str, Any]) -> None:
    family = body["family"] or {"name": "(not readable)", "known": False}
    layers = f"{body['layers']} layers" + (f" and MTP layer {body['mtp_layers']}" if body["mtp_layers"] else "")
    name = (family["name"] or "(no model_type)") + ("" if family["known"] else " (not a known family)")
    ui.pairs([
        ("model", f"{name}, {layers}"),
        ("dialect", f"{body['dialect'] or '(not readable)'}"),
        ("files", f"{len(body['files']):,}"),
    ])  # fmt: skip
    ui.say()
    ui.table(
        ("dtype", ">tensors", ">bytes"),
        [(dtype, f"{sums['tensors']:,}", gib(sums["bytes"])) for dtype, sums in body["dtypes"].items()],
    )
    ui.say()
    ui.table(
        ("role", ">layers", ">experts", ">tensors", ">bytes"),
        [
            (
                line["role"],
                str(line["layers"] or ""),
                str(line["experts"] or ""),
                f"{line['tensors']:,}",
                gib(line["bytes"]),
            )
            for line in body["roles"]
        ],
    )
    if "matching" in body:
        ui.heading(counted(len(body["matching"]), "tensor"))
        _matching_table(ui, body)
    ui.say()
    encoded = ", ".join(f"{body[f'{form}_weights'] or 0:,} {form.upper()} weights" for form in ("fp8", "int4"))
    ui.say(f"{exact(body['bytes'])} in {counted(body['tensors'], 'tensor')}, {encoded}")
    ui.result(f"convertible: {_verdict(body)}")


def _verdict(body: dict[str, Any]) -> str:
    if body["convertible"]:
        return "yes"
    if body["problems"]:
        return f"no: {body['obstacle']}"
    other = " (--scheme fp8-block, --scheme bf16 or --format make something of it)" if body["int4_weights"] else ""
    return f"not without options: {body['obstacle']}{other}"


def show_matching(ui: Ui, body: dict[str, Any]) -> None:
    _matching_table(ui, body)
    found = body["matching"]
    ui.result(f"{len(found):,} of {counted(body['tensors'], 'tensor')}, {exact(sum(t['bytes'] for t in found))}")


def _matching_table(ui: Ui, body: dict[str, Any]) -> None:
    heads = ("dtype", "shape", ">bytes", *(["file"] if ui.verbose else []), "tensor")
    ui.table(
        heads,
        [
            (t["dtype"], str(t["shape"]), f"{t['bytes']:,}", *([t["file"]] if ui.verbose else []), t["name"])
            for t in body["matching"]
        ],
    )


COMMAND = Command(
    "inspect",
    inspect,
    (
        "kizami inspect GLM-5.2-FP8/",
        "kizami inspect zai-org/GLM-5.2-FP8 --tensors '*.layers.78.eh_proj*'",
        "kizami inspect src/ --json | jq .dtypes",
    ),
    plans=True,
)
