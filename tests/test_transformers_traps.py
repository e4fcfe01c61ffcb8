"""Damage that loaders take without a word, with every hash right: what transformers does, and that verify names it.

A loader allocates first and fills in what it finds. So a tensor that is not there leaves whatever was in memory, and
only some loaders, for some tensors, say so.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.24")

import torch
from case_runner import kizami
from client_models import fp8_model, logits, open_model
from forging import forge, forge_tensors
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

TOKEN_IDS = torch.arange(0, 511, 7)[None]
EXPERT, O_PROJ = "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.self_attn.o_proj"
KV_B = "model.layers.1.self_attn.kv_b_proj"
PACKED = ("weight_packed", "weight_scale", "weight_shape")
OPTIONS = {
    "int4": ("--targets", r"re:.*\.experts\.\d+\..*", "--targets", "re:.*o_proj"),
    "mixed": ("--rest", "fp8"),
}
Forger = Callable[[Path], object]


def without(module: str, *parts: str) -> Forger:
    return lambda out: forge_tensors(out, drop=[f"{module}.{part}" for part in parts])


def config(change: Callable[[dict[str, Any]], object]) -> Forger:
    """Changes the quantization config."""

    def edit(data: bytearray) -> None:
        document = json.loads(bytes(data))
        change(document["quantization_config"])
        data[:] = json.dumps(document).encode()

    return lambda out: forge(out, "config.json", edit)


def group(number: int, part: str, **values: object) -> Forger:
    return config(lambda quant: quant["config_groups"][f"group_{number}"][part].update(values))


@dataclass(frozen=True)
class Trap:
    """transformers: "silent" loads with no key missing and computes something else; "missing" loads, and lists missing
    keys in a report; "raises" loads nothing."""

    form: Literal["int4", "mixed"]
    forger: Forger
    transformers: Literal["silent", "missing", "raises"]
    code: str
    named: str


TRAPS = {
    "expert-without-scale": Trap("int4", without(EXPERT, "weight_scale"), "silent", "incomplete_module", EXPERT),
    "expert-without-packed": Trap("int4", without(EXPERT, "weight_packed"), "raises", "missing_packed", EXPERT),
    "expert-without-shape": Trap("int4", without(EXPERT, "weight_shape"), "raises", "incomplete_module", EXPERT),
    "expert-without-all": Trap("int4", without(EXPERT, *PACKED), "raises", "report_row", EXPERT),
    "o_proj-without-packed": Trap("int4", without(O_PROJ, "weight_packed"), "missing", "missing_packed", O_PROJ),
    "o_proj-without-scale": Trap("int4", without(O_PROJ, "weight_scale"), "missing", "incomplete_module", O_PROJ),
    "kv_b-without-weight": Trap("int4", without(KV_B, "weight"), "missing", "report_row", KV_B),
    "kv_b-without-scale": Trap("mixed", without(KV_B, "weight_scale"), "missing", "missing_scale", KV_B),
    "kv_b-without-fp8": Trap("mixed", without(KV_B, "weight"), "raises", "missing_packed", KV_B),
    "lm_head-not-ignored": Trap(
        "int4", config(lambda quant: quant["ignore"].remove("lm_head")), "missing", "config_rules", "lm_head"
    ),
    "o_proj-ignored": Trap(
        "int4", config(lambda quant: quant["ignore"].append("re:.*o_proj")), "missing", "config_rules", O_PROJ
    ),
    "group-size": Trap("int4", group(0, "weights", group_size=64), "raises", "scale_grid", ".experts.0."),
    "block": Trap("mixed", group(1, "weights", block_structure=[64, 64]), "raises", "scale_grid", ".layers.0.mlp."),
    "activations": Trap(
        "mixed", group(1, "input_activations", group_size=64), "silent", "config_figures", ".layers.0.mlp."
    ),
    "status": Trap(
        "int4", config(lambda quant: quant.update(quantization_status="frozen")),
        "missing", "config_figures", ".experts.0.",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Of each form: an output of kizami and its logits."""
    folder = tmp_path_factory.mktemp("traps")
    source = fp8_model("deepseek_v3", folder / "source")
    for form, options in OPTIONS.items():
        said = kizami("convert", source, folder / form, *options)
        assert said.code == 0, said.stderr
    return {form: (folder / form, logits(open_model(folder / form), TOKEN_IDS)) for form in OPTIONS}


def loads(folder: Path, right: torch.Tensor) -> str:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    except (RuntimeError, NotImplementedError):
        return "raises"
    if info["missing_keys"]:
        return "missing"  # they are what was in memory
    with torch.inference_mode():
        found = model.eval()(input_ids=TOKEN_IDS).logits[0].float()
    assert not torch.allclose(found, right, atol=0.5), "it computes the right thing all the same"
    return "silent"


@pytest.mark.parametrize("name", TRAPS)
def test_verify_names_what_transformers_may_load_without_a_word(
    name: str, outputs: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    trap = TRAPS[name]
    whole, right = outputs[trap.form]
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    trap.forger(out)
    assert loads(out, right) == trap.transformers
    said = kizami("verify", out, "--json")
    assert said.code == 1, said.stderr
    problems = json.loads(said.stdout)["problems"]
    assert trap.code in {problem["code"] for problem in problems}
    assert any(trap.named in str(problem.values()) for problem in problems), problems
