"""`convert --engine llmcompressor`: what it refuses, and that its codes are those that llm-compressor itself saves.

The refusals run anywhere. The rest needs the [llmcompressor] extra, which wants an environment of its own. Their side
of the comparison is llm-compressor as its users have it: a BF16 checkpoint, AutoModelForCausalLM, oneshot with a
recipe, save_pretrained.
"""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import Run

from kizami.calibration.llmcompressor import limits
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.given import engine_facts, given_steps
from kizami.quantize.planner import build_plan
from kizami.quantize.settings import Method, Policy

TEXT = Path(__file__).parent.parent / "examples" / "heldout.txt"
ENGINE = ("--engine", "llmcompressor")
VERSIONS = {"llmcompressor": "0.14.0.1", "compressed-tensors": "0.19.0", "torch": "2.13.0", "transformers": "5.17.0"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "awq"), "--method awq is llm-compressor's"),
        (("--data", TEXT), "--data is for --engine llmcompressor"),
        (("--samples", 3), "--samples is for --engine llmcompressor"),
        (("--seq-len", 64), "--seq-len is for --engine llmcompressor"),
        (("--seed", 1), "--seed is for --engine llmcompressor"),
        (("--tokenizer", "x"), "--tokenizer is for --engine llmcompressor"),
        (ENGINE, "llmcompressor with --method search; expected gptq or awq"),
        ((*ENGINE, "--method", "weighted"), "llmcompressor with --method weighted; expected gptq or awq"),
        ((*ENGINE, "--method", "gptq", "--stats", "x"), "--stats with --engine llmcompressor"),
        ((*ENGINE, "--method", "gptq", "--clip-allowance", 1), "--clip-allowance 1 with --engine llmcompressor"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", *options)
    assert done.code == 2
    assert said in done.err
    assert "hint: " in done.err or "--clip-allowance" in said
    assert list(tmp_path.iterdir()) == []


def test_plan_has_no_awq(kizami: Run, tiny_checkpoint: Path) -> None:
    done = kizami("plan", tiny_checkpoint, "--method", "awq")
    assert done.code == 2
    assert "kizami convert --engine llmcompressor" in done.err


def test_variables_that_are_meant_for_calibrate_do_not_stop_a_conversion(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_SAMPLES", "3")
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--dry-run").code == 0


def missing(package: str) -> str:
    raise PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("version", "said"),
    [(missing, "which is not installed"), (lambda package: "0.15.0", "needs llmcompressor 0.14.0.1; 0.15.0 is")],
)
def test_a_missing_or_another_llm_compressor_is_told_with_what_to_install(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Any, said: str
) -> None:
    monkeypatch.setattr(limits, "version", version)
    done = kizami("convert", demo_checkpoint, tmp_path / "out", *ENGINE, "--method", "gptq", "--data", TEXT)
    assert done.code == 2
    assert said in done.err
    assert "pip install 'kizami[llmcompressor]' in an environment of its own" in done.err


def test_a_model_too_large_for_memory_is_refused_with_the_numbers_before_anything_is_loaded(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(limits, "version", VERSIONS.__getitem__)
    monkeypatch.setattr(limits, "available_memory", lambda: 20_000_000)
    monkeypatch.setattr(limits, "load_engine", lambda: pytest.fail("it was loaded"))
    words = ("convert", demo_checkpoint, tmp_path / "out", *ENGINE, "--method", "gptq", "--data", TEXT)
    done = kizami(*words, "--seq-len", 128, "--samples", 8, "--json")
    assert done.code == 2
    error = done.json["error"]
    assert error["code"] == "out_of_memory"
    # 10 million weights in BF16, the Hessians of 16 experts, what solving one takes, 7 x 128 tokens
    assert "bytes are needed at least, 20,000,000 are available" in error["message"]
    needed = int(error["message"].split(": ")[1].split()[0].replace(",", ""))
    assert 25_000_000 < needed < 40_000_000
    assert list(tmp_path.iterdir()) == []


def test_needed_memory_counts_model_hessians_and_tokens() -> None:
    shapes = {"l.0.up_proj": (8, 16), "l.0.down_proj": (16, 8), "l.1.up_proj": (8, 16)}
    layers = {"l.0.up_proj": 0, "l.0.down_proj": 0, "l.1.up_proj": 1}
    solving = 4 * (4 * 16 * 16 + 3 * 8 * 16)
    gptq = limits.needed_memory("gptq", 1000, shapes, layers, 10)
    assert gptq == 2000 + 4 * (16 * 16 + 8 * 8) + solving + 4 * 10 * 16
    assert limits.needed_memory("awq", 1000, shapes, layers, 10) == 2000 + 2 * 10 * 8 + 4 * 10 * 16


def test_available_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    assert limits.available_memory(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert limits.available_memory(meminfo, tmp_path) == 4000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    assert limits.available_memory(meminfo, tmp_path) == 4000
    assert limits.available_memory(tmp_path / "none", tmp_path / "none") is None


# ------------------------------------------------------------------------------------------- with llm-compressor

FAMILIES = ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "deepseek_v32")
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


@pytest.fixture(scope="module")
def engine() -> Any:
    pytest.importorskip("llmcompressor")
    return limits.load_engine()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> dict[str, Path]:
    from client_fixtures import kimi_k2, kimi_k25
    from client_models import fp8_model

    folder = tmp_path_factory.mktemp("sources")
    kimi = {"kimi_k2": kimi_k2(demo_checkpoint, folder / "k2"), "kimi_k25": kimi_k25(demo_checkpoint, folder / "k25")}
    return {"demo": demo_checkpoint} | kimi | {family: fp8_model(family, folder / family) for family in FAMILIES}


@pytest.mark.parity
def test_the_text_model_of_kimi_k25_is_packed_as_that_of_k2(
    engine: Any, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Its names have a prefix, its config is nested, and a vision tower lies beside it."""
    from safetensors.torch import load_file

    found = []
    for name in ("kimi_k2", "kimi_k25"):
        checkpoint, targets = targets_of(sources[name], 32)
        engine(checkpoint, targets, "gptq", 32, token_ids(2000), tmp_path / f"{name}.safetensors")
        found.append(load_file(tmp_path / f"{name}.safetensors"))
    assert len(found[0]) == 2 * 192
    assert {f"language_model.{name}" for name in found[0]} == found[1].keys()
    assert all((tensor == found[1][f"language_model.{name}"]).all() for name, tensor in found[0].items())


def token_ids(vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, vocabulary, (6, 96)).astype(np.int32)


def targets_of(source: Path, group_size: int, **policy: Any) -> tuple[Checkpoint, dict[str, Any]]:
    checkpoint = Checkpoint.open(source)
    facts = engine_facts("x", 1, [], {}, {})
    method = Method("llmcompressor-gptq", stats=facts["sha256"])
    plan = build_plan(checkpoint, Policy(group_size=group_size, **policy), method, facts)
    return checkpoint, {step.module: step.shape for step in given_steps(plan)}


def their_codes(source: Path, work: Path, method: str, group_size: int, ids: np.ndarray) -> dict[str, Any]:
    """weight_packed and weight_scale as llm-compressor's users get them."""
    import torch
    from client_fixtures import convert, read_config
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

    twin = convert(source, work / "twin", "--scheme", "bf16")
    config = read_config(twin)
    config.pop("layer_types", None)  # 5.17 does not know what 5.24 wrote there
    (twin / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.bfloat16)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": [EXPERTS], "weights": weights}}
    recipe: list[Any] = [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    if method == "awq":
        mapping = AWQMapping(r"re:.*experts.*up_proj$", [r"re:.*experts.*down_proj$"])
        recipe = [AWQModifier(mappings=[mapping]), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():  # AWQ of 0.14.0.1 pins memory for one
            patch.setattr(IntermediatesCache, "pin_memory", lambda *_: None)
        oneshot(
            model=model,
            processor=PreTrainedTokenizerBase(),
            dataset=data,
            recipe=recipe,
            num_calibration_samples=len(ids),
            max_seq_length=ids.shape[1],
            shuffle_calibration_samples=False,
        )
    model.save_pretrained(work / "theirs")
    tensors = {n: t for path in (work / "theirs").glob("*.safetensors") for n, t in load_file(path).items()}
    return {n: t for n, t in tensors.items() if n.endswith((".weight_packed", ".weight_scale"))}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "method", "group_size"),
    [
        ("demo", "gptq", 32),
        ("demo", "gptq", 128),
        ("demo", "awq", 32),
        ("glm4_moe", "gptq", 64),
        ("glm4_moe", "awq", 128),
        ("deepseek_v3", "gptq", 32),
    ],
)
def test_codes_and_scales_are_those_that_llm_compressor_saves(
    engine: Any, sources: dict[str, Path], tmp_path: Path, family: str, method: str, group_size: int
) -> None:
    import torch
    from safetensors.torch import load_file

    ids = token_ids(500)
    theirs = their_codes(sources[family], tmp_path, method, group_size, ids)
    checkpoint, targets = targets_of(sources[family], group_size)
    done = engine(checkpoint, targets, method, group_size, ids, tmp_path / "given.safetensors")
    ours = load_file(tmp_path / "given.safetensors")
    assert done.rounded == ()
    assert len(targets) == (192 if family == "demo" else 24)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_every_family_runs(engine: Any, sources: dict[str, Path], tmp_path: Path, family: str, method: str) -> None:
    checkpoint, targets = targets_of(sources[family], 32)
    done = engine(checkpoint, targets, method, 32, token_ids(500), tmp_path / "given.safetensors")
    assert done.file.nbytes > sum(n * k // 2 for n, k in targets.values())


@pytest.mark.parity
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_command_writes_an_output_that_verifies(
    engine: Any, kizami: Run, demo_checkpoint: Path, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "out"
    words = (*ENGINE, "--method", method, "--data", TEXT, "--seq-len", 64, "--samples", 10, "--json")
    done = kizami("convert", demo_checkpoint, out, *words)
    assert done.code == 0, done.err
    assert done.json["method"] == f"llmcompressor-{method}"
    facts = done.json["calibration"]
    assert facts["tokens"] == 9 * 64  # one of ten sequences is held out
    assert dict(limits.versions()) == facts["libraries"]
    assert {entry["reason"] for entry in done.json["fallbacks"]} == {"the engine's model has no MTP layer"}
    verified = kizami("verify", out, "--against", demo_checkpoint, "--json")
    assert verified.code == 0, verified.out


@pytest.mark.parity
def test_held_out_sequences_are_not_seen(
    engine: Any, kizami: Run, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kizami.calibration.data.tokenizer import Tokenizer
    from kizami.calibration.data.tokens import TokenSettings, read_tokens

    seen: list[np.ndarray] = []

    def spy(
        checkpoint: Any, targets: Any, method: Any, group_size: int, ids: np.ndarray, *rest: Any, **more: Any
    ) -> Any:
        seen.append(ids)
        return engine(checkpoint, targets, method, group_size, ids, *rest, **more)

    monkeypatch.setattr(limits, "load_engine", lambda: spy)
    words = (*ENGINE, "--method", "gptq", "--data", TEXT, "--seq-len", 64, "--samples", 20, "--seed", 3)
    assert kizami("convert", demo_checkpoint, tmp_path / "out", *words).code == 0
    tokens = read_tokens([TEXT], Tokenizer.open(demo_checkpoint), TokenSettings(20, 64, 3), 2048)
    assert len(tokens.held_out) == 2
    kept = [row for i, row in enumerate(tokens.ids) if i not in tokens.held_out]
    np.testing.assert_array_equal(seen[0], kept)


@pytest.mark.parity
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_output_loads_and_answers_like_its_twin(
    engine: Any, sources: dict[str, Path], tmp_path: Path, method: str
) -> None:
    import torch
    from client_fixtures import dense_twin
    from client_models import logits, open_model

    from kizami.quantize.pipeline import run

    checkpoint, targets = targets_of(sources["glm4_moe"], 32)
    facts = engine_facts("x", 1, [], {}, {})
    plan = build_plan(checkpoint, Policy(), Method(f"llmcompressor-{method}", stats=facts["sha256"]), facts)  # type: ignore[arg-type]
    run(
        plan,
        checkpoint,
        tmp_path / "out",
        engine=lambda p: engine(checkpoint, targets, method, 32, token_ids(500), p).file,
    )
    ids = torch.arange(2, 500, 7)[None]
    ours = logits(open_model(tmp_path / "out"), ids)
    assert torch.equal(ours, logits(open_model(dense_twin(tmp_path / "out", tmp_path / "twin")), ids))
    (tmp_path / "fp8").mkdir()
    run(build_plan(checkpoint, Policy(to="bf16"), Method()), checkpoint, tmp_path / "bf16")
    exact = logits(open_model(tmp_path / "bf16"), ids)
    similar = torch.nn.functional.cosine_similarity(ours, exact, dim=-1).mean()
    assert similar > 0.95  # AWQ's factors cancel: without one half of each pair this is far off


@pytest.mark.parity
def test_awq_of_half_an_expert_is_refused(engine: Any, sources: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, targets = targets_of(sources["glm4_moe"], 32, ignore=(r"re:.*experts\.3\.down_proj",))
    with pytest.raises(KizamiError, match="AWQ changes both") as found:
        engine(checkpoint, targets, "awq", 32, token_ids(500), tmp_path / "given.safetensors")
    assert found.value.code == "bad_option"
    done = engine(checkpoint, targets, "gptq", 32, token_ids(500), tmp_path / "given.safetensors")
    assert done.file.nbytes > 0


@pytest.mark.parity
def test_awq_changes_nothing_outside_the_experts(engine: Any, sources: dict[str, Path], tmp_path: Path) -> None:
    """What it did to the norm, the router or the shared experts would be missing in the output."""
    from kizami.calibration.llmcompressor import engine as module
    from kizami.calibration.llmcompressor.model import dense_model

    checkpoint, targets = targets_of(sources["glm_moe_dsa"], 32)
    before = dense_model(checkpoint)[0].state_dict()
    with pytest.MonkeyPatch.context() as patch:
        kept: list[Any] = []
        patch.setattr(module, "dense_model", lambda c: kept.append(dense_model(c)) or kept[0])
        engine(checkpoint, targets, "awq", 32, token_ids(500), tmp_path / "given.safetensors")
    after = kept[0][0].state_dict()
    changed = {name for name, tensor in before.items() if not (after[name] == tensor).all()}
    assert changed
    assert {name.removesuffix(".weight") for name in changed} <= {m for m in targets if not m.endswith("gate_proj")}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "a_model_of_its_own"}, "unsupported_model"),
        ({"hidden_size": "many"}, "unsupported_model"),
        ({"num_hidden_layers": 3}, "model_mismatch"),
        ({"vocab_size": 600}, "model_mismatch"),
        ({"attention_bias": False}, "model_mismatch"),
    ],
)
def test_a_config_of_another_model_is_refused(
    engine: Any, sources: dict[str, Path], tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    checkpoint, targets = targets_of(sources["glm4_moe"], 32)
    checkpoint.config.update(change)
    with pytest.raises(KizamiError) as found:
        engine(checkpoint, targets, "gptq", 32, token_ids(500), tmp_path / "given.safetensors")
    assert found.value.code == code


@pytest.mark.parity
def test_code_that_a_config_names_is_never_looked_for(
    engine: Any, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, targets = targets_of(sources["glm4_moe"], 32)
    clean = engine(checkpoint, targets, "gptq", 32, token_ids(500), tmp_path / "clean.safetensors").file.sha256
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    kernels = dict.fromkeys(("attn_implementation", "_attn_implementation", "_name_or_path"), "someone/kernel")
    checkpoint.config.update({"auto_map": classes, "experts_implementation": "someone/kernel", **kernels})
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    assert engine(checkpoint, targets, "gptq", 32, token_ids(500), tmp_path / "x.safetensors").file.sha256 == clean


@pytest.mark.parity
def test_sequences_longer_than_the_model_takes_are_refused(
    engine: Any, sources: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, targets = targets_of(sources["glm4_moe"], 32)
    with pytest.raises(KizamiError, match="513 tokens, and the model takes at most 512"):
        engine(checkpoint, targets, "gptq", 32, np.full((1, 513), 5, np.int32), tmp_path / "given.safetensors")


@pytest.mark.parity
def test_the_engine_is_silent_on_stdout(engine: Any, kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    words = (*ENGINE, "--method", "gptq", "--data", TEXT, "--seq-len", 64, "--samples", 4, "--json")
    done = kizami("convert", demo_checkpoint, tmp_path / "out", *words)
    assert done.json["schema"] == "kizami.convert/1"
    assert "Calibrating" not in done.err
