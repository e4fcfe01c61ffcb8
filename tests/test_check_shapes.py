"""Rules of `check` about sizes per rank, each with its numbers, and where they do not hold."""

import pytest
from engine_checkpoints import Made, good
from engine_failures import Mutation, awq, chain, gptq, ignore, pack_all, set_quant, to_fp8

from kizami.formats.engines.check import find_problems
from kizami.formats.engines.finding import EngineName
from kizami.formats.tensors import TensorSpec

DENSE_IN = ignore(without=(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",))
DENSE = chain(DENSE_IN, pack_all("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"))


def _hidden(size: int) -> Mutation:
    """Experts of another hidden size."""

    def mutate(made: Made) -> None:
        for name, spec in list(made.tensors.items()):
            if ".mlp.experts." in name and name.endswith(("weight_packed", "weight_scale")):
                factor = 8 if name.endswith("packed") else 32
                down = ".down_proj." in name
                shape = (size, spec.shape[1]) if down else (spec.shape[0], size // factor)
                made.tensors[name] = TensorSpec(name, spec.dtype, shape)

    return mutate


def _rows(ending: str, rows: int) -> Mutation:
    """Another number of rows of an FP8 linear."""

    def mutate(made: Made) -> None:
        name = next(name for name in made.tensors if name.endswith(f"{ending}.weight"))
        cols = made.tensors[name].shape[1]
        made.add(name, "F8_E4M3", rows, cols)
        made.add(f"{name}_scale_inv", "F32", -(-rows // 128), -(-cols // 128))

    return mutate


def _w4afp8(made: Made) -> None:
    """Experts as two nibbles a byte; FP8 in blocks elsewhere."""
    made.config["quantization_config"] = {"quant_method": "w4afp8"}
    for name in [name for name in made.tensors if ".mlp.experts." in name and name.endswith(".weight")]:
        rows, cols = made.tensors[name].shape
        made.add(name, "I8", rows, cols // 2)
        made.add(f"{name}_scale_inv", "F32", rows, cols // 128)


EXPERTS, LINEAR, SIZES = "expert_shape", "linear_shape", "parallel_sizes"


@pytest.mark.parametrize(
    ("base", "mutation", "engine", "tp", "ep", "code", "words"),
    [
        ("glm4 int4", None, "sglang", 8, 1, EXPERTS, None),
        ("glm4 int4", None, "sglang", 16, 1, EXPERTS, "1536 on 16 ranks is 96, no multiple of Marlin's tile 64"),
        ("glm4 int4", None, "vllm", 16, 1, EXPERTS, "note: experts: 1536 on 16 ranks is 96, padded"),
        ("glm4 int4", None, "sglang", 16, 16, EXPERTS, None),
        ("glm4 int4", None, "sglang", 16, 2, EXPERTS, None),
        ("glm4 int4", None, "vllm", 32, 1, EXPERTS, "1536 on 32 ranks is 48, no multiple of the group 32: ValueError"),
        ("glm4 int4", None, "sglang", 32, 1, EXPERTS, "group 32: wrong scales without a message"),
        ("kimi thinking", _hidden(7200), "sglang", 1, 1, EXPERTS, "hidden size 7200 is not a multiple of 128"),
        ("kimi thinking", _hidden(7232), "vllm", 8, 1, EXPERTS, "7232 is not a multiple of 128"),
        ("kimi thinking", None, "sglang", 3, 1, EXPERTS, "2048 rows on 3 ranks is 682.667"),
        ("glm fp8", None, "sglang", 16, 1, EXPERTS, None),
        ("glm fp8", None, "sglang", 32, 1, EXPERTS, "2048 on 32 ranks is 64, not a multiple of the FP8 block 128"),
        ("glm fp8", None, "vllm", 32, 32, EXPERTS, None),
        ("glm4 fp8", None, "vllm", 32, 1, EXPERTS, None),
        ("kimi thinking", gptq(), "vllm", 32, 1, EXPERTS, None),
        ("kimi thinking", gptq(), "vllm", 128, 1, EXPERTS, "2048 on 128 ranks is 16"),
        ("glm int4", awq, "vllm", 32, 1, EXPERTS, None),
        ("glm int4", awq, "vllm", 128, 1, EXPERTS, "2048 on 128 ranks is 16"),
        ("glm fp8", _w4afp8, "sglang", 16, 1, EXPERTS, None),
        ("glm fp8", _w4afp8, "sglang", 32, 1, EXPERTS, "2048 on 32 ranks is 64, no multiple of the group 128"),
        ("glm int4", DENSE, "sglang", 8, 1, LINEAR, None),
        ("glm int4", DENSE, "sglang", 128, 1, LINEAR, "down_proj: [6144, 96] per rank"),
        ("glm int4", DENSE, "vllm", 128, 1, LINEAR, None),
        ("glm int4", DENSE, "vllm", 256, 1, LINEAR, "48 columns per rank, not a multiple of the group 32"),
        ("glm int4", DENSE, "vllm", 5, 1, LINEAR, "gate_proj: [12288, 6144] cannot be cut into 5"),
        ("glm int4", DENSE, "vllm", 5, 1, LINEAR, "down_proj: [6144, 12288] cannot be cut into 5"),
        ("glm fp8", _rows("layers.0.mlp.gate_proj", 12224), "vllm", 1, 1, LINEAR, "gate_proj: 12224 rows on 1 ranks"),
        ("glm fp8", _rows("layers.0.self_attn.q_b_proj", 16320), "vllm", 1, 1, LINEAR, None),  # merged with nothing
        ("glm fp8", _rows("layers.0.self_attn.q_b_proj", 16320), "vllm", 2, 1, LINEAR, "q_b_proj: 16320 rows on 2"),
        ("glm4 fp8", None, "vllm", 96, 1, LINEAR, None),
        ("glm int4", None, "vllm", 5, 1, LINEAR, None),  # plain linears are checked by the heads
        ("glm fp8", None, "vllm", 16, 1, LINEAR, None),
        ("glm fp8", None, "vllm", 32, 1, LINEAR, "down_proj: 2048 columns on 32 ranks is 64, FP8 blocks have 128"),
        ("glm fp8", None, "sglang", 64, 1, LINEAR, "gate_proj: 2048 rows on 64 ranks is 32, FP8 blocks have 128"),
        ("glm4 fp8", None, "vllm", 32, 1, LINEAR, None),  # 8 KV heads are repeated
        ("glm4 fp8", None, "vllm", 7, 1, LINEAR, "q_proj: 12288 on 7 ranks"),
        ("glm4 fp8", None, "sglang", 12, 1, SIZES, "8 KV heads on 12 ranks"),
        ("glm4 fp8", None, "sglang", 16, 1, SIZES, None),
        ("kimi thinking", None, "vllm", 8, 4, SIZES, "spreads experts over all 8 ranks"),
        ("kimi thinking", None, "sglang", 8, 4, SIZES, None),
        ("kimi thinking", None, "sglang", 8, 3, SIZES, "ep 3 does not divide tp 8"),
        ("kimi thinking", None, "sglang", 64, 64, SIZES, "32 experts on 64 ranks is 0.5 each"),
        ("kimi thinking", None, "vllm", 64, 64, SIZES, None),
        ("glm fp8", chain(_w4afp8, set_quant(quant_method="w4afp8")), "sglang", 8, 1, "no_kernel", None),
        ("kimi thinking", to_fp8("layers.0.mlp.gate_proj"), "vllm", 1, 1, "fused_members", "gate_proj fp8"),
    ],
)  # fmt: skip
def test_sizes_per_rank(
    base: str, mutation: Mutation | None, engine: EngineName, tp: int, ep: int, code: str, words: str | None
) -> None:
    made = good(base)
    if mutation:
        mutation(made)
    found = [finding for finding in find_problems(made.served, engine, tp=tp, ep=ep) if finding.code == code]
    told = [("" if finding.severity == "error" else f"{finding.severity}: ") + finding.message for finding in found]
    if words is None:
        assert told == []
    else:
        assert any(line.startswith("note: ") == words.startswith("note: ") and words in line for line in told), told


def test_the_advice_is_parallelism_only_where_it_helps() -> None:
    made = good("kimi thinking")
    for name, spec in made.tensors.items():
        if ".gate_proj.weight" in name and ".experts." in name and not name.endswith("weight_shape"):
            made.tensors[name] = TensorSpec(name, spec.dtype, (2064, spec.shape[1]))
    (odd,) = [found for found in find_problems(made.served, "vllm") if found.code == "expert_shape"]
    assert "group size that divides" in odd.advice
    (cut,) = [found for found in find_problems(good("glm4 int4").served, "vllm", tp=32) if found.code == "expert_shape"]
    assert "expert parallelism" in cut.advice
