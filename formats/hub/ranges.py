"""A part of a file on the Hub, without the rest."""

from kizami.formats.hub.client import hub_utils
from kizami.formats.hub.repository import Repository

TIMEOUT = 60.0  # seconds without a byte


def read_range(repository: Repository, name: str, begin: int, count: int) -> bytes:
    """`count` bytes from `begin` of the file at the repository's commit. huggingface_hub's errors; ConnectionError if
    the connection ends before, or gives another part. Nothing proves that they are the file's: the whole has a hash."""
    from huggingface_hub import hf_hub_url

    utils = hub_utils()
    url = hf_hub_url(repository.name, name, revision=repository.commit)
    headers = utils.build_hf_headers(library_name="kizami") | {
        "Range": f"bytes={begin}-{begin + count - 1}",
        "Accept-Encoding": "identity",
    }
    data = bytearray()
    if count:
        with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as answer:
            utils.hf_raise_for_status(answer)
            whole = answer.status_code == 200  # a server that knows no ranges begins at 0
            if not whole and not answer.headers.get("content-range", "").startswith(f"bytes {begin}-"):
                raise ConnectionError("another part of the file came")
            skip = begin if whole else 0
            for part in answer.iter_bytes():
                data += part[min(skip, len(part)) :]
                skip -= min(skip, len(part))
                if len(data) >= count:
                    break
    if len(data) < count:
        raise ConnectionError(f"{len(data)} bytes of {count} came")
    return bytes(data[:count])
