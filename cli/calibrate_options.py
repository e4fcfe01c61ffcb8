"""The options of `kizami calibrate`."""

from pathlib import Path
from typing import Annotated, Literal

from kizami.cli.options import option

DATA, RUN = "In and out", "Run"

KeepName = Literal["none", "held-out", "all"]
DeviceName = Literal["cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]

Stats = Annotated[
    Path, option("-o", "--output", panel=DATA, metavar="STATS", help="The folder to write; it must not exist yet.")
]
Data = Annotated[
    list[Path] | None,
    option(
        "--data",
        panel=DATA,
        metavar="FILE",
        help="Text, source code, JSONL or parquet with `text` or `messages`; a pipe, too. Repeatable. Without it: a "
        "small built-in sample of about 50,000 tokens, good for trying; your own data is better.",
    ),
]
Samples = Annotated[
    int, option("--samples", panel=DATA, metavar="N", min=1, max=1_000_000, help="The most sequences. Default 128.")
]
SeqLen = Annotated[
    int, option("--seq-len", panel=DATA, metavar="N", min=8, max=1 << 20, help="Tokens of a sequence. Default 2048.")
]
Seed = Annotated[
    int,
    option(
        "--seed", panel=DATA, metavar="N", min=0, max=(1 << 32) - 1, help="Which documents, in which order. Default 0."
    ),
]
TokenizerFolder = Annotated[
    str | None,
    option(
        "--tokenizer",
        panel=DATA,
        metavar="DIR",
        help="Take tokenizer and chat template from this folder or Hub id instead of SRC.",
    ),
]
Keep = Annotated[
    KeepName,
    option(
        "--keep",
        panel=RUN,
        help="Which tokens' inputs of the experts stay in STATS: held-out (default), all (what --method gptq needs) or "
        "none.",
    ),
]
MaxMemory = Annotated[
    str, option("--max-memory", panel=RUN, metavar="SIZE", help="The most memory to take. Default 2GB.")
]
Device = Annotated[DeviceName, option("--device", panel=RUN, help="cpu (default) or cuda.")]
Dtype = Annotated[
    DtypeName,
    option("--dtype", panel=RUN, help="Of activations: auto (float32 on cpu, bfloat16 on cuda), float32 or bfloat16."),
]
Threads = Annotated[
    int | None, option("--threads", panel=RUN, metavar="N", min=1, max=4096, help="Threads. Default: all cores.")
]
Restart = Annotated[
    bool, option("--restart", panel=RUN, flag=True, help="Throw away an unfinished STATS.partial and start over.")
]
