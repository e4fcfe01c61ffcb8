"""The options of `kizami kv-scales`."""

from pathlib import Path
from typing import Annotated, Literal

from kizami.cli.options import option

MEASURED, WRITTEN = "What is measured", "What is written"

FormatName = Literal["json", "checkpoint", "sglang"]

Stats = Annotated[
    Path | None,
    option(
        "--stats",
        panel=MEASURED,
        metavar="STATS",
        help="What kizami calibrate measured of SRC. Without it: the certificate, and the scales that SRC brings.",
    ),
]
From = Annotated[
    Path | None,
    # not --kv-scales: KIZAMI_KV_SCALES is meant for convert
    option(
        "--from",
        panel=MEASURED,
        metavar="FILE",
        help="Write these in another --format, and hold them to what is known, instead of choosing: a file of "
        "kv-scales, or a .safetensors of k_scale and v_scale.",
    ),
]
PerHead = Annotated[
    bool,
    option("--per-head", panel=MEASURED, flag=True, help="A scale for each KV head (vLLM's attn_head); not for MLA."),
]
Format = Annotated[
    FormatName,
    # report has a --format of its own, and with it KIZAMI_FORMAT
    option(
        "--kv-format",
        "--format",
        panel=WRITTEN,
        help="json (default): for convert --kv-scales; checkpoint: a safetensors file of scales; sglang: the file for "
        "--quantization-param-path.",
    ),
]
TensorParallel = Annotated[
    int | None,
    option("--tp", panel=WRITTEN, metavar="N", min=1, max=1024, help="Ranks of the server; --format sglang needs it."),
]
Force = Annotated[
    bool, option("--force", panel=WRITTEN, flag=True, help="Write what kizami refuses because it spoils attention.")
]
