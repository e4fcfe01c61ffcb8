"""The checkpoint's own tokenizer and chat template, from its files and without its code.

The files are read here, under the rules for untrusted folders, and handed to `tokenizers` and transformers as text:
AutoTokenizer would follow links, and ask for trust_remote_code where a checkpoint names a Python class of its own. The
template runs in the Jinja sandbox of transformers.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kizami.calibration.data.chat import with_text_arguments
from kizami.calibration.data.files import Document
from kizami.calibration.data.tiktoken_model import CODE, FILE, tiktoken_backend
from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, open_regular, read_exactly, resolve_inside
from kizami.formats.strict_json import parse_json_object

_JSON, _CONFIG, _MAP, _TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_MOST_BYTES = {_JSON: 256 << 20, _CONFIG: 32 << 20, FILE: 64 << 20, _TEMPLATE: 1 << 20, CODE: 1 << 20, _MAP: 1 << 20}
_WORDS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_HINT = "put a tokenizer.json into the folder, or name a folder that has one with --tokenizer DIR"


class Tokenizer:
    """root: the folder. kind: `tokenizer.json` or `tiktoken.model`. template: what renders chats, empty without one."""

    def __init__(self, root: Path, backend: Backend, kind: str, config: Mapping[str, Any], template: Any) -> None:
        self.root, self.kind = root, kind
        self.template = template if isinstance(template, str) else "\n".join((template or {}).values())
        backend.no_truncation()  # either may be set in tokenizer.json
        backend.no_padding()
        words = {name: word for name in _WORDS if (word := _word(config.get(name))) and _id(backend, word) is not None}
        self._backend = backend
        self._renderer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **words)
        self._sorts_tools = kind == FILE  # tokenization_kimi.py, deep_sort_dict
        self.eos = _id(backend, words.get("eos_token"))
        self.bos = _id(backend, words.get("bos_token")) if config.get("add_bos_token") is True else None

    @staticmethod
    def open(root: Path) -> "Tokenizer":
        """Reads tokenizer.json, or Kimi's tiktoken.model, with tokenizer_config.json and chat_template.jinja.

        KizamiError "missing_file", "no_tokenizer", "bad_tokenizer", "bad_json", "outside_folder", "not_a_file",
        "too_large", "io_error".
        """
        if not root.is_dir():
            raise KizamiError(
                "is not a folder", code="missing_file", file=str(root), hint="name the tokenizer's folder"
            )
        config = _json(root, _CONFIG)
        config = _json(root, _MAP) | config
        if (data := _bytes(root, _JSON)) is not None:
            return Tokenizer(root, _from_json(data), _JSON, config, _template(root, config))
        if (data := _bytes(root, FILE)) is not None:
            code = _bytes(root, CODE)
            backend = tiktoken_backend(data, config, None if code is None else code.decode("utf-8", "replace"))
            return Tokenizer(root, backend, FILE, config, _template(root, config))
        raise KizamiError(f"has neither {_JSON} nor {FILE}", code="no_tokenizer", file=str(root), hint=_HINT)

    def text_of(self, document: Document) -> str:
        """Its text, or its messages through the chat template. KizamiError "no_template", "bad_template"."""
        if document.text is not None:
            return document.text
        assert document.messages is not None
        if not self.template:
            raise KizamiError(
                f"is a chat, and {self.root} has no chat template",
                code="no_template",
                file=document.where,
                hint="name a folder with one with --tokenizer DIR, or give the data as text",
            )
        tools = None if document.tools is None else [_sorted(t) if self._sorts_tools else t for t in document.tools]
        failed: Exception | None = None
        for messages in (document.messages, with_text_arguments(document.messages)):
            try:
                text = str(self._renderer.apply_chat_template(list(messages), tools=tools, tokenize=False))
                text.encode()  # half a surrogate pair is no text
                return text
            except MemoryError:
                raise
            except Exception as e:  # whatever a stranger's template may raise
                failed = failed or e
        raise KizamiError(
            f"the chat template does not render it: {type(failed).__name__}: {printable(str(failed), 300)}",
            code="bad_template",
            file=document.where,
        )

    def encode(self, texts: Sequence[str], are_chats: Sequence[bool]) -> list[NDArray[np.int32]]:
        """The ids of each, ended with EOS if there is one. Chats have their special tokens from the template; texts get
        those that the tokenizer puts around a text, and BOS if `add_bos_token` says so.

        KizamiError "bad_tokenizer" if nothing is left of a text.
        """
        encoded: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(texts)
        for chats in (False, True):
            which = [i for i, chat in enumerate(are_chats) if chat == chats]
            found = self._backend.encode_batch([texts[i] for i in which], add_special_tokens=not chats)
            for i, encoding in zip(which, found, strict=True):
                ids = list(encoding.ids)
                if texts[i].strip() and all(encoding.special_tokens_mask):
                    raise KizamiError(
                        f"gives no token for a text of {len(texts[i]):,} characters",
                        code="bad_tokenizer",
                        file=self.kind,
                        hint="download it again, or name a folder with another one with --tokenizer DIR",
                    )
                if self.bos is not None and not chats and ids[:1] != [self.bos]:
                    ids.insert(0, self.bos)
                if self.eos is not None and ids[-1:] != [self.eos]:
                    ids.append(self.eos)
                encoded[i] = np.array(ids, np.int32)
        return encoded


def _undated(template: str) -> str:
    """The template, printing the first day of 2025 where it asks for today: the same data gives the same ids tomorrow.

    transformers hands no functions of ours to a template, so a macro takes the place of its `strftime_now`."""
    forms = dict.fromkeys(re.findall(r"""strftime_now\(\s*["']([^"'\\]*)["']\s*\)""", template))
    if not forms:
        return template
    dates = json.dumps({form: datetime(2025, 1, 1).strftime(form) for form in forms})
    return f"{{% macro strftime_now(form) %}}{{{{ {dates}[form] }}}}{{% endmacro %}}{template}"


def _from_json(data: bytes) -> Backend:
    try:
        return Backend.from_str(data.decode("utf-8"))
    except Exception as e:  # `tokenizers` raises nothing more special
        raise KizamiError(
            f"cannot be read: {printable(str(e), 200)}", code="bad_tokenizer", file=_JSON, hint="download it again"
        ) from None


def _template(root: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One, or by name as older configs list them: transformers takes `tool_use` where tools are given."""
    own = _bytes(root, _TEMPLATE)
    try:
        value = config.get("chat_template") if own is None else own.decode("utf-8")
    except UnicodeDecodeError as e:
        raise KizamiError(
            f"byte {e.object[e.start]:#04x} at {e.start} is not UTF-8",
            code="bad_template",
            file=_TEMPLATE,
            hint="download the file again",
        ) from e
    if not isinstance(value, list):
        return _undated(value) if isinstance(value, str) else None
    named = {
        entry["name"]: _undated(entry["template"])
        for entry in value
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    return named or None


def _word(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _id(backend: Backend, word: str | None) -> int | None:
    return None if word is None else backend.token_to_id(word)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _json(root: Path, name: str) -> dict[str, Any]:
    data = _bytes(root, name)
    return {} if data is None else parse_json_object(data, name, what="file")


def _bytes(root: Path, name: str) -> bytes | None:
    """None if there is no such file."""
    if not os.path.lexists(root / name):
        return None
    fd = open_regular(resolve_inside(root, name), name)
    try:
        size = os.fstat(fd).st_size
        if size > _MOST_BYTES[name]:
            message = f"{size:,} bytes, expected at most {_MOST_BYTES[name]:,}"
            raise KizamiError(message, code="too_large", file=name)
        return read_exactly(fd, 0, size, name)
    except OSError as e:
        raise io_error("cannot read", e, name) from e
    finally:
        os.close(fd)
