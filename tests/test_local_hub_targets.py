"""local_hub refuses and ignores as the Hub does where a repository is pushed to."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from local_hub import LocalHub

ME = "tester/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with LocalHub(tmp_path / "hub") as made:
        yield made


def committed(hub: LocalHub, **files: bytes) -> str:
    added = [CommitOperationAdd(name, data) for name, data in files.items()]
    return str(HfApi(endpoint=hub.url, token=hub.token).create_commit(ME, added, commit_message="change").oid)


def test_a_token_that_may_not_write_is_told_before_a_commit(hub: LocalHub) -> None:
    hub.add_repo(ME, {}, read_only=True)
    with pytest.raises(HfHubHTTPError, match="create_pr=1") as refused:
        committed(hub, a=b"a")
    assert refused.value.response.status_code == 403
    assert "/preupload/" in hub.requests[-1].path


def test_what_the_repository_ignores_is_left_out_of_a_commit_in_silence(hub: LocalHub) -> None:
    hub.add_repo(ME, {".gitignore": b"# none of\na\n"})
    committed(hub, a=b"a", b=b"b")
    assert sorted(hub.files(ME)) == [".gitignore", "b"]


def test_weights_are_large_files_only_where_the_repository_has_them_so(hub: LocalHub) -> None:
    hub.add_repo(ME, {}, lfs_weights=False)
    committed(hub, **{"a.safetensors": b"small"})
    assert hub.commits(ME)[-1].tree["a.safetensors"].sha256 is None
