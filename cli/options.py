"""The options, each declared once: every command that has one spells it, documents it and reads KIZAMI_* alike."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError, printable
from kizami.quantize.settings import GROUP_SIZES, Form, Policy

WHAT, HOW, RUN, OUTPUT = "What is packed", "How", "Run", "Output"

GroupSizeName = Literal["32", "64", "128"]
SchemeName = Literal["w4a16-g32", "w4a16-g64", "w4a16-g128", "fp8-block", "bf16"]
LayoutName = Literal["pack-quantized", "gptq", "gptq_v2", "awq", "w4afp8"]
RestName = Literal["bf16", "fp8"]
MtpName = Literal["quantize", "keep", "drop"]


def option(*spellings: str, panel: str, help: str, **more: Any) -> Any:
    """A typer option with its environment variable: KIZAMI_ and the long spelling in capitals, or `envvar`."""
    long = next(s for s in spellings if s.startswith("--"))
    # What is not shown here is said for all of them: `kizami --help`
    quiet: dict[str, Any] = {"show_default": False, "show_envvar": False, "envvar": variable(long)}
    more = quiet | more
    if more.pop("flag", False):
        more["metavar"] = ""  # not "<bool>"
    return typer.Option(*spellings, help=help, rich_help_panel=panel, **more)


def variable(long: str) -> str:
    """KIZAMI_GROUP_SIZE for --group-size or group_size."""
    return "KIZAMI_" + long.removeprefix("--").replace("-", "_").upper()


def from_environment(context: typer.Context, name: str) -> bool:
    """Whether the parameter's value came from its variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def from_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def spelled(context: typer.Context, name: str) -> str:
    """What the user wrote: the option, or the variable."""
    if not from_environment(context, name):
        return "--" + name.replace("_", "-")
    (parameter,) = (one for one in context.command.params if one.name == name)
    return str(parameter.envvar)


def device(value: str) -> str:
    from kizami.quantize.on_device.names import numbers_of

    try:
        numbers_of(value)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    return value


def finite(value: float | None) -> float | None:
    """A threshold of NaN is never exceeded, and JSON has neither NaN nor infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        show_default=False,
        help="The FP8, BF16 or INT4 checkpoint: a folder, or a Hub id (org/name or org/name@revision), which inspect, "
        "plan, check and convert read on the Hub, the others in its local cache.",
    ),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        show_default=False,
        help="What kizami convert wrote (verify: or another INT4 checkpoint): a folder, or a Hub id (org/name or "
        "org/name@revision) in the local Hub cache.",
    ),
]

GroupSize = Annotated[
    GroupSizeName | None,
    option("--group-size", panel=WHAT, help="Weights that share a scale. Default 32, the layout Kimi ships."),
]
Scheme = Annotated[
    SchemeName | None,
    option(
        "--scheme",
        panel=WHAT,
        metavar="NAME",
        help="What the experts become: w4a16-g32 (default), w4a16-g64, w4a16-g128, fp8-block or bf16.",
    ),
]
Layout = Annotated[
    LayoutName,
    # report has a --format of its own, and with it KIZAMI_FORMAT
    option(
        "--int4-format",
        "--format",
        panel=WHAT,
        help="How INT4 weights lie in the files: pack-quantized (default), gptq, gptq_v2, awq or w4afp8.",
    ),
]
SetRole = Annotated[
    list[str] | None,
    option(
        "--set",
        panel=WHAT,
        metavar="ROLE=FORM",
        help="int4, fp8, bf16 or keep for the linears of a role: shared_expert, dense_mlp, attention, indexer, mtp, "
        "routed_expert, vision, other. Repeatable.",
    ),
]
AllowRequantize = Annotated[
    bool,
    option(
        "--allow-requantize",
        panel=WHAT,
        flag=True,
        help="Let an INT4 source be rounded again to larger groups; the report has the error of it.",
    ),
]
AllowUnloadable = Annotated[
    bool,
    option("--allow-unloadable", panel=WHAT, flag=True, help="Go on where kizami check finds no engine that loads it."),
]
RecipeFile = Annotated[
    Path | None,
    option(
        "--recipe",
        panel=WHAT,
        metavar="FILE",
        help="Take targets, ignore and group size from an llm-compressor recipe (YAML).",
    ),
]
WriteRecipe = Annotated[
    Path | None,
    option("--write-recipe", panel=OUTPUT, metavar="FILE", help="Write targets, ignore and group size as a recipe."),
]
RestOption = Annotated[
    RestName, option("--rest", panel=WHAT, help="The other FP8 linears: bf16 decodes them (default), fp8 keeps them.")
]
MtpOption = Annotated[
    MtpName,
    option(
        "--mtp",
        panel=WHAT,
        help="The MTP layer's experts: quantize (default), keep (not INT4; decoded like the rest), or drop the layer.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    option(
        "--ignore", panel=WHAT, metavar="NAME", help="Leave these modules unpacked: a name or re:REGEX. Repeatable."
    ),
]
Targets = Annotated[
    list[str] | None,
    option("--targets", panel=WHAT, metavar="NAME", help="Pack these instead of the routed experts. Repeatable."),
]
MaxShardSize = Annotated[
    str,
    option(
        "--max-shard-size",
        panel=WHAT,
        metavar="SIZE",
        help="Most tensor data in one output file, its header not counted: 5GB (default), 2GiB, 500MB.",
    ),
]
TensorParallel = Annotated[
    int | None,
    option("--tp", panel=WHAT, metavar="N", min=1, max=1024, help="The tensor-parallel size it will be served at."),
]

Workers = Annotated[
    int | None, option("--workers", panel=RUN, metavar="N", min=1, max=4096, help="Threads. Default: all cores.")
]
DeviceOption = Annotated[
    str,
    option(
        "--device",
        panel=RUN,
        metavar="DEVICE",
        callback=device,
        help="What packs linears, and solves for --method gptq: cpu (default), cuda for all GPUs (gptq: the first), "
        "cuda:0 or cuda:0,1 for some. The same bytes, but for gptq.",
    ),
]
DryRun = Annotated[
    bool, option("--dry-run", panel=RUN, flag=True, help="Show the plan and the free space; write nothing.")
]
Restart = Annotated[
    bool, option("--restart", panel=RUN, flag=True, help="Throw away an unfinished OUT.partial and start over.")
]
MaxRelError = Annotated[
    float | None,
    option(
        "--max-rel-error",
        panel=RUN,
        metavar="X",
        min=0.0,
        callback=finite,
        help="Exit 1 if a packed tensor's relative error is above X.",
    ),
]
Against = Annotated[
    str | None, option("--against", panel=RUN, metavar="SRC", help="Also compare every tensor with this source.")
]
Sample = Annotated[
    int | None,
    option("--sample", panel=RUN, metavar="N", min=1, help="Compare N tensors of --against only, evenly spread."),
]

RunStats = Annotated[
    Path | None,
    option("--stats", panel=RUN, metavar="STATS", help="Also hold what a calibrated method did to its statistics."),
]

Tensors = Annotated[
    str | None,
    option(
        "--tensors", panel=OUTPUT, metavar="GLOB", help="List only the tensors whose names match, e.g. '*.eh_proj.*'."
    ),
]
ToFile = Annotated[
    str | None,
    option(
        "-o",
        "--output",
        panel=OUTPUT,
        metavar="FILE",
        help="Write to FILE, which may not lie in SRC or OUT. A link is followed; a pipe or a device is written to.",
    ),
]

Quiet = Annotated[
    bool, option("-q", "--quiet", panel=OUTPUT, flag=True, help="Only the last line, errors and warnings.")
]
Verbose = Annotated[
    bool, option("-v", "--verbose", panel=OUTPUT, flag=True, help="Everything: all tensors, warnings and file names.")
]
Json = Annotated[bool, option("--json", panel=OUTPUT, flag=True, help="One JSON object on stdout.")]
Debug = Annotated[bool, option("--debug", panel=OUTPUT, flag=True, help="Tracebacks.")]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What `plan` and `convert` have been told about the output, as it was written."""

    group_size: str | None
    scheme: str | None
    layout: LayoutName
    rest: RestName
    mtp: MtpName
    roles: list[str] | None
    ignore: list[str] | None
    targets: list[str] | None
    allow_requantize: bool
    recipe: Path | None
    max_shard_size: str

    def policy(self, context: typer.Context) -> Policy:
        """Raises KizamiError where two options contradict each other."""
        to, group_size = self._scheme(context)
        if to != "int4" and self.layout != "pack-quantized":
            given = spelled(context, "int4_format")
            raise KizamiError(
                f"{given} {self.layout} is a layout of INT4, and {spelled(context, 'scheme')} {self.scheme} makes none",
                code="bad_option",
                hint="give one of the two",
            )
        targets, ignore = tuple(self.targets or ()), tuple(self.ignore or ())
        if self.recipe is not None:
            from kizami.formats.recipes import read_recipe

            recipe = read_recipe(self.recipe)
            if targets or (group_size is not None and group_size != recipe.group_size):
                raise KizamiError(
                    f"{spelled(context, 'recipe')} says what is packed; so do {spelled(context, 'targets')} and "
                    f"{spelled(context, 'group_size')}",
                    code="bad_option",
                    hint="give one of the two; --ignore adds to the recipe's",
                )
            if to != "int4":
                raise KizamiError(
                    f"{spelled(context, 'recipe')} asks for INT4 in groups of {recipe.group_size}, and "
                    f"{spelled(context, 'scheme')} {self.scheme} for another form",
                    code="bad_option",
                    hint="give one of the two",
                )
            targets, ignore, group_size = recipe.targets, recipe.ignore + ignore, recipe.group_size
        return Policy(
            to=to,
            group_size=group_size if group_size is not None else self._default_group_size(),
            format=self.layout,
            rest=self.rest,
            mtp=self.mtp,
            targets=targets,
            ignore=ignore,
            roles=tuple(map(_role, self.roles or ())),
            allow_requantize=self.allow_requantize,
            max_shard_bytes=parse_size(self.max_shard_size, spelled(context, "max_shard_size")),
        )

    def _default_group_size(self) -> int:
        return 128 if self.layout == "w4afp8" else GROUP_SIZES[0]  # its kernel has no other

    def _scheme(self, context: typer.Context) -> tuple[Literal["int4", "fp8", "bf16"], int | None]:
        """--group-size and --scheme say the same: the command line wins, as always."""
        group_size, scheme = self.group_size, self.scheme
        if group_size is not None and scheme is not None:
            if from_environment(context, "group_size") and not from_environment(context, "scheme"):
                group_size = None
            elif from_environment(context, "scheme") and not from_environment(context, "group_size"):
                scheme = None
        chosen = None if group_size is None else int(group_size)
        if scheme is None:
            return "int4", chosen
        named = int(scheme.rpartition("g")[2]) if scheme.startswith("w4a16") else None
        if chosen is not None and named != chosen:
            ours, theirs = spelled(context, "group_size"), spelled(context, "scheme")
            raise KizamiError(
                f"{ours} {group_size} and {theirs} {scheme} contradict each other",
                code="bad_option",
                hint="give one of the two",
            )
        return ("int4" if named else "fp8" if scheme == "fp8-block" else "bf16"), named


def policy_from(context: typer.Context, told: PolicyOptions, ui: Ui) -> Policy:
    """Also says what of a recipe is not taken over, and which variable was hardly meant for another command."""
    policy = told.policy(context)
    meant = os.environ.get(variable("format"))
    if meant in get_args(LayoutName) and meant != told.layout:
        ui.warn([f"{variable('format')}={meant} is for kizami report; here it is {variable('int4_format')}"])
    if told.recipe is not None:
        from kizami.formats.recipes import read_recipe

        ui.warn(read_recipe(told.recipe).notes)
    return policy


def _role(text: str) -> tuple[str, Form]:
    role, _, form = text.partition("=")
    if form not in get_args(Form):
        raise KizamiError(
            f"--set {printable(text, 60)}; expected ROLE=FORM, where FORM is one of {', '.join(get_args(Form))}",
            code="bad_option",
        )
    return role.strip().replace("-", "_"), cast(Form, form)


_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def size_given(context: typer.Context, name: str, text: str | None) -> int | None:
    """Bytes of an option that may be left out."""
    return None if text is None else parse_size(text, spelled(context, name))


def parse_size(text: str, spelling: str = "--max-shard-size") -> int:
    """Bytes in `5GB`, `2GiB`, `500MB` or `1000000`; decimal units are powers of 1000, as the Hub counts."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]I?)?B?\s*", text.upper(), re.ASCII)
    unit = _UNITS.get(match[2] or "") if match else None
    if match is None or unit is None:
        raise KizamiError(f"{spelling} {text!r} is not a size", code="bad_option", hint="write 5GB, 2GiB or 500MB")
    nbytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if nbytes < 1:
        raise KizamiError(f"{spelling} {text!r} is less than 1 byte", code="bad_option", hint="write 5GB or 500MB")
    return nbytes
