"""Calibration data: files to documents, documents to packed sequences, and what is refused, with file and line."""

import gzip
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kizami.calibration.data import files as data
from kizami.calibration.data.files import open_data, part_of
from kizami.calibration.data.tokenizer import Tokenizer
from kizami.calibration.data.tokens import (
    SourceFacts,
    TokenSet,
    TokenSettings,
    hold_out,
    read_sample,
    read_tokens,
    tokens_sha256,
)
from kizami.formats.errors import KizamiError

VOCABULARY = 2048
WORDS = ("tide", "marsh", "sluice", "plover", "redshank", "channel", "post", "shower", "creek", "wind", "seed", "stem")


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer.open(demo_checkpoint)


def prose(lines: int, seed: int = 0) -> str:
    chosen = random.Random(seed)
    return "".join(" ".join(chosen.choices(WORDS, k=12)) + ".\n" for _ in range(lines))


def packed(tokenizer: Tokenizer, *paths: Path, samples: int = 4, seq_len: int = 32, seed: int = 0) -> TokenSet:
    return read_tokens(paths, tokenizer, TokenSettings(samples, seq_len, seed), VOCABULARY)


def refused(make: Callable[[], object]) -> KizamiError:
    with pytest.raises(KizamiError) as caught:
        make()
    return caught.value


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return write


Write = Callable[[str, str | bytes], Path]

# ------------------------------------------------------------------------------------------------------------- packing


def test_a_document_is_its_ids_and_an_end_token(tokenizer: Tokenizer, write: Write) -> None:
    text = prose(3)
    made = packed(tokenizer, write("a.txt", text), samples=100, seq_len=64)  # a piece has 256 bytes
    whole = [*tokenizer.encode([text], [False])[0]]
    assert whole[-1] == tokenizer.eos == 0
    assert made.ids.dtype == np.int32
    assert made.ids.reshape(-1).tolist() == whole[: made.ids.size]
    assert made.ids.size == len(whole) // 64 * 64 > 0


def test_documents_follow_each_other_without_a_gap(tokenizer: Tokenizer, write: Write) -> None:
    texts = [f"{word} {i}" for i, word in enumerate(WORDS)]
    path = write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = packed(tokenizer, path, samples=1000, seq_len=8)
    stream = made.ids.reshape(-1).tolist()
    each = [ids.tolist() for ids in tokenizer.encode(texts, [False] * len(texts))]
    order = []
    while (document := next((i for i, ids in enumerate(each) if stream[: len(ids)] == ids), None)) is not None:
        order.append(document)
        del stream[: len(each[document])]
    assert len(order) == len(set(order)) >= len(each) - 3
    assert order != sorted(order)
    left = [ids for i, ids in enumerate(each) if i not in order]
    assert not stream or any(ids[: len(stream)] == stream for ids in left)  # the last sequence ends where it is full
    used = len(order) + bool(stream)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert made.sources == (SourceFacts("a.jsonl", sha256, used, made.ids.size),)


def test_the_same_data_and_seed_give_the_same_ids_in_every_version(tokenizer: Tokenizer, write: Write) -> None:
    first, second = write("a.txt", prose(80, 1)), write("b.md", prose(80, 2))
    made = packed(tokenizer, first, second)
    assert made.sha256 == "65e3145c3168269f8b42a2e630eb493d21a45cf94cd3867732a20c5f2b06f5ce"
    turned = packed(tokenizer, second, first)
    assert (turned.sha256, turned.sources, turned.mix) == (made.sha256, made.sources, made.mix)
    assert packed(tokenizer, first, second, seed=1).sha256 != made.sha256


def test_the_hash_is_of_shape_and_ids() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    expected = hashlib.sha256(b"int32 3 4\n" + b"".join(int(i).to_bytes(4, "little") for i in range(12))).hexdigest()
    assert tokens_sha256(ids) == expected
    assert tokens_sha256(ids.reshape(4, 3)) != expected
    assert tokens_sha256(np.asfortranarray(ids)) == expected


@pytest.mark.parametrize(("sequences", "count"), [(1, 0), (2, 1), (10, 1), (24, 2), (128, 13)])
def test_a_tenth_of_the_sequences_is_held_out(sequences: int, count: int) -> None:
    rows = hold_out(sequences, 0)
    assert len(rows) == len(set(rows)) == count
    assert list(rows) == sorted(rows)
    assert all(0 <= row < sequences for row in rows)


def test_another_seed_holds_out_other_sequences() -> None:
    assert len({hold_out(128, seed) for seed in range(5)}) == 5


def test_sources_are_used_in_proportion_to_their_size(tokenizer: Tokenizer, write: Write) -> None:
    small, large = write("small.txt", prose(100, 1)), write("large.txt", prose(300, 2))
    made = packed(tokenizer, small, large, samples=60, seq_len=32)
    assert [source.name for source in made.sources] == ["large.txt", "small.txt"]
    share = made.sources[1].tokens / made.ids.size
    assert 0.15 < share < 0.35
    assert sum(source.tokens for source in made.sources) == made.ids.size == 60 * 32


def test_a_file_that_is_given_twice_is_used_once(tokenizer: Tokenizer, write: Write) -> None:
    first = write("a.txt", prose(40))
    second = write("b.txt", prose(40))
    for order in ((first, second), (second, first)):
        made = packed(tokenizer, *order)
        assert made.sha256 == packed(tokenizer, first).sha256
        assert [source.name for source in made.sources] == ["a.txt"]
        assert "used once" in made.warnings[0]


def test_too_few_tokens_make_fewer_sequences_and_a_warning_with_numbers(tokenizer: Tokenizer, write: Write) -> None:
    made = packed(tokenizer, write("a.txt", prose(10)), samples=500)
    total = len(tokenizer.encode([prose(10)], [False])[0])
    assert total // 32 - 3 <= made.sequences <= total // 32 + 3  # each piece has an end token
    (warning,) = made.warnings
    assert f"{made.sequences} sequences of 32 instead of 500" in warning


def test_less_than_one_sequence_is_refused(tokenizer: Tokenizer, write: Write) -> None:
    error = refused(lambda: packed(tokenizer, write("a.txt", "tide"), seq_len=64))
    assert error.code == "no_data"
    assert "expected at least one sequence of 64" in error.message


def test_an_id_beyond_the_vocabulary_names_both(tokenizer: Tokenizer, write: Write) -> None:
    path = write("a.txt", prose(20))
    error = refused(lambda: read_tokens([path], tokenizer, TokenSettings(1, 1024), 300))
    assert error.code == "bad_token"
    assert "vocab_size in config.json is 300" in error.message
    largest = max(int(ids.max()) for ids in tokenizer.encode([prose(20)], [False]))
    assert largest >= 300
    assert error.file == f"{path} line 1"


# ------------------------------------------------------------------------------------------------------ text and pieces


@pytest.mark.parametrize(
    "text", ["a\nbb\n\nccc\n" * 30, "no line end at all " * 40, "é中\U0001f600" * 50, "\n" * 50 + "x"]
)
def test_pieces_are_the_whole_text_and_cut_no_character(write: Write, text: str) -> None:
    with open_data(write("a.txt", text), 64) as file:
        pieces = [document.text for document in file.read(range(len(file.units)))]
    assert all(len(str(piece).encode()) <= 64 for piece in pieces)
    assert "".join(map(str, pieces)) in (text, text.lstrip("\n"))
    assert len(pieces) > 1 or text.startswith("\n")


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("text", ["one\ntwo\nthree\nfour\n" * 9, "x" * 100, "", "\n" * 30])
def test_parts_are_the_whole_text(text: str, parts: int) -> None:
    cut = [part_of(text, part, parts) for part in range(parts)]
    assert "".join(cut) == text
    assert max(map(len, cut)) <= 2 * (len(text) // parts + 1)


def test_a_long_document_of_a_line_is_cut_into_parts(tokenizer: Tokenizer, write: Write) -> None:
    path = write("a.jsonl", json.dumps({"text": prose(60)}))
    with open_data(path, 128) as file:
        documents = file.read(range(len(file.units)))
        assert len(documents) == -(-len(prose(60)) // 128)
        assert "".join(part_of(str(d.text), d.part, d.parts) for d in documents) == prose(60)
    assert packed(tokenizer, path, samples=4).sequences == 4


def test_a_byte_order_mark_is_no_text(write: Write) -> None:
    for name, content in (("a.txt", "\ufefftide\n"), ("b.jsonl", '\ufeff{"text": "tide\\n"}\r\n\r\n')):
        with open_data(write(name, content), 64) as file:
            assert [document.text for document in file.read([0])] == ["tide\n"]


def test_json_lines_are_known_by_name_or_by_their_first_line(write: Write) -> None:
    row = '{"text": "tide"}\n'
    for name in ("a.jsonl", "b.ndjson", "c.json", "stdin"):
        with open_data(write(name, row), 64) as file:
            assert type(file) is data.JsonLines
    for name, content in (("package.json", '{\n "text": 1}\n'), ("a.py", row), ("LICENSE", "Copyright\n")):
        with open_data(write(name, content), 64) as file:
            assert type(file) is data.TextFile


def test_a_pipe_is_read_to_its_end(write: Write, tmp_path: Path) -> None:
    for content, kind in (('{"text": "tide"}\n', data.JsonLines), ("tide\n", data.TextFile)):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=(content,))
        writer.start()
        with open_data(pipe, 64) as file:
            assert type(file) is kind
            assert file.sha256 == hashlib.sha256(content.encode()).hexdigest()
            assert [document.text for document in file.read([0])] == ["tide\n" if kind is data.TextFile else "tide"]
        writer.join()
        pipe.unlink()


def test_a_link_is_followed(tokenizer: Tokenizer, write: Write, tmp_path: Path) -> None:
    path = write("a.txt", prose(40))
    (tmp_path / "link.txt").symlink_to(path)
    assert packed(tokenizer, tmp_path / "link.txt").sha256 == packed(tokenizer, path).sha256


def test_a_file_that_changes_while_it_is_used_is_noticed(write: Write) -> None:
    path = write("a.txt", prose(40))
    with open_data(path, 64) as file:
        path.write_text(prose(41))
        assert refused(lambda: file.read([0])).code == "source_changed"


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "content", "where", "said"),
    [
        ("a.txt", b"tide\nmarsh \xff\n", " line 2", "byte 0xff at 6 of the line is not UTF-8"),
        ("a.txt", b"tide\n\0\n", " line 2", "has a NUL byte"),
        ("a.txt", b"", "", "has no text"),
        ("a.txt", b" \n\n", "", "has no text"),
        ("a.txt", gzip.compress(b"tide", mtime=0), "", "is packed with gzip"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\0", "", "is packed with zstd"),
        ("a.txt", "tide".encode("utf-16"), "", "is UTF-16"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', " line 2", "is not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n["text"]\n', " line 3", "is a JSON list, expected an object"),
        ("a.jsonl", b'{"text": "a\xe9"}\n', " line 1", "is not UTF-8"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', " line 1", "twice"),
        (
            "a.jsonl",
            b'{"prompt": "a", "answer": "b"}\n',
            " line 1",
            "the keys prompt, answer; expected text or messages",
        ),
        ("a.jsonl", b"{}\n", " line 1", "the keys none"),
        ("a.jsonl", b'{"text": 7}\n', " line 1", "text is a int, expected a string"),
        ("a.jsonl", b'{"text": ""}\n{"messages": []}\n', "", "has no text"),
        ("a.json", b'[{"text": "a"}]\n', "", "is one JSON list"),
        ("a.jsonl", b'{"messages": 7}\n', " line 1", "messages is a int, expected a list"),
        ("a.jsonl", b'{"messages": ["hi"]}\n', " line 1", "message 1 is a str"),
        ("a.jsonl", b'{"messages": [{"from": "human", "value": "a"}]}\n', " line 1", "no role (its keys: from, value"),
        ("a.jsonl", b'{"messages": [{"role": "bot"}]}\n', " line 1", "the role 'bot', expected one of"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": 7}]}\n', " line 1", "content of message 1 is a int"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n',
            " line 1",
            "parts of type image_url, expected text only",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}\n',
            " line 1",
            "a tool call of message 1 is not",
        ),
        ("a.jsonl", b'{"messages": [{"role": "user"}], "tools": ["f"]}\n', " line 1", "tool 1 is a str"),
        ("a.jsonl", b'{"messages": "[{"}\n', " line 1", "messages is a string that is not JSON"),
    ],
)
def test_bad_data_is_refused_with_file_and_line(write: Write, name: str, content: bytes, where: str, said: str) -> None:
    path = write(name, content)
    error = refused(lambda: open_data(path, 64))
    assert error.file == f"{path}{where}"
    assert said in error.message


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_of_many_bad_lines_is_named(tokenizer: Tokenizer, write: Write, seed: int) -> None:
    """The demo has no chat template: each chat is refused, and they come in shuffled order."""
    fine = write("a.jsonl", "".join(json.dumps({"text": f"tide {i}"}) + "\n" for i in range(90)))
    chats = "".join(json.dumps({"messages": [{"role": "user", "content": f"tide {i}"}]}) + "\n" for i in range(90))
    mixed = write("b.jsonl", json.dumps({"text": "tide"}) + "\n\n" + chats)
    error = refused(lambda: packed(tokenizer, fine, mixed, seed=seed))
    assert (error.code, error.file) == ("no_template", f"{mixed} line 3")


def test_a_huge_line_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_LINE", 100)
    for name in ("a.txt", "a.jsonl"):
        path = write(name, '{"text": "a"}\n' + "x" * 101)
        error = refused(lambda path=path: open_data(path, 64))  # type: ignore[misc]
        assert (error.code, error.file) == ("too_large", f"{path} line 2")
    with open_data(write("b.txt", "x" * 99 + "\n"), 200) as file:
        assert len(file.units) == 1


def test_a_pipe_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_PIPE", 100)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("x" * 101,))
    writer.start()
    assert refused(lambda: open_data(tmp_path / "pipe", 64)).code == "too_large"
    writer.join()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path, code, said in (
        (tmp_path, "not_a_file", "is a folder"),
        (Path("/dev/zero"), "not_a_file", "is a device"),
        (tmp_path / "dangling", "missing_file", "not found"),
        (tmp_path / "nowhere", "missing_file", "not found"),
    ):
        error = refused(lambda path=path: open_data(path, 64))  # type: ignore[misc]
        assert error.code == code
        assert said in error.message
    assert "--data" in str(refused(lambda: open_data(tmp_path, 64)).hint)


# ------------------------------------------------------------------------------------------------------------- parquet


def parquet(path: Path, columns: dict[str, list[Any]], rows_per_group: int = 2) -> Path:
    import pyarrow
    from pyarrow import parquet as writer

    writer.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


def test_parquet_gives_the_ids_of_the_same_rows_in_json_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [prose(3, seed) for seed in range(7)]
    path = parquet(tmp_path / "a.parquet", {"id": list(range(9)), "text": [*texts, None, ""]})
    with open_data(path, 10_000) as file:
        order = [6, 0, 3, 0]
        assert [document.text for document in file.read(order)] == [texts[unit] for unit in order]
        assert len(file.units) == 7
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert packed(tokenizer, path).sequences == 4


def test_messages_of_parquet_lose_the_nulls_that_structs_give_them(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        [
            {"role": "user", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    ]
    path = parquet(tmp_path / "a.parquet", {"messages": messages, "tools": ['[{"type": "function"}]']})
    with open_data(path, 10_000) as file:
        (document,) = file.read([0])
    assert document.messages == (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    )
    assert document.tools == ({"type": "function"},)


def test_bad_parquet_is_refused(tmp_path: Path, write: Write) -> None:
    error = refused(lambda: open_data(parquet(tmp_path / "a.parquet", {"prompt": ["a"]}), 64))
    assert error.message == "has the columns prompt; expected text or messages"
    whole = parquet(tmp_path / "b.parquet", {"text": [prose(9)] * 9}).read_bytes()
    assert refused(lambda: open_data(write("c.parquet", whole[:-40]), 64)).code == "bad_data"
    hurt = write("d.parquet", whole[:40] + b"\xff" * 60 + whole[100:])
    assert refused(lambda: open_data(hurt, 64)).code == "bad_data"
    third = parquet(tmp_path / "e.parquet", {"messages": [[{"role": "user"}], [{"role": "user"}], [{"role": "x"}]]})
    assert refused(lambda: open_data(third, 64)).file == f"{third} row 3"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["tide"]})
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    error = refused(lambda: open_data(path, 64))
    assert (error.code, error.hint) == ("missing_package", "pip install pyarrow")


# -------------------------------------------------------------------------------------------------------------- sample


def test_the_built_in_sample_is_small_and_varied(tokenizer: Tokenizer) -> None:
    folder = Path(__file__).parent.parent / "calibration" / "data" / "sample"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 150_000
    rows = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text("utf-8").splitlines()]
    texts = [row["text"] for row in rows if "text" in row]
    assert len(texts) == len(set(texts)) > 70
    assert sum("tools" in row for row in rows) >= 8
    lines = [line for text in texts for line in text.splitlines() if len(line) > 40]
    assert len(set(lines)) > 0.99 * len(lines)


def test_without_a_chat_template_the_chats_of_the_sample_are_left_out(tokenizer: Tokenizer) -> None:
    made = read_sample(tokenizer, TokenSettings(8, 128), VOCABULARY)
    assert made.built_in
    assert made.sequences == 8
    assert [source.name for source in made.sources] == [
        f"{name}.jsonl (built-in sample)" for name in ("code", "maths", "prose")
    ]
    assert "small sample" in made.warnings[0]
    assert "no chat template" in made.warnings[1]


def test_the_sample_has_code_tool_calls_and_many_scripts(demo_checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n"
        "{% endfor %}"
    )
    made = read_sample(Tokenizer.open(tmp_path), TokenSettings(10_000, 128), VOCABULARY)
    assert made.ids.size > 60_000  # 50,000 with a usual vocabulary
    assert made.mix.code > 0.2
    assert made.mix.tool_calls > 0.1
    assert {"Latin", "Han", "Kana", "Cyrillic", "Arabic", "Devanagari", "Hangul"} <= {
        script for script, share in made.mix.scripts if share > 0.005
    }
    assert "instead of 10,000" in made.warnings[0]
