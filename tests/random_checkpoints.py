"""Small odd checkpoints from a seed: styles of names, dialects, dtypes, shapes, shards and options in any mixture.

A Case knows what must come of it: which modules are packed, which tensors are dropped, or for which of a few reasons
the conversion must be refused. That knowledge is written down here once more, from the README, not taken from the code.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from make_cases import PT, Checkpoint, Tensor, bf16, random_bytes

DTYPES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "BOOL": 1, "I64": 8}
PREFIXES = ("model.", "model.", "language_model.model.", "", "model.language_model.", "a.decoder.", "re:m.")
MLPS = ("mlp", "mlp", "block_sparse_moe", "ffn", "feed_forward", "moe")
TARGETS = (
    "re:.*experts.*",
    "re:.*(gate|up|down)_proj$",
    "re:.*self_attn.*",
    "re:.*",
    "re:.*(w[123]|_proj)$",
    "lm_head",
)
IGNORES = (
    r"re:.*layers\.1\..*", r"re:.*experts\.0\..*", "re:.*attn.*_proj$", "nothing.like.this", "re:.*embed_tokens$",
    r"re:.*\.(mtp|layers)\.\d+\.\w+\.experts\.1\.", "re:.*(kv_b_proj|lm_head)$",
)  # fmt: skip
NO_LINEARS = ("embed_tokens", "lm_head", "gate")  # never kept in FP8


@dataclass
class Case:
    seed: int
    checkpoint: Checkpoint
    options: list[str]
    refusals: set[str] = field(default_factory=set)  # codes; empty: it is converted
    packed: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


@dataclass
class _Linear:
    """A 2-D weight, what its config or its dtype says of it, and whether a number of it is none."""

    module: str
    shape: tuple[int, int]
    dtype: str
    expert: bool
    mtp: bool
    kept_block: tuple[int, int] | None  # of an FP8 weight: rows and columns that share a scale
    finite: bool = True


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 20251])
        self.tensors: dict[str, Tensor] = {}
        self.mtp: set[str] = set()
        self.linears: list[_Linear] = []
        self.stale: set[str] = set()
        self.group = int(self.one_of([32, 32, 32, 64, 128]))
        self.prefix, self.mlp = self.one_of(PREFIXES), self.one_of(MLPS)
        self.parts = self.one_of([("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
        self.layers, self.experts = int(self.one_of([0, 1, 2, 2, 3])), int(self.rng.integers(1, 4))
        self.block = self.one_of([(128, 128), (128, 128), (128, 128), (64, 32), (16, 96), None, None])
        self.channel = self.block is None and self.chance(0.5)
        self.suffix = self.one_of(["weight_scale_inv", "weight_scale_inv", "weight_scale", "scale"])
        self.scale_dtype = self.one_of(["F32", "F32", "BF16", "F16", "F8_E8M0", "U8"])
        self.fp8_share = self.one_of([1.0, 1.0, 0.7, 0.0])
        self.narrow = self.chance(0.1)  # some K that no group divides
        self.broken = self.chance(0.1)  # some number that is none

    def one_of(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    # ------------------------------------------------------------ tensors

    def columns(self) -> int:
        odd = self.narrow and self.chance(0.3)
        return int(self.one_of([8, 40, 33]) if odd else self.group * self.rng.integers(1, 1 + 256 // self.group))

    def linear(self, module: str, *, expert: bool = False, mtp: bool = False, shape: Any = None) -> None:
        shape = shape or (int(self.rng.integers(1, 200)), self.columns())
        if self.chance(self.fp8_share):
            self.fp8(module, shape, expert, mtp)
            return
        dtype = self.one_of(["BF16", "BF16", "F16", "F32"])
        values = self.rng.standard_normal(shape) * 2.0 ** self.rng.integers(-12, 4)
        finite = not (self.broken and self.chance(0.3))
        if not finite:
            values[-1, -1] = self.one_of([np.nan, np.inf, -np.inf])
        data = {
            "BF16": _bf16_bytes,
            "F16": lambda x: x.astype("<f2").tobytes(),
            "F32": lambda x: x.astype("<f4").tobytes(),
        }
        self.add(module + ".weight", Tensor(dtype, shape, data[dtype](values)), mtp)
        self.linears.append(_Linear(module, shape, dtype, expert, mtp, None, finite))

    def fp8(self, module: str, shape: tuple[int, int], expert: bool, mtp: bool) -> None:
        rows, cols = shape
        block = self.block or ((1, cols) if self.channel else shape)
        grid: tuple[int, ...] = (-(-rows // block[0]), -(-cols // block[1]))
        if self.channel:
            grid = self.one_of([(rows,), (rows, 1)])
        elif self.block is None or (grid == (1, 1) and self.chance(0.3)):
            grid = self.one_of([(), (1,), (1, 1)])
        codes = random_bytes(f"{module} {self.rng.integers(1 << 30)}", rows, cols)
        if self.chance(0.2):
            codes[self.rng.integers(rows)] = 0
        exponent = self.one_of([-7, -7, -7, -12, 3, *([-135, -118, 105] if self.scale_dtype != "F16" else [])])
        values = 2.0**exponent * self.rng.uniform(0.5, 2, grid)
        finite = not (self.broken and self.chance(0.3))
        if not finite and self.chance(0.5):
            codes[-1, -1] = self.one_of([0x7F, 0xFF])
        elif not finite:
            values = np.full(grid, np.nan)
        elif self.chance(0.1) and self.scale_dtype not in ("F8_E8M0", "U8"):
            values = values * 0
        self.add(module + ".weight", Tensor("F8_E4M3", shape, codes.tobytes()), mtp)
        self.add(f"{module}.{self.suffix}", Tensor(self.scale_dtype, grid, self.scale_bytes(values)), mtp)
        if self.chance(0.1):
            self.add(module + ".input_scale", Tensor("F32", (), np.float32(1).tobytes()), mtp)
            self.stale.add(module + ".input_scale")
        self.linears.append(_Linear(module, shape, "F8_E4M3", expert, mtp, block, finite))

    def scale_bytes(self, values: np.ndarray) -> bytes:
        match self.scale_dtype:
            case "F32":
                return values.astype("<f4").tobytes()
            case "BF16":
                return _bf16_bytes(values)
            case "F16":
                return values.astype("<f2").tobytes()
        exponents = np.where(np.isnan(values), 128, np.rint(np.log2(np.where(values > 0, values, 1))))
        return np.clip(exponents + 127, 0, 255).astype(np.uint8).tobytes()

    def add(self, name: str, tensor: Tensor, mtp: bool = False) -> None:
        self.tensors[name] = tensor
        if mtp:
            self.mtp.add(name)

    def other(self, name: str, mtp: bool = False) -> None:
        """Not a linear: a norm, a bias, a table, nothing at all."""
        dtype = self.one_of(["BF16", "F32", "F16", "I64", "BOOL", "U8", "I32"])
        shape = self.one_of([(), (0,), (7,), (3, 5, 2), (1,), (64,), (2, 0, 3)])
        self.add(name, Tensor(dtype, shape, self.rng.bytes(DTYPES[dtype] * int(np.prod(shape)))), mtp)

    # ------------------------------------------------------------ the model

    def layer(self, at: str, moe: bool, mtp: bool) -> None:
        attention = self.one_of([
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            ("q_proj", "k_proj", "v_proj", "o_proj"), ("o_proj",), (),
        ])  # fmt: skip
        for part in attention:
            self.linear(f"{at}self_attn.{part}", mtp=mtp)
        if self.chance(0.2):
            self.linear(at + "self_attn.indexer.wq_b", mtp=mtp)
        self.other(at + "input_layernorm.weight", mtp)
        inner = f"{at}{self.mlp}."
        if moe:
            self.linear(inner + "gate", mtp=mtp, shape=(self.experts, 64))
            self.other(inner + "gate.e_score_correction_bias", mtp)
            for expert in range(self.experts):
                for part in self.parts:
                    self.linear(f"{inner}experts.{expert}.{part}", expert=True, mtp=mtp)
            if self.chance(0.5):
                for part in self.parts:
                    self.linear(f"{inner}shared_experts.{part}", mtp=mtp)
        else:
            for part in self.parts:
                self.linear(inner + part, mtp=mtp)
        if self.chance(0.2):
            self.other(
                at + self.one_of(["weight_scale_inv_norm.weight", "self_attn.scale.bias", "é.²", "x y'\"[z]"]), mtp
            )
        if self.chance(0.1):
            self.linear(at + self.one_of(["down_proj", "foo.²", "w1", "experts_like.0.w1", "a..b"]), mtp=mtp)

    def model(self) -> dict[str, Any]:
        """The tensors; returns the config."""
        first_moe = int(self.chance(0.5) and self.layers > 1)
        for i in range(self.layers):
            self.layer(f"{self.prefix}layers.{i}.", i >= first_moe, False)
        kind = self.one_of(["none", "layer", "layer", "mtp.0.", "mtp.layers.0."])
        if kind != "none":
            at = f"{self.prefix}layers.{self.layers}." if kind == "layer" else kind
            self.linear(at + "eh_proj", mtp=True)
            self.layer(at, True, True)
        self.linear(self.prefix + "embed_tokens")
        self.other(self.prefix + "norm.weight")
        if self.chance(0.7):
            self.linear(self.prefix.removesuffix("model.") + "lm_head")
        if self.chance(0.2):
            self.linear("vision_tower.blocks.0.mlp.fc0")
        return self.config(kind)

    def config(self, mtp: str) -> dict[str, Any]:
        quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        if self.block is not None:
            quantization["weight_block_size"] = list(self.block)
        if self.scale_dtype in ("U8", "F8_E8M0"):
            quantization["scale_fmt"] = "ue8m0"
        config: dict[str, Any] = {
            "model_type": self.one_of(["deepseek_v3", "glm4_moe", "kimi_k2", "someone_else", None])
        }
        config |= {"x": [1.5, None, {"y": "é\u202e[red]"}], "rms_norm_eps": 1e-06, "eos": 10**20}
        numbers: dict[str, Any] = {self.one_of(["n_routed_experts", "num_experts", "z"]): self.experts}
        if mtp != "layer" or self.chance(0.7):
            numbers["num_hidden_layers"] = self.layers
        if self.chance(0.5):
            numbers["num_nextn_predict_layers"] = int(mtp != "none")
        if self.chance(0.3):
            config |= {"text_config": numbers}
        else:
            config |= numbers
        holder = config["text_config"] if "text_config" in config and self.chance(0.5) else config
        if any(linear.dtype == "F8_E4M3" for linear in self.linears):
            holder["quantization_config"] = quantization
        return config

    def sharded(self, config: dict[str, Any]) -> Checkpoint:
        count = int(self.rng.integers(1, 5))
        pattern = self.one_of(
            ["model-{}-of-{}.safetensors", "model-{:05}-of-{:05}.safetensors", "w eight{}é{}.safetensors"]
        )
        files = [pattern.format(i + 1, count) for i in range(count)]
        indexed = count > 1 or self.chance(0.5)
        files = files if indexed else ["model.safetensors"]
        shards: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        names = list(self.tensors)
        self.rng.shuffle(names)
        for name in names:
            shards[self.one_of(files)][name] = self.tensors[name]
        side = {"tokenizer.json": b"{}", "sub/é.txt": b"x", "README.md": b"---\nlicense: mit\n---\n", ".hidden": b""}
        side = {name: data for name, data in side.items() if self.chance(0.6)}
        metadata = self.one_of([PT, PT, {}, None, ..., {"format": "np", "é": "\u202e"}])
        shards = {file: tensors for file, tensors in shards.items() if tensors}
        return Checkpoint(config, shards, side, indexed, metadata=metadata)


def _bf16_bytes(values: np.ndarray) -> bytes:
    values = values.astype(np.float32)
    words = np.where(np.isnan(values), 0x7FC0, bf16(np.where(np.isnan(values), 0, values)))
    return words.astype("<u2").tobytes()


def random_case(seed: int) -> Case:
    maker = _Maker(seed)
    config = maker.model()
    checkpoint = maker.sharded(config)
    rng, chance, one_of = maker.rng, maker.chance, maker.one_of
    rest, mtp = one_of(["bf16", "bf16", "fp8"]), one_of(["quantize", "quantize", "keep", "drop"])
    targets = [one_of(TARGETS) for _ in range(int(rng.integers(1, 3)))] if chance(0.25) else []
    ignores = [one_of(IGNORES) for _ in range(int(rng.integers(1, 3)))] if chance(0.4) or "re:.*" in targets else []
    if "re:.*" in targets and chance(0.8):
        ignores.append("re:.*embed_tokens$")
    if chance(0.2):
        ignores.append(one_of(maker.linears).module)
    options = ["--group-size", str(maker.group), "--rest", rest, "--mtp", mtp, "--workers", one_of(["1", "2"])]
    options += ["--max-shard-size", one_of(["1", "20KB", "300KB", "5GB"])]
    options += one_of([
        ["--method", "minmax"], ["--method", "signed"], ["--method", "search"], ["--clip-allowance", "0.5"],
        ["--scale-sign", "positive"],
    ])  # fmt: skip
    options += [word for pattern in targets for word in ("--targets", pattern)]
    options += [word for pattern in ignores for word in ("--ignore", pattern)]
    made = Case(seed, checkpoint, options)
    made.dropped = (maker.mtp if mtp == "drop" else set()) | maker.stale
    left = [linear for linear in maker.linears if not (linear.mtp and mtp == "drop")]
    for linear in left:
        wanted = any(_hits(p, linear.module) for p in targets) if targets else linear.expert
        if wanted and not (linear.mtp and mtp == "keep") and not any(_hits(p, linear.module) for p in ignores):
            made.packed.add(linear.module)
    made.refusals = _refusals(left, made.packed, maker.group, rest)
    return made


def _hits(pattern: str, module: str) -> bool:
    return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module


def _refusals(linears: list[_Linear], packed: set[str], group: int, rest: str) -> set[str]:
    """All reasons there are; kizami may name any of them."""
    found = set() if packed else {"nothing_matched"}
    forms: dict[str, str] = {}
    blocks: set[tuple[int, int] | str | None] = set()  # of what stays FP8: one kind, of two that engines have
    for linear in linears:
        kept = linear.dtype == "F8_E4M3" and rest == "fp8" and linear.module.rpartition(".")[2] not in NO_LINEARS
        forms[linear.module] = "int4" if linear.module in packed else "fp8" if kept else "plain"
        computed = linear.module in packed or linear.dtype == "F8_E4M3"
        if computed and not linear.finite:
            found.add("non_finite")
        if linear.module in packed and linear.shape[1] % group:
            found.add("group_does_not_divide")
        if linear.module in packed and linear.module.endswith("embed_tokens"):
            found.add("unsupported_target")
        if forms[linear.module] == "fp8":
            blocks.add("channel" if linear.kept_block == (1, linear.shape[1]) else linear.kept_block)
    if blocks - {(128, 128), "channel"} or len(blocks) > 1:
        found.add("unsupported_block")
    for members in (
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_proj", "k_proj", "v_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
    ):
        for module in forms:
            parent, _, part = module.rpartition(".")
            siblings = {forms[f"{parent}.{m}"] for m in members if f"{parent}.{m}" in forms}
            if part in members and len(siblings) > 1:
                found.add("fused_pair_split")
    return found
