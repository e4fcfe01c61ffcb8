"""What models, files and servers are called where everybody can read it: a publisher's folders and hosts are nobody's
business."""

import re
from collections.abc import Iterable
from itertools import pairwise
from posixpath import normpath

SERVER = "a server"
_URL = re.compile(r"(?<!\w)\w+://[^\s,;()]*")
# A path that begins as one: /x, ~/x, ./x, ../x, C:\x. No path: and/or, +/-, 1/2
_ROOTED = re.compile(r"(?<![\w.~\\/+)\]}%])(?:(?:~\w*|\.{1,2})?/(?=[\w.])|[A-Za-z]:[\\/](?=\w))")
# One that does not, known by the ending of a file, or of a folder
_WORD = r"[^\s,;:()\"'/\\]"
_RELATIVE = re.compile(rf"(?<!{_WORD})(?:{_WORD}+/)+(?:{_WORD}*\.[A-Za-z]\w{{0,9}}(?![\w/])|(?=[\s,;:)]|$))")


def last_part(path: str) -> str:
    """`INT4` of `/x/y/INT4/`; nothing of `/` and `..`."""
    return next((part for part in reversed(re.split(r"[/\\]", path)) if part not in ("", ".", "..")), "")


def public_name(name: str) -> str:
    """Of a path the last part, of a URL nothing. org/name becomes name: who can tell it from a folder?"""
    return SERVER if _URL.match(name) else last_part(name) or "a model"


class PublicNames:
    """Of names that stand beside each other: equal last parts of different paths are told apart by a number, in the
    order of `names`; one that is given without a folder keeps its own."""

    def __init__(self, names: Iterable[str]) -> None:
        places: dict[str, list[str]] = {}
        for name in names:
            place = name.rstrip("/") if _URL.match(name) else normpath(name)
            places.setdefault(place, []).append(name)
        cut = {place: public_name(place) for place in places}
        taken = {*cut.values()}
        self._public: dict[str, str] = {}
        for place, spellings in places.items():
            public, number = cut[place], 0
            alike = [other for other, theirs in cut.items() if theirs == public]
            if len(alike) > 1 and place != public:
                number = alike.index(place) + 1
                while f"{public} ({number})" in taken:
                    number += 1
                public = f"{public} ({number})"
                taken.add(public)
            self._public |= dict.fromkeys((*spellings, place), public)
        differ = (name for name, public in self._public.items() if name != public and name.strip("./"))
        replaced = sorted(differ, key=len, reverse=True)
        self._known = re.compile(
            "|".join(rf"(?<![\w./\\~-]){re.escape(name)}(?![\w/\\-])" for name in replaced) or "(?!)"
        )

    def of(self, name: str) -> str:
        return self._public.get(name) or public_name(name)

    def words(self, text: str) -> str:
        """A sentence with the names in it replaced, which may have spaces; else what looks like a path or URL is taken
        for one."""
        found, done = "", 0
        for known in self._known.finditer(text):
            found += _cut(text[done : known.start()]) + self._public[known[0]]
            done = known.end()
        return found + _cut(text[done:])


def _cut(text: str) -> str:
    """Without the folders of paths that nobody has named. Where a path with spaces ends is not to be seen: from where
    one begins all is dropped to the last slash before the next one, rather than a folder's name be kept."""
    text = _URL.sub(SERVER, text)
    ends = [*(found.start() for found in _ROOTED.finditer(text)), len(text)]
    before = _RELATIVE.sub(lambda found: last_part(found[0]) or "...", text[: ends[0]])
    return before + "".join(_dropped(text[begin:end]) for begin, end in pairwise(ends))


def _dropped(text: str) -> str:
    last = max(text.rfind("/"), text.rfind("\\"))
    left = text[last + 1 :]
    return left if re.match(r"[\w.]", left) else (last_part(text[:last]) or "...") + left
