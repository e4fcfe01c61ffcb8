"""A repository on the Hub that is being filled: few commits, each of which is known to have arrived or not.

create_commit of huggingface_hub is not made again after an error, since a lost answer would give two commits. Here the
repository is looked at first: what has arrived is not sent again, and a commit names its parent, so that one which
lands late, or a stranger's between two of ours, is an error at the Hub and never a second commit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.hub.client import Patience, as_refusal, cause_of, hub, patiently, status_of, wait_of
from kizami.formats.hub.ranges import read_range
from kizami.formats.hub.repository import Repository

TRIES = 12  # of a commit
MAX_FILE_BYTES = 200 * 10**9  # of one file (huggingface_hub PR #3696); the Hub recommends 50 GB
CONFLICT = 412
STAKE = "kizami-push.json"
MAX_STAKE_BYTES = 1 << 16
THREADS = 5  # uploads at once, as huggingface_hub has it


@dataclass(slots=True)
class Target:
    """`name` as org/name. Nothing that others put there is changed."""

    name: str
    private: bool
    patience: Patience
    sent: int = field(default=0, init=False)  # files of the last commit that were not there before
    _head: Repository | None = field(default=None, init=False)

    def begin(self) -> Repository:
        """Makes the repository unless it is there, and gives what is in it. KizamiError as `as_refusal`: a token that
        may not write, above all; "push_target" where a private one was asked for and the one that is there is
        public."""
        with as_refusal(self.name):
            patiently(lambda: hub().create_repo(self.name, private=self.private or None, exist_ok=True), self.patience)
        head = self.look()
        if self.private and head.private is False:
            raise KizamiError(
                "is there and is public; --private was asked for",
                code="push_target",
                file=self.name,
                hint="make it private first, or leave --private out",
            )
        return head

    def look(self, revision: str | None = None) -> Repository:
        """The head, or the commit that is named: what the repository holds now."""
        self._head = Repository.look(self.name, revision, self.patience)
        return self._head

    @property
    def head(self) -> Repository:
        """What `look` saw last."""
        assert self._head is not None
        return self._head

    def has(self, name: str, sha256: str) -> bool:
        """Whether the file is there, in large storage, by what `look` saw last."""
        there = self.head.files.get(name)
        return there is not None and there.sha256 == sha256

    def holds(self, name: str, path: Path) -> bool:
        """The same for a file at hand, which is hashed as the Hub hashes it."""
        there = self.head.files.get(name)
        return there is not None and there.is_at(path)

    def commit(self, files: Mapping[str, Path], message: str, *, stake: bytes, last: bool = False) -> str:
        """Adds those that are not there, in one commit, and gives the head's id. stake: what says whose the files are
        as long as the model is not whole, in STAKE; the last commit removes it. KizamiError as `as_refusal`;
        "push_target" for a file of another job or person in the place of ours; "too_large" before anything is sent."""
        refuse_too_large(files)
        revision: str | None = None
        most = 0
        for tried in range(TRIES):
            head = self.look(revision)
            left = {name: path for name, path in files.items() if not self.holds(name, path)}
            staked = STAKE in head.files
            if not left and not (last and staked):
                self.sent = most
                return head.commit
            most = max(most, len(left))
            self._refuse_others(head, left, stake)
            revision = None
            try:
                revision = self._send(left, message, head.commit, None if last or staked else stake, last and staked)
            except Exception as failure:
                error = cause_of(failure)
                seconds = _wait_of(error, tried)
                if seconds is not None and tried < TRIES - 1:
                    self.patience.on_wait(seconds, error)
                    if not self.patience.stop.wait(seconds):
                        continue
                with as_refusal(self.name):
                    raise error from None
        raise KizamiError("took a commit and does not hold its files", code="hub_error", file=self.name)

    def check_free(self, names: Iterable[str], stake: bytes) -> None:
        """Before anything is converted: no file of others in the place of one of `names`, and no other job's stake.
        KizamiError "push_target"."""
        self._refuse_others(self.head, () if STAKE in self.head.files else names, stake)

    def _refuse_others(self, head: Repository, left: Iterable[str], stake: bytes) -> None:
        there = next((name for name in left if name in head.files), None)
        if there is None and STAKE in head.files:
            size = head.files[STAKE].size
            with as_refusal(self.name):
                found = patiently(lambda: read_range(head, STAKE, 0, min(size, MAX_STAKE_BYTES)), self.patience)
            there = STAKE if found != stake else None
        if there is not None:
            whose = "an unfinished push of another conversion" if there == STAKE else "of somebody else"
            raise KizamiError(
                f"holds {there}, {whose}",
                code="push_target",
                file=self.name,
                hint="push to a new repository, or remove it there; kizami replaces and deletes nothing of others",
            )

    def _send(self, files: Mapping[str, Path], message: str, parent: str, stake: bytes | None, unstake: bool) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = hub()
        added: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        added += [CommitOperationAdd(STAKE, stake)] if stake is not None else []
        api.preupload_lfs_files(self.name, added, num_threads=THREADS)
        gone: list[Any] = [CommitOperationDelete(STAKE)] if unstake else []
        return str(api.create_commit(self.name, [*added, *gone], commit_message=message, parent_commit=parent).oid)


def _wait_of(error: Exception, tried: int) -> float | None:
    """As `wait_of`; after somebody else's commit the next try has another parent."""
    return 1.0 if status_of(error) == CONFLICT else wait_of(error, tried)


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
