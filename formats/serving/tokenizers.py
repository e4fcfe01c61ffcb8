"""Whether two checkpoints of a pair tokenize alike, from the bytes of their tokenizer files."""

import re

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, io_error, listed, resolve_inside
from kizami.formats.serving.foretell import Finding, Severity

_FILES = re.compile(
    r"tokenizer\.(json|model)|tiktoken\.model|.*\.tiktoken|vocab\.(json|txt)|merges\.txt|added_tokens\.json|"
    r"special_tokens_map\.json|tokenizer_config\.json|tokenization_\w+\.py|chat_template\.jinja"
)
# A difference in these changes the prompt's text, or which class reads the vocabulary; in the others, the tokens.
_SOFT = frozenset({"tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"})
_MOST_BYTES = 256 << 20  # the largest real one has 34 MB
_SOURCE = "SGLang 0.5.23 disaggregation compares neither tokenizer nor weights; both sides tokenize by themselves"


def compare_tokenizers(prefill: Checkpoint, decode: Checkpoint) -> list[Finding]:
    """One finding per file that is on one side only or differs; a note if there is nothing to compare."""
    if prefill.root == decode.root:
        return []
    ours, theirs = _tokenizer_files(prefill), _tokenizer_files(decode)
    if not ours and not theirs:
        return [_finding("note", "tokenizer_missing", "neither checkpoint has tokenizer files: not compared", "")]
    return [
        finding
        for name in sorted(ours | theirs)
        if (finding := _compare(prefill, decode, name, name in ours, name in theirs))
    ]


def _compare(prefill: Checkpoint, decode: Checkpoint, name: str, ours: bool, theirs: bool) -> Finding | None:
    severity: Severity = "warning" if name in _SOFT or not (ours and theirs) else "error"
    if not (ours and theirs):
        side = "prefill" if ours else "decode"
        return _finding(
            severity, "tokenizer_differs", f"{name} is in the {side} checkpoint only", "the files of one release"
        )
    first, second = _digest(prefill, name), _digest(decode, name)
    if first == second:
        return None
    message = f"{name} differs between prefill ({first[:12]}) and decode ({second[:12]})"
    return _finding(severity, "tokenizer_differs", message, "the files of one release")


def _tokenizer_files(checkpoint: Checkpoint) -> set[str]:
    return {entry.name for entry in listed(checkpoint.root) if _FILES.fullmatch(entry.name)}


def _digest(checkpoint: Checkpoint, name: str) -> str:
    path = resolve_inside(checkpoint.root, name)
    try:
        size = path.stat().st_size
    except OSError as e:
        raise io_error("cannot look up", e, name) from e
    if size > _MOST_BYTES:
        raise KizamiError(f"{size} bytes, expected at most {_MOST_BYTES}", code="too_large", file=name)
    return file_sha256(path, name)


def _finding(severity: Severity, code: str, message: str, advice: str) -> Finding:
    return Finding(severity, code, "pair", message, _SOURCE, advice)
