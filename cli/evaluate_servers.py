"""`kizami evaluate http://A http://B`: the same conversations with tools, put to two servers."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.calibration.evaluation.served import Asking, Replay

NEEDED = ("httpx", "jsonschema")
INSTALL = "pip install 'kizami[eval]'"
NOTES = (
    "a conversation is one question: valid or right means in every turn; later turns follow the model's own earlier "
    "answers",
    "servers are not deterministic: --control asks A twice, and what differs there is noise",
    "right means the expected calls and no others, argument by argument; another way to do the same does not count",
)
BUILT_IN = "no --requests: these are the {} conversations that come with kizami: too few for more than a first look"


def on_servers(
    ui: Ui, a: str, others: list[str], requests: Path | None, asking: "Asking", margin: float, *, control: bool
) -> dict[str, Any]:
    """The body of --json. KizamiError "missing_package", "bad_requests", "no_answer", "bad_answer"."""
    from kizami.calibration.evaluation.served import Server, joined, replay
    from kizami.calibration.evaluation.tool_calls import read_conversations
    from kizami.calibration.evaluation.verdicts import judge
    from kizami.cli.evaluate_text import CONTROL, answers_body

    _refuse_missing_packages()
    conversations = read_conversations(requests)
    named = [(a, a), *((url, url) for url in others), *([(CONTROL, a)] if control else [])]
    found: list[tuple[str, Replay]] = []
    with ExitStack() as stack:
        servers = {url: stack.enter_context(Server(url, asking)) for url in dict.fromkeys(url for _, url in named)}
        for name, url in named:
            ui.progress(f"{name}: {servers[url].model}, {counted(len(conversations), 'conversation')}")
            found.append((name, replay(servers[url], conversations, asking)))
    (_, reference), *rest = found
    body = answers_body(
        a, [(name, [judge(one, margin) for one in joined(reference, side)], []) for name, side in rest], margin
    )
    for one, (_, side) in zip(body["compared"], rest, strict=True):
        one |= _turns(side)
    body["reference_turns"] = _turns(reference)
    body["notes"] = [*NOTES, *body["notes"]]
    body["warnings"] = [] if requests is not None else [BUILT_IN.format(len(conversations))]
    return body


def _turns(side: "Replay") -> dict[str, Any]:
    from kizami.calibration.evaluation.served import by_turn, finish_reasons

    return {"turns": [asdict(turn) for turn in by_turn(side)], "finish_reasons": finish_reasons(side)}


def _refuse_missing_packages() -> None:
    from importlib.util import find_spec

    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise KizamiError(f"{' and '.join(absent)} not installed", code="missing_package", hint=INSTALL)
