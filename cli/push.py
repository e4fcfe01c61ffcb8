"""`kizami push`: a finished output onto the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kizami.cli import hub_options as h
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui, counted, gib
from kizami.cli.stop import STOP
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.formats.hub.target import Target

Repo = Annotated[
    str, typer.Argument(metavar="REPO", show_default=False, help="The repository on the Hub: org/name. Made if absent.")
]


def push(
    out: o.Out,
    repo: Repo,
    private: h.PrivateRepo = False,
    workers: o.Workers = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Push a finished output to the Hub: verified first, its index last, and only what is not there yet.

    Nothing is sent if `kizami verify` finds a problem. A repository that holds another model is refused; files of
    others stay. The same command again sends what is missing. Token, endpoint and proxies are those of `hf`.
    """
    from kizami.cli.hub_source import open_target, refuse_nameless_target
    from kizami.cli.source import finished_output
    from kizami.cli.verify import run_verify, show_verify
    from kizami.formats.files import file_sha256
    from kizami.formats.hub.target import refuse_too_large
    from kizami.quantize.manifest import CARD, MANIFEST, read_manifest
    from kizami.quantize.run.delivery import (
        LAST,
        LAST_MESSAGE,
        NO_CARD,
        card_stays,
        in_commits,
        stake_of,
        without_their_card,
    )

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    refuse_nameless_target(repo)
    folder = finished_output(out)
    path = folder / MANIFEST  # before it is verified: what comes in between is not what was proven
    proven_manifest = file_sha256(path, MANIFEST) if path.is_file() else ""
    found = run_verify(ui, folder, None, workers=workers)
    if not found.ok:
        if not json:
            show_verify(ui, folder, found)
        first = found.problems[0]
        said = f"does not verify, and is not pushed: {first.message}"
        raise KizamiError(said, code="not_verified", file=str(folder), tensor=first.tensor, hint="kizami verify OUT")
    manifest = read_manifest(folder)
    shards, others = files_of(folder, manifest)
    refuse_too_large(shards | others)
    _check_card(folder)
    STOP.say = lambda: "interrupted; the same command again sends what is missing"
    names = (shards | others).keys() - {CARD}  # a card of theirs may stay
    target, there = open_target(ui, repo, manifest["plan_hash"], names, shards, private=private)
    _check_target(target, there, manifest)
    replaced = _replaced(target, there)
    if not replaced:
        others = dict(without_their_card(target.head, others, ui.progress))
    stake = stake_of(manifest["plan_hash"])
    stated = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    before = sum(target.has(name, sha256) for name, sha256 in stated.items())
    before += sum(target.holds(name, path) for name, path in others.items())
    nbytes = sum(path.stat().st_size for path in (shards | others).values())
    alone = () if there is not None else LAST
    for part in in_commits(shards):
        begin, end = next(iter(part)), list(part)[-1]
        message = begin if begin == end else f"{begin} to {end}"
        commit = target.commit(part, message, stake=stake, sha256=stated, alone=alone)
        if target.sent:
            ui.progress(f"pushed {counted(target.sent, 'file')} (commit {commit[:12]})")
    proven = {**manifest["files"], MANIFEST: proven_manifest}
    proven.pop(CARD, None)  # one may edit it
    commit = target.commit(
        others, LAST_MESSAGE, stake=stake, sha256=proven, shards=stated, replaced=replaced or NO_CARD
    )
    if target.kept:
        ui.progress(card_stays(repo))
    files = len(shards) + len(others)
    body: dict[str, Any] = {
        "out": str(folder), "repo": repo, "commit": commit, "files": files, "bytes": nbytes, "sent": files - before,
    }  # fmt: skip
    if json:
        ui.emit("push", body)
    else:
        ui.result(
            f"{repo}: {counted(files, 'file')}, {gib(nbytes)}, {files - before} of them sent now; commit {commit}"
        )


def _check_target(target: "Target", there: dict[str, Any] | None, manifest: dict[str, Any]) -> None:
    """Before anything is sent. there: the manifest of what a run of this plan has finished. KizamiError "push_target",
    and as `as_write_refusal` where something is to be sent."""
    from kizami.quantize.manifest import MANIFEST, output_identity
    from kizami.quantize.run.delivery import missing_files, stated_files

    ours = {*(shard["file"] for shard in manifest["shards"]), *manifest["files"], MANIFEST}
    missing = ours - target.head.files.keys()
    if there is not None:
        stated_files(there, target.name)
        if output_identity(there) != output_identity(manifest):
            raise KizamiError(
                "holds another conversion by the same plan",
                code="push_target",
                file=target.name,
                hint="push to a new repository",
            )
        missing_files(target, there)
    if missing or there is None:
        target.check_takes(missing)


def _check_card(folder: Path) -> None:
    """The one file of OUT that one may edit, and that huggingface_hub reads. KizamiError "bad_file"."""
    from kizami.quantize.manifest import CARD

    try:
        (folder / CARD).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KizamiError(f"is not UTF-8: {e}", code="bad_file", file=CARD, hint="save it as UTF-8") from None


def _replaced(target: "Target", there: dict[str, Any] | None) -> dict[str, str]:
    """The card, if the one that is there is the one that kizami wrote, by its SHA-256: a later one takes its place."""
    from kizami.quantize.manifest import CARD

    wrote = None if there is None else there["files"].get(CARD)
    return {CARD: wrote} if wrote is not None and target.has(CARD, wrote) else {}


def files_of(folder: Path, manifest: dict[str, Any]) -> tuple[dict[str, Path], dict[str, Path]]:
    """Shards, and all other files of the output; the manifest is the last of them."""
    from kizami.quantize.manifest import MANIFEST

    shards = [shard["file"] for shard in manifest["shards"]]
    others = [*manifest["files"], MANIFEST]
    return {name: folder / name for name in shards}, {name: folder / name for name in others}


COMMAND = Command(
    "push",
    push,
    (
        "kizami push GLM-5.2-INT4/ me/GLM-5.2-INT4 --private",
        "kizami push GLM-5.2-INT4/ me/GLM-5.2-INT4 --json",
    ),
)
