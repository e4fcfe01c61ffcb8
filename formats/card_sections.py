"""Where things stand in a README: lines of their own, outside blocks of code."""

import re
from collections.abc import Iterator

from kizami.formats.errors import KizamiError

_ITEM = r"(?:[-*+]|\d{1,9}[.)]) {1,4}"  # of a list, or of a list in it
_FENCE = re.compile(rf"( *(?:{_ITEM})*)(`{{3,}}(?=[^`]*$)|~{{3,}})")


def plain_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside fenced blocks of code with the place at which each begins, without what ends them and the space
    before that (CommonMark 4.5: a block ends with its fence alone on a line, and an item's with the item)."""
    at, fence, indent = 0, "", 0
    for line in text.split("\n"):
        begins, at = at, at + len(line) + 1
        bare, deep = line.strip(" \t"), len(line) - len(line.lstrip(" ")) - indent
        if fence and bare and deep < 0:
            fence = ""
        if fence:
            if deep <= 3 and bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
            continue
        found = _FENCE.match(line)
        is_item = found is not None and bool(found[1].strip())
        if found is not None and (is_item or len(found[1]) <= 3):
            fence, indent = found[2], len(found[1]) if is_item else 0
            continue
        yield begins, line.rstrip(" \t")


def without_marked(text: str, begin: str, end: str) -> str:
    """Without what stands between the marks, each a line of its own that is in no block of code, and the empty line
    behind it. KizamiError "bad_card" where one of them is alone: what stands between it and the next pair is not
    kizami's."""
    places = [(at, line) for at, line in plain_lines(text) if line in (begin, end)]
    if [line for _, line in places] != [begin, end] * (len(places) // 2):
        raise KizamiError(
            f"has {begin} and {end} that do not belong together",
            code="bad_card",
            file="README.md",
            hint="remove the one that is left, with what kizami wrote there",
        )
    kept, done = "", 0
    for (first, _), (last, _) in zip(places[::2], places[1::2], strict=True):
        kept += text[done:first]
        ends = text.find("\n", last) + 1 or len(text)
        done = ends + text.startswith("\n", ends)
    return kept + text[done:]


def last_heading(text: str, heading: str) -> int | None:
    """Where it begins."""
    return max((at for at, line in plain_lines(text) if line == heading), default=None)
