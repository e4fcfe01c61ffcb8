"""Damaged, forged and hostile inputs by the thousand, against the real command line, each in a process of its own.

    python tests/mutations.py 10000 [SEED [FIRST]]     numbers FIRST (0) and on; exit code 1 if one breaks a rule
    python tests/mutations.py 1 7 4711 DIR             number 4711 of seed 7 again, its files kept in DIR

A small checkpoint, the output made from it, and an unfinished run are the good inputs. Each number changes one to three
of their files, with an eye for JSON (keys dropped, doubled, retyped; numbers, names and shapes that no one writes) or
blindly in bytes, and runs one command. Half of the changed outputs are forged: their hashes are made right again.

The rules: exit code 0, 1 (plan --tp, verify, report) or 2; at most 2 s of CPU and 500 MB; a refusal is one line of
stderr (or one object under --json); no traceback; nothing on the streams that a terminal would obey.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bounded_run import MAX_SECONDS, Ran, broken_rules, in_child, run, run_here
from forging import agreed
from hostile_json import (
    CONTAINERS,
    DTYPES,
    KEYS,
    MODEL_TYPES,
    MODULES,
    NUMBERS,
    PATTERNS,
    STRINGS,
    change,
    change_bytes,
    dumps,
    hostile,
    hostile_name,
    pick,
)
from make_cases import BLOCK, Checkpoint, bf, f8, f32, tiny_config

from kizami.quantize.run.journal import Journal

INDEX, CONFIG, MANIFEST = "model.safetensors.index.json", "config.json", "kizami.json"
Files = dict[str, bytes]

# ---------------------------------------------------------------- the good inputs


def good_source() -> Checkpoint:
    """Two files, 20 kB: a dense layer, a layer with two experts, a next-token layer."""
    rng = np.random.default_rng(3)

    def fp8(module: str, n: int, k: int) -> dict[str, Any]:
        byte = rng.integers(0, 126, (n, k)).astype(np.uint8)
        scale = rng.uniform(0.01, 0.02, (-(-n // BLOCK), -(-k // BLOCK)))
        return {f"{module}.weight": f8(byte), f"{module}.weight_scale_inv": f32(scale)}

    def float_(name: str, *shape: int) -> dict[str, Any]:
        return {name: bf(rng.standard_normal(shape))}

    first = fp8("model.layers.0.mlp.gate_proj", 32, 64) | fp8("model.layers.0.mlp.up_proj", 32, 64)
    first |= fp8("model.layers.0.self_attn.q_a_proj", 32, 64) | float_("model.embed_tokens.weight", 8, 64)
    second = (
        float_("lm_head.weight", 8, 64)
        | float_("model.norm.weight", 64)
        | float_("model.layers.1.mlp.gate.weight", 2, 64)
    )
    for module in ("layers.1.mlp.experts.0", "layers.1.mlp.experts.1", "layers.2.mlp.experts.0"):
        for part in ("gate_proj", "up_proj", "down_proj"):
            second |= fp8(f"model.{module}.{part}", 32, 32)
    second |= float_("model.layers.2.eh_proj.weight", 32, 64)
    side = {
        "README.md": b"---\nlicense: mit\ntags:\n- fp8\n- moe\n---\n# Small\n",
        "generation_config.json": b'{"temperature": 0.6}\n',
        "tokenizer/vocab.txt": b"a\n",
    }
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    return Checkpoint(tiny_config(), shards, side)


def load(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def store(files: Files, folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


SHARDS = ["--max-shard-size", "8KB", "--workers", "1"]


@dataclass(frozen=True)
class Good:
    source: Files
    out: Files
    partial: Files


def make_good(folder: Path) -> Good:
    """Also loads all that the commands need, so that a forked child has it."""
    source = good_source().save(folder / "src")
    for words in (
        ["convert", "src", "out", *SHARDS],
        ["verify", "out", "--against", "src"],
        ["report", "out"],
        ["inspect", "src"],
        ["check", "out", "--matrix"],
        ["serve", "out"],
    ):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as talk:
            code = run_here(words, folder)
        assert code == 0 or words[0] in ("check", "serve"), talk.getvalue()  # a part of a model loads nowhere
    partial = folder / "part.partial"

    def die() -> None:
        append = Journal.append

        def append_and_die(self: Journal, record: Any) -> None:
            append(self, record)
            if len(self.done) == 2:
                os._exit(9)

        Journal.append = append_and_die  # type: ignore[method-assign]
        run_here(["convert", "src", "part", *SHARDS], folder)

    assert in_child(die)[0] == 9
    return Good(load(source), load(folder / "out"), load(partial))


# ---------------------------------------------------------------- one changed input


def split_header(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def change_file(name: str, data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25 or not name.endswith((".safetensors", ".json", ".jsonl")):
        return change_bytes(data, rng)
    if name.endswith(".safetensors"):
        header, body = split_header(data)
        value = json.loads(header)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            value = change_header(value, rng) if rng.random() < 0.5 and isinstance(value, dict) else change(value, rng)
        text = dumps(value).encode("utf-8", "surrogatepass")
        length = (
            len(text) if rng.random() < 0.95 else rng.choice([0, 1, 2**63, 2**64 - 1, len(text) + 1, 10**8, 10**8 + 1])
        )
        return length.to_bytes(8, "little") + text + body
    if name.endswith(".jsonl"):
        lines = data.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = dumps(change(json.loads(lines[at]), rng))
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        value = (
            change_config(value, rng)
            if name == CONFIG and rng.random() < 0.5 and isinstance(value, dict)
            else change(value, rng)
        )
    return dumps(value).encode("utf-8", "surrogatepass")


def change_header(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What a header can say wrongly and still be a header: the tensors still tile the data."""
    names = [name for name, entry in header.items() if isinstance(entry, dict) and "shape" in entry]
    if not names:
        return header
    name = rng.choice(names)
    entry = header[name]
    match rng.randrange(6):
        case 0 if isinstance(entry["shape"], list):
            entry["shape"] = rng.choice(
                [entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [0], [0, 2**62]]
            )
        case 1:
            entry["dtype"] = pick(rng, DTYPES)
        case 2:  # one tensor under another's name or a new one
            header[hostile_name(rng)] = header.pop(name)
        case 3:  # many empty tensors
            for i in range(rng.choice([1, 50, 2000])):
                header[f"{rng.choice(MODULES)}.{i}.weight"] = {"dtype": "BF16", "shape": [0, i], "data_offsets": [0, 0]}
        case 4:
            other = rng.choice(names)
            entry["data_offsets"], header[other]["data_offsets"] = (
                header[other].get("data_offsets"),
                entry.get("data_offsets"),
            )
        case _:  # the numbers of another kind that fill the same bytes
            pair = entry.get("data_offsets")
            if isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair):
                size = pair[1] - pair[0]
                entry["dtype"], entry["shape"] = rng.choice(
                    [
                        ("U8", [size]),
                        ("F8_E4M3", [1, size]),
                        ("F8_E4M3", [size, 1]),
                        ("BF16", [size // 2]),
                        ("F8_E4M3", [size]),
                    ]
                )
    return header


def change_config(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    quant = config.get("quantization_config")
    match rng.randrange(9):
        case 0:
            config[rng.choice(KEYS)] = hostile(rng)
        case 1:
            config["model_type"] = rng.choice(MODEL_TYPES + STRINGS)
        case 2:
            config[rng.choice(["num_hidden_layers", "num_nextn_predict_layers"])] = pick(rng, NUMBERS)
        case 3:
            config["text_config"] = rng.choice([dict(config), hostile(rng), {"quantization_config": quant}])
        case 4 if isinstance(quant, dict):
            quant[rng.choice(KEYS)] = hostile(rng)
        case 5 if isinstance(quant, dict):
            quant["weight_block_size"] = pick(rng, CONTAINERS)
        case 6 if isinstance(quant, dict):
            group = {
                "targets": [pick(rng, PATTERNS)],
                "weights": {
                    "type": hostile(rng),
                    "num_bits": pick(rng, NUMBERS),
                    "strategy": "block",
                    "block_structure": pick(rng, CONTAINERS),
                },
            }
            quant["config_groups"] = rng.choice([{"group_0": group}, hostile(rng), {hostile_name(rng): hostile(rng)}])
        case 7 if isinstance(quant, dict):
            quant[rng.choice(["ignore", "modules_to_not_convert"])] = [
                rng.choice(PATTERNS + STRINGS + NUMBERS) for _ in range(rng.choice([1, 3, 500]))
            ]
        case _:
            return change(config, rng)
    return config


def forge(files: Files) -> Files:
    """As somebody would do who wants to deceive; as they are, if kizami.json is none any more."""
    try:
        return agreed(files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return files


OPTIONS: list[list[str]] = [
    [], [], ["--rest", "fp8"], ["--mtp", "drop"], ["--mtp", "keep"], ["--method", "minmax"], ["--scheme", "bf16"],
    ["--format", "gptq"], ["--format", "awq"], ["--format", "w4afp8", "--rest", "fp8"],
    ["--set", "attention=int4", "--set", "mtp=keep"], ["--set", "dense_mlp=fp8"],
]  # fmt: skip
FROM_INT4 = [["--scheme", "bf16"], ["--scheme", "fp8-block"], ["--format", "gptq_v2"], ["--set", "routed_expert=keep"]]


def make_case(good: Good, rng: random.Random) -> tuple[dict[str, Files], list[str]]:
    """The folders with their files, and the command's words (folders as `src`, `out`, `new`)."""
    kind = rng.choices(["source", "out", "partial"], [70, 22, 8])[0]
    folders = {"src": good.source}
    if kind == "source":
        folders["src"] = changed(
            good.source, [INDEX, CONFIG, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], rng
        )
        words = rng.choices(
            [
                ["inspect", "src"],
                ["plan", "src"],
                ["convert", "src", "new", "--dry-run"],
                ["convert", "src", "new", *SHARDS],
                ["verify", "out", "--against", "src"],
                ["check", "src", *rng.choice([[], ["--engine", "vllm", "--ep", "2", "--pp", "2"], ["--matrix"]])],
                ["serve", "src", *rng.choice([[], ["--engine", "vllm"], ["--prefill", "src"]])],
            ],
            [20, 35, 15, 15, 5, 10, 10],
        )[0]
        if words[0] in ("plan", "convert"):
            words = [*words, *rng.choice(OPTIONS)]
        if words[0] == "plan":
            words = [*words, *rng.choice([[], ["-v"], ["--tp", "8"], ["-q"]])]
        if words[0] == "verify":
            folders["out"] = good.out
    elif kind == "out":
        names = [
            MANIFEST,
            "kizami-report.jsonl",
            CONFIG,
            INDEX,
            *sorted(n for n in good.out if n.endswith(".safetensors"))[:2],
        ]
        files = changed(good.out, names, rng)
        folders["out"] = forge(files) if rng.random() < 0.6 else files
        words = rng.choice(
            [
                ["verify", "out"],
                ["verify", "out"],
                ["verify", "out", "--against", "src"],
                ["report", "out"],
                ["report", "out", "--format", "markdown"],
                ["check", "out"],
                ["serve", "out", "--prefill", "src"],
                ["inspect", "out"],
                ["plan", "out", *rng.choice(FROM_INT4)],
                ["convert", "out", "new", *SHARDS, *rng.choice(FROM_INT4)],
            ]
        )
    else:
        journal = [name for name in good.partial if name.startswith(".kizami/") and not name.endswith("lock")]
        folders["new.partial"] = changed(good.partial, [*journal, ".kizami/journal.jsonl"], rng)
        words = ["convert", "src", "new", *SHARDS, *rng.choice([[], ["--restart"]])]
    if rng.random() < 0.4 and "markdown" not in words:
        words = [*words, "--json"]
    return folders, words


def changed(files: Files, names: list[str], rng: random.Random) -> Files:
    result = dict(files)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(names) if rng.random() < 0.95 else rng.choice(sorted(files))
        if rng.random() < 0.02:
            result.pop(name, None)
        elif name in result:
            with contextlib.suppress(ValueError, RecursionError):  # changed before, and no JSON any more
                result[name] = change_file(name, result[name], rng)
    return result


# ---------------------------------------------------------------- runs


def run_number(good: Good, folder: Path, seed: int, number: int) -> tuple[list[str], Ran, list[str]]:
    folders, words = make_case(good, random.Random(f"{seed}/{number}"))
    for name, files in folders.items():
        store(files, folder / name)
    for _ in range(3):  # on a busy machine a run may stand still for long
        ran = run(words, folder)
        if ran.seconds <= MAX_SECONDS and ran.code != -signal.SIGALRM:
            break
        shutil.rmtree(folder)
        for name, files in folders.items():
            store(files, folder / name)
    return words, ran, list(broken_rules(words, ran))


def campaign(count: int, seed: int, first: int, keep: Path | None = None) -> int:
    """Runs the numbers, prints what breaks a rule and a summary. Returns how many did."""
    top = Path(tempfile.mkdtemp(prefix="kizami-mutations-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    codes: Counter[str] = Counter()
    begin = time.monotonic()
    slowest, largest, bad = (0.0, 0), (0.0, 0), 0
    try:
        good = make_good(top / "good")
        for number in range(first, first + count):
            folder = top / "case" if keep is None else keep
            words, ran, broken = run_number(good, folder, seed, number)
            codes[f"{words[0]} {ran.code}"] += 1
            slowest, largest = max(slowest, (ran.seconds, number)), max(largest, (ran.mib, number))
            if broken or keep is not None:
                bad += bool(broken)
                print(f"{seed}/{number}: {' '.join(words)}: {'; '.join(broken) or 'no rule broken'}", flush=True)
                print(
                    "\n".join(f"    {line[:300]}" for line in (ran.stderr or ran.stdout).splitlines()[-4:]), flush=True
                )
            if keep is None:
                shutil.rmtree(folder)
            if (number + 1) % 1000 == 0:
                print(f"{seed}/{number}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    finally:
        os.chdir("/")
        shutil.rmtree(top)
    print(
        json.dumps(
            {"ran": count, "broken": bad, "slowest": slowest, "largest": largest, "codes": dict(sorted(codes.items()))}
        )
    )
    return bad


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:4]]
    count, seed, first = (*numbers, *(1000, 0, 0)[len(numbers) :])
    sys.exit(1 if campaign(count, seed, first, Path(sys.argv[4]).absolute() if len(sys.argv) > 4 else None) else 0)
