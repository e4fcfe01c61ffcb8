"""Hub ids: a checkpoint that `hf download` has put into the local cache. Nothing here reaches the network."""

import os
import re
from pathlib import Path

from kizami.formats.errors import KizamiError

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def locate(source: str) -> Path:
    """The folder (or file) that `source` means: a path that exists, else `org/name[@revision]` in the Hub cache.

    Raises KizamiError "not_in_cache" for a Hub id that is not there; what is neither comes back as a path.
    """
    named = hub_id(source)
    return Path(source) if named is None else cached_snapshot(*named)


def hub_id(source: str) -> tuple[str, str | None] | None:
    """Repository and revision; None for a path that exists, and for what is no id."""
    match = None if os.path.lexists(source) else _HUB_ID.fullmatch(source)
    return None if match is None else (match["repo"], match["revision"])


def cached_snapshot(repo: str, revision: str | None) -> Path:
    """The snapshot folder of a downloaded repository (`HF_HOME` and `HF_HUB_CACHE` as huggingface_hub has them)."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        at = f" --revision {revision}" if revision else ""
        raise KizamiError(
            "no folder of this name, and no such repository in the local Hub cache",
            code="not_in_cache",
            file=f"{repo}@{revision}" if revision else repo,
            hint="HF_HUB_OFFLINE is set: unset it, or download it before"
            if constants.HF_HUB_OFFLINE
            else f"hf download {repo}{at}",
        ) from None
