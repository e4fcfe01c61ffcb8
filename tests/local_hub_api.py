"""The answers of local_hub: one function per endpoint, and the tables of the Hub's and the CDN's paths."""

import base64
import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode

from local_hub_faults import NO_ONE, Answer, Call, Refusal
from local_hub_repos import Blob, Commit, Repo, folders, tree_id

if TYPE_CHECKING:
    from local_hub import LocalHub

LFS_POINTER = 134  # bytes: what the real Hub says of most files


def whoami(hub: "LocalHub", call: Call) -> Answer:
    if not hub.known(call):
        raise Refusal(401, NO_ONE)
    auth = {"type": "access_token", "accessToken": {"displayName": "local", "role": "write"}}
    return Answer.of({"type": "user", "id": "0" * 24, "name": hub.user, "fullname": hub.user, "orgs": [], "auth": auth})


def create(hub: "LocalHub", call: Call) -> Answer:
    if not hub.known(call):
        raise Refusal(401, NO_ONE)
    asked = json.loads(call.body.read())
    name = f"{asked.get('organization') or hub.user}/{asked['name']}"
    place = {"url": f"{hub.url}/{name}", "name": name}
    private = asked.get("private") is True or asked.get("visibility") == "private"  # of 1.x, of 2.x
    if not hub.created(name, private):
        return Answer.of({"error": "You already created this model repo: " + name} | place, 409)
    return Answer.of(place)


def validate_yaml(hub: "LocalHub", call: Call) -> Answer:
    """Asked before each commit of a README.md."""
    return Answer.of({"errors": [], "warnings": []})


def info(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call)
    commit = hub.at(call, repo)
    siblings: list[dict[str, Any]] = []
    for path, blob in sorted(commit.tree.items()):
        siblings.append({"rfilename": path})
        if call.query.get("blobs", "").lower() == "true":
            siblings[-1] |= {"size": blob.size, "blobId": blob.oid}
            if blob.sha256:
                siblings[-1]["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": LFS_POINTER}
    told = {"_id": "0" * 24, "id": repo.name, "modelId": repo.name, "author": repo.name.split("/")[0]}
    told |= {"sha": commit.oid, "lastModified": commit.date, "createdAt": hub.commits(repo.name)[0].date}
    about: dict[str, Any] = {
        "private": repo.private,
        "gated": "auto" if repo.gated else False,
        "disabled": False,
        "tags": [],
    }
    return Answer.of(told | about | {"downloads": 0, "likes": 0, "siblings": siblings})


def entry(repo: Repo, commit: Commit, path: str, expand: bool) -> dict[str, Any]:
    """A file or folder as listings have it."""
    blob = commit.tree.get(path)
    made: dict[str, Any] = {"type": "file" if blob else "directory", "oid": tree_id(commit.tree, path), "path": path}
    made["size"] = blob.size if blob else 0
    if blob and blob.sha256:
        made["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": LFS_POINTER}
    if expand:
        last = repo.changed(commit, path)
        made["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
    return made


def list_tree(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call)
    commit = hub.at(call, repo)
    inside = call.groups["path"] + "/" if call.groups["path"] else ""
    paths = sorted(path for path in {*commit.tree, *folders(commit.tree)} if path.startswith(inside))
    if inside and not paths:
        raise Refusal(404, f"{inside} does not exist on {commit.oid}", "EntryNotFound")
    if call.query.get("recursive", "").lower() != "true":
        paths = [path for path in paths if "/" not in path[len(inside) :]]
    expand = call.query.get("expand", "").lower() == "true"
    limit = min(int(call.query.get("limit", hub.page)), hub.page)
    after = [path for path in paths if path > call.query.get("cursor", "")]
    made = Answer.of([entry(repo, commit, path, expand) for path in after[:limit]])
    return made if len(after) <= limit else next_page(hub, call, made, after[limit - 1])


def next_page(hub: "LocalHub", call: Call, made: Answer, cursor: str) -> Answer:
    link = f'<{hub.url}{call.path}?{urlencode({**call.query, "cursor": cursor})}>; rel="next"'
    return replace(made, headers={**made.headers, "Link": link})


def paths_info(hub: "LocalHub", call: Call) -> Answer:
    """Those asked for that are there; the others are left out."""
    repo = hub.repo(call)
    commit = hub.at(call, repo)
    asked = parse_qs(call.body.read().decode())
    there = {*commit.tree, *folders(commit.tree)}
    expand = asked.get("expand", [""])[0].lower() == "true"
    return Answer.of([entry(repo, commit, path, expand) for path in asked.get("paths", []) if path in there])


def history(hub: "LocalHub", call: Call) -> Answer:
    """Newest first."""
    repo = hub.repo(call)
    commits = hub.commits(repo.name)
    commits = list(reversed(commits[: commits.index(hub.at(call, repo)) + 1]))
    start = int(call.query.get("cursor", 0))
    made = Answer.of(
        [
            {"id": one.oid, "title": one.title, "message": one.description, "date": one.date}
            | {"authors": [{"user": hub.user}]}
            for one in commits[start : start + hub.page]
        ]
    )
    more = start + hub.page
    return made if more >= len(commits) else next_page(hub, call, made, str(more))


def refs(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call)
    main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.head.oid}
    tags = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid} for tag, oid in sorted(repo.tags.items())]
    return Answer.of({"branches": [main], "converts": [], "tags": tags, "pullRequests": []})


def settings(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call, write=True)
    asked = json.loads(call.body.read())
    if "private" in asked or "visibility" in asked:
        repo.private = asked.get("private") is True or asked.get("visibility") == "private"
    if "gated" in asked:
        repo.gated = bool(asked["gated"])
    return Answer.of({"private": repo.private, "gated": repo.gated})


def resolve(hub: "LocalHub", call: Call) -> Answer:
    """Listings of a gated repository are for all, its files are not."""
    repo = hub.repo(call)
    if repo.gated and not hub.known(call):
        raise Refusal(403, f"Access to model {repo.name} is restricted.", "GatedRepo")
    commit, path = hub.at(call, repo), call.groups["path"]
    if path not in commit.tree:
        raise Refusal(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
    blob = commit.tree[path]
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
    if not blob.sha256:
        return content(hub, call, blob, headers | {"Content-Type": "text/plain; charset=utf-8"})
    headers |= {"X-Linked-ETag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
    headers |= {"Location": hub.signed(blob.sha256, filename=path), "Content-Type": "text/plain; charset=utf-8"}
    return Answer(302, headers, f"Found. Redirecting to {headers['Location']}".encode())


def content(hub: "LocalHub", call: Call, blob: Blob, headers: dict[str, str]) -> Answer:
    """All of it, or one range of it. Several ranges are answered by all, as RFC 9110 allows."""
    file = hub.store.path(blob)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", "").strip())
    if not asked or not any(asked.groups()):
        return Answer(200, headers, file, (0, blob.size))
    first, last = asked.groups()
    start = int(first) if first else max(blob.size - int(last), 0)
    end = min(int(last) + 1, blob.size) if first and last else blob.size
    if start >= end:
        return Answer(416, headers | {"Content-Range": f"bytes */{blob.size}"})
    return Answer(206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{blob.size}"}, file, (start, end - start))


def let_in(hub: "LocalHub", call: Call) -> str:
    """The hash of the object, for a request as S3 and CloudFront take them."""
    if "Authorization" in call.headers:
        raise Refusal(400, "Only one auth mechanism allowed")
    sha256 = call.groups["sha256"]
    if call.query.get("Signature") != hub.signature(sha256):
        raise Refusal(403, "Access denied")
    return sha256


def download(hub: "LocalHub", call: Call) -> Answer:
    sha256 = let_in(hub, call)
    blob = hub.store.object(sha256)
    if blob is None:
        raise Refusal(404, "The specified key does not exist.")
    etag = f'"{sha256[::2]}-1"'  # the storage's own: not the hash that X-Linked-ETag names
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    name = call.query.get("filename", "").rpartition("/")[2]
    return content(hub, call, blob, headers | {"Content-Disposition": f"inline; filename*=UTF-8''{quote(name)};"})


def upload(hub: "LocalHub", call: Call) -> Answer:
    if hub.store.receive(call.body, let_in(hub, call), int(call.query["size"])) is None:
        raise Refusal(422, "the content is not the object that was announced")
    return Answer(200, {"ETag": '"stored"'})


def preupload(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call, write=True)
    on_main(call)
    asked = json.loads(call.body.read())
    there = repo.head.tree.get(".gitignore")
    rules = asked.get("gitIgnore") or (hub.store.path(there).read_text() if there else "")
    ignored = [line.strip() for line in rules.splitlines() if line.strip()[:1] not in ("", "#")]
    told = []
    for file in asked["files"]:
        path, blob = file["path"], repo.head.tree.get(file["path"])
        hidden = any(fnmatch.fnmatch(name, line) for line in ignored for name in (path, path.rpartition("/")[2]))
        mode = "lfs" if repo.large(path, file["size"]) else "regular"
        told.append({"path": path, "uploadMode": mode, "shouldIgnore": hidden} | ({"oid": blob.etag} if blob else {}))
    return Answer.of({"files": told})


def on_main(call: Call) -> None:
    if call.groups["rev"] != "main":
        raise Refusal(404, f"Invalid rev id: {call.groups['rev']}", "RevisionNotFound")
    if call.query.get("create_pr"):
        raise Refusal(400, "the local hub has no pull requests")


def batch(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call, write=True)
    objects = []
    for asked in json.loads(call.body.read())["objects"]:
        one: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
        if hub.store.object(asked["oid"]) is None:
            put = {"href": hub.signed(asked["oid"], size=str(asked["size"]))}
            one["actions"] = {"upload": put, "verify": {"href": f"{hub.url}/{repo.name}.git/info/lfs/objects/verify"}}
        objects.append(one)
    return Answer.of({"transfer": "basic", "objects": objects})


def verify(hub: "LocalHub", call: Call) -> Answer:
    hub.repo(call, write=True)
    asked = json.loads(call.body.read())
    blob = hub.store.object(asked["oid"])
    if blob is None or blob.size != asked["size"]:
        raise Refusal(422, "no such object")
    return Answer.of({})


def make_commit(hub: "LocalHub", call: Call) -> Answer:
    repo = hub.repo(call, write=True)
    on_main(call)
    lines = [json.loads(line) for line in call.body.read().splitlines() if line]
    header = lines[0]["value"]
    with hub.lock:
        head = repo.head
        if (header.get("parentCommit") or head.oid) != head.oid:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.tree)
        for line in lines[1:]:
            CHANGES[line["key"]](hub, files, line["value"])
        made = repo.add(files, header["summary"], header.get("description", ""))
    where = f"{hub.url}/{repo.name}/commit/{made.oid}"
    return Answer.of({"success": True, "commitOid": made.oid, "commitUrl": where, "hookOutput": ""})


def change_file(hub: "LocalHub", files: dict[str, Blob], value: Mapping[str, Any]) -> None:
    text = value["content"]
    files[value["path"]] = hub.store.regular(
        base64.b64decode(text) if value.get("encoding") == "base64" else text.encode()
    )


def change_lfs_file(hub: "LocalHub", files: dict[str, Blob], value: Mapping[str, Any]) -> None:
    blob = hub.store.object(value["oid"])
    if blob is None or value.get("size", blob.size) != blob.size:
        raise Refusal(400, f"LFS pointer points to a file that does not exist: {value['path']}")
    files[value["path"]] = blob


def change_deleted_file(hub: "LocalHub", files: dict[str, Blob], value: Mapping[str, Any]) -> None:
    if files.pop(value["path"], None) is None:
        raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")


def change_deleted_folder(hub: "LocalHub", files: dict[str, Blob], value: Mapping[str, Any]) -> None:
    inside = [path for path in files if path.startswith(value["path"].rstrip("/") + "/")]
    for path in inside:
        del files[path]
    if not inside:
        raise Refusal(404, "A folder with this name doesn't exist", "EntryNotFound")


CHANGES: Mapping[str, Callable[["LocalHub", dict[str, Blob], Mapping[str, Any]], None]] = {
    "file": change_file,
    "lfsFile": change_lfs_file,
    "deletedFile": change_deleted_file,
    "deletedFolder": change_deleted_folder,
}

Routes = tuple[tuple[str, str, Callable[["LocalHub", Call], Answer]], ...]
MODEL = "/api/models/(?P<repo>[^/]+/[^/]+)"
REPO = "/(?P<repo>[^/]+/[^/]+)"
READ = "GET|HEAD"
ROUTES: Routes = (
    (READ, "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate_yaml),
    (READ, MODEL, info),
    (READ, f"{MODEL}/revision/(?P<rev>[^/]+)", info),
    (READ, f"{MODEL}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?", list_tree),
    ("POST", f"{MODEL}/paths-info/(?P<rev>[^/]+)", paths_info),
    (READ, f"{MODEL}/commits/(?P<rev>[^/]+)", history),
    (READ, f"{MODEL}/refs", refs),
    ("PUT", f"{MODEL}/settings", settings),
    ("POST", f"{MODEL}/preupload/(?P<rev>[^/]+)", preupload),
    ("POST", f"{MODEL}/commit/(?P<rev>[^/]+)", make_commit),
    (READ, f"{REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", resolve),
    ("POST", rf"{REPO}\.git/info/lfs/objects/batch", batch),
    ("POST", rf"{REPO}\.git/info/lfs/objects/verify", verify),
)
CDN_ROUTES: Routes = (
    (READ, "/cdn/(?P<sha256>[0-9a-f]{64})", download),
    ("PUT", "/cdn/(?P<sha256>[0-9a-f]{64})", upload),
)
