"""The options of `kizami evaluate` that no other command has."""

from pathlib import Path
from typing import Annotated

import typer

from kizami.cli.options import finite, option

TEXT, ANSWERS = "On text, from checkpoints", "On answers, from lm-eval's logs"
SERVERS = "On tool calls and tasks, from servers"

Reference = Annotated[
    str,
    typer.Argument(
        metavar="A",
        show_default=False,
        help="The reference: a checkpoint, lm-eval's samples (a file or a folder), or the base URL of a server.",
    ),
]
Others = Annotated[
    list[str],
    typer.Argument(metavar="B...", show_default=False, help="What is held to it: one or several of its kind."),
]
Layouts = Annotated[
    list[str] | None,
    option(
        "--layout",
        panel=TEXT,
        metavar="NAME",
        help="Evaluate B once more with an FP8 KV cache: fp8 or fp8_ds_mla, as in kizami kv-accuracy. Repeatable.",
    ),
]
KvScales = Annotated[
    list[Path] | None,
    option(
        "--kv-scales",
        panel=TEXT,
        metavar="FILE",
        help="Evaluate B once more with an FP8 KV cache at the scales of FILE. Repeatable.",
    ),
]
Control = Annotated[
    bool,
    option(
        "--control",
        panel=TEXT,
        flag=True,
        help="Also run A a second time, as a control: what differs there is noise. Expected: nothing, to the bit.",
    ),
]
Noise = Annotated[
    Path | None,
    option(
        "--noise",
        panel=ANSWERS,
        metavar="LOGS",
        help="Samples of another run of A: how many answers change with nothing changed.",
    ),
]
Margin = Annotated[
    float | None,
    option(
        "--margin",
        panel=ANSWERS,
        metavar="X",
        min=0.0001,
        max=1.0,
        callback=finite,
        help="Exit 1 unless a drop of the share X or more is excluded in every task, of servers too. Default for "
        "what is shown: 0.01.",
    ),
]
Requests = Annotated[
    Path | None,
    option(
        "--requests",
        panel=SERVERS,
        metavar="FILE",
        help="Conversations with tools, JSONL: id, tools, turns of messages and expected calls. Default: the small set "
        "that comes with kizami.",
    ),
]
MaxTokens = Annotated[
    int, option("--max-tokens", panel=SERVERS, metavar="N", min=1, help="The most tokens of an answer. Default 1024.")
]
Concurrency = Annotated[
    int, option("--concurrency", panel=SERVERS, metavar="N", min=1, max=1024, help="Requests at once. Default 8.")
]
ServedModel = Annotated[
    str | None, option("--model", panel=SERVERS, metavar="NAME", help="Default: the first that /models names.")
]
Batteries = Annotated[
    list[str] | None,
    option(
        "--battery",
        panel=SERVERS,
        metavar="NAME",
        help="Instead of tool calls, a set of lm-eval's tasks: knowledge, coding, long-context or instructions. "
        "Repeatable; lm-eval must be installed.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    option("--task", panel=SERVERS, metavar="NAME", help="One of lm-eval's tasks, beside --battery's. Repeatable."),
]
TaskFolder = Annotated[
    Path | None,
    option("--task-folder", panel=SERVERS, metavar="DIR", help="Where --task finds tasks that are not lm-eval's own."),
]
Questions = Annotated[
    int | None,
    option("--questions", panel=SERVERS, metavar="N", min=1, help="The most questions of a task. Default: all."),
]
Logs = Annotated[
    Path | None,
    option(
        "--logs",
        panel=SERVERS,
        metavar="DIR",
        help="A new folder for lm-eval's samples, with one for each server: a, b0, b1 and so on, a-again.",
    ),
]
RunGeneratedCode = Annotated[
    bool,
    option(
        "--run-generated-code",
        panel=SERVERS,
        flag=True,
        help="Let lm-eval execute code that the models wrote, here: humaneval and mbpp need it.",
    ),
]
MaxKl = Annotated[
    float | None,
    option(
        "--max-kl",
        panel=TEXT,
        metavar="X",
        min=0.0,
        callback=finite,
        help="Exit 1 if the mean KL is above X nats, over all positions or in a range or domain.",
    ),
]
MinTop1 = Annotated[
    float | None,
    option(
        "--min-top1",
        panel=TEXT,
        metavar="X",
        min=0.0,
        max=1.0,
        callback=finite,
        help="Exit 1 if B has A's most likely token at less than the share X of positions.",
    ),
]
Samples = Annotated[
    int,
    option(
        "--samples", panel=TEXT, metavar="N", min=1, max=1_000_000, help="The most sequences of each FILE. Default 8."
    ),
]
SeqLen = Annotated[
    int | None,
    option(
        "--seq-len",
        panel=TEXT,
        metavar="N",
        min=8,
        max=1 << 20,
        help="Tokens of a sequence: long ones show what short ones hide. Default 2048, or the model's limit.",
    ),
]
