"""kizami's output in vLLM's CPU build, against the BF16 model that it stands for in the same vLLM.

What this proves: vLLM reads the config as it is meant (which scheme each module gets), finds every tensor and puts it
where it belongs. What it does not prove: anything about vLLM's INT4 and FP8 kernels; their matrix products are done in
torch here (tests/vllm_plugin.py), since vLLM's CPU build has these kernels only for some CPUs. GLM-5 and DeepSeek-V3.2
are missing: vLLM has no sparse attention on CPUs.

vLLM's pins live in an environment of their own; `.ci/run` makes one.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:  # to import it takes seconds, and this process does not need it
    pytest.skip("vLLM is not installed: its pins need an environment of their own", allow_module_level=True)

from case_runner import kizami
from client_fixtures import convert, dense_twin, load_tensors, read_config
from client_models import fp8_model
from forging import forge_tensors

from kizami.quantize.verify import verify

pytestmark = pytest.mark.vllm
Answer = dict[str, Any]
Ask = Callable[[Path], Any]
Converted = Callable[..., Path]
TOLERANCE = 2e-4  # of log probabilities, in float32: products are summed in another order
MORE = ("--set", "shared_expert=int4", "--set", "dense_mlp=int4")
FORMS = {  # family, options that change no value, options that do
    "experts": ("deepseek_v3", (), ()),
    "fp8-rest": ("deepseek_v3", ("--rest", "fp8"), ()),
    "gptq": ("deepseek_v3", ("--format", "gptq"), ()),
    "awq": ("deepseek_v3", ("--format", "awq"), ()),
    "more-linears": ("deepseek_v3", (), (*MORE, "--group-size", "128", "--method", "minmax")),
    "glm-fp8-rest": ("glm4_moe", ("--rest", "fp8"), ()),
    "glm-more-linears": ("glm4_moe", (), (*MORE, "--set", "attention=int4")),
    "glm-gptq": ("glm4_moe", ("--format", "gptq_v2"), (*MORE, "--set", "attention=int4")),
    "glm-awq": ("glm4_moe", ("--format", "awq"), (*MORE, "--set", "attention=int4")),
}
# vLLM's classes, by what a linear's tensors are called and what it is: an expert, or any other.
SCHEMES = {
    "weight_packed": ("CompressedTensorsWNA16MoEMethod", "CompressedTensorsWNA16"),
    "weight_scale": ("no FP8 experts", "CompressedTensorsW8A8Fp8"),
    "g_idx": ("AutoGPTQMoEMethod", "AutoGPTQLinearMethod"),
    "qweight": ("AutoAWQMoEMethod", "AutoAWQMarlinLinearMethod"),
    "weight": ("no plain experts", "UnquantizedLinearMethod"),
}
FUSED = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"), "routed_experts": ("0.gate_proj", "3.up_proj", "7.down_proj"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """ask(folder): what vLLM says of a model, once per folder."""
    command = [sys.executable, str(Path(__file__).with_name("vllm_engine.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None

        @cache
        def asked(folder: Path) -> Answer:
            print(folder, file=engine.stdin, flush=True)
            return dict(json.loads(engine.stdout.readline()))

        yield asked
        engine.stdin.close()
    assert engine.returncode == 0


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """converted(family, *options): the output folder, made once."""
    folder = tmp_path_factory.mktemp("vllm")
    source = cache(lambda family: fp8_model(family, folder / "sources" / family))

    @cache
    def make(family: str, *options: str) -> Path:
        return convert(source(family), folder / re.sub(r"\W+", "_", "_".join((family, *options))), *options)

    return make


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """twin(folder): the dense BF16 model that an output in pack-quantized stands for."""
    folder = tmp_path_factory.mktemp("twins")
    return cache(lambda out: dense_twin(out, folder / out.name))


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a log probability that both give."""
    pairs = zip(a["log_probs"], b["log_probs"], strict=True)
    return max(abs(x[token] - y[token]) for x, y in pairs for token in x.keys() & y.keys())


def scheme(tensors: Collection[str], module: str) -> str:
    """The class that vLLM must use for one of its modules, by the tensors of a checkpoint."""
    parent, _, leaf = module.rpartition(".")
    found = set()
    for member in FUSED.get(leaf, (leaf,)):
        kind = next(kind for kind in SCHEMES if f"{parent}.{member}.{kind}" in tensors)
        found.add(SCHEMES[kind][0 if leaf == "routed_experts" else 1])
    (name,) = found
    return name


@pytest.mark.parametrize("form", FORMS)
def test_vllm_answers_like_the_dense_twin(form: str, twin: Ask, converted: Converted, ask: Ask) -> None:
    family, layout, options = FORMS[form]
    out = converted(family, *layout, *options)
    ours, theirs = ask(out), ask(twin(converted(family, *options)))
    assert "error" not in ours | theirs
    assert ours["tokens"] == theirs["tokens"]
    assert distance(ours, theirs) < TOLERANCE
    tensors = load_tensors(out)
    linears = {name: found for name, found in ours["schemes"].items() if ".self_attn.attn" not in name}
    heads = {name for name in linears if name in ("lm_head", "model.embed_tokens")}
    assert {linears[name] for name in heads} == {"UnquantizedEmbeddingMethod"}
    assert {name: linears[name] for name in linears.keys() - heads} == {
        name: scheme(tensors, name) for name in linears.keys() - heads
    }


def test_vllm_reads_the_same_model_under_kimis_name(converted: Converted, ask: Ask, tmp_path: Path) -> None:
    out = converted("deepseek_v3")
    kimi = Path(shutil.copytree(out, tmp_path / "kimi"))
    (kimi / "config.json").write_text(json.dumps(read_config(out) | {"model_type": "kimi_k2"}))
    assert ask(kimi) == ask(out)


@pytest.mark.parametrize(
    "lost",
    [
        "experts.3.down_proj.weight_scale",
        "experts.3.gate_proj.weight_packed",
        "experts.3.",
        "shared_experts.up_proj.weight",
    ],
)
def test_vllm_computes_something_else_without_a_word_where_verify_and_check_name_the_module(
    lost: str, converted: Converted, ask: Ask, tmp_path: Path
) -> None:
    whole = converted("deepseek_v3")
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    lost = f"model.layers.1.mlp.{lost}"
    forge_tensors(damaged, drop=[name for name in load_tensors(whole) if name.startswith(lost)])
    found = ask(damaged)
    assert "error" not in found
    assert not distance(found, ask(whole)) < 0.1  # or NaN
    module = lost.rpartition(".")[0]
    assert any(str(problem.tensor).startswith(module) for problem in verify(damaged).problems)
    said = kizami("check", damaged, "--engine", "vllm")
    assert said.code == 1
    assert lost.removeprefix("model.layers.1.mlp.").rpartition(".")[0] in said.stdout
