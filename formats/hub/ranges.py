"""A part of a file on the Hub, without the rest."""

import importlib
from typing import Any

from kizami.formats.hub.repository import Repository

TIMEOUT = 60.0  # seconds without a byte


def first_bytes(repository: Repository, name: str, count: int) -> bytes:
    """The first `count` bytes of the file at the repository's commit. huggingface_hub's errors; ConnectionError if the
    connection ends before."""
    from huggingface_hub import hf_hub_url

    utils: Any = importlib.import_module("huggingface_hub.utils")
    url = hf_hub_url(repository.name, name, revision=repository.commit)
    headers = utils.build_hf_headers(library_name="kizami") | {
        "Range": f"bytes=0-{count - 1}",
        "Accept-Encoding": "identity",
    }
    data = bytearray()
    if count:
        with utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as answer:
            utils.hf_raise_for_status(answer)
            for part in answer.iter_bytes():  # of a server that knows no ranges the first ones are enough
                data += part
                if len(data) >= count:
                    break
    if len(data) < count:
        raise ConnectionError(f"{len(data)} bytes of {count} came")
    return bytes(data[:count])
