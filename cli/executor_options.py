"""The options of `kizami convert` that say which machines do it: `--shards`, `--executor`."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kizami.cli import options as o
from kizami.formats.errors import KizamiError, printable

if TYPE_CHECKING:
    from kizami.quantize.parts import Part

Shards = Annotated[
    str | None,
    o.option(
        "--shards",
        panel=o.RUN,
        metavar="A-B/N",
        help="Convert only shards A to B (or A) of the plan's N, beside other processes that convert others into the "
        "same OUT; the same command without --shards finishes. SRC in a folder, no --push-to.",
    ),
]


@dataclass(frozen=True, slots=True)
class Where:
    """As it was written."""

    shards: str | None

    @property
    def on_disk(self) -> bool:
        """Whether SRC must be a folder: other processes read it, too."""
        return self.shards is not None

    def part(self, context: typer.Context) -> "Part | None":
        """Of --shards. KizamiError "bad_option"."""
        from kizami.quantize.parts import Part

        if self.shards is None:
            return None
        given = o.spelled(context, "shards")
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?/(\d{1,5})\s*", self.shards, re.ASCII)
        first, last, of = (0, 0, 0) if match is None else (int(match[1]), int(match[2] or match[1]), int(match[3]))
        if not 1 <= first <= last <= of:
            raise KizamiError(
                f"{given} {printable(self.shards, 60)}; expected A-B/N or A/N with 1 <= A <= B <= N",
                code="bad_option",
                hint="write 1-20/142 for the first 20 of 142 shards; kizami plan tells their number",
            )
        return Part(first, last, of)

    def check(self, context: typer.Context, *, engine: str, push_to: str | None) -> None:
        """KizamiError "bad_option" for what one process alone can do."""
        alone = {"engine": engine != "kizami", "push_to": push_to is not None}
        for name, asked in alone.items():
            if asked and self.shards is not None:
                raise KizamiError(
                    f"{o.spelled(context, 'shards')} with {o.spelled(context, name)}, which one process does alone",
                    code="bad_option",
                    hint="kizami push OUT REPO pushes what is finished" if name == "push_to" else None,
                )
