"""The corpus of the coverage-guided fuzzing, without the fuzzer: what reached something new is read in every run."""

from pathlib import Path

import pytest
from fuzz.fuzz_readers import STRICTER, TARGETS, check_header

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("target", ["header", "index"])
def test_every_input_of_the_corpus_is_read_or_refused_as_it_must_be(target: str) -> None:
    read = [TARGETS[target](path.read_bytes()) is not None for path in INPUTS if path.parent.name == target]
    assert any(read)
    assert not all(read)


def test_every_input_of_the_corpus_is_json_as_python_reads_it_or_refused() -> None:
    read = [TARGETS["json"](path.read_bytes()) is not None for path in INPUTS]
    assert any(read)
    assert not all(read)


def test_the_corpus_is_small() -> None:
    assert 20 < len(INPUTS) < 1000
    assert sum(path.stat().st_size for path in INPUTS) < 200_000


@pytest.mark.parametrize(
    "header",
    [
        b'{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',  # serde_json: a float
        b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,-0]}}',
    ],
)
def test_headers_that_once_only_kizami_read_are_refused(header: bytes) -> None:
    assert check_header(header) is None


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    assert check_header(twice) is None
    monkeypatch.delitem(STRICTER, r"has the key .* twice")
    with pytest.raises(AssertionError, match="twice"):
        check_header(twice)
