"""SRC as the user writes it: a folder, a file, or a Hub id."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kizami.formats.checkpoint import Checkpoint


def open_source(source: str) -> "Checkpoint":
    from kizami.formats.checkpoint import Checkpoint
    from kizami.formats.hub import locate

    return Checkpoint.open(locate(source))
