"""SRC and OUT as the user writes them: a folder, a file, or a Hub id."""

from pathlib import Path
from typing import TYPE_CHECKING

from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint


def open_source(source: str) -> "Checkpoint":
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub.cache import locate

    refuse_nameless(source, "SRC")
    return Checkpoint.open(locate(source))


def finished_output(out: str) -> Path:
    from kizami.formats.hub.cache import locate

    refuse_nameless(out, "OUT")
    return locate(out)


def refuse_nameless(word: str, what: str) -> None:
    """`kizami verify "$OUT"` with an unset variable: Path("") would be the current folder."""
    if not word:
        raise KizamiError(f"{what} is empty", code="usage", hint="name a folder (is a variable of your shell unset?)")
