"""verify without a source finds a config whose numbers are not those of the tensors, every hash being right."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_runner import kizami
from forging import forge, forge_rows, forge_tensors

from kizami.formats.config_figures import wrong_figures
from kizami.quantize.verify import verify

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
OPTIONS = {"int4": (), "mixed": ("--rest", "fp8"), "fp8": ("--scheme", "fp8-block")}


@pytest.fixture(scope="module")
def outputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("figures")
    for name, options in OPTIONS.items():
        said = kizami("convert", tiny_checkpoint, folder / name, *options)
        assert said.code == 0, said.stderr
        assert verify(folder / name).ok
    return {name: folder / name for name in OPTIONS}


@pytest.fixture
def copy(outputs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(outputs[name], tmp_path / "out"))


def put(out: Path, path: str, value: object) -> None:
    """Sets the value at a dotted path of the quantization config; `...` takes it away."""
    *parents, key = path.split(".")

    def edit(data: bytearray) -> None:
        document = json.loads(bytes(data))
        holder: dict[str, Any] = document["quantization_config"]
        for parent in parents:
            holder = holder[parent]
        if value is ...:
            del holder[key]
        else:
            holder[key] = value
        data[:] = json.dumps(document).encode()

    forge(out, "config.json", edit)


W0, W1, A1 = "config_groups.group_0.weights", "config_groups.group_1.weights", "config_groups.group_1.input_activations"


@pytest.mark.parametrize(
    ("form", "path", "value"),
    [
        ("int4", "quant_method", "fp8"),
        ("int4", "quantization_status", "frozen"),
        ("int4", "quantization_status", ...),
        ("int4", "format", "int-quantized"),
        ("mixed", "format", "mixed-precision"),
        ("fp8", "format", "pack-quantized"),
        ("int4", "config_groups.group_0.format", "marlin-24"),
        ("mixed", "config_groups.group_1.format", "naive-quantized"),
        ("int4", f"{W0}.group_size", 64),
        ("int4", f"{W0}.group_size", 16),
        ("int4", f"{W0}.group_size", 32.0),
        ("int4", f"{W0}.group_size", None),
        ("int4", f"{W0}.strategy", "channel"),
        ("int4", f"{W0}.symmetric", False),
        ("int4", f"{W0}.symmetric", ...),
        ("int4", f"{W0}.dynamic", True),
        ("int4", f"{W0}.actorder", "group"),
        ("int4", f"{W0}.num_bits", 8),
        ("int4", f"{W0}.type", "float"),
        ("int4", "config_groups.group_0.input_activations", {"num_bits": 8, "type": "int"}),
        ("mixed", f"{W0}.group_size", 128),
        ("mixed", f"{W1}.block_structure", [64, 64]),
        ("mixed", f"{W1}.block_structure", [128, 256]),
        ("mixed", f"{W1}.block_structure", None),
        ("mixed", f"{W1}.strategy", "tensor"),
        ("mixed", f"{A1}.group_size", 64),
        ("mixed", f"{A1}.dynamic", False),
        ("mixed", "config_groups.group_1.input_activations", None),
        ("fp8", f"{W0}.block_structure", [256, 128]),
    ],
)
def test_a_number_that_is_not_that_of_the_tensors_is_found(
    copy: Callable[[str], Path], form: str, path: str, value: object
) -> None:
    out = copy(form)
    put(out, path, value)
    problems = verify(out).problems
    assert problems
    assert {problem.code for problem in problems} <= {
        "config_figures", "config_rules", "scale_grid", "bad_config", "unsupported_format", "already_int4",
        "missing_block_size",
    }  # fmt: skip


def test_a_wrong_number_is_said_with_the_right_one_and_a_module(copy: Callable[[str], Path]) -> None:
    out = copy("int4")
    put(out, "quantization_status", "frozen")
    (problem,) = verify(out).problems
    assert (problem.code, problem.file) == ("config_figures", "config.json")
    assert problem.message == "quantization_status is 'frozen', expected 'compressed'"
    assert ".experts." in str(problem.tensor)


def test_what_says_nothing_of_numbers_may_differ(copy: Callable[[str], Path]) -> None:
    out = copy("int4")
    put(out, f"{W0}.observer", "mse")
    put(out, "kv_cache_scheme", None)
    assert verify(out).ok


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_part_of_an_expert_that_was_never_written_is_named(copy: Callable[[str], Path], part: str) -> None:
    out = copy("int4")
    forge_tensors(out, drop=[f"{EXPERT}.{part}"])
    assert any(str(problem.tensor).startswith(EXPERT) for problem in verify(out).problems)


@pytest.mark.parametrize(
    ("form", "tensor"),
    [
        ("int4", "model.layers.1.self_attn.o_proj.weight"),
        ("mixed", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("mixed", "model.layers.1.self_attn.kv_b_proj.weight_scale"),
        ("int4", "model.norm.weight"),
    ],
)
def test_a_tensor_that_was_never_written_is_named(copy: Callable[[str], Path], form: str, tensor: str) -> None:
    out = copy(form)
    forge_tensors(out, drop=[tensor])
    assert any(tensor.rpartition(".")[0] in str(problem.tensor) for problem in verify(out).problems)


def test_an_expert_without_a_row_is_for_check_to_find(copy: Callable[[str], Path]) -> None:
    """Nothing in the files then speaks of it but the number of experts in the model's config."""
    out = copy("int4")
    parts = [
        f"{EXPERT.replace('up', name)}.{part}"
        for name in ("gate", "up", "down")
        for part in ("weight_packed", "weight_scale", "weight_shape")
    ]
    forge_tensors(out, drop=parts)
    forge_rows(out, lambda rows: rows.__setitem__(slice(None), [row for row in rows if row["crc32"]]))
    assert verify(out).ok
    said = kizami("check", out)
    assert said.code == 1
    assert "model.layers.1.mlp.experts.2" in said.stdout


def test_the_figures_of_every_config_that_kizami_writes_are_right(outputs: dict[str, Path]) -> None:
    for name, out in outputs.items():
        config = json.loads((out / "config.json").read_bytes())["quantization_config"]
        assert list(wrong_figures(config, 32, has_int4=name != "fp8")) == []
        found = {figure.where: figure.found for figure in wrong_figures(config, 64, has_int4=name != "fp8")}
        assert found == ({} if name == "fp8" else {f"{W0}.group_size": 32})
