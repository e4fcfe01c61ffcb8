"""`kizami evaluate http://A http://B`: the same conversations with tools, put to two servers."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted
from kizami.formats.errors import KizamiError

if TYPE_CHECKING:
    from kizami.calibration.evaluation.batteries import Battery
    from kizami.calibration.evaluation.served import Asking, Replay

NEEDED = ("httpx", "jsonschema")
INSTALL = "pip install 'kizami[eval]'"
NOTES = (
    "a conversation is one question: valid or right means in every turn; later turns follow the model's own earlier "
    "answers",
    "servers are not deterministic: --control asks A twice, and what differs there is noise",
    "right means the expected calls and no others, argument by argument; another way to do the same does not count",
)
NO_CALLS = (
    "A called no tool in any answer: nothing here says what B lost. Does its server read tool calls (SGLang and vLLM: "
    "--tool-call-parser), and are --max-tokens enough?"
)
BUILT_IN = "no --requests: these are the {} conversations that come with kizami: too few for more than a first look"


def on_servers(
    ui: Ui, a: str, others: list[str], requests: Path | None, asking: "Asking", margin: float, *, control: bool
) -> dict[str, Any]:
    """The body of --json. KizamiError "missing_package", "bad_requests", "no_answer", "bad_answer"."""
    from kizami.calibration.evaluation.served import Server, joined, replay
    from kizami.calibration.evaluation.tool_calls import read_conversations
    from kizami.calibration.evaluation.verdicts import judge
    from kizami.cli.evaluate_text import answers_body
    from kizami.formats.card_evaluation import CONTROL

    _refuse_missing_packages()
    conversations = read_conversations(requests)
    named = [(a, a), *((url, url) for url in others), *([(CONTROL, a)] if control else [])]
    found: list[tuple[str, Replay]] = []
    with ExitStack() as stack:
        servers = {url: stack.enter_context(Server(url, asking)) for url in dict.fromkeys(url for _, url in named)}
        for name, url in named:
            ui.progress(f"{name}: {servers[url].shown_model}, {counted(len(conversations), 'conversation')}")
            found.append((name, replay(servers[url], conversations, asking)))
    (_, reference), *rest = found
    compared = []
    for name, side in rest:
        both, left_out = joined(reference, side)
        compared.append((name, [judge(one, margin) for one in both], left_out))
    body = answers_body(a, compared, margin)
    for one, (_, side) in zip(body["compared"], rest, strict=True):
        one |= _turns(side)
    body["reference_turns"] = _turns(reference)
    body["called"] = any(turn["called"] for turn in body["reference_turns"]["turns"])
    body["notes"] = [*NOTES, *body["notes"]]
    body["warnings"] = [] if requests is not None else [BUILT_IN.format(len(conversations))]
    if not body["called"]:
        body["warnings"].append(NO_CALLS)
    return body


def on_batteries(
    ui: Ui, a: str, others: list[str], battery: "Battery", asking: "Asking", margin: float, logs: Path | None, *,
    control: bool,
) -> dict[str, Any]:  # fmt: skip
    """lm-eval asks every server the same; its samples are joined by question. KizamiError "lm_eval_failed"."""
    from kizami.calibration.evaluation.batteries import run
    from kizami.calibration.evaluation.lm_eval_logs import join_logs, read_logs
    from kizami.calibration.evaluation.served import Server
    from kizami.calibration.evaluation.verdicts import judge
    from kizami.cli.evaluate_text import answers_body
    from kizami.formats.card_evaluation import CONTROL

    _refuse_missing_packages()
    if logs is None:
        raise KizamiError("lm-eval's samples need a folder", code="usage", hint="add --logs DIR, a new one")
    if logs.exists():
        raise KizamiError(
            "exists, and lm-eval's samples need a new folder", code="usage", file=str(logs), hint="--logs another"
        )
    named = [
        (a, a, "a"),
        *((url, url, f"b{at}") for at, url in enumerate(others)),
        *([(CONTROL, a, "a-again")] * control),
    ]
    for name, url, folder in named:
        with Server(url, asking) as server:
            ui.progress(f"{name}: {server.shown_model}, {', '.join(battery.tasks)}")
            run(url, server.model, battery, logs / folder)
    reference = read_logs(logs / "a")
    compared = []
    for name, _, folder in named[1:]:
        joined, left_out = join_logs(reference, read_logs(logs / folder))
        compared.append((name, [judge(one, margin) for one in joined], left_out))
    return answers_body(a, compared, margin)


def _turns(side: "Replay") -> dict[str, Any]:
    from kizami.calibration.evaluation.served import by_turn, finish_reasons

    return {"turns": [asdict(turn) for turn in by_turn(side)], "finish_reasons": finish_reasons(side)}


def _refuse_missing_packages() -> None:
    from importlib.util import find_spec

    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise KizamiError(f"{' and '.join(absent)} not installed", code="missing_package", hint=INSTALL)
