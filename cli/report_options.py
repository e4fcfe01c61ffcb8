"""The options of `kizami report` that no other command has."""

from pathlib import Path
from typing import Annotated, Literal

from kizami.cli.options import OUTPUT, RUN, finite, option

FormatName = Literal["text", "json", "markdown", "html", "junit"]
MaxRelError = Annotated[
    list[str] | None,
    option(
        "--max-rel-error",
        panel=RUN,
        metavar="[ROLE=]X",
        help="Exit 1 if a packed tensor's relative error is above X, of one role or of all. Repeatable.",
    ),
]
MinSqnr = Annotated[
    list[str] | None,
    option(
        "--min-sqnr",
        panel=RUN,
        metavar="[ROLE=]dB",
        help="Exit 1 if a packed tensor's signal-to-noise ratio is below dB, of one role or of all. Repeatable.",
    ),
]
Compare = Annotated[
    str | None,
    option(
        "--compare",
        panel=RUN,
        metavar="OTHER",
        help="Hold OUT's errors to those of another output of the same source: another method, another group size.",
    ),
]
InputStats = Annotated[
    Path | None,
    option(
        "--stats",
        panel=RUN,
        metavar="STATS",
        help="Also measure the error of what comes out of the experts, for the inputs that STATS keeps.",
    ),
]
OutputAgainst = Annotated[
    str | None,
    option(
        "--against",
        panel=RUN,
        metavar="SRC",
        help="The source: its outputs are right (--stats), its weights are the ones before (--format html).",
    ),
]
MaxOutputError = Annotated[
    float | None,
    option(
        "--max-output-error",
        panel=RUN,
        metavar="X",
        min=0.0,
        callback=finite,
        help="Exit 1 if the output of an expert has a relative error above X.",
    ),
]
ReportFormat = Annotated[
    FormatName | None,
    option(
        "--format",
        panel=OUTPUT,
        help="text (default), json, markdown, junit (each limit is a test), or html: one file with pictures (-o FILE; "
        "kizami's extra report).",
    ),
]
Top = Annotated[
    int, option("--top", panel=OUTPUT, metavar="N", min=0, help="How many of the worst tensors to list. Default 10.")
]
