"""The tokens of a calibration: sequences of one length, some of them held out, and where they came from.

The same files, seed, length and tokenizer give the same ids, in whichever order the files are named: every order is
that of a hash, which no version of NumPy or Python changes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kizami.calibration.data.files import DataFile, Document, open_data, part_of
from kizami.calibration.data.mix import Mix, MixCounter
from kizami.calibration.data.tokenizer import Tokenizer
from kizami.formats.errors import KizamiError

HELD_OUT = 0.1
SAMPLE_CHATS = frozenset({"chats.jsonl", "tools.jsonl"})
BYTES_PER_TOKEN = 4  # of English and of code; a piece of a text is then about one sequence
_BATCH = 64  # documents that are read and tokenised together
_SEARCHED = 2048  # documents of a file, for its first bad line


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A file of the data. name: without its folder; sha256: of the file; pieces, tokens: those that were used."""

    name: str
    sha256: str
    pieces: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenSet:
    """ids: int32 [sequences, seq_len]; held_out: rows of it, ascending, that no statistic may see. sha256: of shape and
    ids (`tokens_sha256`). sources: in the order of their names. warnings: sentences for the user. built_in: whether it
    is the sample that kizami ships."""

    ids: NDArray[np.int32]
    held_out: tuple[int, ...]
    sha256: str
    sources: tuple[SourceFacts, ...]
    mix: Mix
    warnings: tuple[str, ...] = ()
    built_in: bool = False

    @property
    def sequences(self) -> int:
        return int(self.ids.shape[0])

    @property
    def seq_len(self) -> int:
        return int(self.ids.shape[1])


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """samples: the most sequences; seq_len: tokens of each."""

    samples: int = 128
    seq_len: int = 2048
    seed: int = 0


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer, settings: TokenSettings, vocab_size: int) -> TokenSet:
    """Reads, shuffles, tokenises and packs. Every file is read to its end, so that a bad line is found before the hours
    of work; only as many documents are tokenised as are needed.

    KizamiError "no_data" (too little), "bad_data" (with the line), "too_large", "bad_token", "missing_file",
    "not_a_file", "missing_package", "source_changed", "bad_template", "io_error".
    """
    with ExitStack() as stack:
        by_hash: dict[str, DataFile] = {}
        warnings: list[str] = []
        for path in paths:
            file = stack.enter_context(open_data(path, BYTES_PER_TOKEN * settings.seq_len))
            if (same := by_hash.get(file.sha256)) is not None:
                warnings.append(f"{path} has the bytes of {same.path}: it is used once")
            if same is None or file.path.name < same.path.name:
                by_hash[file.sha256] = file
        opened = sorted(by_hash.values(), key=lambda file: (file.path.name, file.sha256))
        return _pack(opened, tokenizer, settings, vocab_size, warnings)


def read_sample(tokenizer: Tokenizer, settings: TokenSettings, vocab_size: int) -> TokenSet:
    """The same from the texts that kizami ships: some 50,000 tokens."""
    made = read_tokens(sample_files(tokenizer), tokenizer, settings, vocab_size)
    sources = tuple(replace(source, name=f"{source.name} (built-in sample)") for source in made.sources)
    short = f", {made.sequences:,} sequences instead of {settings.samples:,}" * (made.sequences < settings.samples)
    warnings = [
        f"no --data: this is the small sample that comes with kizami{short}; it is good for trying, and data of the "
        "kind that the model will see is better"
    ]
    if not tokenizer.template:
        warnings.append(f"{tokenizer.root} has no chat template: the chats of the built-in sample are left out")
    return replace(made, sources=sources, warnings=tuple(warnings), built_in=True)


def sample_files(tokenizer: Tokenizer) -> list[Path]:
    """The texts that kizami ships; chats only where there is a chat template."""
    folder = Path(str(files("kizami.calibration.data").joinpath("sample")))
    return sorted(path for path in folder.iterdir() if tokenizer.template or path.name not in SAMPLE_CHATS)


def tokens_sha256(ids: NDArray[np.int32]) -> str:
    """Of the words `int32 ROWS COLUMNS`, a newline, and the ids row by row, little-endian."""
    digest = hashlib.sha256(f"int32 {ids.shape[0]} {ids.shape[1]}\n".encode())
    digest.update(np.ascontiguousarray(ids, "<i4").data)
    return digest.hexdigest()


def hold_out(sequences: int, seed: int) -> tuple[int, ...]:
    """A tenth of the sequences, at least one of two; none of one."""
    count = max(1, round(sequences * HELD_OUT)) if sequences > 1 else 0
    order = sorted(range(sequences), key=lambda i: _key(seed, b"held-out", i))
    return tuple(sorted(order[:count]))


def _key(seed: int, what: bytes, index: int) -> bytes:
    return hashlib.blake2b(b"%d %d " % (seed, index) + what, digest_size=8).digest()


def _shuffled(opened: Sequence[DataFile], seed: int) -> Iterator[list[tuple[DataFile, int]]]:
    """All documents of all files in batches; the order is that of hashes of the file's bytes and the place in it."""
    sizes = [len(file.units) for file in opened]
    keys = np.fromiter(
        (
            int.from_bytes(_key(seed, bytes.fromhex(file.sha256), unit), "big")
            for file, size in zip(opened, sizes, strict=True)
            for unit in range(size)
        ),
        np.uint64,
        sum(sizes),
    )
    begins = np.concatenate([[0], np.cumsum(sizes)])
    order = np.argsort(keys, kind="stable")
    for at in range(0, len(order), _BATCH):
        batch = order[at : at + _BATCH]
        which = np.searchsorted(begins, batch, side="right") - 1
        yield [(opened[int(f)], int(i - begins[f])) for f, i in zip(which, batch, strict=True)]


def _pack(
    opened: Sequence[DataFile], tokenizer: Tokenizer, settings: TokenSettings, vocab_size: int, warnings: list[str]
) -> TokenSet:
    wanted, found = settings.samples * settings.seq_len, 0
    stream: list[NDArray[np.int32]] = []
    read: list[tuple[DataFile, Document, str]] = []
    for batch in _shuffled(opened, settings.seed):
        documents = _read(batch)
        try:
            texts, encoded = _tokenised(documents, tokenizer, vocab_size)
        except KizamiError as error:
            raise _first_of_its_file(error, batch, documents, tokenizer, vocab_size) from error
        for (file, _), document, text, ids in zip(batch, documents, texts, encoded, strict=True):
            stream.append(ids)
            read.append((file, document, text))
            found += len(ids)
            if found >= wanted:
                break
        if found >= wanted:
            break
    sequences = min(found // settings.seq_len, settings.samples)
    if sequences == 0:
        raise KizamiError(
            f"the data has {found:,} tokens, expected at least one sequence of {settings.seq_len:,}",
            code="no_data",
            hint="give more data, or a smaller --seq-len",
        )
    if sequences < settings.samples:
        some = f"{sequences:,} sequence{'' if sequences == 1 else 's'} of {settings.seq_len:,}"
        warnings.append(f"the data has {found:,} tokens: {some} instead of {settings.samples:,}")
    ids = np.concatenate(stream)[: sequences * settings.seq_len].reshape(sequences, settings.seq_len)
    mix = MixCounter()
    facts = _facts(opened, read, [len(tokens) for tokens in stream], ids.size, mix)
    return TokenSet(ids, hold_out(sequences, settings.seed), tokens_sha256(ids), facts, mix.total(), tuple(warnings))


def _tokenised(
    documents: Sequence[Document], tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[str], list[NDArray[np.int32]]]:
    texts = [part_of(tokenizer.text_of(document), document.part, document.parts) for document in documents]
    encoded = tokenizer.encode(texts, [document.messages is not None for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        _check_ids(ids, vocab_size, document)
    return texts, encoded


def _first_of_its_file(
    error: KizamiError,
    batch: Sequence[tuple[DataFile, int]],
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> KizamiError:
    """The error of the file's first bad line: one in shuffled order would send whoever mends it up and down."""
    found = (file for (file, _), document in zip(batch, documents, strict=True) if document.where == error.file)
    if (file := next(found, None)) is None:
        return error
    for at in range(0, min(len(file.units), _SEARCHED), _BATCH):
        for document in file.read(range(at, min(at + _BATCH, len(file.units)))):
            try:
                _tokenised([document], tokenizer, vocab_size)
            except KizamiError as first:
                return first
    return error


def _read(batch: Sequence[tuple[DataFile, int]]) -> list[Document]:
    """Each file is asked once, for all it has in the batch."""
    documents: dict[tuple[int, int], Document] = {}
    for file in {id(file): file for file, _ in batch}.values():
        units = [unit for other, unit in batch if other is file]
        documents |= {(id(file), unit): document for unit, document in zip(units, file.read(units), strict=True)}
    return [documents[id(file), unit] for file, unit in batch]


def _check_ids(ids: NDArray[np.int32], vocab_size: int, document: Document) -> None:
    if len(ids) and int(ids.max()) >= vocab_size:
        raise KizamiError(
            f"the tokenizer gives the id {int(ids.max())}; vocab_size in config.json is {vocab_size}",
            code="bad_token",
            file=document.where,
            hint="the tokenizer is not of this model: --tokenizer DIR names another",
        )


def _facts(
    opened: Sequence[DataFile],
    read: Sequence[tuple[DataFile, Document, str]],
    lengths: Sequence[int],
    used: int,
    mix: MixCounter,
) -> tuple[SourceFacts, ...]:
    """Of the first `used` tokens."""
    pieces: dict[str, int] = dict.fromkeys((file.sha256 for file in opened), 0)
    tokens = dict(pieces)
    at = 0
    for (file, document, text), length in zip(read, lengths, strict=True):
        if (inside := min(length, used - at)) > 0:
            pieces[file.sha256] += 1
            tokens[file.sha256] += inside
            mix.add(document, text)
        at += length
    return tuple(SourceFacts(file.path.name, file.sha256, pieces[file.sha256], tokens[file.sha256]) for file in opened)
