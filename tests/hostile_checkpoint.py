"""A checkpoint that converts, with everything in it that a name, a text or a link can hold."""

import os
import socket
import unicodedata
from pathlib import Path

from make_cases import Checkpoint, normal, shard_name, tiny

MARKUP = "[bold red]x[/] [link=http://evil]y[/link] <img src=x onerror=alert(1)> **b** `c` | $(touch PWNED)"
BIDI = "\u202egnp.exe\u2066 \u200b\ufeff\U000e0041"
CSI = "\x9b31m"  # the C1 form of ESC [, which some terminals obey in UTF-8, too
ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\r" + CSI
README = f"""---
license: &a mit
license_name: "x\\n  evil: yes"
license_link: !!python/object/apply:os.system ["touch PWNED"]
base_model: evil/model
library_name: evil
language: *a
pipeline_tag: text-generation
tags: [ok, "a b", {{x: y}}, "\\u202e", fp8]
extra: {{a: &b [*a, *a], c: [*b, *b]}}
model-index: &c
- *c
---
<script>alert(1)</script> {MARKUP} {ESCAPES}
"""


def hostile() -> Checkpoint:
    """Converts, with everything in it that a name or a text can hold."""
    checkpoint = tiny()
    config = checkpoint.config
    config |= {
        "model_type": f"m {MARKUP} {BIDI} {ESCAPES}",
        "architectures": [MARKUP, ESCAPES],
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "../evil--evil.M"},
        "tokenizer_class": {"__reduce__": ["os.system", "touch PWNED"]},
        ESCAPES: MARKUP,
    }
    checkpoint.shards[shard_name(2, 3)] |= normal(f"model.{MARKUP}{BIDI}.weight", 4, 32)
    checkpoint.shards[shard_name(2, 3)] |= normal(f"model.layers.1.mlp.experts.4.{MARKUP}{BIDI}.weight", 4, 32)
    checkpoint.shards[f"{MARKUP.replace('/', '')}{BIDI}.safetensors"] = normal("model.other", 4)
    checkpoint.metadata = {"format": "pt", MARKUP: ESCAPES}
    code = b'open(__file__ + ".PWNED", "w")\nraise SystemExit(3)\n'
    for name in ("evil.py", "__init__.py", "sitecustomize.py", "numpy.py", "json.py", "conftest.py", "sub/__init__.py"):
        checkpoint.side[name] = code
    pickle = b"cos\nsystem\n(S'touch PWNED'\ntR."
    for name in ("pytorch_model.bin", "x.pt", "x.pkl", "x.npy", "tokenizer.pickle", "optimizer.pth"):
        checkpoint.side[name] = pickle
    checkpoint.side |= {
        "chat_template.jinja": ("{{ ''.__class__.__mro__[1].__subclasses__() }}" + ESCAPES).encode(),
        "README.md": README.encode(),
        f"{MARKUP.replace('/', '')}{BIDI}.txt": b"x",
        f"{ESCAPES.replace('/', '')}.txt": b"x",
        "new\nline.txt": b"x",
        "-rf": b"x",
        "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["evil.T", null]}, "x": "\x1b[31m"}',
    }
    return checkpoint


def save_hostile(folder: Path) -> Path:
    """With links to everywhere and a name that is no text."""
    source = hostile().save(folder / "src")
    (source / os.fsdecode(b"\xff\xfe\x1b.txt")).write_bytes(b"x")
    (folder / "secret").write_text("SECRET")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "key.txt").write_text("SECRET")
    for name, target in {
        "up.txt": "../secret", "absolute.txt": str(folder / "secret"), "folder": "../secrets", "loop": "loop",
        "environ.txt": "/proc/self/environ", "fd.txt": "/proc/self/fd/0", "self": ".", "root": "/proc/self/root",
        "zero.bin.txt": "/dev/zero", "tty.txt": "/dev/tty", "a": "b", "b": "a", "nothing.txt": "\x1b[31m",
    }.items():  # fmt: skip
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe.txt")
    here = os.getcwd()
    os.chdir(source)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket.txt")
    finally:
        os.chdir(here)
    return source


def harmful(text: str) -> list[str]:
    """Characters that are not shown as they are: controls, directions, halves of pairs."""
    return [c for c in text if (unicodedata.category(c)[0] == "C" and c != "\n") or c in "\u2028\u2029"]
