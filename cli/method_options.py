"""The options of how scales and codes are chosen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kizami.cli.options import HOW, option
from kizami.formats.errors import KizamiError
from kizami.quantize.settings import Method, default_allowance

if TYPE_CHECKING:
    from kizami.formats.statistics import Statistics

MethodChoice = Literal["search", "weighted", "gptq", "minmax", "signed", "awq"]
SignName = Literal["signed", "positive"]
AllowanceName = Literal["auto", "0.5", "0.75", "1", "2", "none"]

MethodOption = Annotated[
    MethodChoice,
    option(
        "--method",
        panel=HOW,
        help="How scales and codes are chosen: search (default), weighted, gptq, minmax, signed; awq: only with "
        "--engine llmcompressor.",
    ),
]
StatsOption = Annotated[
    Path | None,
    option("--stats", panel=HOW, metavar="STATS", help="What kizami calibrate wrote, for --method weighted and gptq."),
]
ScaleSignOption = Annotated[
    SignName,
    option("--scale-sign", panel=HOW, help="May searched scales be negative: signed (default) or positive."),
]
ClipAllowance = Annotated[
    AllowanceName,
    option(
        "--clip-allowance",
        panel=HOW,
        help="Most a weight may be clipped, in steps, by searches. auto (default): of search 2 in groups of 64 "
        "and 0.5 in groups of 128, else none.",
    ),
]


def method_from(
    method: MethodChoice, scale_sign: SignName, clip_allowance: str, stats: Path | None, group_size: int
) -> "tuple[Method, Statistics | None]":
    """With the opened STATS. KizamiError where a method needs them and they are not given, or the other way round."""
    from kizami.quantize.planner import check_statistics_option

    if method == "awq":
        raise KizamiError(
            "--method awq is llm-compressor's",
            code="bad_option",
            hint="kizami convert --engine llmcompressor --data FILE runs it; kizami's own calibrated methods are "
            "weighted and gptq",
        )
    check_statistics_option(method, stats is not None)
    statistics = None
    if stats is not None:
        from kizami.formats.statistics import Statistics

        statistics = Statistics.open(stats)
    allowance = default_allowance(method, group_size)
    if clip_allowance != "auto":
        allowance = None if clip_allowance == "none" else float(clip_allowance)
    sha256 = None if statistics is None else statistics.sha256
    return Method(method, scale_sign, allowance, sha256), statistics


def statistics_facts(statistics: "Statistics | None") -> dict[str, Any] | None:
    """What a plan keeps of STATS."""
    if statistics is None:
        return None
    from kizami.quantize.calibrated.statistics import facts_of

    return facts_of(statistics)
