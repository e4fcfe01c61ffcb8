"""SRC and OUT as the user writes them: a folder, a file, or a Hub id."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint


def open_source(source: str) -> "Checkpoint":
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub import locate

    return Checkpoint.open(locate(source))


def finished_output(out: str) -> Path:
    from kizami.formats.hub import locate

    return locate(out)
