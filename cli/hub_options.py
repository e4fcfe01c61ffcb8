"""The options of `kizami convert` and `kizami push` that are about the Hub, and about who follows a run."""

from typing import Annotated

from kizami.cli.options import OUTPUT, RUN, option

ScratchLimit = Annotated[
    str,
    option(
        "--scratch-limit",
        panel=RUN,
        metavar="SIZE",
        help="Disk at most for what comes from the Hub and goes there: SRC's files ahead of the cores, with "
        "--delete-pushed OUT's, too. Default 50GB.",
    ),
]
EventsFile = Annotated[
    str | None,
    option(
        "--events",
        panel=OUTPUT,
        metavar="FILE",
        help="Append a line of JSON for each step: planned, started, progress, shard, lost, pushed, finished, failed.",
    ),
]
PushTo = Annotated[
    str | None,
    option(
        "--push-to",
        panel=OUTPUT,
        metavar="REPO",
        help="Push finished shards to this repository on the Hub while the next ones are converted.",
    ),
]
Private = Annotated[
    bool, option("--private", panel=OUTPUT, flag=True, help="Make a new repository private (--push-to).")
]
PrivateRepo = Annotated[bool, option("--private", panel=OUTPUT, flag=True, help="Make a new repository private.")]
DeletePushed = Annotated[
    bool,
    option(
        "--delete-pushed",
        panel=OUTPUT,
        flag=True,
        help="Remove each shard once it is on the Hub; no OUT appears (--push-to).",
    ),
]
