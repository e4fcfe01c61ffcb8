r"""Calibration text and held-out text from packages: news, a hackers' dictionary, Python's documentation, code.

    pip download --no-deps gensim==4.4.0 && unzip -q gensim-*.whl -d gensim
    apt-get download jargon-text python3.11-doc && for f in *.deb; do dpkg -x "$f" debian; done
    python benchmarks/mixed_text.py texts --news gensim/gensim/test/test_data/lee_background.cor --code \
        --jargon debian/usr/share/doc/jargon-text/jargon.txt.gz --docs debian/usr/share/doc/python3.11/html/_sources

Every document goes to one of the two sides, in turn; passages of about 1500 characters of the kinds follow each other,
so that any beginning of either file has as much of each kind. --exclude drops documents that share lines with a text:
the held-out text of the model that is measured.
"""

import argparse
import gzip
import itertools
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PASSAGE = 1500  # characters
LEAST = 400


def news(file: Path) -> list[str]:
    """One document a line."""
    return file.read_text("utf-8").splitlines()


def jargon(file: Path) -> list[str]:
    """Entries begin with `   :word:`."""
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
        return [":" + entry for entry in re.split(r"\n   :(?=\S)", text.read())[1:]]


def docs(folder: Path) -> list[str]:
    return [file.read_text("utf-8") for file in sorted(folder.rglob("*.rst.txt"))]


def code() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(f.parts)]
    return [text for file in files if len(text := file.read_text("utf-8", errors="ignore")) > LEAST]


def unlike(documents: list[str], other: set[str]) -> list[str]:
    """Those of which at most a tenth of the longer lines occur in the other text."""

    def shared(document: str) -> float:
        lines = [line for line in document.splitlines() if len(line.strip()) > 30]
        return sum(line in other for line in lines) / max(1, len(lines))

    return [document for document in documents if shared(document) <= 0.1]


def passages(documents: list[str]) -> Iterator[str]:
    """Whole paragraphs of one document, or of short ones in a row, up to PASSAGE characters."""
    taken = ""
    for document in documents:
        for paragraph in re.split(r"(?<=\n)\n+", document):
            if len(taken) + len(paragraph) > PASSAGE and len(taken) >= LEAST:
                yield taken.strip("\n")
                taken = ""
            taken += paragraph[: 2 * PASSAGE].rstrip("\n") + "\n\n"
        if len(taken) >= LEAST:
            yield taken.strip("\n")
            taken = ""


def mix(kinds: list[list[str]]) -> str:
    """The kinds in turn, until one of them ends."""
    rounds = zip(*(passages(documents) for documents in kinds), strict=False)
    return "\n\n".join(itertools.chain.from_iterable(rounds)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for calibration.txt and heldout.txt")
    parser.add_argument("--news", type=Path)
    parser.add_argument("--jargon", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--code", action="store_true", help="the standard library of this Python")
    parser.add_argument("--exclude", type=Path, help="text whose documents may not occur")
    args = parser.parse_args()
    kinds = [
        read(place)
        for read, place in ((news, args.news), (jargon, args.jargon), (docs, args.docs))
        if place is not None
    ] + ([code()] if args.code else [])
    other = set(args.exclude.read_text("utf-8").splitlines()) if args.exclude else set()
    sides: dict[str, list[list[str]]] = {"calibration.txt": [], "heldout.txt": []}
    for documents in kinds:
        documents = unlike(documents, other)
        random.Random(0).shuffle(documents)
        for side, name in enumerate(sides):
            sides[name].append(documents[side::2])
    args.out.mkdir(parents=True)
    for name, kept in sides.items():
        (args.out / name).write_text(mix(kept), "utf-8")
        print(f"{name}: {len((args.out / name).read_text('utf-8'))} characters of {[len(d) for d in kept]} documents")


if __name__ == "__main__":
    main()
