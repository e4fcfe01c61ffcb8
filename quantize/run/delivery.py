"""Finished shards on their way to the Hub, while the next ones are converted.

A thread commits them: when BATCH of them wait, or, where they leave the disk, as soon as the next shard waits for room.
What is read by engines first (index, config, card, manifest) goes with the last commit, so that the repository never
looks complete before it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from kizami.formats.errors import KizamiError
from kizami.formats.hub.repository import Repository
from kizami.formats.hub.target import Target
from kizami.formats.index import INDEX_NAME
from kizami.formats.run_log import canonical
from kizami.quantize.manifest import CARD, CONFIG, MANIFEST, self_hash
from kizami.quantize.report import Row
from kizami.quantize.run.job_folder import ShardRecord

BATCH = 10  # shards in a commit: 10 commits for GLM-5.2
LAST_MESSAGE = "Index, config and card"
LAST = (INDEX_NAME, CONFIG, MANIFEST)  # a repository that has one of them looks like a model
NO_CARD = {CARD: ""}  # as `replaced`: none that is there gives way


@dataclass(slots=True)
class Delivery:
    """From `folder` to `target`. delete: shards leave the disk once they are committed; `on_gone` is told. short: says
    whether somebody waits for the room. on_error: for those who would wait for ever. gate: raises before the last
    commit for what is not to be published. finished: the target holds this very model, or did. A context manager, which
    on an error leaves the rest unsent."""

    target: Target
    folder: Path
    delete: bool
    plan_hash: str
    on_gone: Callable[[int], None] = lambda number: None
    on_error: Callable[[BaseException], None] = lambda error: None
    short: Callable[[], bool] = lambda: False
    on_commit: Callable[[int, str], None] = lambda files, commit: None
    on_card: Callable[[str], None] = lambda message: None
    gate: Callable[[list[Row]], None] = lambda rows: None
    finished: bool = False
    commit: str | None = None  # the last one
    _waiting: list[ShardRecord] = field(default_factory=list)
    _change: Condition = field(default_factory=Condition)
    _ended: bool = False
    _busy: bool = False
    _error: BaseException | None = None

    def is_there(self, record: ShardRecord) -> bool:
        """Whether the repository holds these bytes already."""
        return self.target.has(record.file, record.sha256)

    def __enter__(self) -> "Delivery":
        Thread(target=self._run, name="kizami-push", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()

    def hand(self, record: ShardRecord) -> None:
        """A finished shard. Raises what a commit ended with."""
        with self._change:
            self._raise()
            self._waiting.append(record)
            self._change.notify_all()

    def forget(self, records: Sequence[ShardRecord]) -> None:
        """Shards that were committed by a run which was killed before it removed them."""
        for record in records:
            (self.folder / record.file).unlink(missing_ok=True)

    def nudge(self) -> None:
        """Somebody has begun to wait for room."""
        with self._change:
            self._change.notify_all()

    def last(self, sha256: Mapping[str, str], records: Sequence[ShardRecord]) -> str:
        """Commits what waits, then the files that `sha256` names, and gives the commit's id. records: of all shards,
        which must be there by then. KizamiError as `Target.commit`."""
        with self._change:
            self._change.wait_for(lambda: self._error is not None or not self._busy)
            self._raise()
            waiting, self._waiting = self._waiting, []
            self._ended = True
        self._send(waiting)
        ours = {name: self.folder / name for name in sha256}
        files = without_their_card(self.target.look(), ours, self.on_card)
        shards = {record.file: record.sha256 for record in records}
        self.commit = self.target.commit(
            files, LAST_MESSAGE, stake=stake_of(self.plan_hash), sha256=sha256, shards=shards, replaced=NO_CARD
        )
        if self.target.kept:
            self.on_card(card_stays(self.target.name))
        if self.target.sent:
            self.on_commit(self.target.sent, self.commit)
        return self.commit

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> bool:
        return len(self._waiting) >= BATCH or (self.delete and bool(self._waiting) and self.short())

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._ended or self._due())
                    if self._ended:
                        return
                    waiting, self._waiting = self._waiting, []
                    self._busy = True
                self._send(waiting)
                with self._change:
                    self._busy = False
                    self._change.notify_all()
        except BaseException as e:
            with self._change:
                self._error, self._busy = e, False
                self._change.notify_all()
            self.on_error(e)

    def _send(self, records: list[ShardRecord]) -> None:
        if not records:
            return
        names = sorted(record.file for record in records)  # they finish in any order
        commit = self.target.commit(
            {record.file: self.folder / record.file for record in records},
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            stake=stake_of(self.plan_hash),
            sha256={record.file: record.sha256 for record in records},
            alone=() if self.finished else LAST,
        )
        if self.target.sent:
            self.on_commit(self.target.sent, commit)
        for record in records if self.delete else ():
            (self.folder / record.file).unlink()
            self.on_gone(record.number)


def stake_of(plan_hash: str) -> bytes:
    """Says in the repository whose the shards are, until the last commit takes it away."""
    return f"{canonical({'kizami': 'unfinished', 'plan_hash': plan_hash})}\n".encode()


def without_their_card(
    head: Repository, files: Mapping[str, Path], on_card: Callable[[str], None]
) -> Mapping[str, Path]:
    """The card that is there, somebody's words or one that was edited on the Hub, stays; `on_card` is told."""
    there = head.files.get(CARD)
    if there is None or CARD not in files or there.is_at(files[CARD]):
        return files
    on_card(card_stays(head.name))
    return {name: path for name, path in files.items() if name != CARD}


def card_stays(repo: str) -> str:
    by_hand = f"`hf upload {repo} OUT/{CARD} {CARD}` puts it there"
    return f"{repo} has a {CARD} of its own, which stays: the one of this output is not pushed; {by_hand}"


def in_commits(shards: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """BATCH of them at a time."""
    names = list(shards)
    for i in range(0, len(names), BATCH):
        yield {name: shards[name] for name in names[i : i + BATCH]}


def refuse_other_model(
    head: Repository, plan_hash: str, read: Callable[[str], dict[str, Any]]
) -> dict[str, Any] | None:
    """A repository with a model in it would hold a mixture until the last commit. One that was finished by this plan is
    fine, and its manifest is given. read: the JSON object of a file there. KizamiError "push_target"."""
    there = [name for name in LAST if name in head.files]
    if not there:
        return None
    if MANIFEST in there and (manifest := read(MANIFEST)).get("plan_hash") == plan_hash:
        return manifest
    raise KizamiError(
        f"holds another model ({there[0]})",
        code="push_target",
        file=head.name,
        hint="push to a new repository; kizami changes and deletes nothing that is there",
    )


def stated_files(manifest: Mapping[str, Any], repo: str) -> dict[str, str]:
    """Names and SHA-256 of the shards and the other files that a finished repository has by its manifest, but for the
    card, which may be somebody's. KizamiError "push_target" for a manifest that is not as kizami wrote it."""
    try:
        if manifest["self_sha256"] == self_hash(dict(manifest)):
            shards = {str(shard["file"]): str(shard["sha256"]) for shard in manifest["shards"]}
            files = shards | {str(name): str(sha256) for name, sha256 in manifest["files"].items()}
            return {name: sha256 for name, sha256 in files.items() if name != CARD}
    except (LookupError, TypeError, AttributeError):
        pass
    raise KizamiError(
        f"its {MANIFEST} is not as kizami wrote it", code="push_target", file=repo, hint="push to a new repository"
    )


def missing_files(target: Target, manifest: Mapping[str, Any]) -> list[str]:
    """What a repository that was finished by this manifest does not have any more. KizamiError "push_target" for
    another file in the place of one of ours."""
    stated, there = stated_files(manifest, target.name), target.head.files
    other = next((name for name, sha256 in stated.items() if name in there and not target.has(name, sha256)), None)
    if other is not None:
        raise KizamiError(
            f"holds another {other} than its {MANIFEST} states",
            code="push_target",
            file=target.name,
            hint="push to a new repository, or remove it there; kizami replaces and deletes nothing of others",
        )
    return [name for name in stated if name not in there]
