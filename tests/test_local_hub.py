"""local_hub answers the unmodified client as the Hub does, and its faults reach that client as they should."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import get_session, http_backoff
from local_hub import LocalHub
from local_hub_faults import Fault, Faults

ME = "tester/model"
SMALL, LARGE = b'{"a": 1}\n', bytes(range(256)) * 80
FILES: dict[str, bytes | Path] = {"config.json": SMALL, "model.safetensors": LARGE, "sub/notes.txt": b"notes"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with LocalHub(tmp_path / "hub") as made:
        yield made


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have waited before it asked again."""
    made: list[float] = []
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=made.append))
    return made


def adding(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def committing(api: HfApi, *operations: Any, **options: Any) -> str:
    return str(api.create_commit(ME, list(operations), commit_message="change", **options).oid)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(hub: LocalHub, content: bytes, announced: bytes) -> int:
    address = hub.signed(sha256(announced), size=str(len(announced)))
    return int(get_session().put(address, content=content).status_code)


def asked(hub: LocalHub, part: str, method: str = "") -> list[int]:
    """The statuses of the requests to such a path."""
    return [one.status for one in hub.requests if part in one.path and method in ("", one.method)]


def test_a_token_names_its_user(hub: LocalHub, api: HfApi) -> None:
    assert api.whoami()["name"] == "tester"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.url, token="hf_wrong").whoami()


def test_a_created_repository_has_a_first_commit_and_is_created_once(hub: LocalHub, api: HfApi) -> None:
    made = api.create_repo(ME, private=True)
    assert (made.repo_id, str(made)) == (ME, f"{hub.url}/{ME}")
    assert list(hub.files(ME)) == [".gitattributes"]
    assert api.repo_info(ME).private
    assert api.create_repo(ME, exist_ok=True).repo_id == ME
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo(ME)
    assert len(hub.commits(ME)) == 1


def test_an_uploaded_folder_is_one_commit_of_regular_and_lfs_files(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    api.create_repo(ME)
    folder = tmp_path / "folder"
    for path, content in {**FILES, "README.md": b"---\nlicense: mit\n---\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(content, bytes)
        (folder / path).write_bytes(content)
    done = api.upload_folder(repo_id=ME, folder_path=folder, commit_message="all", commit_description="of it")
    first, second = hub.commits(ME)
    assert (done.oid, second.title, second.description, second.parent) == (second.oid, "all", "of it", first.oid)
    assert hub.read(ME, "model.safetensors") == LARGE
    assert hub.files(ME)["sub/notes.txt"] == sha256(b"notes")
    assert {path for path, blob in second.tree.items() if blob.sha256} == {"model.safetensors"}
    assert asked(hub, "/cdn/") == [200]
    assert asked(hub, "/objects/verify") == [200]


def test_lfs_files_may_go_up_before_their_commit_and_only_once(hub: LocalHub, api: HfApi) -> None:
    api.create_repo(ME)
    ahead = adding("a.safetensors", LARGE)
    api.preupload_lfs_files(ME, [ahead])
    assert list(hub.files(ME)) == [".gitattributes"]
    committing(api, ahead, adding("b.safetensors", LARGE))
    assert hub.read(ME, "a.safetensors") == hub.read(ME, "b.safetensors") == LARGE
    assert asked(hub, "/cdn/", "PUT") == [200]


def test_an_object_is_refused_unless_it_is_the_one_announced(hub: LocalHub) -> None:
    assert [put(hub, content, b"right") for content in (b"wrong", b"righ", b"right")] == [422, 422, 200]
    assert get_session().get(hub.signed(sha256(b"right"))).content == b"right"
    assert get_session().get(hub.signed(sha256(b"right"))[:-1]).status_code == 403


def test_a_commit_needs_its_lfs_objects(hub: LocalHub, api: HfApi) -> None:
    hub.add_repo(ME, FILES)
    never = adding("b.safetensors", b"never sent")
    never._upload_mode, never._should_ignore, never._is_uploaded = "lfs", False, True
    with pytest.raises(BadRequestError, match="does not exist"):
        committing(api, never)
    assert len(hub.commits(ME)) == 1


def test_listings_tell_sizes_and_hashes(hub: LocalHub, api: HfApi) -> None:
    first = hub.add_repo(ME, FILES)
    later = hub.commit(ME, {"sub/deep/x.bin": LARGE}, "deeper")
    listed = {one.path: one for one in api.list_repo_tree(ME, recursive=True, expand=True)}
    assert sorted(listed) == ["config.json", "model.safetensors", "sub", "sub/deep", "sub/deep/x.bin", "sub/notes.txt"]
    file: Any = listed["model.safetensors"]
    assert (file.size, file.lfs.sha256, file.last_commit.oid) == (len(LARGE), sha256(LARGE), first)
    folder: Any = listed["sub"]
    assert folder.last_commit.oid == later
    assert [one.path for one in api.list_repo_tree(ME, "sub")] == ["sub/deep", "sub/notes.txt"]
    siblings = {one.rfilename: one for one in api.model_info(ME, revision=first, files_metadata=True).siblings or []}
    assert sorted(siblings) == sorted(FILES)
    assert siblings["config.json"].size == len(SMALL)
    assert siblings["config.json"].lfs is None
    assert siblings["model.safetensors"].lfs == {"size": len(LARGE), "sha256": sha256(LARGE), "pointer_size": 134}
    infos = api.get_paths_info(ME, ["sub", "config.json", "nothing"])
    assert [one.path for one in infos] == ["sub", "config.json"]


def test_long_listings_come_in_pages(hub: LocalHub, api: HfApi) -> None:
    hub.page = 3
    hub.add_repo(ME, {f"{i}.txt": b"%d" % i for i in range(10)})
    for i in range(4):
        hub.commit(ME, {"0.txt": None if i % 2 else b"%d" % i})
    assert len(list(api.list_repo_tree(ME, revision=hub.commits(ME)[0].oid))) == 10
    assert asked(hub, "/tree/") == [200] * 4
    assert [one.commit_id for one in api.list_repo_commits(ME)] == [one.oid for one in reversed(hub.commits(ME))]


def test_a_revision_is_main_a_commit_or_a_tag(hub: LocalHub, api: HfApi) -> None:
    first = hub.add_repo(ME, FILES)
    second = hub.commit(ME, {"config.json": b"{}"})
    hub.tag(ME, "v1", first)
    assert [api.repo_info(ME, revision=one).sha for one in ("main", first, "v1")] == [second, first, first]
    assert {one.name: one.target_commit for one in api.list_repo_refs(ME).tags} == {"v1": first}
    with pytest.raises(RevisionNotFoundError):
        api.repo_info(ME, revision="v2")


def test_commit_ids_are_the_same_in_every_run(hub: LocalHub, tmp_path: Path) -> None:
    with LocalHub(tmp_path / "other", token="hf_other") as other:
        assert hub.add_repo(ME, FILES) == other.add_repo(ME, FILES)
        assert hub.commit(ME, {"x": b"1"}) == other.commit(ME, {"x": b"1"})


def test_downloads_are_the_bytes_of_the_commit(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    first = hub.add_repo(ME, FILES)
    hub.commit(ME, {"model.safetensors": LARGE[::-1]})
    for path, content in FILES.items():
        done = api.hf_hub_download(ME, path, revision=first, local_dir=tmp_path / "here")
        assert Path(done).read_bytes() == content
    cached = api.snapshot_download(ME, cache_dir=tmp_path / "cache")
    assert (Path(cached) / "model.safetensors").read_bytes() == LARGE[::-1]


def test_the_token_stays_with_the_hub(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    hub.add_repo(ME, FILES, private=True)
    api.hf_hub_download(ME, "model.safetensors", local_dir=tmp_path)
    mine = {"Authorization": f"Bearer {hub.token}"}
    assert http_backoff("GET", f"{hub.url}/{ME}/resolve/main/model.safetensors", headers=mine).content == LARGE
    sent = [(one.path[:5], one.authorization) for one in hub.requests]
    assert set(sent) == {("/cdn/", False), ("/test", True)}
    assert get_session().get(hub.signed(sha256(LARGE)), headers=mine, follow_redirects=True).status_code == 400


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_one_range_of_a_file_can_be_had(hub: LocalHub, path: str) -> None:
    hub.add_repo(ME, FILES)
    content, address = FILES[path], f"{hub.url}/{ME}/resolve/main/{path}"
    assert isinstance(content, bytes)
    size = len(content)
    for asked_for, part in {
        "2-4": content[2:5],
        "3-": content[3:],
        "-2": content[-2:],
        "1-99999999": content[1:],
    }.items():
        got = http_backoff("GET", address, headers={"Range": f"bytes={asked_for}"})
        assert (got.status_code, got.content) == (206, part)
    start = size - len(part)
    assert got.headers["Content-Range"] == f"bytes {start}-{size - 1}/{size}"
    beyond = http_backoff("GET", address, headers={"Range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
    assert hub.requests[-1].range == f"bytes={size}-"


def test_headers_name_commit_size_and_hash(hub: LocalHub, api: HfApi) -> None:
    oid = hub.add_repo(ME, FILES)
    told = api.get_hf_file_metadata(url=f"{hub.url}/{ME}/resolve/main/model.safetensors")
    assert (told.commit_hash, told.etag, told.size) == (oid, sha256(LARGE), len(LARGE))
    regular = api.get_hf_file_metadata(url=f"{hub.url}/{ME}/resolve/main/config.json")
    assert (regular.etag, regular.size) == (hub.commits(ME)[0].tree["config.json"].oid, len(SMALL))


def test_what_is_missing_or_closed_is_refused_in_the_clients_own_words(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    hub.add_repo("a/private", FILES, private=True)
    hub.add_repo("a/gated", FILES, gated=True)
    nobody = HfApi(endpoint=hub.url, token=False)
    for who, repo in ((nobody, "a/private"), (nobody, "a/nothing"), (api, "a/nothing")):
        with pytest.raises(RepositoryNotFoundError):
            who.repo_info(repo)
    with pytest.raises(GatedRepoError):
        nobody.hf_hub_download("a/gated", "config.json", local_dir=tmp_path)
    assert nobody.repo_info("a/gated").gated == "auto"
    assert api.hf_hub_download("a/gated", "config.json", local_dir=tmp_path)
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("a/private", "nothing.json", local_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download("a/private", "config.json", revision="v9", local_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        nobody.create_commit("a/gated", [adding("x", b"x")], commit_message="no token")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        HfApi(endpoint=hub.url, token="hf_wrong").repo_info("a/gated")


def test_settings_close_and_gate_a_repository(hub: LocalHub, api: HfApi) -> None:
    hub.add_repo(ME, FILES)
    api.update_repo_settings(ME, private=True, gated="auto")
    assert (api.repo_info(ME).private, api.repo_info(ME).gated) == (True, "auto")


def test_files_and_folders_are_deleted(hub: LocalHub, api: HfApi) -> None:
    hub.add_repo(ME, FILES)
    committing(api, CommitOperationDelete("sub/"), CommitOperationDelete("config.json"))
    assert list(hub.files(ME)) == ["model.safetensors"]
    with pytest.raises(EntryNotFoundError):
        committing(api, CommitOperationDelete("config.json"))


def test_a_commit_that_changes_nothing_is_not_sent(hub: LocalHub, api: HfApi) -> None:
    head = hub.add_repo(ME, FILES)
    assert committing(api, adding("config.json", SMALL), adding("model.safetensors", LARGE)) == head
    assert asked(hub, "/commit/") == []


def test_a_commit_that_changes_nothing_is_answered_by_the_head(hub: LocalHub, api: HfApi) -> None:
    head = hub.add_repo(ME, FILES)
    same = [CommitOperationDelete("config.json"), adding("config.json", SMALL)]
    assert committing(api, *same) == head
    assert asked(hub, "/commit/") == [200]
    assert len(hub.commits(ME)) == 1


def test_a_commit_on_another_parent_than_the_head_is_refused(hub: LocalHub, api: HfApi) -> None:
    first = hub.add_repo(ME, FILES)
    hub.commit(ME, {"x": b"of somebody else"})
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as refused:
        committing(api, adding("y", b"y"), parent_commit=first)
    assert refused.value.response.status_code == 412
    assert "y" not in hub.files(ME)


def test_a_process_of_its_own_finds_the_hub_by_its_environment(hub: LocalHub, tmp_path: Path) -> None:
    hub.add_repo(ME, FILES, private=True)
    code = f"from huggingface_hub import hf_hub_download as get; print(open(get({ME!r}, 'config.json')).read(), end='')"
    done = subprocess.run([sys.executable, "-c", code], env=hub.environment(tmp_path / "home"), capture_output=True)
    assert (done.returncode, done.stdout) == (0, SMALL)


# --- faults

retries = pytest.mark.skipif(huggingface_hub.__version__.startswith("1."), reason="1.x asks again less often")


@retries
def test_a_rate_limit_is_waited_for(hub: LocalHub, api: HfApi, waits: list[float]) -> None:
    hub.add_repo(ME, FILES)
    hub.faults.add(Fault("status", "POST", "/preupload/", status=429, headers={"Retry-After": "1"}))
    committing(api, adding("x", b"x"))
    assert asked(hub, "/preupload/") == [429, 200]
    assert waits == [2.0]
    assert hub.faults.left == []


@retries
def test_an_upload_is_sent_again(hub: LocalHub, api: HfApi, waits: list[float]) -> None:
    """After a reset, and after an answer that was lost: then it had arrived, and is taken twice."""
    hub.add_repo(ME, FILES)
    hub.faults.add(Fault("status", "POST", "/objects/batch", status=504))
    hub.faults.add(Fault("reset", "PUT", "/cdn/"), Fault("lost", "PUT", "/cdn/"))
    committing(api, adding("new.safetensors", LARGE[1:]))
    assert hub.read(ME, "new.safetensors") == LARGE[1:]
    puts = [(one.status, one.received) for one in hub.requests if one.method == "PUT"]
    assert puts == [(0, 0), (0, len(LARGE) - 1), (200, len(LARGE) - 1)]
    assert asked(hub, "/objects/batch") == [504, 200]
    assert waits == [1, 1, 2]


@retries
def test_a_gateway_that_times_out_is_asked_again(hub: LocalHub, waits: list[float]) -> None:
    hub.add_repo(ME, FILES)
    hub.faults.add(Fault("status", path="/resolve/", status=504, times=2, skip=1))
    for _ in range(2):
        assert http_backoff("GET", f"{hub.url}/{ME}/resolve/main/config.json").content == SMALL
    assert asked(hub, "/resolve/") == [200, 504, 504, 200]


@retries
def test_a_download_that_was_cut_goes_on_where_it_was(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    content = LARGE * 1100  # 22 MB: the client keeps whole pieces of 10 MB
    hub.add_repo(ME, {"model.safetensors": content})
    hub.faults.add(Fault("cut", path="/cdn/.*model.safetensors"))
    done = api.hf_hub_download(ME, "model.safetensors", local_dir=tmp_path / "here")
    assert Path(done).read_bytes() == content
    first, second = [one for one in hub.requests if "/cdn/" in one.path]
    assert (first.sent, first.range) == (len(content) // 2, None)
    assert (second.range, second.status) == (f"bytes={10 << 20}-", 206)


def test_the_client_keeps_a_corrupt_download(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    hub.add_repo(ME, FILES)
    hub.faults.add(Fault("corrupt", path="/cdn/"))
    got = Path(api.hf_hub_download(ME, "model.safetensors", local_dir=tmp_path / "here")).read_bytes()
    assert [i for i in range(len(LARGE)) if got[i] != LARGE[i]] == [len(LARGE) // 2]


def test_a_slow_answer_is_whole(hub: LocalHub) -> None:
    hub.add_repo(ME, {"model.safetensors": LARGE * 13})
    hub.faults.add(Fault("slow", path="/cdn/", seconds=0.02))
    answer = get_session().get(hub.signed(sha256(LARGE * 13)))
    assert answer.content == LARGE * 13
    assert answer.elapsed.total_seconds() > 0.08  # five pieces


@pytest.mark.parametrize("kind", ["lost", "reset", "status"])
def test_the_client_sends_a_commit_once(hub: LocalHub, api: HfApi, kind: Any) -> None:
    head = hub.add_repo(ME, FILES)
    hub.faults.add(Fault(kind, "POST", "/commit/main"))
    with pytest.raises(Exception, match=r"disconnected|reset|503"):
        committing(api, adding("x", b"x"))
    assert len(asked(hub, "/commit/")) == 1
    made = hub.commits(ME)[1:]
    assert [one.parent for one in made] == ([head] if kind == "lost" else [])


def test_a_repository_that_moves_does_so_before_the_answer(hub: LocalHub, api: HfApi) -> None:
    first = hub.add_repo(ME, FILES)
    hub.faults.add(Fault("move", "POST", "/commit/", repo=ME, files={"config.json": None}))
    with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
        committing(api, adding("x", b"x"), parent_commit=first)
    assert [one.title for one in hub.commits(ME)] == ["initial commit", "moved"]
    assert sorted(hub.files(ME)) == ["model.safetensors", "sub/notes.txt"]


def test_random_faults_are_those_of_their_seed_in_any_order() -> None:
    requests = [(method, f"/{ME}/resolve/main/{i}") for i in range(500) for method in ("GET", "HEAD")]

    def hits(seed: int, order: list[tuple[str, str]]) -> set[tuple[str, str]]:
        faults = Faults()
        faults.random(seed, 0.1, ["status", "cut", "lost"])
        return {(faults.hits[-1], method) for method, target in order if faults.take(method, target)}

    assert hits(1, requests) == hits(1, requests[::-1])
    assert hits(1, requests) != hits(2, requests)
    assert 60 < len(hits(1, requests)) < 140
    assert {hit.split()[0] for hit, method in hits(1, requests) if method == "HEAD"} == {"status", "lost"}


def test_random_faults_spare_listings(hub: LocalHub, api: HfApi) -> None:
    hub.add_repo(ME, FILES)
    hub.faults.random(0, 1.0, ["status"])
    assert len(list(api.list_repo_tree(ME))) == 3
    assert get_session().head(f"{hub.url}/{ME}/resolve/main/config.json").status_code >= 429
