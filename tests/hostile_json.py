"""JSON and bytes that no writer writes: values, names and numbers that readers get wrong, and ways to put them in."""

import copy
import json
import random
from typing import Any


class Raw(str):
    """Text that stands in the JSON as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may come twice."""


def dumps(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ",".join(f"{json.dumps(str(key))}:{dumps(item)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def nested(depth: int, bracket: str = "[]") -> Raw:
    before, after = ("[", "]") if bracket == "[]" else ('{"a":', "}")
    return Raw(before * depth + "1" + after * depth)


NUMBERS: list[Any] = [
    0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 1000, 99_999, 100_000, 2**31 - 1, 2**31, 2**32,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**18, 10**30, 10**400, -1, -2, -32, -(2**31), -(2**63), 0.0,
    0.5, 1.0, 32.0, 1e18, 1e308, -1.5, Raw("-0"), Raw("-0.0"), Raw("1e400"), Raw("-1e400"), Raw("1E2"),
    Raw("9" * 4300), Raw("9" * 5000), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), True, False, None, "1", "128",
    Raw("01"), Raw("0x10"),
]  # fmt: skip
STRINGS: list[Any] = [
    "", " ", ".", "..", "/", "\\", "../x", "/etc/passwd", "a/b", "con", "\0", "a\0b", "\n", "a\r\nb",
    "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\u202eevil\u202c", "\u2066x\u2069", "\u2028", "\ufeff",
    "\u200b", "[bold red]x[/]", "[link=file:///x]", "<script>alert(1)</script>", "| a | b |", "`x`", "${HOME}",
    "$(id)", "%s%n{0}", "{}", "é" * 300, "模型.層", "x" * 1024, "x" * 1025, "x" * 100_000, "." * 500, "a." * 400,
    "0" * 500, "\u0301" * 50, "😀", "🏴" * 30, "NaN", Raw('"\\ud83d"'), Raw('"\\udc00\\ud83d"'),
    Raw('"\\ud83d\\ude00"'), "__metadata__", "weight", "model", "None", "re:",
]  # fmt: skip
PATTERNS: list[Any] = [
    "re:(a+)+$", "re:(.*)*$", "re:(.*.*.*.*.*.*.*.*.*.*)*x", "re:(x|x|x)*y", "re:.*.*.*.*.*.*.*.*.*.*.*.*=", "re:(",
    "re:[", "re:*", "re:(?P<a>", "re:(?<=.*)x", "re:\\", "re:" + "(" * 200 + ")" * 200, "re:" + "(" * 5000,
    "re:a{1,99999}", "re:(a{1,1000}){1,1000}", "re:a{99999999999}", "re:(?s:.)*", "re:.*", "re:(?i).*", "Linear",
    "Embedding", "lm_head", "re:(model|.)*\\.(layers|.)*(\\d|.)*!", "re:" + "|".join(f"x{i}" for i in range(2000)),
    "re:(?:" * 3000,
]  # fmt: skip
CONTAINERS: list[Any] = [
    [], {}, [[]], [{}], [None], {"": None}, [1, 2], [128, 128], [128], [0, 0], [-1, 128], [1, 1], [10**18, 10**18],
    ["128", "128"], [1.0, 128], [True, True], "128x128", nested(10), nested(63), nested(64), nested(65), nested(1000),
    nested(20_000), nested(70, "{}"), nested(5000, "{}"), Raw("[" * 1000), Raw('{"a":' * 1000), list(range(5000)),
    {f"k{i}": i for i in range(2000)},
]  # fmt: skip
DTYPES: list[Any] = [
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "C64", "F64", "I64", "U64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FN", "f32", "float32", "",
]  # fmt: skip
MODEL_TYPES: list[Any] = [
    "glm_moe_dsa", "glm4_moe", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_k3", "deepseek_v4",
    "glm5_next", "llama", "qwen3_moe", "", None,
]  # fmt: skip
KEYS: list[str] = [
    "model_type", "text_config", "num_hidden_layers", "num_nextn_predict_layers", "quantization_config",
    "config_groups", "compression_config", "weight_block_size", "modules_to_not_convert", "ignore", "targets",
    "weights", "quant_method", "scale_fmt", "kv_cache_scheme", "strategy", "block_structure", "group_size",
    "num_bits", "type", "format", "dtype", "shape", "data_offsets", "__metadata__", "weight_map", "metadata",
    "total_size", "n_routed_experts", "architectures",
]  # fmt: skip
LEAVES = [
    "weight", "weight_scale_inv", "weight_scale", "scale", "weight_packed", "weight_shape", "weight_zero_point",
    "bias", "weight_scale_2", "qweight", "qzeros", "absmax", "input_scale", "k_scale", "gate_up_proj_blocks", "w1",
    "w13",
]  # fmt: skip
MODULES = [
    "model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.0",
    "model.layers.1.mlp.experts.999999.up_proj", "model.layers.99999.mlp.experts.0.gate_proj",
    "model.layers.1.self_attn.q_a_proj", "mtp.0.ffn.experts.0.w1", "mtp", "mtp.x", "mtp.layers.0.eh_proj", "layers.1",
    "layers.0001.mlp.gate", "model.layers.٣.mlp.experts.٤.gate_proj", "re:.*", "Linear",
    "language_model.model.layers.1.mlp.experts.0.up_proj", "visual.blocks.0.attn.qkv", "lm_head", "experts.0.w1",
    "model.layers.-1.x", "model.layers.1.mlp.experts.gate_up_proj", "a.b.c.d", "re:(a+)+", "experts.1",
    "x.experts.2.experts.3.y", "model.layers..mlp",
]  # fmt: skip


def pick(rng: random.Random, values: list[Any]) -> Any:
    """A copy: what is changed later must not change the next case."""
    return copy.deepcopy(rng.choice(values))


def hostile(rng: random.Random) -> Any:
    return pick(rng, rng.choice([NUMBERS, STRINGS, PATTERNS, CONTAINERS, DTYPES, MODEL_TYPES]))


def hostile_name(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return str(pick(rng, STRINGS))
    if kind == 1:
        return rng.choice(KEYS)
    return f"{rng.choice(MODULES)}.{rng.choice(LEAVES)}"


def slots(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or position) of everything below `value`."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if type(node) is list else ()
        for key in keys:
            found.append((node, key))
            todo.append(node[key])
    return found


def change(value: Any, rng: random.Random) -> Any:
    """`value`, parsed JSON, with one thing in it changed (in place where that is possible)."""
    where = slots(value)
    if not where or rng.random() < 0.01:
        return hostile(rng)
    node, key = rng.choice(where)
    old = node[key]
    match rng.randrange(9):
        case 0:
            del node[key]
        case 1:
            node[key] = hostile(rng)
        case 2 if isinstance(node, dict):  # another name, in the same place
            new = rng.choice(list(node)) if rng.random() < 0.3 else hostile_name(rng)
            items = [(new if k == key else k, item) for k, item in node.items()]
            node.clear()
            node.update(items)
        case 3 if isinstance(node, dict):
            node[hostile_name(rng)] = hostile(rng) if rng.random() < 0.6 else old
        case 4 if isinstance(old, dict) and old:  # a key twice
            node[key] = Pairs([*old.items(), rng.choice(list(old.items()))])
        case 5:
            other, at = rng.choice(where)
            node[key] = copy.deepcopy(other[at])  # no swap: an object could come to lie in itself
        case 6 if type(old) is int:
            node[key] = (
                old + rng.choice([-256, -64, -8, -1, 1, 2, 8, 64, 256, 2**20, 2**40]) if rng.random() < 0.7 else -old
            )
        case 7 if type(old) is str:
            node[key] = rng.choice(
                [*DTYPES, *MODEL_TYPES, *STRINGS, *PATTERNS, (old * 50)[:200_000], old[: len(old) // 2]]
            )
        case _:
            node[key] = pick(rng, NUMBERS) if not isinstance(old, dict | list) else pick(rng, CONTAINERS)
    return value


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(7):
            case 0 if result:
                result[at % len(result)] = rng.randrange(256)
            case 1 if result:
                result[at % len(result)] ^= 1 << rng.randrange(8)
            case 2:
                del result[at : at + rng.choice([1, 2, 9, 64, 500])]
            case 3:
                result[at:at] = rng.choice(TOKENS)
            case 4:
                other = rng.randrange(len(result) + 1)
                result[at : at + 8] = result[other : other + rng.choice([1, 8, 40])]
            case 5:
                del result[at:]
            case _:
                result += bytes(rng.choice([1, 7, 4096]))
    return bytes(result)


TOKENS = [
    b"[", b"{", b'"', b"-", b"9" * 30, b"null", b"1e5", b"1e400", b"-0", b"NaN", b"\\ud800", b",", b"true", b"\0",
    b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b"\x1b[2J", b"[" * 3000, b'{"a":' * 300, b" " * 10_000, b"/*",
    b"\\u0000", b"0" * 5000,
]  # fmt: skip
