"""The model card: content, determinism, and that a hostile source README stays inside its lines."""

import dataclasses
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kizami.formats.model_card import (
    MAX_README_CHARS,
    TP_SIZES,
    CardFacts,
    EngineFacts,
    ErrorRow,
    escape_markdown,
    render_card,
    tensor_parallel_fits,
)
from kizami.quantize.card import command_line, hub_origin, title
from kizami.quantize.settings import Method, Policy


def tensor_parallel_sizes(shapes: dict[str, list[tuple[int, int]]], group: int) -> tuple[int, ...]:
    each = [(part, *shape) for part, given in shapes.items() for shape in given]
    return tuple(tp for tp in TP_SIZES if all(tensor_parallel_fits(*one, group, tp) for one in each))


ENGINES = (
    EngineFacts("SGLang", "0.5.23", (1, 2, 4, 8, 16, 32)),
    EngineFacts("vLLM", "0.33.0", (1, 2, 4, 8, 16, 32)),
    EngineFacts("transformers", "5.24.0", None),
)
FACTS = CardFacts(
    title="GLM-5.2-INT4",
    kizami_version="0.1.0",
    command="kizami convert zai-org/GLM-5.2-FP8 out/ --group-size 32",
    base_model="zai-org/GLM-5.2-FP8",
    scheme="w4a16-g32",
    method="search, signed scales",
    forms=(("INT4 modules", "58,368 linears, group size 32"), ("everything else", "BF16")),
    tags=("int4", "compressed-tensors", "kizami"),
    source_bytes=755_617_140_416,
    output_bytes=450_903_738_368,
    bits_per_weight=4.787,
    errors=(ErrorRow("routed_expert", 58_368, 0.0812, 0.0931, 21.81),),
    has_negative_scales=True,
    is_quantized=True,
    engines=ENGINES,
    kv_scales="none",
    source_hashes=(("model-00001-of-00141.safetensors", "ab" * 32),),
)
OWN_FRONT_MATTER = [
    "---", "base_model:", "- zai-org/GLM-5.2-FP8", "base_model_relation: quantized", "library_name: transformers",
    "tags:", "- int4", "- compressed-tensors", "- kizami", "---",
]  # fmt: skip


def front_matter(readme: str | None, facts: CardFacts = FACTS) -> list[str]:
    lines = render_card(readme, facts).split("\n")
    return lines[: lines.index("---", 1) + 1]


def test_the_card_says_what_was_done() -> None:
    card = render_card(None, FACTS)
    for words in (
        "# GLM-5.2-INT4", "kizami convert zai-org/GLM-5.2-FP8 out/ --group-size 32", "58,368 linears",
        "group size 32", "703.72 GiB -> 419.94 GiB", "450,903,738,368 bytes", "4.787", "search, signed scales",
        "| routed_expert | 58,368 | 0.08120 | 0.09310 | 21.81 |", "vllm serve", "sglang.launch_server",
        "1, 2, 4, 8, 16, 32", "negative", "not evaluated on benchmarks", "KV-cache scales | none", "ab" * 32,
        "from the weights alone, with no calibration data", "kizami verify THIS --against zai-org/GLM-5.2-FP8\n",
        "--tp-size 8\n", "--tensor-parallel-size 8\n",
    ):  # fmt: skip
        assert words in card


def test_a_revision_is_named_and_verified_against() -> None:
    card = render_card(None, dataclasses.replace(FACTS, revision="c0ffee"))
    assert "| source revision | c0ffee |" in card
    assert "--against zai-org/GLM-5.2-FP8@c0ffee\n" in card


def test_without_a_hub_id_the_card_says_what_to_add() -> None:
    card = render_card(None, dataclasses.replace(FACTS, base_model=None))
    assert "\nThe source, converted offline" in card
    assert "`base_model` and `license` were not known to kizami" in card
    assert "kizami verify THIS --against SOURCE\n" in card
    assert "`license` was not known" in render_card(None, FACTS)
    assert "not known" not in render_card("---\nlicense: mit\n---\n", FACTS)


@pytest.mark.parametrize(("sizes", "largest"), [((1, 2, 4), 4), ((1, 2, 4, 8, 16, 32), 8), ((1,), 1)])
def test_serve_lines_have_the_largest_size_of_one_node_that_works(sizes: tuple[int, ...], largest: int) -> None:
    engines = [dataclasses.replace(engine, sizes=sizes) for engine in ENGINES[:2]]
    card = render_card(None, dataclasses.replace(FACTS, engines=(*engines, ENGINES[2])))
    assert f"--tp-size {largest}\n" in card
    assert f"--tensor-parallel-size {largest}\n" in card
    assert f"| SGLang 0.5.23 | yes | {', '.join(map(str, sizes))} |" in card


def test_an_engine_that_does_not_load_it_has_its_reason_and_no_command() -> None:
    broken = EngineFacts("vLLM", "0.33.0", (1, 2), "there is no loader for it")
    flagged = EngineFacts("SGLang", "0.5.23", (1, 2), None, ("serve with --dtype float16", "compare answers"))
    away = EngineFacts("transformers", "5.24.0", None, "no")
    card = render_card(None, dataclasses.replace(FACTS, engines=(flagged, broken, away)))
    assert "| vLLM 0.33.0 | no: there is no loader for it |" in card
    assert "vllm serve" not in card
    assert "--tp-size 2 --dtype float16\n" in card
    assert "| serve with --dtype float16; compare answers |" in card
    assert "library_name" not in card


def test_a_decoded_checkpoint_is_not_called_quantized() -> None:
    assert "base_model_relation" not in render_card(None, dataclasses.replace(FACTS, is_quantized=False))


def test_small_sizes_have_a_small_unit() -> None:
    card = render_card(None, dataclasses.replace(FACTS, source_bytes=12_799_328, output_bytes=11_864_768))
    assert "12.21 MiB -> 11.32 MiB (11,864,768 bytes)" in card


def test_the_source_table_is_short() -> None:
    hashes = tuple((f"model-{i:05d}-of-00141.safetensors", f"{i:064x}") for i in range(1, 142))
    card = render_card(None, dataclasses.replace(FACTS, source_hashes=hashes))
    assert card.count("-of-00141.safetensors |") == 8
    assert card.endswith("\n\n... and 133 more in `kizami.json`.\n")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("zai-org/GLM-5.2-FP8", "GLM-5.2"), ("GLM-tiny-fp8", "GLM-tiny"), ("GLM_FP8", "GLM"),
        ("DeepSeek-V3", "DeepSeek-V3"), ("fp8", "model"), ("", "model"),
    ],
)  # fmt: skip
def test_the_title_does_not_call_int4_fp8(source: str, shown: str) -> None:
    assert title(source, "INT4 (w4a16-g32)") == f"{shown} INT4 (w4a16-g32)"


def test_a_cached_snapshot_tells_its_origin() -> None:
    root = Path("hub/models--zai-org--GLM-5.2-FP8/snapshots")
    assert hub_origin(root / "c0ffee") == ("zai-org/GLM-5.2-FP8", "c0ffee")
    for other in ("GLM-5.2-FP8", "models--a--b", "datasets--a--b/snapshots/x", "models--gpt2/snapshots/x"):
        assert hub_origin(Path("hub") / other) is None


def test_the_command_leaves_defaults_out_and_quotes_patterns() -> None:
    assert command_line(Policy(), Method(), None) == "kizami convert SRC OUT"
    policy = Policy(group_size=64, rest="fp8", ignore=("re:.*it's.*",), max_shard_bytes=8)
    line = command_line(policy, Method("search", "positive", 0.5), "a/b@c")
    assert shlex.split(line) == [
        "kizami", "convert", "a/b@c", "OUT", "--group-size", "64", "--rest", "fp8", "--ignore", "re:.*it's.*",
        "--clip-allowance", "0.5", "--scale-sign", "positive", "--max-shard-size", "8",
    ]  # fmt: skip


def test_the_same_facts_give_the_same_bytes() -> None:
    assert render_card("---\nlicense: mit\n---\n", FACTS) == render_card("---\nlicense: mit\n---\n", FACTS)


def test_front_matter_without_a_source() -> None:
    assert front_matter(None) == OWN_FRONT_MATTER


@pytest.mark.parametrize("base_model", [None, "/home/me/glm", "a/b\nlicense: mit", "org/name: x", "../../x"])
def test_only_a_hub_id_becomes_base_model(base_model: str | None) -> None:
    lines = front_matter(None, dataclasses.replace(FACTS, base_model=base_model))
    assert lines == ["---", *OWN_FRONT_MATTER[4:]]


def test_allowed_keys_are_kept_word_for_word_and_others_replaced() -> None:
    source = (
        "---\r\nlicense: other\r\nlicense_name: modified-mit\r\n"
        "license_link: https://example.org/x/y/blob/main/LICENSE\r\n"
        "language:\r\n- en\r\n- zh\r\nlibrary_name: vllm\r\npipeline_tag: text-generation\r\nbase_model: evil/x\r\n"
        "tags:\r\n- moe\r\n- fp8\r\nwidget:\r\n- text: hi\r\n---\r\n# Hello\r\n"
    )
    assert front_matter(source) == [
        "---", "license: other", "license_name: modified-mit",
        "license_link: https://example.org/x/y/blob/main/LICENSE", "language:", "- en", "- zh",
        "pipeline_tag: text-generation", *OWN_FRONT_MATTER[1:6], "- moe", *OWN_FRONT_MATTER[6:],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "block",
    [
        "license: !!python/object/apply:os.system [id]",
        "license: &a mit",
        "license: *a",
        'license: "open',
        "license: |\n  many\n  lines",
        "license: mit # comment",
        "license: {a: b}",
        "license: a: b",
        "license: mit\n  more",
        "license:\n- a\n- b: c",
        "license:\n- - x",
        "license:",
        "license:mit",
        "license: \x1b[2J",
        "license: [a, [b]]",
        "license: mit\u2028base_model: x",
    ],
)
def test_front_matter_that_could_change_its_surroundings_is_dropped(block: str) -> None:
    assert front_matter(f"---\n{block}\n---\n") == OWN_FRONT_MATTER


@pytest.mark.parametrize("value", ["mit", "'mit'", '"mit"', "[en, zh]", "apache-2.0", "MIT License (Modified)"])
def test_plain_values_are_kept(value: str) -> None:
    assert front_matter(f"---\nlicense: {value}\n---\n")[1] == f"license: {value}"


@pytest.mark.parametrize("tags", ["tags: [moe, true, 'x-y', 123]", "tags:\n- moe\n- true\n- 'x-y'\n- 123"])
def test_tags_stay_strings(tags: str) -> None:
    lines = front_matter(f"---\n{tags}\n---\n")
    assert lines[lines.index("tags:") + 1 : -1] == ["- moe", "- x-y", "- int4", "- compressed-tensors", "- kizami"]


@pytest.mark.parametrize(
    "readme", ["", "# no front matter", "---\nlicense: mit\n", "\n---\nlicense: mit\n---\n", " ---\nlicense: mit\n---"]
)
def test_text_that_is_not_front_matter_is_not_read(readme: str) -> None:
    assert front_matter(readme) == OWN_FRONT_MATTER


def test_a_huge_readme_is_ignored() -> None:
    head = "---\nlicense: mit\n---\n"
    assert front_matter(head + "x" * (MAX_README_CHARS - len(head)))[1] == "license: mit"
    assert front_matter(head + "x" * (MAX_README_CHARS - len(head) + 1)) == OWN_FRONT_MATTER


def test_the_first_of_two_equal_keys_counts_and_comes_once() -> None:
    lines = front_matter("---\nlicense: mit\nlicense: apache-2.0\n---\n")
    assert [line for line in lines if line.startswith("license")] == ["license: mit"]


def test_names_cannot_add_markup() -> None:
    hostile = dataclasses.replace(
        FACTS, title="a\n# b <script> | `x` [l](http://e)", source_hashes=(("a|b\n---\x1b", "c"),), notes=("# n",)
    )
    card = render_card(None, hostile)
    assert "\n# b" not in card
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert "\x1b" not in card
    assert "\n# n" not in card
    assert "| a\\|b\\\\n---\\\\x1b | c |" in card


def test_a_command_with_backticks_stays_in_its_fence() -> None:
    card = render_card(None, dataclasses.replace(FACTS, command="kizami convert ```\n# x"))
    lines = card.split("\n")
    start = lines.index("````sh")
    assert lines[start + 1 : start + 3] == ["kizami convert ```\\n# x", "````"]


@pytest.mark.parametrize("note", ["# x", "- x", "+ x", "1. x", "12) x", "---", "==="])
def test_a_note_is_a_paragraph(note: str) -> None:
    lines = render_card(None, dataclasses.replace(FACTS, notes=(note,))).split("\n")
    assert f"&#8203;{note}" in lines


def test_an_error_of_zero_is_called_exact() -> None:
    card = render_card(None, dataclasses.replace(FACTS, errors=(ErrorRow("attention", 1, 0.0, 0.0, None),)))
    assert "| attention | 1 | 0.00000 | 0.00000 | exact |" in card


def test_a_line_of_blanks_costs_no_time() -> None:
    assert front_matter("---\nlicense: [" + " " * 500_000 + "x\n---\n") == OWN_FRONT_MATTER


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a_b*c", r"a_b\*c"),
        ("_a_ b_ __init__", r"\_a\_ b\_ \_\_init\_\_"),
        ("w4a16-g32", "w4a16-g32"),
        ("0.1.0", "0.1.0"),
        ("a\nb", r"a\\nb"),
        ("  x  ", "x"),
    ],
)
def test_escape_markdown(text: str, line: str) -> None:
    assert escape_markdown(text) == line


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(
    ["---", "license: mit", "license", ":", " ", "\n", "- a", "tags:", '"', "'", "[", "|", "&a", "*a", "#", "language:"]
), max_size=20))  # fmt: skip
def test_no_readme_breaks_out_of_the_front_matter(parts: list[str]) -> None:
    lines = front_matter("---\n" + "".join(parts) + "\n---\n")
    assert lines[-len(OWN_FRONT_MATTER[4:6]) - 4 :][-1] == "---"
    keys = [line.partition(":")[0] for line in lines[1:-1] if not line.lstrip(" ").startswith("- ")]
    assert len(keys) == len(set(keys))
    assert set(keys) <= {"license", "language", "base_model", "base_model_relation", "library_name", "tags"}
    assert not {"&", "*", "|", "#"} & set("".join(lines))


# ---------------------------------------------------------------------------------------------------- parallelism


@pytest.mark.parametrize(
    ("cols", "group", "sizes"),
    [
        (2048, 32, (1, 2, 4, 8, 16, 32)),
        (2048, 128, (1, 2, 4, 8, 16)),
        (1536, 128, (1, 2, 4)),
        (1536, 64, (1, 2, 4, 8)),
        (1408, 32, (1, 2, 4)),
        (192, 64, (1,)),
    ],
)
def test_tensor_parallel_sizes_of_published_widths(cols: int, group: int, sizes: tuple[int, ...]) -> None:
    """Kimi and GLM-5 2048, GLM-4.x 1536, GLM-4.5-Air 1408 columns of down_proj."""
    shapes = {"gate_proj": [(cols, 4096)], "up_proj": [(cols, 4096)], "down_proj": [(4096, cols)] * 3}
    assert tensor_parallel_sizes(shapes, group) == sizes


def test_three_ranks_fit_three_groups_of_64() -> None:
    fits = {tp: tensor_parallel_fits("down_proj", 256, 192, 64, tp) for tp in (2, 3, 8)}
    assert fits == {2: False, 3: True, 8: False}


def test_row_counts_limit_the_projections_that_are_split_by_rows() -> None:
    assert tensor_parallel_sizes({"up_proj": [(12, 4096)]}, 32) == (1, 2, 4)
