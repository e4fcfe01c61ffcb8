"""cli -> (quantize, calibration) -> formats, also inside functions; the oracle imports nothing of ours."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY = {
    "formats": {"formats"},
    "quantize": {"quantize", "formats"},
    "calibration": {"calibration", "formats"},
    "cli": {"cli", "quantize", "calibration", "formats"},
}
FILES = [path for top in MAY for path in sorted((ROOT / top).rglob("*.py"))]
HEAVY = {"torch", "transformers", "accelerate", "llmcompressor", "compressed_tensors", "ray", "lm_eval"}


def imported(source: str, path: Path) -> set[str]:
    """Full names of everything that `source` imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the import in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folders_of_ours(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("kizami.")}


def may_import(path: Path) -> set[str]:
    relative = path.relative_to(ROOT)
    return set() if relative.as_posix() == "quantize/reference.py" else MAY[relative.parts[0]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path: Path) -> None:
    assert folders_of_ours(imported(path.read_text(encoding="utf-8"), path)) <= may_import(path)


ASKED_IF_THERE = {
    # `convert --executor ray`; a task runs in Ray's own processes
    "quantize/run/on_ray.py": {"ray"},
    "quantize/run/ray_task.py": {"ray"},
    # The forward pass of `kizami calibrate`; of it only settings.py is imported before that is asked for
    "calibration/forward/attention.py": {"torch", "transformers"},
    "calibration/forward/experts.py": {"torch"},
    "calibration/forward/layers.py": {"torch"},
    "calibration/forward/model.py": {"torch", "transformers"},
    "calibration/forward/observers.py": {"torch"},
    "calibration/forward/run.py": {"torch"},
    "calibration/forward/state.py": {"torch"},
    "calibration/forward/weights.py": {"torch"},
    "calibration/forward/work.py": {"torch"},
    # `kizami kv-accuracy`: the same pass with rounded rows in its cache, and the logits behind it
    "calibration/kv_accuracy/logits.py": {"torch"},
    "calibration/kv_accuracy/measures.py": {"torch"},
    "calibration/kv_accuracy/rounding.py": {"torch"},
    "calibration/kv_accuracy/passes.py": {"torch"},
    "calibration/kv_accuracy/sweep.py": {"torch"},
    "calibration/kv_accuracy/variants.py": {"torch"},
    "calibration/data/tokenizer.py": {"transformers"},  # chat templates, in its Jinja sandbox
    # `--engine llmcompressor`: only llmcompressor_limits.py is imported before that is asked for
    "calibration/llmcompressor/model.py": {"accelerate", "llmcompressor", "torch", "transformers"},
    "calibration/llmcompressor/engine.py": {"compressed_tensors", "llmcompressor", "torch", "transformers"},
    "calibration/machine.py": {"torch"},  # threads and memory, for the command
    "formats/engines/transformers.py": {"compressed_tensors"},  # its verdict on a config, in a function
    # `--method gptq`: Cholesky factors and products of 7168 x 7168, on a GPU where there is one. Only solver.py is
    # imported before that method is asked for, and it imports torch in functions.
    "quantize/calibrated/gptq.py": {"torch"},
    "quantize/calibrated/hessian.py": {"torch"},
    "quantize/calibrated/solver.py": {"torch"},
    # `convert --device cuda`: imported when it is asked for; choice.py asks torch, in a function, what there is
    "quantize/on_device/arithmetic.py": {"torch"},
    "quantize/on_device/choice.py": {"torch"},
    "quantize/on_device/compute.py": {"torch"},
    "quantize/on_device/linear.py": {"torch"},
    "quantize/on_device/probe.py": {"torch"},
    "quantize/on_device/rounding.py": {"torch"},
    "quantize/on_device/scales.py": {"torch"},
    "quantize/on_device/search.py": {"torch"},
    "quantize/on_device/transfer.py": {"torch"},
    "quantize/on_device/weight.py": {"torch"},
    "quantize/on_device/weighted.py": {"torch"},
    # A reference for what engines keep on a GPU, imported by nobody unless asked
    "quantize/kv_cache/e4m3.py": {"torch"},
    "quantize/kv_cache/layouts.py": {"torch"},
    "quantize/kv_cache/pages.py": {"torch"},
    "quantize/kv_cache/store.py": {"torch"},
    "quantize/kv_cache/transfer.py": {"torch"},
    # Page tags live beside the KV cache of an engine, on its device; no command imports them.
    "quantize/page_tags/agreement.py": {"torch"},
    "quantize/page_tags/check.py": {"torch"},
    "quantize/page_tags/hashes.py": {"torch"},
    "quantize/page_tags/sglang.py": {"torch"},
    "quantize/page_tags/stamps.py": {"torch"},
    "quantize/page_tags/tags.py": {"torch"},
    "quantize/page_tags/triton_check.py": {"torch"},
    "quantize/page_tags/vllm.py": {"torch"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_heavy_library_is_needed(path: Path) -> None:
    """Convert, verify and report need numpy, numba, safetensors, typer, rich and huggingface_hub only."""
    top = {name.split(".")[0] for name in imported(path.read_text(encoding="utf-8"), path)}
    assert top & HEAVY == ASKED_IF_THERE.get(path.relative_to(ROOT).as_posix(), set())


def test_every_layer_has_files() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(MAY)


def test_the_rule_sees_an_import_inside_a_function() -> None:
    source = "def f():\n    from kizami.cli.output import Ui\n    import kizami.quantize.plan\n"
    assert folders_of_ours(imported(source, Path("x.py"))) == {"cli", "quantize"}
