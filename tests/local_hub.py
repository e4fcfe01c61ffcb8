"""The Hugging Face Hub's HTTP API on loopback, as far as an unmodified huggingface_hub (1.0 on) asks for models.

Two origins, as in the real one: the Hub, and the CDN to which it redirects for LFS files. Clients judge by the origin
whether to send their token on and whether to follow a HEAD: on one origin they would do both, which they never do
outside. The CDN wants a signature and refuses an Authorization header. There is no Xet and no multipart.

The client before 1.4 reads the address of a commit by HF_ENDPOINT alone: with HfApi(endpoint=) it fails once the commit
is made."""

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlencode

from local_hub_api import CDN_ROUTES, ROUTES, Routes
from local_hub_faults import NO_ONE, Answer, Call, Ends, Fault, Faults, Refusal, Request, Server
from local_hub_repos import Blob, Commit, Repo, Store

NO_WRITER = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
GITATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class LocalHub:
    """A context manager. Nothing is kept between two of them but the files in `folder`, which are contents only."""

    def __init__(self, folder: Path, *, token: str = "hf_" + "x" * 34, user: str = "tester", page: int = 1000) -> None:
        self.token, self.user, self.page = token, user, page
        self.requests: list[Request] = []
        self.faults = Faults()
        self.store = Store(folder)
        self.lock = threading.RLock()  # of the repositories
        self._repos: dict[str, Repo] = {}
        self._hub: Server | None = None
        self._cdn: Server | None = None

    def __enter__(self) -> "LocalHub":
        note = self.requests.append
        self._hub = Server(Ends(lambda call: self._answer(call, ROUTES), self.faults, note, self._move))
        self._cdn = Server(Ends(lambda call: self._answer(call, CDN_ROUTES), self.faults, note, self._move))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self._hub, self._cdn):
            assert server is not None
            server.close()

    @property
    def url(self) -> str:
        assert self._hub is not None, "not entered"
        return self._hub.url

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes | Path],
        *,
        private: bool = False,
        gated: bool = False,
        lfs_from: int = 10_000,
        lfs_weights: bool = True,
        read_only: bool = False,
    ) -> str:
        """The id of its first commit. Files of `lfs_from` bytes and more are LFS, and all *.safetensors where
        `lfs_weights`. read_only: the token may not write there."""
        with self.lock:
            assert name not in self._repos, name
            assert re.fullmatch("[^/]+/[^/]+", name), name
            self._repos[name] = repo = Repo(name, private, gated, lfs_from, lfs_weights, read_only)
            return repo.add(self._tree(repo, {}, files), "initial commit").oid

    def commit(self, repo: str, files: Mapping[str, bytes | Path | None], title: str = "moved") -> str:
        """The id of a new commit on main; None deletes a file."""
        with self.lock:
            here = self._repos[repo]
            return here.add(self._tree(here, here.head.tree, files), title).oid

    def tag(self, repo: str, name: str, oid: str) -> None:
        assert self._repos[repo].find(oid) is not None, oid
        self._repos[repo].tags[name] = oid

    def commits(self, repo: str) -> list[Commit]:
        """Of main, oldest first."""
        with self.lock:
            return list(self._repos[repo].commits)

    def files(self, repo: str, revision: str = "main") -> dict[str, str]:
        """path -> sha256 of the content, of every file."""
        tree = self._at(self._repos[repo], revision).tree
        return {
            path: blob.sha256 or hashlib.sha256(self.store.path(blob).read_bytes()).hexdigest()
            for path, blob in sorted(tree.items())
        }

    def read(self, repo: str, path: str, revision: str = "main") -> bytes:
        return self.store.path(self._at(self._repos[repo], revision).tree[path]).read_bytes()

    def environment(self, home: Path) -> dict[str, str]:
        """For a client in a process of its own: this hub, its token, a cache of its own, no Xet, no proxy."""
        mine = {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return mine | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def signed(self, sha256: str, **query: str) -> str:
        """The address of an LFS object for those who were let in."""
        assert self._cdn is not None
        return f"{self._cdn.url}/cdn/{sha256}?{urlencode(query | {'Signature': self.signature(sha256)})}"

    def signature(self, sha256: str) -> str:
        return hashlib.sha256(f"{self.token} {sha256}".encode()).hexdigest()[:32]

    def repo(self, call: Call, *, write: bool = False) -> Repo:
        """The repository of a call, as far as its token reaches. Who sees none is told of no private one."""
        known = self.known(call)
        repo = self._repos.get(call.groups["repo"])
        if repo is not None and known and write and repo.read_only:
            raise Refusal(403, NO_WRITER)
        if repo is not None and (known or not (write or repo.private)):
            return repo
        raise Refusal(404, "Repository not found", "RepoNotFound") if known else Refusal(401, NO_ONE, "RepoNotFound")

    def known(self, call: Call) -> bool:
        given = call.headers.get("Authorization")
        if given not in (None, f"Bearer {self.token}"):
            raise Refusal(401, "Invalid credentials in Authorization header")
        return given is not None

    def created(self, name: str, private: bool) -> bool:
        """As the real Hub's, a new repository has a commit, with .gitattributes."""
        with self.lock:
            if name in self._repos and self._repos[name].read_only:
                raise Refusal(403, "You don't have the rights to create a model under this namespace")
            if name in self._repos:
                return False
            self.add_repo(name, {".gitattributes": GITATTRIBUTES}, private=private)
            return True

    def at(self, call: Call, repo: Repo) -> Commit:
        with self.lock:
            return self._at(repo, call.groups.get("rev") or "main")

    def _at(self, repo: Repo, revision: str) -> Commit:
        commit = repo.find(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def _tree(
        self, repo: Repo, before: Mapping[str, Blob], files: Mapping[str, bytes | Path | None]
    ) -> Mapping[str, Blob]:
        tree = dict(before)
        for path, content in files.items():
            if content is None:
                del tree[path]
            elif repo.large(path, len(content) if isinstance(content, bytes) else content.stat().st_size):
                tree[path] = self.store.large(content)
            else:
                tree[path] = self.store.regular(content if isinstance(content, bytes) else content.read_bytes())
        return tree

    def _move(self, fault: Fault) -> None:
        with self.lock:
            files = fault.files or {"MOVED.md": b"moved %d times\n" % len(self.commits(fault.repo))}
            self.commit(fault.repo, files)

    def _answer(self, call: Call, routes: Routes) -> Answer:
        for method, path, answer in routes:
            match = re.fullmatch(path, call.path)
            if match and re.fullmatch(method, call.method):
                groups = {name: unquote(text or "") for name, text in match.groupdict().items()}
                try:
                    return answer(self, replace(call, groups=groups))
                except Refusal as refused:
                    return refused.answer
        return Refusal(404, f"the local hub has no {call.method} {call.path}").answer
