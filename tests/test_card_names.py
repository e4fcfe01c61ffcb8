"""What a card calls models, files and servers: told apart, and without their publisher's folders and hosts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from evaluation_figures import FIGURES, TASK

from kizami.formats.card_evaluation import with_evaluation
from kizami.formats.public_names import PublicNames, public_name
from kizami.quantize.manifest import output_identity, read_manifest

HOME = "/home/me/my secret clients"


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(converted, tmp_path / "out")


def on_card(out: Path, body: dict[str, Any]) -> list[str]:
    """The lines of its section."""
    output = output_identity(read_manifest(out))
    card = with_evaluation((out / "README.md").read_text(), {"e.json": body}, output)
    return card.split("## Evaluation\n")[1].split("<!--")[0].splitlines()


def text(out: Path, rows: list[dict[str, Any]], domains: list[str], **more: Any) -> dict[str, Any]:
    identity = {"config_sha256": "0" * 64, **output_identity(read_manifest(out))}
    parts = [{"name": name} | FIGURES for name in domains]
    return {
        "schema": "kizami.evaluate/1", "kind": "text", "reference": f"{HOME}/fp8",
        "tokens": {"sequences": 8, "seq_len": 512, "domains": [{"name": name} for name in domains]},
        "compared": [{"all": FIGURES, "domains": parts, "identity": identity} | row for row in rows],
    } | more  # fmt: skip


def answers(reference: str, name: str, **more: Any) -> dict[str, Any]:
    compared = [{"name": name, "tasks": [TASK]} | more]
    return {"schema": "kizami.evaluate/1", "kind": "answers", "reference": reference, "compared": compared}


def plain(model: str) -> dict[str, Any]:
    return {"name": model, "model": model, "cache": None, "scales": None}


def cached(model: str, cache: str, scales: str | None = None) -> dict[str, Any]:
    return {"name": f"{model}, KV {cache}", "model": model, "cache": cache, "scales": scales}


def labels(lines: list[str]) -> list[str]:
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ") and "e-03" in line]


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("/home/me/models/GLM-5.2-FP8/", "GLM-5.2-FP8"),
        ("/home/me/my models/GLM 5.2", "GLM 5.2"),
        ("../GLM-5.2-FP8", "GLM-5.2-FP8"),
        ("zai-org/GLM-5.2-FP8", "GLM-5.2-FP8"),
        ("clients/acme", "acme"),
        ("~/acme", "acme"),
        ("out, KV x", "out, KV x"),
        ("http://10.1.2.3:8000/v1", "a server"),
        ("HTTPS://10.1.2.3/v1", "a server"),
        ("/", "a model"),
        ("..", "a model"),
    ],
)
def test_a_name_has_no_folder_and_no_host(name: str, public: str) -> None:
    assert public_name(name) == public
    assert PublicNames([name]).of(name) == public


@pytest.mark.parametrize(
    ("names", "public"),
    [
        (["a/x.txt", "b/x.txt"], ["x.txt (1)", "x.txt (2)"]),
        (["x.txt", "b/x.txt"], ["x.txt", "x.txt (2)"]),
        (["b/x.txt", "x.txt"], ["x.txt (1)", "x.txt"]),
        (["a/x", "b/x", "x (1)", "c/x"], ["x (2)", "x (3)", "x (1)", "x (4)"]),
        (["a/x", "a/x/", "./a/x", "b/../a/x"], ["x"] * 4),
        (["http://h/v1", "http://h/v1/", "http://g/v1"], ["a server (1)", "a server (1)", "a server (2)"]),
        (["a/x", "b/y"], ["x", "y"]),
    ],
)
def test_equal_ends_of_different_paths_are_told_apart(names: list[str], public: list[str]) -> None:
    found = PublicNames(names)
    assert [found.of(name) for name in names] == public


# ----------------------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "text",
    [
        "and/or", "input/output", "I/O, read/write/execute, TCP/IP", "tokens/s and km/h", "1/2 of 3/4.5", "+/- 0.3",
        "w/o, n/a", "a / b", "(yes)/(no)", "org/name", "50 %/s", "niah_single_1 (none), 4096: 3 of 9 questions have it",
        "A.B and e.g. this", "",
    ],
)  # fmt: skip
def test_ordinary_words_with_slashes_stay(text: str) -> None:
    assert PublicNames([f"{HOME}/fp8", "out"]).words(text) == text


@pytest.mark.parametrize(
    ("text", "public"),
    [
        (f"{HOME}/int4 has another tokenizer than {HOME}/fp8, and", "int4 has another tokenizer than fp8, and"),
        (f"{HOME}/int4: and/or", "int4: and/or"),
        ("clients/acme, all: mean KL", "acme, all: mean KL"),
        (f"({HOME}/int4/)", "(int4)"),
        (f"{HOME}/unknown/x.txt has the bytes of {HOME}/y.txt: it", "x.txt has the bytes of y.txt: it"),
        (f"see {HOME}/unknown/", "see unknown"),
        ("see ~/acme and ../acme/x.txt", "see acme and x.txt"),
        ("acme/plans/x.txt is read", "x.txt is read"),
        ("acme/plans/, too", "plans, too"),
        (r"C:\acme\x.txt", "x.txt"),
        ("http://10.0.0.7:8000/v1 is silent", "a server is silent"),
        ("clients/acme2 and clients/acme", "clients/acme2 and acme"),
    ],
)  # fmt: skip
def test_paths_in_a_sentence_lose_their_folders_whole(text: str, public: str) -> None:
    names = PublicNames([f"{HOME}/fp8", f"{HOME}/int4/", "clients/acme", "x.txt"])
    assert names.words(text) == public


def test_the_current_folder_is_no_full_stop() -> None:
    assert PublicNames([".", "./"]).words("a . b") == "a . b"


# ----------------------------------------------------------------------------------------------------------- on a card


def test_files_of_one_name_are_told_apart_wherever_they_stand(out: Path) -> None:
    files = [f"{HOME}/a/x.txt", f"{HOME}/b/x.txt", f"{HOME}/c/x.txt"]
    model = f"{HOME}/int4"
    body = text(
        out, [plain(model)], files[:2], problems=[f"{model}, {files[1]}: mean KL 0.2, expected at most 0.1"],
        warnings=[f"{files[2]} has the bytes of {files[0]}: it is used once"],
    )  # fmt: skip
    body["tokens"]["repeated"] = files[2:]
    lines = on_card(out, body)
    assert "on 8 sequences of 512 tokens (x.txt (1), x.txt (2))" in lines[1]
    assert labels(lines) == ["KV cache BF16", "x.txt (1)", "x.txt (2)"]
    assert "- int4, x.txt (2): mean KL 0.2, expected at most 0.1" in lines
    assert "- x.txt (3) has the bytes of x.txt (1): it is used once" in lines
    assert "secret" not in "".join(lines)


def test_scales_of_one_name_are_told_apart(out: Path) -> None:
    """Also where the name of the cache has the path cut short, as it stands in evaluations."""
    model, long = f"{HOME}/int4", f"{HOME}/{'x' * 60}"
    caches = [(f"fp8, {f'{long}/{i}/kv.json':.80}... (per layer)", f"{long}/{i}/kv.json") for i in "ab"]
    assert caches[0][0] == caches[1][0]
    rows = [plain(model), cached(model, "fp8 at 1.0"), *(cached(model, *cache) for cache in caches)]
    lines = on_card(out, text(out, rows, ["x.txt"], problems=[f"{rows[3]['name']}, all: mean KL 0.2"]))
    assert labels(lines) == [
        "KV cache BF16", "KV cache fp8 at 1.0", "KV cache fp8, kv.json (1) (per layer)",
        "KV cache fp8, kv.json (2) (per layer)",
    ]  # fmt: skip
    assert "secret" not in "".join(lines)
    assert "xxx" not in "".join(lines)


@pytest.mark.parametrize("old", [False, True])
def test_a_folder_that_is_called_like_a_cache_is_none(out: Path, old: bool) -> None:
    model, file = f"{HOME}/out, KV x", f"{HOME}/kv.json"
    rows = [plain(model), cached(model, "fp8 at 1.0"), cached(model, f"fp8, {file} (per head)", file)]
    rows = [{"name": row["name"]} if old else row for row in rows]
    problems = [f"{row['name']}, all: mean KL 0.2" for row in rows]
    lines = on_card(out, text(out, rows, ["x.txt"], problems=problems))
    assert labels(lines) == ["KV cache BF16", "KV cache fp8 at 1.0", "KV cache fp8, kv.json (per head)"]
    at = lines.index("Of the limits set for this run, not kept:")
    assert lines[at + 2 : at + 5] == [
         "- out, KV x, all: mean KL 0.2",
        "- out, KV x, KV fp8 at 1.0, all: mean KL 0.2", "- out, KV x, KV fp8, kv.json (per head), all: mean KL 0.2",
    ]  # fmt: skip


def test_an_old_name_of_a_cache_that_is_cut_names_no_folder(out: Path) -> None:
    rows = [{"name": "out"}, {"name": f"out, KV fp8, {HOME}/fold... (per layer)"}]
    lines = on_card(out, text(out, rows, ["x.txt"]))
    assert labels(lines) == ["KV cache BF16", "KV cache fp8, a file (per layer)"]


def test_limits_that_another_model_missed_are_not_this_ones(out: Path) -> None:
    other = plain("out, the second") | {"identity": {"plan_hash": "x", "shards_sha256": "y"}}
    problems = ["out, all: mean KL 0.2", "out, the second, all: mean KL 0.3"]
    lines = on_card(out, text(out, [plain("out"), other], ["x.txt"], problems=problems))
    assert [line for line in lines if "mean KL" in line] == ["- out, all: mean KL 0.2"]


def test_two_models_of_one_name_are_told_apart(out: Path) -> None:
    lines = on_card(out, answers(f"{HOME}/fp8/model", f"{HOME}/int4/model"))
    assert lines[1].startswith("Answers of model (2), question by question, against model (1) (that")


def test_two_servers_are_told_apart(out: Path) -> None:
    lines = on_card(out, answers("http://10.0.0.1/v1", "HTTP://10.0.0.2/v1"))
    assert lines[1].startswith("Answers of a server (2), question by question, against a server (1) (that")


def test_what_is_compared_in_part_stands_on_the_card_as_it_is(out: Path) -> None:
    notes = ["niah (none), 4096: 3 of 9 questions have it", "mmlu/law and/or tax (none), f1: only A has it"]
    lines = on_card(out, answers("fp8", "int4", left_out=notes, not_judged=notes[1:]))
    at = lines.index("Left out, or compared in part:")
    assert lines[at + 2 : at + 4] == [f"- {note}" for note in notes]
