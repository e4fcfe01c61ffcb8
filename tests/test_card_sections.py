"""Kizami's own section of a card is known by its marks, each alone on a line; everything else is its publisher's."""

import shutil
from pathlib import Path

import pytest

from kizami.formats.card_evaluation import BEGIN, END, with_evaluation
from kizami.formats.card_sections import last_heading, plain_lines, without_marked
from kizami.formats.errors import KizamiError

TASK = {
    "task": "gsm8k", "metric": "exact_match", "n": 1319, "a": 0.9439, "b": 0.9356, "drop": 0.0083,
    "interval": [-0.0012, 0.0178], "p_value": 0.117, "visible_drop": 0.0136,
}  # fmt: skip
ANSWERS = {
    "a.json": {
        "schema": "kizami.evaluate/1", "kind": "answers", "reference": "fp8",
        "compared": [{"name": "int4", "tasks": [TASK]}],
    }
}  # fmt: skip
OURS = f"{BEGIN}\n## Evaluation\n\nold figures\n{END}\n\n"
# What is no mark of kizami's, and stays with what stands behind it
NO_MARKS = {
    "at the end of a line": f"as in {BEGIN}\nhours of work\nand {END}\n",
    "before something": f"{BEGIN} is a mark\nhours of work\n{END} too\n",
    "indented": f"    {BEGIN}\n    hours of work\n    {END}\n",
    "of an item": f"- item\n  {BEGIN}\n  hours of work\n  {END}\n",
    "quoted": f"> {BEGIN}\n> hours of work\n> {END}\n",
    "in code": f"```\n{BEGIN}\nhours of work\n{END}\n```\n",
    "in code with a language": f"```md\n{BEGIN}\nhours of work\n{END}\n```\n",
    "in code of tildes": f"~~~~\n{BEGIN}\n~~~\nhours of work\n{END}\n~~~~~\n",
    "in code that quotes a fence": f"````\n```\n{BEGIN}\n```\nhours of work\n{END}\n````\n",
    "in code that begins another": f"```sh\n```sh\n{BEGIN}\nhours of work\n{END}\n```\n",
    "behind an item's code": f"- ```sh\n  kizami card\n  ```\n\n{BEGIN}x\nhours of work\n",
    "one alone in code": f"```\n{BEGIN}\n```\nhours of work\n",
    "one alone at the end of a line": f"see {BEGIN}\nhours of work\n",
    "split by another line end": f"hours of work\u2028{BEGIN}\u2028more\n",
}


@pytest.fixture
def card(converted: Path, tmp_path: Path) -> str:
    return (shutil.copytree(converted, tmp_path / "out") / "README.md").read_text()


@pytest.mark.parametrize("own", NO_MARKS.values(), ids=NO_MARKS)
@pytest.mark.parametrize("before", [False, True])
def test_what_is_no_mark_takes_nothing_with_it(card: str, own: str, before: bool) -> None:
    """Before a section of kizami's, behind it, and where there is none yet."""
    mine = card.replace("## Command\n", f"{own}\n## Command\n")
    once = with_evaluation(mine, ANSWERS, {})
    assert own in once
    with_old = mine.replace("## Command\n", f"{OURS}## Command\n") if before else mine.replace(own, OURS + own)
    assert with_evaluation(with_old, ANSWERS, {}) == once
    assert with_evaluation(once, ANSWERS, {}) == once


def test_a_section_of_somebodys_own_stays(card: str) -> None:
    own = card.replace("## Command\n", "## Evaluation\n\nhours of work\n\n```\n## Limits\n```\n\n## Command\n")
    once = with_evaluation(own, ANSWERS, {})
    assert "hours of work" in once
    assert once.index(BEGIN) > once.index("## Serving")
    assert with_evaluation(once, ANSWERS, {}) == once


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card.replace(f"{END}\n", "my own words\n"),
        lambda card: card.replace(f"{BEGIN}\n", "my own words\n"),
        lambda card: card.replace(f"{END}\n", f"    {END}\n"),
        lambda card: card.replace(f"{BEGIN}\n", f"```\n{BEGIN}\n```\n"),
        lambda card: card.replace(f"{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n"),
        lambda card: f"{card}\n{END}\n{BEGIN}\n",
    ],
    ids=["no end", "no beginning", "indented end", "beginning in code", "twice", "the wrong way round"],
)
def test_a_mark_without_its_other_one_deletes_nothing(card: str, change: object) -> None:
    assert callable(change)
    with pytest.raises(KizamiError, match="do not belong together") as refused:
        with_evaluation(change(with_evaluation(card, ANSWERS, {})), ANSWERS, {})
    assert refused.value.code == "bad_card"


def test_marks_with_space_behind_them_and_at_the_end_are_marks() -> None:
    assert without_marked(f"a\n{BEGIN}  \nold\n{END}\t\n\nb\n", BEGIN, END) == "a\nb\n"
    assert without_marked(f"a\n{BEGIN}\nold\n{END}", BEGIN, END) == "a\n"
    assert without_marked(f"{OURS}a\n{OURS}b\n", BEGIN, END) == "a\nb\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n```\nb\n```\nc", "ac"),
        ("a\n```\nb\n``` x\nc\n```\nd", "ad"),
        ("a\n``` `b`\nc", ["a", "``` `b`", "c"]),
        ("a\n    ```\nb\n", ["a", "    ```", "b", ""]),
        ("- ```\n  a\nb\n", ["b", ""]),
        ("1. ```\n   a\n   ```\nb", "b"),
        ("- - ~~~\n    a\n\n    b\n    ~~~\nc", "c"),
        ("```\na\n    ```\nb", ""),
        ("a\n```\nb", "a"),
        ("a  \nb\t", "ab"),
    ],
)
def test_lines_of_code_are_none_of_the_texts(text: str, lines: str | list[str]) -> None:
    found = list(plain_lines(text))
    assert [line for _, line in found] == list(lines)
    for at, line in found:
        assert text[at:].startswith(line)


def test_the_last_heading_counts() -> None:
    assert last_heading("## A\nb\n## A\n```\n## A\n```\n", "## A") == 7
    assert last_heading("b\n", "## A") is None
