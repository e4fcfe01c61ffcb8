"""Recipes of llm-compressor: every form of them is read, what cannot be followed is refused by its key, and what is
written back is read by llm-compressor itself."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fixtures import Run

from kizami.formats import strict_yaml
from kizami.formats.errors import KizamiError
from kizami.formats.recipes import Recipe, read_recipe, write_recipe

EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": [EXPERTS], "weights": WEIGHTS}

STAGES = """
# As llm-compressor 0.14 saves it beside a model.
default_stage:
  default_modifiers:
    QuantizationModifier:
      targets: [Linear]
      ignore: [lm_head, 're:.*self_attn.*']
      scheme: W4A16
      bypass_divisibility_checks: false
"""
GPTQ = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      sequential_targets: [DeepseekV3DecoderLayer]
      dampening_frac: 0.01
      block_size: 128
      actorder: static
      ignore: ["re:.*lm_head"]
      config_groups:
        group_0:
          targets: ["re:.*experts.*"]
          input_activations: null
          output_activations: null
          weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 64, observer: mse}
"""
OLDER = "      sequential_targets: [DeepseekV3DecoderLayer]\n"  # an argument of `oneshot` in 0.14
FLAT = """
- QuantizationModifier:
    ignore: [lm_head]
    scheme: {W4A16: ["re:.*experts.*", Linear]}
"""


def read(folder: Path, text: str | bytes) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(path)


def refusal(folder: Path, text: str | bytes) -> KizamiError:
    with pytest.raises(KizamiError) as e:
        read(folder, text)
    assert e.value.file == "recipe.yaml"
    return e.value


def modifier(**body: Any) -> str:
    return yaml.safe_dump({"default_stage": {"default_modifiers": {"QuantizationModifier": body}}}, sort_keys=False)


def with_weights(**changes: Any) -> str:
    return modifier(config_groups={"group_0": GROUP | {"weights": WEIGHTS | changes}})


# ---------------------------------------------------------------- what is read


def test_a_saved_recipe_with_a_preset(tmp_path: Path) -> None:
    assert read(tmp_path, STAGES) == Recipe(("Linear",), ("lm_head", "re:.*self_attn.*"), 128)


def test_a_gptq_recipe_is_read_and_what_is_done_otherwise_is_told(tmp_path: Path) -> None:
    recipe = read(tmp_path, GPTQ)
    assert (recipe.targets, recipe.ignore, recipe.group_size) == (("re:.*experts.*",), ("re:.*lm_head",), 64)
    assert len(recipe.notes) == 2
    assert "not by GPTQ" in recipe.notes[0]
    assert 'group_0.weights.observer is "mse"' in recipe.notes[1]


def test_the_flat_list_with_a_preset_and_its_targets(tmp_path: Path) -> None:
    assert read(tmp_path, FLAT) == Recipe(("re:.*experts.*", "Linear"), ("lm_head",), 128)


@pytest.mark.parametrize(
    "text",
    [
        "QuantizationModifier: {scheme: W4A16}",
        "modifiers: [{QuantizationModifier: {scheme: w4a16}}]",
        "quant_stage: {quant_modifiers: [{QuantizationModifier: {scheme: W4A16, targets: Linear}}]}",
        "args: {}\nquant_stage: {run_type: oneshot, quant_modifiers: {QuantizationModifier: {scheme: W4A16}}}",
        "QuantizationModifier: {config_groups: {W4A16: [Linear]}}",
        "QuantizationModifier: {scheme: {W4A16: Linear}, kv_cache_scheme: null, targets: [Linear]}",
        "---\nQuantizationModifier:\n  scheme: W4A16\n  weight_observer: minmax\n",
        '{"QuantizationModifier": {"scheme": "W4A16", "ignore": []}}',
        "\ufeffQuantizationModifier: {scheme: W4A16, start: 0.0}",
    ],
)
def test_other_spellings_say_the_same(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == Recipe(("Linear",), (), 128)


def test_groups_of_one_form_are_one(tmp_path: Path) -> None:
    groups = {"a": GROUP, "b": GROUP | {"targets": ["x.y", EXPERTS]}}
    assert read(tmp_path, modifier(config_groups=groups)) == Recipe((EXPERTS, "x.y"), (), 32)


def test_aliases_as_yaml_dump_writes_them_are_followed(tmp_path: Path) -> None:
    text = modifier(config_groups={"a": GROUP, "b": {"targets": ["x.y"], "weights": WEIGHTS}})
    assert "&id001" in text
    assert read(tmp_path, text).group_size == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bypass_divisibility_checks": True}, "kizami pads no group"),
        ({"weight_observer": "mse"}, 'weight_observer is "mse"'),
        ({"observer": {"weights": "MSE"}}, 'observer is "MSE"'),
        ({"targets": ["a.b"], "scheme": {"W4A16": ["Linear"]}}, "targets has no effect beside scheme"),
    ],
)
def test_what_makes_no_difference_to_the_layout_is_a_note(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    recipe = read(tmp_path, modifier(**{"scheme": "W4A16"} | change))
    assert len(recipe.notes) == 1
    assert words in recipe.notes[0]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"num_bits": 8}, "num_bits", "is 8, expected 4"),
        ({"num_bits": None}, "num_bits", "is 8 (llm-compressor's default), expected 4"),
        ({"num_bits": "4"}, "num_bits", 'is "4", expected 4'),
        ({"type": "float"}, "type", 'is "float", expected "int"'),
        ({"symmetric": False}, "symmetric", "is false, expected true"),
        ({"dynamic": True}, "dynamic", "is true, expected false"),
        ({"strategy": "channel"}, "strategy", 'is "channel", expected group'),
        ({"actorder": "group"}, "actorder", 'is "group": kizami writes no weight_g_idx'),
        ({"actorder": True}, "actorder", "is true"),
        ({"group_size": None}, "group_size", "is null"),
        ({"group_size": 0}, "group_size", "is 0"),
        ({"group_size": True}, "group_size", "is true"),
        ({"block_structure": [128, 128]}, "block_structure", "is a list, expected null"),
        ({"scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype", "expected null"),
        ({"zero_point": 1}, "zero_point", "is a key that kizami does not know"),
    ],
)
def test_other_weights_are_refused_by_their_key(tmp_path: Path, changes: dict[str, Any], key: str, found: str) -> None:
    error = refusal(tmp_path, with_weights(**changes))
    path = f"default_stage.default_modifiers.QuantizationModifier.config_groups.group_0.weights.{key} "
    assert error.message.startswith(path)
    assert found in error.message


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"scheme": "W4A16_ASYM"}, "unsupported_recipe", "QuantizationModifier.scheme is the scheme W4A16_ASYM"),
        ({"scheme": "W8A8"}, "unsupported_recipe", "W8A8"),
        ({"scheme": {"FP8_BLOCK": ["Linear"]}}, "unsupported_recipe", "FP8_BLOCK"),
        ({"scheme": "W4A16", "kv_cache_scheme": {"num_bits": 8}}, "unsupported_recipe", "kv_cache_scheme asks"),
        ({"scheme": "W4A16", "config_groups": {"g": GROUP}}, "bad_recipe", "either scheme or config_groups"),
        ({}, "unsupported_recipe", "default is 8 bit"),
        ({"config_groups": {}}, "unsupported_recipe", "default is 8 bit"),
        ({"scheme": {}}, "bad_recipe", "at least one scheme"),
        ({"scheme": "W4A16", "targets": []}, "bad_recipe", "at least one module"),
        ({"scheme": "W4A16", "targets": [1]}, "bad_recipe", "QuantizationModifier.targets is a list"),
        ({"scheme": "W4A16", "targets": {"a": 1}}, "bad_recipe", "is a mapping"),
        ({"scheme": "W4A16", "targets": ["Embedding"]}, "unsupported_recipe", "has Embedding, a class"),
        ({"scheme": "W4A16", "ignore": ["DeepseekV3TopkRouter"]}, "unsupported_recipe", "a class"),
        ({"scheme": "W4A16", "ignore": ["Linear"]}, "unsupported_recipe", "nothing would be left"),
        ({"scheme": "W4A16", "actorder": "group"}, "unsupported_recipe", 'QuantizationModifier.actorder is "group"'),
        ({"scheme": "W4A16", "mystery": 1}, "unsupported_recipe", "QuantizationModifier.mystery is a key"),
        ({"config_groups": {"g": GROUP | {"targets": []}}}, "bad_recipe", "g.targets is a list"),
        ({"config_groups": {"g": {"targets": [EXPERTS]}}}, "bad_recipe", "config_groups.g is null"),
        ({"config_groups": {"g": GROUP | {"format": "marlin-24"}}}, "unsupported_recipe", 'g.format is "marlin-24"'),
        ({"config_groups": {"g": GROUP | {"extra": None}}}, "unsupported_recipe", "g.extra is a key"),
        (
            {"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8}}}}, "unsupported_recipe",
            "g.input_activations asks for quantized activations",
        ),
        (
            {"config_groups": {"g": GROUP, "h": GROUP | {"weights": WEIGHTS | {"group_size": 128}}}},
            "unsupported_recipe", "groups of several sizes",
        ),
    ],
)  # fmt: skip
def test_a_modifier_that_cannot_be_followed_is_refused(
    tmp_path: Path, body: dict[str, Any], code: str, words: str
) -> None:
    error = refusal(tmp_path, modifier(**body))
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize(
    "name",
    [
        "AWQModifier",
        "SmoothQuantModifier",
        "SpinQuantModifier",
        "SparseGPTModifier",
        "AutoRoundModifier",
        "NewModifier",
    ],
)
def test_other_modifiers_are_refused_by_name_also_beside_a_known_one(tmp_path: Path, name: str) -> None:
    known = "    QuantizationModifier: {scheme: W4A16}\n"
    error = refusal(tmp_path, f"quant_stage:\n  quant_modifiers:\n    {name}: {{x: 1}}\n{known}")
    assert error.code == "unsupported_recipe"
    assert error.message.startswith(f"quant_stage.quant_modifiers.{name} ")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "bad_recipe", "the document is null"),
        ("just words", "bad_recipe", 'the document is "just words"'),
        ("[]", "bad_recipe", "0 quantization modifiers"),
        ("quant_stage: {}", "bad_recipe", "0 quantization modifiers"),
        ("quant_stage: 3", "bad_recipe", "quant_stage is 3, expected a mapping"),
        ("- 3", "bad_recipe", "[0] is 3"),
        ("QuantizationModifier: W4A16", "bad_recipe", 'QuantizationModifier is "W4A16"'),
        ("a_stage: {b_stage: {c_stage: {d_stage: {e_stage: {}}}}}", "bad_recipe", "lie in one another"),
        ("QuantizationModifier: {scheme: W4A16}\nGPTQModifier: {}", "unsupported_recipe", "2 quantization"),
        ("args: {bits: 4}\nQuantizationModifier: {scheme: W4A16}", "unsupported_recipe", "args is a key"),
        ("other: 1\nQuantizationModifier: {scheme: W4A16}", "unsupported_recipe", "other is a key"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, code: str, words: str) -> None:
    error = refusal(tmp_path, text)
    assert error.code == code
    assert words in error.message


# ---------------------------------------------------------------- YAML from strangers


def laughs(tail: str) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join([*lines, tail])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs("QuantizationModifier: {scheme: W4A16, targets: *a9}"), "a0 is a key that kizami does not know"),
        (f"- {{QuantizationModifier: {{scheme: W4A16, targets: &t [{'[x], ' * 9}]}}}}", "targets is a list"),
        (
            "a0_stage: &a0 {b_modifiers: {}}\n"
            + "".join(f"a{i}_stage: &a{i} {{p_stage: *a{i - 1}, q_stage: *a{i - 1}}}\n" for i in range(1, 45)),
            "lie in one another",
        ),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n", "line 2: a merge key (<<)"),
        ("a: &a x\nb: [" + "*a, " * 200 + "]", "more than 100 aliases"),
        ("a_stage: &a {b_stage: *a}", "a value that contains itself"),
        ("&a [*a]", "a value that contains itself"),
        ("[" * 200_000, "more than 24 levels"),
        ("- " * 100_000, "more than 24 levels"),
        ("{a: " * 50_000, "more than 24 levels"),
        ("? " * 100_000, "more than 24 levels"),
        ("!!python/object/apply:os.system ['true']", "the tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: !secret x", "the tag !secret"),
        ("a: 1\na: 2", "line 2: the key a a second time"),
        ("? [a]\n: 1", "a key that is a list or a mapping"),
        ("a: *nowhere", "undefined alias"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: [1", "line 1"),
        ("\t", "line 1"),
        ("a: \x00", "special characters"),
        ("#" * (strict_yaml.MAX_BYTES + 1), f"more than {strict_yaml.MAX_BYTES} bytes"),
        (b"a: \xff", "byte 3 is not UTF-8"),
    ],
)
def test_hostile_yaml_is_refused_at_once(tmp_path: Path, text: str | bytes, words: str) -> None:
    begin = time.perf_counter()
    error = refusal(tmp_path, text)
    assert words in str(error)
    assert time.perf_counter() - begin < 5


def test_numbers_stay_numbers_and_the_rest_stays_text() -> None:
    found = strict_yaml.parse_yaml("[4, -4, 0.5, 1e3, 1:30, 0x10, 010, yes, No, ~, '4', 2026-01-01, .inf, =]")
    assert found == [4, -4, 0.5, "1e3", "1:30", "0x10", 10, True, False, None, "4", "2026-01-01", ".inf", "="]
    assert strict_yaml.parse_yaml("9" * 5000) == "9" * 5000


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(KizamiError):
        read_recipe(tmp_path if kind == "folder" else tmp_path / "none.yaml")


# ---------------------------------------------------------------- what is written

WRITTEN = [
    (("Linear",), ("lm_head", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"), 32),
    ((EXPERTS, "a.b"), (), 128),
    (("re:.*'\"#: {}[]&*!|>%@`\\é\u202e$", "yes.no", "1.5"), ("null.x", "re:" + "x" * 300), 64),
]


@pytest.mark.parametrize(("targets", "ignore", "size"), WRITTEN)
def test_a_written_recipe_is_read_as_what_it_was_written_from(
    tmp_path: Path, targets: tuple[str, ...], ignore: tuple[str, ...], size: int
) -> None:
    text = write_recipe(targets, ignore, size)
    assert read(tmp_path, text) == Recipe(targets, ignore, size)
    assert text.isascii()


@pytest.mark.parity
@pytest.mark.parametrize(("targets", "ignore", "size"), WRITTEN)
def test_llm_compressor_reads_a_written_recipe_as_the_same(
    tmp_path: Path, targets: tuple[str, ...], ignore: tuple[str, ...], size: int
) -> None:
    llmcompressor = pytest.importorskip("llmcompressor.recipe")
    path = tmp_path / "recipe.yaml"
    path.write_text(write_recipe(targets, ignore, size))
    (found,) = llmcompressor.Recipe.create_instance(str(path)).modifiers
    (scheme,) = found.resolved_config.config_groups.values()
    assert (tuple(scheme.targets), tuple(found.ignore)) == (targets, ignore)
    args = scheme.weights
    assert (args.num_bits, args.type, args.symmetric, args.strategy) == (4, "int", True, "group")
    assert (args.group_size, args.dynamic) == (size, False)
    assert scheme.input_activations is None


@pytest.mark.parity
@pytest.mark.parametrize("text", [STAGES, GPTQ.replace(OLDER, "")])
def test_kizami_reads_recipes_as_llm_compressor_does(tmp_path: Path, text: str) -> None:
    llmcompressor = pytest.importorskip("llmcompressor.recipe")
    ours = read(tmp_path, text)
    (theirs,) = llmcompressor.Recipe.create_instance(str(tmp_path / "recipe.yaml")).modifiers
    (scheme,) = theirs.resolved_config.config_groups.values()
    assert ours.targets == tuple(scheme.targets)
    assert ours.ignore == tuple(theirs.ignore)
    assert ours.group_size == scheme.weights.group_size


@pytest.mark.parity
def test_a_recipe_that_llm_compressor_saved_is_read(tmp_path: Path) -> None:
    recipe = pytest.importorskip("llmcompressor.recipe").Recipe.create_instance(STAGES)
    recipe.yaml(file_path=str(tmp_path / "saved.yaml"))
    assert read_recipe(tmp_path / "saved.yaml") == Recipe(("Linear",), ("lm_head", "re:.*self_attn.*"), 128)
    assert "default_stage" in (tmp_path / "saved.yaml").read_text()


def test_a_recipe_and_a_scheme_of_another_form_contradict_each_other(
    tiny_checkpoint: Path, kizami: Run, tmp_path: Path
) -> None:
    """It would be INT4 by the one and BF16 by the other."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(write_recipe(("Linear",), ("lm_head",), 64))
    for scheme in ("bf16", "fp8-block", "w4a16-g32"):
        refused = kizami("plan", tiny_checkpoint, "--recipe", recipe, "--scheme", scheme)
        assert refused.code == 2, scheme
        assert "--recipe" in refused.err
    assert kizami("plan", tiny_checkpoint, "--recipe", recipe, "--scheme", "w4a16-g64").code == 0
