"""`kizami card`: the model card of an output, with what an evaluation measured."""

from pathlib import Path
from typing import Annotated, Any

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui
from kizami.cli.target import Target
from kizami.formats.errors import KizamiError

CARD = "README.md"
MOST_BYTES = 16 << 20

Evaluation = Annotated[
    list[Path] | None,
    o.option(
        "--evaluation",
        panel=o.RUN,
        metavar="FILE",
        help="What kizami evaluate -o FILE wrote: its figures go onto the card. Repeatable.",
    ),
]
InPlace = Annotated[
    bool,
    o.option("--in-place", panel=o.OUTPUT, flag=True, help="Write the card into OUT, in place of the one there."),
]


def card(
    out: o.Out,
    evaluation: Evaluation = None,
    in_place: InPlace = False,
    output: o.ToFile = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Print the model card of an output, with the figures of its evaluations.

    The card says what was changed, how large the error is, how to make it again, which engines load it, and what was
    not measured. Figures on text are taken for this very checkpoint only; whose answers those of logs and servers are,
    nobody can see, and the card says so. --evaluation replaces the evaluation that the card has.
    """
    from kizami.cli.source import finished_output
    from kizami.formats.card_evaluation import with_evaluation
    from kizami.formats.files import resolve_inside
    from kizami.formats.strict_json import read_json_object
    from kizami.formats.writer import write_file_durably
    from kizami.quantize.manifest import output_identity, read_manifest

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    folder = finished_output(out)
    if in_place and output is not None:
        raise KizamiError("--in-place and -o contradict each other", code="usage", hint="give one of the two")
    target = None if output is None else Target.checked(output, folder, *(evaluation or []))
    manifest = read_manifest(folder)
    path = resolve_inside(folder, CARD, "kizami convert writes a card; put it back")
    text = _text(path)
    evaluations = {str(file): read_json_object(file, file.name, limit=MOST_BYTES) for file in evaluation or []}
    if evaluations:
        text = with_evaluation(text, evaluations, output_identity(manifest))
    if target is not None:
        target.write(text.encode())
    elif in_place:
        write_file_durably(path, text.encode())
    _show(ui, folder, text, written=output or (str(path) if in_place else None))


def _text(path: Path) -> str:
    import os

    from kizami.formats.files import open_regular, read_exactly

    fd = open_regular(path, CARD)
    try:
        size = os.fstat(fd).st_size
        if size > MOST_BYTES:
            raise KizamiError(f"has {size} bytes, expected at most {MOST_BYTES}", code="bad_card", file=CARD)
        return read_exactly(fd, 0, size, CARD).decode("utf-8")
    except UnicodeDecodeError:
        raise KizamiError("is not UTF-8", code="bad_card", file=CARD) from None
    finally:
        os.close(fd)


def _show(ui: Ui, out: Path, text: str, written: str | None) -> None:
    body: dict[str, Any] = {"out": str(out), "card": text, "written": written}
    if ui.json:
        ui.emit("card", body)
    elif written is None:
        ui.data(text)
    else:
        ui.result(f"card written to {written}")


COMMAND = Command(
    "card",
    card,
    (
        "kizami card GLM-5.2-INT4/",
        "kizami card GLM-5.2-INT4/ --evaluation text.json --evaluation gsm8k.json --in-place",
    ),
)
