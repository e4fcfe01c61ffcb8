"""`kizami evaluate`: what a quantised model lost against its source, on text or question by question."""

import time
from pathlib import Path
from typing import Any

import typer

from kizami.cli import calibrate_options as c
from kizami.cli import evaluate_options as e
from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.kv_accuracy_options import Scratch
from kizami.cli.output import Ui
from kizami.formats.errors import KizamiError, printable
from kizami.formats.strict_json import dump_json

MARGIN = 0.01


def evaluate(
    context: typer.Context,
    a: e.Reference,
    b: e.Others,
    data: c.Data = None,
    layout: e.Layouts = None,
    kv_scales: e.KvScales = None,
    control: e.Control = False,
    samples: e.Samples = 8,
    seq_len: e.SeqLen = None,
    seed: c.Seed = 0,
    tokenizer: c.TokenizerFolder = None,
    max_kl: e.MaxKl = None,
    min_top1: e.MinTop1 = None,
    noise: e.Noise = None,
    margin: e.Margin = None,
    requests: e.Requests = None,
    max_tokens: e.MaxTokens = 1024,
    concurrency: e.Concurrency = 8,
    model: e.ServedModel = None,
    battery: e.Batteries = None,
    task: e.Tasks = None,
    task_folder: e.TaskFolder = None,
    questions: e.Questions = None,
    logs: e.Logs = None,
    run_generated_code: e.RunGeneratedCode = False,
    scratch: Scratch = None,
    max_memory: c.MaxMemory = "2GB",
    device: c.Device = "cpu",
    dtype: c.Dtype = "auto",
    threads: c.Threads = None,
    output: o.ToFile = None,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Compare models with a reference: on text, question by question, or in tool calls.

    Checkpoints are run a layer at a time, one after the other, on the same tokens: KL, agreement of the top token,
    perplexity, and next tokens lost and won, by domain (each --data FILE is one) and by position. Needs kizami's extra
    "calibrate". Logs (lm-eval --log_samples) are joined by question: McNemar's exact test, interval, what n can see,
    and whether a drop of --margin is excluded; several runs in a folder are several answers to each question. Servers
    (http://HOST/v1, OpenAI's API) are asked the same conversations with tools, or, where lm-eval is installed, its
    tasks: kizami's extra "eval"; the key is in OPENAI_API_KEY. FILE gets the object of --json. Exit code 1 if a
    threshold is not met.
    """
    from kizami.calibration.evaluation.batteries import Battery, tasks_of
    from kizami.calibration.evaluation.served import Asking
    from kizami.cli.evaluate_checkpoints import Caches, Machine, Texts, on_text
    from kizami.cli.evaluate_servers import on_batteries, on_servers
    from kizami.cli.evaluate_text import answer_problems, show_answers, show_text, text_problems
    from kizami.cli.target import Target
    from kizami.formats.card_evaluation import CONTROL
    from kizami.formats.hidden import without_login

    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    started = time.monotonic()
    kind = _kind(a)
    _check_kind(context, kind)
    if kind == SERVERS:
        _check_asked(context, lm_eval=bool(battery or task))
    for other in b:
        if (theirs := _kind(other)) != kind:
            shown = printable(without_login(other), 100)
            raise KizamiError(f"A is of {kind}, and {shown} of {theirs}", code="usage")
        if other == CONTROL:
            raise KizamiError(f"{CONTROL} is what A is called a second time", code="usage", hint=f"write ./{CONTROL}")
    read = (*(data or []), *(kv_scales or []), noise, requests, task_folder)
    _refuse_logins(*read, tokenizer)
    target = None if output is None else Target.checked(output, Path(a), *read, *map(Path, b))
    limit = MARGIN if margin is None else margin
    if kind == ANSWERS:
        body = _on_answers(a, b, noise, limit)
    elif kind == SERVERS:
        asking = Asking(max_tokens, seed, concurrency, model=model)
        named = tasks_of(battery or [], task or [])
        if named:
            asked = Battery(named, tokenizer, questions, run_generated_code, concurrency, seed, task_folder)
            body = on_batteries(ui, a, b, asked, asking, limit, logs, control=control)
        else:
            body = on_servers(ui, a, b, requests, asking, limit, control=control)
    else:
        memory = o.parse_size(max_memory, o.spelled(context, "max_memory"))
        machine = Machine(scratch, max_memory, memory, device, None if dtype == "auto" else dtype, threads)
        texts = Texts(data, tokenizer, samples, seq_len, seed)
        body = on_text(ui, a, b, Caches(layout, kv_scales), texts, machine, control=control)
        body["thresholds"] = {"max_kl": max_kl, "min_top1": min_top1}
    if kind == TEXT:
        problems = text_problems(body, max_kl, min_top1)
    else:
        problems = [] if margin is None else answer_problems(body)
    body |= {"problems": problems, "ok": not problems, "seconds": time.monotonic() - started}
    if target is not None:
        target.write(dump_json({"schema": "kizami.evaluate/1", **body}))
    if json:
        ui.emit("evaluate", body)
    elif kind == TEXT:
        show_text(ui, body)
    else:
        show_answers(ui, body)
    if problems:
        raise typer.Exit(1)


TEXT, ANSWERS, SERVERS = "checkpoints", "answers in logs", "servers"
OPTIONS_OF = {
    TEXT: (
        "data", "layout", "kv_scales", "control", "samples", "seq_len", "seed", "tokenizer", "max_kl", "min_top1",
        "scratch", "max_memory", "device", "dtype", "threads",
    ),
    ANSWERS: ("noise", "margin"),
    SERVERS: (
        "requests", "max_tokens", "concurrency", "model", "battery", "task", "task_folder", "questions", "logs",
        "run_generated_code", "tokenizer", "seed", "margin", "control",
    ),
}  # fmt: skip
OF_CONVERSATIONS = ("requests", "max_tokens")
OF_TASKS = ("task_folder", "questions", "logs", "run_generated_code", "tokenizer")
CONFIG = "config.json"


def _kind(a: str) -> str:
    from kizami.calibration.evaluation.lm_eval_logs import is_log
    from kizami.formats.hidden import without_login
    from kizami.formats.hub.cache import hub_id

    if a.lower().startswith(("http://", "https://")):
        return SERVERS
    if is_log(path := Path(a)):
        return ANSWERS
    if hub_id(a) is not None:  # in the user's cache
        return TEXT
    if not path.exists():
        hint = "a checkpoint, lm-eval's logs, or a URL"
        raise KizamiError("does not exist", code="missing_file", file=without_login(a), hint=hint)
    if path.is_dir() and not (path / CONFIG).exists():
        raise KizamiError(
            f"has neither {CONFIG}, as a checkpoint has, nor samples_TASK_DATE.jsonl, as lm-eval's logs have",
            code="usage",
            file=a,
        )
    return TEXT


def _refuse_logins(*given: Path | str | None) -> None:
    """KizamiError "missing_file" for a URL with a name or a password where a file is meant: whoever looked for it would
    print it."""
    from kizami.formats.hidden import without_login

    for name in (str(one) for one in given if one is not None):
        if (shown := without_login(name)) != name and not Path(name).exists():
            raise KizamiError("is no file", code="missing_file", file=shown, hint="name a file or folder here")


def _check_kind(context: typer.Context, kind: str) -> None:
    """KizamiError "usage" for an option that another kind of A has."""
    for other, names in OPTIONS_OF.items():
        for name in names:
            if name not in OPTIONS_OF[kind] and o.from_command_line(context, name):
                raise KizamiError(f"{o.spelled(context, name)} is for {other}, and A is of {kind}", code="usage")


def _check_asked(context: typer.Context, *, lm_eval: bool) -> None:
    """KizamiError "usage" for an option of conversations with lm-eval's tasks, or the other way round."""
    for name in OF_CONVERSATIONS if lm_eval else OF_TASKS:
        if o.from_command_line(context, name):
            asked = "lm-eval's tasks are asked" if lm_eval else "conversations with tools are asked"
            raise KizamiError(
                f"{o.spelled(context, name)} does nothing where {asked}",
                code="usage",
                hint="two runs of kizami evaluate" if lm_eval else "add --battery or --task for lm-eval's",
            )


# -------------------------------------------------------------------------------------------------------- on answers


def _on_answers(a: str, others: list[str], noise: Path | None, margin: float) -> dict[str, Any]:
    from kizami.calibration.evaluation.lm_eval_logs import join_logs, read_logs
    from kizami.calibration.evaluation.verdicts import judge
    from kizami.cli.evaluate_text import answers_body
    from kizami.formats.card_evaluation import CONTROL

    first = read_logs(Path(a))
    named = [(other, Path(other)) for other in others] + ([] if noise is None else [(CONTROL, noise)])
    compared = []
    for name, path in named:
        joined, left_out = join_logs(first, read_logs(path))
        compared.append((name, [judge(one, margin) for one in joined], left_out))
    return answers_body(a, compared, margin)


COMMAND = Command(
    "evaluate",
    evaluate,
    (
        "kizami evaluate GLM-5.2-FP8/ GLM-5.2-INT4/ --data chats.jsonl --data code.txt",
        "kizami evaluate GLM-5.2-FP8/ GLM-5.2-INT4/ --data chats.jsonl --layout fp8 --control",
        "kizami evaluate logs/fp8/ logs/int4/ --noise logs/fp8-again/ --margin 0.01",
        "kizami evaluate http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 --requests mine.jsonl --control",
        "kizami evaluate http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 --battery knowledge --logs logs/",
    ),
)
