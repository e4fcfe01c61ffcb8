"""A repository on the Hub that is being filled: few commits, each of which is known to have arrived or not.

create_commit of huggingface_hub is not made again after an error, since a lost answer would give two commits. Here the
repository is looked at first: what has arrived is not sent again, and a commit names its parent, so that one which
lands late, or a stranger's between two of ours, is an error at the Hub and never a second commit.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.hub.client import (
    Patience,
    as_refusal,
    beside,
    cause_of,
    hub,
    hub_utils,
    patiently,
    status_of,
    wait_of,
)
from kizami.formats.hub.outgoing import Outgoing, refuse_change
from kizami.formats.hub.ranges import TIMEOUT, read_range
from kizami.formats.hub.repository import RemoteFile, Repository

TRIES = 12  # of a commit
MAX_FILE_BYTES = 200 * 10**9  # of one file (huggingface_hub PR #3696); the Hub recommends 50 GB
CONFLICT = 412
STAKE = "kizami-push.json"
MAX_STAKE_BYTES = 1 << 16
THREADS = 5  # uploads at once, as huggingface_hub has it
ASKED_AT_ONCE = 256  # files, as huggingface_hub asks
_PIECE = 8 << 20
EMPTY: Mapping[str, str] = MappingProxyType({})
HINTS = {
    401: "`hf auth login`, or HF_TOKEN in the environment: a token that may write there",
    402: "the account's storage or plan is used up: its billing page tells; then the same command again",
    403: "may the token write there? `hf auth whoami` tells whose it is; a fine-grained one names its repositories",
    413: "too large for this Hub: a smaller --max-shard-size, or more storage for the account",
}  # of answers to who writes


@dataclass(slots=True)
class Target:
    """`name` as org/name. Nothing that others put there is changed."""

    name: str
    private: bool
    patience: Patience
    sent: int = field(default=0, init=False)  # files of the last commit that were not there before
    kept: set[str] = field(default_factory=set, init=False)  # of it: what others have there, in the place of ours
    _head: Repository | None = field(default=None, init=False)
    _sha256: dict[str, str] = field(default_factory=dict, init=False)  # of small files, by Git's hash

    def begin(self) -> Repository:
        """Makes the repository unless it is there, and gives what is in it. KizamiError as `as_refusal`: a token that
        may not write, above all; "push_target" where a private one was asked for and the one that is there is
        public."""
        with as_write_refusal(self.name):
            patiently(lambda: hub().create_repo(self.name, private=self.private or None, exist_ok=True), self.patience)
        return self.open()

    def open(self) -> Repository:
        """What is in the repository. KizamiError as `begin`; "hub_not_found"."""
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
        """Whether the file is there, by what `look` saw last. Of one outside large storage the Hub states no SHA-256:
        its bytes are read, once."""
        head = self.head
        there = head.files.get(name)
        return there is not None and (there.sha256 or self._read_sha256(head, there)) == sha256

    def _read_sha256(self, head: Repository, file: RemoteFile) -> str:
        def read() -> str:
            sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            for begin in range(0, file.size, _PIECE):
                part = read_range(head, file.name, begin, min(_PIECE, file.size - begin))
                sha256.update(part)
                git.update(part)
            if git.hexdigest() != file.git:
                raise ConnectionError("other bytes came than the Hub states")
            return sha256.hexdigest()

        if file.git not in self._sha256:
            with as_refusal(self.name):
                self._sha256[file.git] = patiently(read, self.patience)
        return self._sha256[file.git]

    def holds(self, name: str, path: Path) -> bool:
        """The same for a file at hand, which is hashed as the Hub hashes it."""
        there = self.head.files.get(name)
        return there is not None and there.is_at(path)

    def commit(
        self,
        files: Mapping[str, Path],
        message: str,
        *,
        stake: bytes,
        sha256: Mapping[str, str],
        shards: Mapping[str, str] | None = None,
        replaced: Mapping[str, str] = EMPTY,
        alone: Iterable[str] = (),
    ) -> str:
        """Adds those that are not there, in one commit, and gives the head's id. stake: what says whose the files are
        as long as the model is not whole, in STAKE. sha256: of `files`, as they were proven; one that is not in it is
        taken as it is. shards: of the last commit, which removes the stake: SHA-256 of all of them, which the very
        commit that it names as its parent must have. replaced: files, and SHA-256 of what may give way to them there;
        where something else is there, that stays and they are not sent: then they are in `kept`. alone: files of which
        none may be there. KizamiError as `as_write_refusal`; "push_target" for a file of another job or person in the
        place of ours, and for one that the Hub would leave out; "hub_error" for a shard that is lost; "changed" for a
        file that is not what `sha256` says; "too_large" before anything is sent."""
        refuse_too_large(files)
        outgoing = {name: Outgoing.of(name, path, sha256.get(name)) for name, path in files.items()}
        last = shards is not None
        revision: str | None = None
        most = 0
        for tried in range(TRIES):
            head = self.look(revision)
            left = {name: one for name, one in outgoing.items() if not one.is_there(head.files.get(name))}
            gives_way = {name for name, old in replaced.items() if name in head.files and self.has(name, old)}
            self.kept = {name for name in replaced.keys() & head.files.keys() - gives_way if left.pop(name, None)}
            staked = STAKE in head.files
            self._refuse_loss(shards or {})
            if not left and not (last and staked):
                self.sent = most
                return head.commit
            most = max(most, len(left))
            self._refuse_others(head, left.keys() - gives_way, stake)
            self._refuse_others(head, alone, stake)
            revision = None
            try:
                new_stake = None if last or staked else stake
                send = partial(self._send, left, message, head.commit, new_stake, unstake=last and staked)
                revision = beside(send)
            except Exception as failure:
                error = cause_of(failure)
                seconds = _wait_of(error, tried)
                if seconds is not None and tried < TRIES - 1:
                    self.patience.on_wait(seconds, error)
                    if not self.patience.stop.wait(seconds):
                        continue
                for name, one in left.items():
                    one.refuse_change(name)  # which explains the failure, whatever its words are
                with as_write_refusal(self.name):
                    raise error from None
        raise KizamiError("took a commit and does not hold its files", code="hub_error", file=self.name)

    def check_free(self, names: Iterable[str], begun: Iterable[str], stake: bytes) -> None:
        """Before anything is converted: no other job's stake, and no file of others in the place of one of `names`, but
        for those of `begun`, which this job may have pushed already. KizamiError "push_target"."""
        mine = set(begun) if STAKE in self.head.files else set()
        self._refuse_others(self.head, (name for name in names if name not in mine), stake)

    def check_takes(self, names: Iterable[str]) -> None:
        """Before anything is converted, what the Hub is asked before each commit, and nothing is changed by it: whether
        the token may write, and whether a .gitignore there would leave one of `names` out of a commit. KizamiError as
        `as_write_refusal`, "push_target"."""
        utils, asked = hub_utils(), sorted({*names, STAKE})
        url = f"{hub().endpoint}/api/models/{self.name}/preupload/main"

        def ask(part: list[str]) -> list[str]:
            body = {"files": [{"path": name, "sample": "", "size": 0} for name in part]}
            headers = utils.build_hf_headers(library_name="kizami")
            answer = utils.get_session().post(url, headers=headers, json=body, timeout=TIMEOUT)
            utils.hf_raise_for_status(answer)
            return [str(file["path"]) for file in answer.json()["files"] if file.get("shouldIgnore")]

        for i in range(0, len(asked), ASKED_AT_ONCE):
            part = asked[i : i + ASKED_AT_ONCE]
            with as_write_refusal(self.name):
                ignored = patiently(lambda part=part: ask(part), self.patience)  # type: ignore[misc]
            self._refuse_ignored(ignored)

    def _refuse_ignored(self, names: list[str]) -> None:
        if names:
            raise KizamiError(
                f"its .gitignore leaves {names[0]} out of every commit",
                code="push_target",
                file=self.name,
                hint="push to a new repository, or remove that line there",
            )

    def _refuse_loss(self, shards: Mapping[str, str]) -> None:
        lost = next((name for name, sha256 in shards.items() if not self.has(name, sha256)), None)
        if lost is not None:
            raise KizamiError(
                "was pushed, and is gone or another file now",
                code="hub_error",
                file=f"{self.name}/{lost}",
                hint="the same command again sends it; another file in its place must go first",
            )

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

    def _send(
        self,
        files: Mapping[str, Outgoing],
        message: str,
        parent: str,
        stake: bytes | None,
        *,
        unstake: bool,
    ) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        api = hub()
        for name, one in files.items():
            one.refuse_change(name)
        added: list[Any] = [CommitOperationAdd(name, one.content) for name, one in files.items()]  # which hashes them
        for one in added:
            refuse_change(one.path_in_repo, one.upload_info.sha256.hex(), files[one.path_in_repo].sha256)
        added += [CommitOperationAdd(STAKE, stake)] if stake is not None else []
        api.preupload_lfs_files(self.name, added, num_threads=THREADS)
        self._refuse_ignored([one.path_in_repo for one in added if getattr(one, "_should_ignore", False)])
        gone: list[Any] = [CommitOperationDelete(STAKE)] if unstake else []
        return str(api.create_commit(self.name, [*added, *gone], commit_message=message, parent_commit=parent).oid)


@contextmanager
def as_write_refusal(repo: str) -> Iterator[None]:
    """As `as_refusal`, with hints for who writes."""
    status = None
    try:
        with as_refusal(repo):
            try:
                yield
            except Exception as e:
                status = status_of(e)
                raise
    except KizamiError as e:
        if status == 401 and e.code == "hub_not_found":  # what the Hub says to nobody of any repository
            said = "the Hub answers 401: it takes nothing from this token, or there is none"
            raise KizamiError(said, code="hub_error", file=repo, hint=HINTS[401]) from None
        if status not in HINTS or e.code != "hub_error":
            raise
        raise KizamiError(e.message, code="hub_error", file=e.file, hint=HINTS[status]) from None


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
