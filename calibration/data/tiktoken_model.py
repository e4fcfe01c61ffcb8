"""Kimi's `tiktoken.model` as a tokenizer of the `tokenizers` package, without the Python file that ships beside it.

The pattern is that of Kimi's public tokenization_kimi.py (Kimi-K2, K2.5, Kimi-Linear; the same in all). transformers
5.24 converts a file of this name, too (tokenization_utils_tokenizers.py `_convert_from_tiktoken`), but with the pattern
of Llama 3, which cuts elsewhere around Chinese, capitals and apostrophes: most ids are the same, not all.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kizami.formats.errors import KizamiError, printable

FILE, CODE = "tiktoken.model", "tokenization_kimi.py"
RESERVED = 258  # special ids behind the ranks: num_reserved_special_tokens + 2
MAX_RANKS = 1_000_000
_LETTERS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_LETTERS}+{_ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_LETTERS}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def tiktoken_backend(data: bytes, config: Mapping[str, Any], code: str | None) -> Backend:
    """`data`: of tiktoken.model; config: tokenizer_config.json; code: the text of tokenization_kimi.py, if there is
    one, which is compared and never run. KizamiError "bad_tokenizer"."""
    if code is not None and not _has_our_pattern(code):
        raise KizamiError(
            f"does not have the pattern that {FILE} is known to be used with",
            code="bad_tokenizer",
            file=CODE,
            hint="put a tokenizer.json into the folder, or name another with --tokenizer DIR",
        )
    ranks = _ranks(data)
    letters = _byte_letters()
    words = {rank: "".join(letters[byte] for byte in token) for token, rank in ranks.items()}
    vocabulary = {word: rank for rank, word in words.items()}
    merges = [(words[left], words[right]) for _, left, right in _merges(ranks)]
    backend = Backend(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex("|".join(PATTERNS)), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in _special(config, len(ranks))]
    )
    return backend


def _has_our_pattern(code: str) -> bool:
    """All eight, as raw strings in their order and nothing else between the brackets of the join."""
    joined = re.search(r"pat_str\s*=\s*[\"']\|[\"']\.join\(\s*\[(.*?)\n?\s*\]\s*\)", code, re.S)
    if joined is None:
        return False
    return re.findall(r'r"""(.*?)"""', joined[1], re.S) == list(PATTERNS)


def _ranks(data: bytes) -> dict[bytes, int]:
    """Lines of `base64 rank`; ranks are 0, 1, 2..."""
    ranks: dict[bytes, int] = {}
    lines = data.splitlines()
    if len(lines) > MAX_RANKS:
        raise _bad(f"has {len(lines):,} lines, expected at most {MAX_RANKS:,}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            found = int(rank)
        except (ValueError, binascii.Error):
            raise _bad(f"line {number} is not `base64 rank`: {printable(repr(line[:60]))}") from None
        if found != len(ranks) or token in ranks:
            raise _bad(f"line {number} has the rank {found}, expected {len(ranks)}, and each token once")
        ranks[token] = found
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _bad(f"has no token for byte 0x{missing[0]:02x}, expected all 256 bytes")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[int, int, int]]:
    """(rank of the whole, left, right) of every pair that makes a token: tiktoken joins whatever adjacent pair has the
    lowest rank, not only the pair that a token was trained from."""
    return sorted(
        (rank, ranks[token[:cut]], ranks[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )


def _special(config: Mapping[str, Any], first: int) -> list[str]:
    """The words of the RESERVED ids from `first` on."""
    named = config.get("added_tokens_decoder")
    words: dict[int, str] = {}
    for key, entry in (named if isinstance(named, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch(r"\d{1,9}", key, re.ASCII) or not isinstance(content, str) or not content:
            raise _bad_config(f"added_tokens_decoder has {printable(key, 40)!r} without an id and a content")
        if not first <= int(key) < first + RESERVED:
            raise _bad_config(f"has the special id {key}, expected {first} to {first + RESERVED - 1}, behind the ranks")
        words[int(key)] = content
    if len(set(words.values())) != len(words):
        raise _bad_config("added_tokens_decoder has one token under two ids")
    return [words.get(i, f"<|reserved_token_{i}|>") for i in range(first, first + RESERVED)]


def _byte_letters() -> list[str]:
    """The printable letter of each byte in byte-level BPE (GPT-2 encoder.py bytes_to_unicode): those that are
    printable in Latin-1 stand for themselves, the others for letters from 256 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def _bad(message: str) -> KizamiError:
    return KizamiError(message, code="bad_tokenizer", file=FILE)


def _bad_config(message: str) -> KizamiError:
    return KizamiError(message, code="bad_tokenizer", file="tokenizer_config.json")
