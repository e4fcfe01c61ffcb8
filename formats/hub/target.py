"""A repository on the Hub that is being filled: few commits, each of which is known to have arrived or not.

create_commit of huggingface_hub is not made again after an error, since a lost answer would give two commits. Here the
repository is looked at first: what has arrived is not sent again, and a commit names its parent, so that one which
lands late, or a stranger's between two of ours, is an error at the Hub and never a second commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.hub.client import Patience, as_refusal, hub, patiently, wait_of
from kizami.formats.hub.repository import Repository

TRIES = 12  # of a commit
MAX_FILE_BYTES = 200 * 10**9  # of one file (huggingface_hub PR #3696); the Hub recommends 50 GB
CONFLICT = 412
THREADS = 5  # uploads at once, as huggingface_hub has it


@dataclass(slots=True)
class Target:
    """`name` as org/name. Nothing that others put there is changed."""

    name: str
    private: bool
    patience: Patience
    _head: Repository | None = field(default=None, init=False)

    def create(self) -> None:
        """Makes the repository unless it is there. KizamiError as `as_refusal`: a token that may not write, above
        all."""
        with as_refusal(self.name):
            patiently(lambda: hub().create_repo(self.name, private=self.private or None, exist_ok=True), self.patience)

    def look(self, revision: str | None = None) -> Repository:
        """The head, or the commit that is named: what the repository holds now."""
        self._head = Repository.look(self.name, revision, self.patience)
        return self._head

    def has(self, name: str, sha256: str) -> bool:
        """Whether the file is there, in large storage, by what `look` saw last."""
        assert self._head is not None
        there = self._head.files.get(name)
        return there is not None and there.sha256 == sha256

    def holds(self, name: str, path: Path) -> bool:
        """The same for a file at hand, which is hashed as the Hub hashes it."""
        assert self._head is not None
        there = self._head.files.get(name)
        return there is not None and there.is_at(path)

    def commit(self, files: Mapping[str, Path], message: str) -> str:
        """Adds those that are not there, in one commit, and gives the head's id. KizamiError as `as_refusal`, or
        "too_large" before anything is sent."""
        refuse_too_large(files)
        revision: str | None = None
        for tried in range(TRIES):
            head = self.look(revision)
            left = {name: path for name, path in files.items() if not self.holds(name, path)}
            if not left:
                return head.commit
            revision = None
            try:
                revision = self._send(left, message, head.commit)
            except Exception as e:
                seconds = _wait_of(e, tried)
                if seconds is None or tried == TRIES - 1:
                    with as_refusal(self.name):
                        raise
                self.patience.on_wait(seconds, e)
                if self.patience.stop.wait(seconds):
                    with as_refusal(self.name):
                        raise
        raise KizamiError("took a commit and does not hold its files", code="hub_error", file=self.name)

    def _send(self, files: Mapping[str, Path], message: str, parent: str) -> str:
        from huggingface_hub import CommitOperationAdd

        api = hub()
        added: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        api.preupload_lfs_files(self.name, added, num_threads=THREADS)
        return str(api.create_commit(self.name, added, commit_message=message, parent_commit=parent).oid)


def _wait_of(error: Exception, tried: int) -> float | None:
    """As `wait_of`; after somebody else's commit the next try has another parent."""
    response = getattr(error, "response", None)
    return 1.0 if getattr(response, "status_code", None) == CONFLICT else wait_of(error, tried)


def refuse_too_large(files: Mapping[str, Path]) -> None:
    """KizamiError "too_large" for a file that the Hub takes from nobody."""
    for name, path in files.items():
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise KizamiError(
                f"has {size:,} bytes; the Hub takes files of up to {MAX_FILE_BYTES:,}",
                code="too_large",
                file=name,
                hint="convert with a smaller --max-shard-size",
            )
