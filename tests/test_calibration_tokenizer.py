"""The checkpoint's own tokenizer and chat template without its code; Kimi's tiktoken.model; the mix of the data."""

import base64
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from kizami.calibration.data.chat import check_messages, check_tools
from kizami.calibration.data.files import Document
from kizami.calibration.data.mix import Claims, Mix, MixCounter, code_characters, lacks, read_claims
from kizami.calibration.data.tokenizer import Tokenizer
from kizami.formats.errors import KizamiError

TEMPLATE = """[start]{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>{% endfor %}
{%- endfor %}{{ eos_token }}"""
CALL = {"id": "1", "type": "function", "function": {"name": "forecast", "arguments": '{"place": "Gent", "hours": 6}'}}
MESSAGES = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
]
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "description": "Rain", "parameters": {"b": 1, "a": None}}}
]


def refused(make: Callable[[], object]) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        make()
    return caught.value


@pytest.fixture
def folder(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the demo's tokenizer, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, tmp_path / name)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def chat(messages: list[Any] | None = None, tools: list[Any] | None = None) -> Document:
    return Document("a.jsonl line 7", messages=check_messages(messages or MESSAGES), tools=check_tools(tools))


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_ids_are_those_of_transformers(folder: Path) -> None:
    texts = ["def f(x):\n    return x  # 刻み", "Straße, 3.14, naïve <|endoftext|> done"]
    reference = AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(texts, Tokenizer.open(folder).encode(texts, [False, False]), strict=True):
        assert ids.tolist() == [*reference(text)["input_ids"], reference.eos_token_id]


def test_one_end_token_is_enough(folder: Path) -> None:
    (ids,) = Tokenizer.open(folder).encode(["tide<|endoftext|>"], [False])
    assert ids.tolist().count(0) == 1


def test_texts_begin_with_bos_where_the_config_says_so(folder: Path) -> None:
    configure(folder, bos_token={"content": "<|pad|>"}, add_bos_token=True)
    tokenizer = Tokenizer.open(folder)
    assert [ids[0] for ids in tokenizer.encode(["tide", "<|pad|>tide", "chat"], [False, False, True])][:2] == [1, 1]
    first, second, rendered = tokenizer.encode(["tide", "<|pad|>tide", "tide"], [False, False, True])
    assert first.tolist() == second.tolist() == [1, *rendered.tolist()]
    configure(folder, add_bos_token=False)
    assert Tokenizer.open(folder).encode(["tide"], [False])[0].tolist() == rendered.tolist()


def test_what_the_tokenizer_puts_around_a_text_is_not_put_around_a_chat(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    text, rendered = Tokenizer.open(folder).encode(["tide", "tide"], [False, True])
    assert text.tolist() == [1, *rendered.tolist()]


def test_without_an_end_token_documents_only_follow_each_other(folder: Path) -> None:
    configure(folder, eos_token="<|not in the vocabulary|>")
    assert Tokenizer.open(folder).eos is None
    assert 0 not in Tokenizer.open(folder).encode(["tide"], [False])[0]


def test_truncation_and_padding_of_tokenizer_json_are_off(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4, pad_id=1)
    backend.save(str(folder / "tokenizer.json"))
    long, short = Tokenizer.open(folder).encode(["tide " * 50, "a"], [False, False])
    assert len(long) > 50
    assert 1 not in short


def test_no_code_of_the_folder_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenization_kimi.py", "tokenization_glm.py"):
        (folder / name).write_text("raise SystemExit('imported')\n")
    configure(folder, auto_map={"AutoTokenizer": ["tokenization_glm.Own", None]}, tokenizer_class="Own")
    monkeypatch.chdir(folder)
    assert Tokenizer.open(folder).encode(["tide"], [False])


def test_a_folder_without_a_tokenizer_says_what_helps(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    error = refused(lambda: Tokenizer.open(tmp_path))
    assert error.code == "no_tokenizer"
    assert "--tokenizer DIR" in str(error.hint)


def test_a_tokenizer_is_a_folder(folder: Path) -> None:
    for path in (folder / "tokenizer.json", folder / "nowhere"):
        assert refused(lambda path=path: Tokenizer.open(path)).code == "missing_file"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", b"{", "bad_tokenizer"),
        ("tokenizer.json", b"\xff", "bad_tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "bad_tokenizer"),
        ("tokenizer_config.json", b"[]", "bad_json"),
        ("chat_template.jinja", b"x" * (1 << 20) + b"x", "too_large"),
    ],
)
def test_damaged_files_of_the_tokenizer_are_named(folder: Path, name: str, content: bytes, code: str) -> None:
    (folder / name).write_bytes(content)
    error = refused(lambda: Tokenizer.open(folder))
    assert (error.code, error.file) == (code, name)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_text("{{ messages }}")
    (folder / "chat_template.jinja").symlink_to(outside)
    assert refused(lambda: Tokenizer.open(folder)).code == "outside_folder"
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    assert refused(lambda: Tokenizer.open(folder)).code == "not_a_file"


# --------------------------------------------------------------------------------------------------------------- chats


def test_a_chat_is_rendered_as_transformers_does_after_a_server_has_read_it(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = Tokenizer.open(folder).text_of(chat(tools=TOOLS))
    assert "<call>forecast place=Gent hours=6</call>" in text
    assert "<assistant><call>" in text  # no content is no word
    assert text.endswith("<tool>no<|endoftext|>")
    parsed = [*MESSAGES]
    function = {"name": "forecast", "arguments": {"place": "Gent", "hours": 6}}
    parsed[1] = {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": function}]}
    reference = AutoTokenizer.from_pretrained(folder)
    assert text == reference.apply_chat_template(parsed, tools=TOOLS, tokenize=False)
    assert json.dumps(TOOLS[0]) in text


def test_a_template_that_wants_arguments_as_text_gets_them_so(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    assert Tokenizer.open(folder).text_of(chat()) == 'call {"place": "Gent", "hours": 6}'


def test_arguments_that_are_no_json_stay_what_they_are(folder: Path) -> None:
    broken = {"function": {"name": "f", "arguments": "{broken"}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [broken]}])
    assert message == {"role": "assistant", "content": "", "tool_calls": [broken]}


def test_a_template_by_name_is_chosen_by_the_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools!"}]
    configure(folder, chat_template=named)
    tokenizer = Tokenizer.open(folder)
    assert [tokenizer.text_of(chat(tools=tools)) for tools in (None, TOOLS)] == ["plain", "tools!"]
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.open(folder).text_of(chat()) == "file"


def test_a_template_that_prints_the_date_prints_the_same_every_day(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    assert Tokenizer.open(folder).text_of(chat()) == "01 Jan 2025"


def test_a_chat_without_a_template_is_refused_by_its_line(folder: Path) -> None:
    error = refused(lambda: Tokenizer.open(folder).text_of(chat()))
    assert (error.code, error.file) == ("no_template", "a.jsonl line 7")
    assert "--tokenizer DIR" in str(error.hint)


def test_a_template_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    error = refused(lambda: Tokenizer.open(folder))
    assert (error.code, error.file) == ("bad_template", "chat_template.jinja")


def test_a_tokenizer_that_loses_a_text_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    made["model"] |= {"vocab": {}, "merges": []}
    path.write_text(json.dumps(made))
    error = refused(lambda: Tokenizer.open(folder).encode(["some text"], [False]))
    assert (error.code, error.file) == ("bad_tokenizer", "tokenizer.json")
    assert len(Tokenizer.open(folder).encode([" "], [False])[0]) == 1  # the end


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at.all }}",
        "{% for",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the sandbox
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        '{{ "\\ud800" }}',  # half a surrogate pair
    ],
)
def test_a_template_that_fails_is_refused_by_the_line_of_the_chat(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    error = refused(lambda: Tokenizer.open(folder).text_of(chat()))
    assert (error.code, error.file) == ("bad_template", "a.jsonl line 7")


# ---------------------------------------------------------------------------------------------------------------- Kimi

PATTERN = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 11: "<|tool_calls_section_begin|>", 257: "[PAD]"}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A vocabulary of 1500 byte pairs, trained on the built-in sample, and a word that no pair makes."""
    sample = Path(__file__).parent.parent / "calibration" / "data" / "sample"
    rows = [json.loads(line) for line in (sample / "prose.jsonl").read_text("utf-8").splitlines()]
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([row["text"] for row in rows] + ["aaaa     \n\n\n\n    " * 50], trainer)
    # GPT-2's letters: what is printable in Latin-1 stands for itself, the rest follows from 256 on
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    byte_of = {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
    words = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    trained = {bytes(byte_of[letter] for letter in word): rank for rank, word in enumerate(words)}
    return trained | {b" zqxjkv": len(trained)}


def model_file(ranks: dict[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


@pytest.fixture
def kimi(tmp_path: Path, ranks: dict[bytes, int]) -> Path:
    """A folder as Kimi's are: tiktoken.model, the config, and code that must not run."""
    lines = "\n".join(f'            r"""{part}""",' for part in PATTERN)
    (tmp_path / "tokenization_kimi.py").write_text(
        f'raise SystemExit("imported")\nclass T:\n    pat_str = "|".join(\n        [\n{lines}\n        ]\n    )\n'
    )
    (tmp_path / "tiktoken.model").write_text(model_file(ranks))
    named = {str(len(ranks) + i): {"content": word, "special": i < 4} for i, word in NAMED.items()}
    config = {"added_tokens_decoder": named, "eos_token": "[EOS]", "bos_token": "[BOS]", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def reference(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """As Kimi's class builds it."""
    special = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(258)}
    return tiktoken.Encoding("kimi", pat_str="|".join(PATTERN), mergeable_ranks=ranks, special_tokens=special)


def test_kimis_ids_are_those_of_tiktoken(kimi: Path, ranks: dict[bytes, int]) -> None:
    encoding, tokenizer = reference(ranks), Tokenizer.open(kimi)
    assert tokenizer.kind == "tiktoken.model"
    pool = "aAbBsdtTlLmM  \n\t'123,.;{}()中文字Приветあカ한글عربहिन्éßǅʰ\u00a0\u0301\r\u2028\u3000½²😀\u200d\u0085\u000b"
    chosen = random.Random(0)
    texts = ["".join(chosen.choices(pool, k=chosen.randint(1, 40))) for _ in range(3000)]
    texts += [
        "a zqxjkv zqxjkvs",
        "aaaaaaaaaaa aaa  aa\n\n\n\n\n",
        "中文English混合's I'LL",
        "<|im_user|>hi<|im_end|><|reserved_token_",
        "[BOS]",
    ]
    texts += [f"x<|reserved_token_{len(ranks) + 200}|>y <|tool_calls_section_begin|>"]
    found = [ids.tolist() for ids in tokenizer.encode(texts, [True] * len(texts))]
    eos = len(ranks) + 1
    for text, ids in zip(texts, found, strict=True):
        assert ids == [*encoding.encode(text, allowed_special="all"), eos], repr(text)


@pytest.mark.parametrize("step", [53, pytest.param(5, marks=pytest.mark.long)])
def test_characters_are_split_as_tiktoken_does(kimi: Path, ranks: dict[bytes, int], step: int) -> None:
    encoding, tokenizer = reference(ranks), Tokenizer.open(kimi)
    characters = [chr(i) for i in range(0x110000) if i % step == 0 and not 0xD800 <= i < 0xE000]
    texts = [" ".join(f"a{c}b {c}1" for c in characters[i : i + 500]) for i in range(0, len(characters), 500)]
    for text, ids in zip(texts, tokenizer.encode(texts, [True] * len(texts)), strict=True):
        assert np.array_equal(ids[:-1], encoding.encode(text, disallowed_special=()))


def test_kimis_tools_are_sorted_by_key(kimi: Path) -> None:
    text = Tokenizer.open(kimi).text_of(chat(tools=TOOLS))
    assert '{"function": {"description": "Rain", "name": "forecast", "parameters": {"a": null, "b": 1}}, "type"' in text


def test_kimi_without_its_python_file_is_read_all_the_same(kimi: Path) -> None:
    before = Tokenizer.open(kimi).encode(["中文English"], [True])[0].tolist()
    (kimi / "tokenization_kimi.py").unlink()
    assert Tokenizer.open(kimi).encode(["中文English"], [True])[0].tolist() == before


def test_another_pattern_in_kimis_file_is_refused(kimi: Path) -> None:
    code = (kimi / "tokenization_kimi.py").read_text()
    for changed in (code.replace("{1,3}", "{1,2}"), code.replace(PATTERN[0], ""), "class T: pass\n", code + code):
        (kimi / "tokenization_kimi.py").write_text(changed)
        if changed == code + code:
            assert Tokenizer.open(kimi)
        else:
            error = refused(lambda: Tokenizer.open(kimi))
            assert (error.code, error.file) == ("bad_tokenizer", "tokenization_kimi.py")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines[:9], "x y", *lines[9:]], "line 10 is not `base64 rank`"),
        (lambda lines: [*lines[:9], "%%% 9", *lines[9:]], "line 10 is not `base64 rank`"),
        (lambda lines: [*lines[:9], lines[8], *lines[9:]], "line 10 has the rank 8, expected"),
        (lambda lines: [*lines, f"{lines[8].split()[0]} {len(lines)}"], "line 1502 has the rank 1501, expected 1501"),
        (lambda lines: lines[1:], "line 1 has the rank 1, expected 0"),
        (lambda lines: lines[:255], "has no token for byte"),
        (lambda lines: [], "has no token for byte 0x00"),
    ],
)
def test_a_damaged_tiktoken_model_is_refused(kimi: Path, change: Callable[[list[str]], list[str]], said: str) -> None:
    lines = (kimi / "tiktoken.model").read_text().splitlines()
    (kimi / "tiktoken.model").write_text("\n".join(change(lines)))
    error = refused(lambda: Tokenizer.open(kimi))
    assert (error.code, error.file) == ("bad_tokenizer", "tiktoken.model")
    assert said in error.message


@pytest.mark.parametrize(
    ("key", "entry", "said"),
    [
        ("7", {"content": "[X]"}, "has the special id 7, expected 1501 to 1758"),
        ("9000", {"content": "[X]"}, "has the special id 9000"),
        ("1600", {}, "without an id and a content"),
        ("one", {"content": "[X]"}, "'one' without an id"),
        ("1600", {"content": "[EOS]"}, "one token under two ids"),
    ],
)
def test_special_tokens_that_do_not_fit_are_refused(kimi: Path, key: str, entry: dict[str, str], said: str) -> None:
    config = json.loads((kimi / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][key] = entry
    (kimi / "tokenizer_config.json").write_text(json.dumps(config))
    assert said in refused(lambda: Tokenizer.open(kimi)).message


# ----------------------------------------------------------------------------------------------------------------- mix

CODE = 'int main(void) {\n    puts("tide");\n    return 0;\n}\n'
PROSE = "The tide came in.\nNobody saw it; nobody was there.\nIt left again.\n"


def mix_of(*documents: tuple[Document, str]) -> Mix:
    counter = MixCounter()
    for document, text in documents:
        counter.add(document, text)
    return counter.total()


def test_code_is_known_by_suffix_fence_or_lines() -> None:
    assert code_characters(PROSE) == 0
    assert code_characters(PROSE, ".py") == len(PROSE)
    assert code_characters(CODE) == len(CODE)
    assert code_characters(f"{PROSE}```c\n{CODE}```\n{PROSE}") == len(CODE)
    assert code_characters(f"{PROSE}```c\n{CODE}") == len(CODE)  # cut off before the fence's end
    assert code_characters("") == 0


@pytest.mark.parametrize("name", ["code", "prose"])
def test_most_of_the_sample_is_told_apart(name: str) -> None:
    path = Path(__file__).parent.parent / "calibration" / "data" / "sample" / f"{name}.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
    found = sum(code_characters(text) > 0 for text in texts)
    assert found >= 0.85 * len(texts) if name == "code" else found <= 1


def test_shares_are_of_characters_and_scripts_of_letters_outside_code() -> None:
    text = Document("a", text="")
    call = {"function": {"name": "f", "arguments": {}}}
    calling = chat([{"role": "user", "content": "a" * 50}, {"role": "assistant", "tool_calls": [call]}])
    talking = chat([{"role": "user", "content": "яя" + "中" * 48}])
    mix = mix_of((text, CODE), (calling, "a" * 50), (talking, "яя" + "中" * 48))
    total = len(CODE) + 100
    arguments = 50 * 2 / 52  # `{}`
    assert mix.code == pytest.approx((len(CODE) + arguments) / total)
    assert (mix.chat, mix.tool_calls) == (100 / total, 50 / total)
    assert mix.scripts == (("Latin", 0.5), ("Han", 0.48), ("Cyrillic", 0.02))
    assert mix_of((text, f"яя яя\n```c\n{CODE}```\n")).scripts == (("Cyrillic", 1.0),)
    assert mix_of((text, "é" + "ⁿªº𝐀ℝ\ue000" * 3)).scripts == (("Latin", 1.0),)
    assert mix_of((text, "あア中ｱ한")).scripts == (("Kana", 0.6), ("Han", 0.2), ("Hangul", 0.2))


TAGS = "<turn>\n<role>{}</role>\n<text>\n{}\n</text>\n</turn>\n"


def test_tags_of_the_chat_template_are_no_code() -> None:
    talk = [{"role": "user", "content": PROSE}, {"role": "assistant", "content": "Да.", "reasoning_content": "Да?"}]
    rendered = "".join(TAGS.format(m["role"], m["content"]) for m in talk)
    assert code_characters(rendered) == len(rendered)
    mix = mix_of(*[(chat(talk), rendered)] * 60)
    assert (mix.code, mix.chat) == (0.0, 1.0)
    assert [script for script, _ in mix.scripts] == ["Latin", "Cyrillic"]
    fenced = chat([{"role": "user", "content": [{"type": "text", "text": f"{PROSE}```c\n{CODE}```\n"}]}])
    assert 0 < mix_of((fenced, rendered)).code < 0.5


def test_the_prose_of_a_long_chat_is_counted_once() -> None:
    talk = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "я" * 59}]
    parts = [replace(chat(talk), part=part, parts=3) for part in range(3)]
    assert mix_of(*((part, "x" * 40) for part in parts)).scripts == (("Latin", 60 / 119), ("Cyrillic", 59 / 119))


def test_nothing_has_shares_of_nothing() -> None:
    assert mix_of() == Mix(0.0, 0.0, 0.0, ())


ALL = Mix(0.2, 0.3, 0.2, (("Latin", 0.6), ("Han", 0.4)))


@pytest.mark.parametrize(
    ("mix", "claims", "said"),
    [
        (ALL, Claims(True, ("en", "zh")), []),
        (Mix(0.0, 0.3, 0.2, ALL.scripts), Claims(True, ()), ["0.0% of the data is code"]),
        (Mix(0.2, 0.3, 0.004, ALL.scripts), Claims(True, ()), ["0.4% of the data is chats with tool calls"]),
        (Mix(0.0, 0.0, 0.0, ALL.scripts), Claims(False, ("en",)), []),
        (Mix(0.2, 0.3, 0.2, (("Latin", 1.0),)), Claims(True, ("en", "zh-CN", "yue", "ru")), ["zh-CN, yue", "Cyrillic"]),
        (Mix(0.2, 0.3, 0.2, (("Han", 1.0),)), Claims(True, ("zh", "en", "de")), ["names en, de"]),
        (Mix(0.2, 0.3, 0.2, (("Latin", 1.0),)), Claims(True, ("multilingual",)), ["multilingual"]),
        (ALL, Claims(True, ("multilingual", "C++")), []),
    ],
)
def test_what_the_model_is_for_and_the_data_lacks_is_said(mix: Mix, claims: Claims, said: list[str]) -> None:
    found = lacks(mix, claims)
    assert len(found) == len(said)
    assert all(words in sentence for words, sentence in zip(said, found, strict=True))


@pytest.mark.parametrize(
    ("card", "languages"),
    [
        ("---\nlanguage:\n- en\n- zh\nlicense: mit\n---\n# M\n", ("en", "zh")),
        ("---\nlanguage: [en, 'zh']\n---\n", ("en", "zh")),
        ("---\nlanguage: ru\n---\n", ("ru",)),
        ('---\nlanguage: "ja"\n---\n', ("ja",)),
        ("---\nlicense: mit\n---\nlanguage: ru\n", ()),
        ("# no front matter\n", ()),
        ("---\nlanguage: &a [en]\n---\n", ()),
    ],
)
def test_languages_are_read_from_the_model_card(tmp_path: Path, card: str, languages: tuple[str, ...]) -> None:
    (tmp_path / "README.md").write_text(card)
    assert read_claims(tmp_path, "{% if tools %}") == Claims(True, languages)
    assert read_claims(tmp_path, "{{ messages }}") == Claims(False, languages)


def test_whoever_has_no_card_claims_nothing(tmp_path: Path) -> None:
    assert read_claims(tmp_path, "") == Claims(False, ())
    os.mkfifo(tmp_path / "README.md")
    assert read_claims(tmp_path, "") == Claims(False, ())
