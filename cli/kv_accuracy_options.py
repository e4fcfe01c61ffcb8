"""The options of `kizami kv-accuracy` that no other command has."""

from pathlib import Path
from typing import Annotated

from kizami.cli.options import finite, option

CACHE, DATA, RUN = "KV cache", "In and out", "Run"

Layouts = Annotated[
    list[str] | None,
    option(
        "--layout",
        panel=CACHE,
        metavar="NAME",
        help="fp8: every number in E4M3 at a scale, MLA's 576-byte rows or K and V by head; fp8_ds_mla: MLA's 656-byte "
        "rows, a scale per 128 latents and RoPE in BF16. Repeatable. Default: fp8, for sparse attention both.",
    ),
]
KvScales = Annotated[
    list[Path] | None,
    option(
        "--kv-scales",
        panel=CACHE,
        metavar="FILE",
        help="Also measure fp8 at the scales of FILE (kizami kv-scales -o FILE), one per layer or one per KV head. "
        "Repeatable. Default: those that SRC was converted with. fp8 without a file is scale 1.0.",
    ),
]
SkipLayers = Annotated[
    str,
    option(
        "--skip-layers",
        panel=CACHE,
        metavar="LAYERS",
        help="Measure again with these layers in BF16: auto (default: those that stand out), none, or a list such as "
        "0,3,17.",
    ),
]
MaxKl = Annotated[
    float | None,
    option(
        "--max-kl",
        panel=RUN,
        metavar="X",
        min=0.0,
        callback=finite,
        help="Exit 1 if the mean KL of a variant is above X nats, over all positions or in one range of them. Where "
        "--skip-layers names layers, the variant with these in BF16 is judged; with --kv-scales and without --layout "
        "only the scales are.",
    ),
]
MinTop1 = Annotated[
    float | None,
    option(
        "--min-top1",
        panel=RUN,
        metavar="X",
        min=0.0,
        max=1.0,
        callback=finite,
        help="Exit 1 if a variant has the reference's most likely token at less than the share X of positions.",
    ),
]
Samples = Annotated[
    int, option("--samples", panel=DATA, metavar="N", min=1, max=1_000_000, help="The most sequences. Default 16.")
]
SeqLen = Annotated[
    int | None,
    option(
        "--seq-len",
        panel=DATA,
        metavar="N",
        min=8,
        max=1 << 20,
        help="Tokens of a sequence: long ones show what short ones hide. Default 4096, or the model's limit.",
    ),
]
Scratch = Annotated[
    Path | None,
    option(
        "--scratch",
        panel=RUN,
        metavar="DIR",
        help="Where hidden states lie during the run; nothing stays there. Default: the system's folder for temporary "
        "files.",
    ),
]
