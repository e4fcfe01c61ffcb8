"""The README.md of an output: what was done, how well, and how to serve it.

Everything taken from the source's README or from names is untrusted text: front matter is copied line by line under
allowed keys and only in forms that cannot change the meaning of the lines around them, and text in the body is
escaped. The card holds no date and no machine data, so the same conversion gives the same bytes.
"""

import re
from dataclasses import dataclass

from kizami.formats.errors import printable

MAX_README_CHARS = 1 << 20
"""A longer source README is ignored."""

TP_SIZES = (1, 2, 4, 8, 16, 32)
ROW_PARALLEL = frozenset({"down_proj", "w2", "o_proj"})  # split along K by tensor parallelism; all others along N

_KEPT_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
_MAX_FRONT_MATTER_LINES = 400
_MAX_LINE = 500  # characters; also bounds the work of the expressions below
_MAX_TAGS = 40
_DROPPED_TAGS = frozenset({"fp8", "int4", "8-bit", "4-bit", "bf16"})  # they describe the source's weights
# A plain YAML scalar that is nothing but a scalar: no quote, anchor, alias, tag, block or flow indicator.
_SCALAR = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._/+~@()=%-]*(?::(?=[A-Za-z0-9/])[A-Za-z0-9 ._/+~@()=%?&-]*)*", re.ASCII)
_FLOW_LIST = re.compile(r"\[ *([^\[\]]*?) *\]")
_QUOTED = re.compile(r'"[A-Za-z0-9 ._/+~@()=%:-]*"|\'[A-Za-z0-9 ._/+~@()=%:-]*\'', re.ASCII)
# Starts with a letter and is no YAML boolean or null: stays a string without quotes.
_TAG = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)$)[A-Za-z].*", re.IGNORECASE)
_LICENSE_KEYS = ("license", "license_name")
_SOURCES_SHOWN = 8
_ONE_NODE = 8  # GPUs; more need further options in the launch commands
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors of one role's packed modules against the source: relative Frobenius error (mean, largest), SQNR in dB.

    sqnr_db is None where INT4 represents every weight exactly: the ratio is infinite.
    """

    role: str
    modules: int
    mean_rel_error: float
    max_rel_error: float
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What `kizami check` says of an engine. sizes: tensor-parallel sizes without an error, None where there is no such
    thing; error: why it does not load, None if it does; needs: what whoever serves it must do."""

    name: str
    version: str
    sizes: tuple[int, ...] | None
    error: str | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card says. Sizes in bytes; `base_model` a Hub id and `revision` its commit, None if the source was a
    folder.

    is_quantized: whether any linear has fewer than 16 bits. source_hashes: (file, SHA-256 of what `hashed` says).
    """

    title: str
    kizami_version: str
    command: str
    base_model: str | None
    scheme: str
    method: str
    forms: tuple[tuple[str, str], ...]  # (which modules, what they are)
    tags: tuple[str, ...]
    source_bytes: int
    output_bytes: int
    bits_per_weight: float
    errors: tuple[ErrorRow, ...]
    has_negative_scales: bool
    is_quantized: bool
    engines: tuple[EngineFacts, ...]
    kv_scales: str
    source_hashes: tuple[tuple[str, str], ...] = ()
    hashed: str = "SHA-256"
    notes: tuple[str, ...] = ()
    revision: str | None = None
    calibrated: bool = False  # whether any data has been looked at


NOT_EVALUATED = "It was not evaluated on benchmarks by the tool that wrote this card."


def tensor_parallel_fits(part: str, rows: int, cols: int, group_size: int, tp: int) -> bool:
    """Whether one packed linear [rows, cols] can be cut into `tp` equal parts without splitting a group or a word.

    down_proj and o_proj are split along their columns, which groups and 8-value words run along; the others by rows.
    """
    if part in ROW_PARALLEL:
        return cols % tp == 0 and cols // tp % group_size == 0 and cols // tp % 8 == 0
    return rows % tp == 0


def render_card(source_readme: str | None, facts: CardFacts) -> str:
    """The whole README.md, ending in a newline."""
    front_matter = _front_matter(source_readme, facts)
    lines = [*front_matter, "", f"# {escape_markdown(facts.title)}", "", *_warning(facts)]
    lines += [*_summary(facts), *_to_be_added(front_matter)]
    for section in (_command, _errors, _verify, _serving, _limits, _sources):
        lines += section(facts)
    return "\n".join(lines).rstrip("\n") + "\n"


def escape_markdown(text: str, limit: int = 200) -> str:
    """`text` as one line of literal Markdown: control characters shown as escapes, markup characters neutralised."""
    inside_word = r"(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])"  # no emphasis there (CommonMark 6.2)
    return re.sub(rf"(?!{inside_word})([\\`*_{{}}\[\]<>|~&$])", r"\\\1", printable(text, limit).strip(" "))


def _paragraph(text: str) -> str:
    """`text` as a line of its own: it can begin neither a heading nor a list."""
    line = escape_markdown(text, 1000)
    return re.sub(r"^(?:[#+=-]|\d+(?=[.)]))", lambda start: f"&#8203;{start[0]}", line)


# ---------------------------------------------------------------------------------------------------- front matter


def source_languages(source_readme: str | None) -> tuple[str, ...]:
    """The `language` of a README's front matter, one or a list; what is not a plain word is left out."""
    block = _source_blocks(source_readme).get("language", [])
    one = block[0].partition(":")[2].strip(" \"'") if len(block) == 1 else ""
    return tuple(_tags(block)) or ((one,) if _is_scalar(one) else ())


def _front_matter(source_readme: str | None, facts: CardFacts) -> list[str]:
    source = _source_blocks(source_readme)
    lines = ["---"]
    for key in _KEPT_KEYS:
        lines += source.get(key, [])
    if _is_hub_id(facts.base_model):
        lines += ["base_model:", f"- {facts.base_model}"]
        lines += ["base_model_relation: quantized"] if facts.is_quantized else []  # the Hub has no word for decoding
    if any(engine.name == "transformers" and engine.error is None for engine in facts.engines):
        lines.append("library_name: transformers")
    lines.append("tags:")
    kept = [tag for tag in _tags(source.get("tags", [])) if tag.lower() not in _DROPPED_TAGS]
    lines += [f"- {tag}" for tag in dict.fromkeys([*kept[:_MAX_TAGS], *facts.tags])]
    return [*lines, "---"]


def _source_blocks(readme: str | None) -> dict[str, list[str]]:
    """Top-level keys of the source's front matter with their lines, the allowed and harmless ones only."""
    if readme is None or len(readme) > MAX_README_CHARS:
        return {}
    lines = readme.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")[:_MAX_FRONT_MATTER_LINES]
    if lines[0].rstrip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() in {"---", "..."}), None)
    if end is None:
        return {}
    blocks: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines[1:end]:
        key, colon, _ = line.partition(":")
        if colon and re.fullmatch(r"[A-Za-z_][\w-]*", key, re.ASCII):
            current = []
            if key not in blocks:  # the first of two equal keys
                blocks[key] = current
        current.append(line.rstrip(" "))
    wanted = (*_KEPT_KEYS, "tags")
    return {key: block for key, block in blocks.items() if key in wanted and _is_harmless(key, block)}


def _is_harmless(key: str, block: list[str]) -> bool:
    """A scalar, a quoted scalar or a one-line list after the key, or plain `- item` lines below it."""
    value = block[0].removeprefix(f"{key}:")
    if max(map(len, block)) > _MAX_LINE or (value and not value.startswith(" ")):
        return False
    value = value.strip(" ")
    if value:
        return len(block) == 1 and (_is_scalar(value) or _QUOTED.fullmatch(value) is not None or bool(_flow(value)))
    items = [line.lstrip(" ") for line in block[1:]]
    return bool(items) and all(item.startswith("- ") and _item(item[2:]) is not None for item in items)


def _is_scalar(text: str) -> bool:
    return _SCALAR.fullmatch(text) is not None


def _item(text: str) -> str | None:
    text = text.strip(" ")
    return text if _is_scalar(text) or _QUOTED.fullmatch(text) else None


def _flow(value: str) -> list[str]:
    found = _FLOW_LIST.fullmatch(value)
    items = [_item(item) for item in found[1].split(",")] if found else []
    return [] if None in items else [item for item in items if item]


def _tags(block: list[str]) -> list[str]:
    if not block:
        return []
    value = block[0].partition(":")[2].strip(" ")
    items = _flow(value) if value else [line.lstrip(" ")[2:].strip(" ") for line in block[1:]]
    return [tag for item in items if _is_scalar(tag := item.strip("\"'")) and _TAG.fullmatch(tag)]


# ---------------------------------------------------------------------------------------------------- body


def _warning(facts: CardFacts) -> list[str]:
    """Before anything else: whoever serves it owes this to those who are served."""
    if not facts.is_quantized:
        return []
    base = f"`{facts.base_model}`" if _is_hub_id(facts.base_model) else "its source"
    return [
        f"> **This is a quantized derivative of {base}, not the original.** Weights are rounded, and answers differ.",
        "> What was measured and what was not stands below; say so where you serve it.",
        "",
    ]


def _summary(facts: CardFacts) -> list[str]:
    base = f"`{facts.base_model}`" if _is_hub_id(facts.base_model) else "The source"
    return [
        f"{base}, converted offline with kizami {escape_markdown(facts.kizami_version)}.",
        "",
        "| | |",
        "|---|---|",
        f"| scheme | {escape_markdown(facts.scheme)} |",
        *(f"| {escape_markdown(which)} | {escape_markdown(what)} |" for which, what in facts.forms),
        f"| method | {escape_markdown(facts.method)} |",
        f"| size | {_size(facts.source_bytes)} -> {_size(facts.output_bytes)} ({facts.output_bytes:,} bytes) |",
        f"| bits per weight, whole model | {facts.bits_per_weight:.3f} |",
        f"| KV-cache scales | {escape_markdown(facts.kv_scales)} |",
        *([f"| source revision | {escape_markdown(facts.revision)} |"] if facts.revision else []),
        "",
    ]


def _to_be_added(front_matter: list[str]) -> list[str]:
    """What a publisher has to fill in: guessing it would be worse."""
    keys = {line.partition(":")[0] for line in front_matter}
    unknown = [] if "base_model" in keys else ["`base_model`"]
    unknown += [] if keys.intersection(_LICENSE_KEYS) else ["`license`"]
    if not unknown:
        return []
    are = "was" if len(unknown) == 1 else "were"
    return [f"{' and '.join(unknown)} {are} not known to kizami: add to the lines at the top before publishing.", ""]


def _is_hub_id(text: str | None) -> bool:
    return text is not None and _HUB_ID.fullmatch(text) is not None


def _command(facts: CardFacts) -> list[str]:
    command = printable(facts.command, 2000)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", command)), default=0))
    return ["## Command", "", f"{fence}sh", command, fence, ""]


def _errors(facts: CardFacts) -> list[str]:
    lines = ["## Error against the source weights", ""]
    if not facts.errors:
        return [*lines, "No weight was rounded to fewer bits than BF16 has.", ""]
    lines += [
        "| role | modules | relative error, mean | relative error, max | SQNR dB |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {escape_markdown(row.role)} | {row.modules:,} | {row.mean_rel_error:.5f} | {row.max_rel_error:.5f} "
        f"| {'exact' if row.sqnr_db is None else format(row.sqnr_db, '.2f')} |"
        for row in facts.errors
    ]
    lines += ["", "Per tensor: `kizami-report.jsonl`. Weight error is not task quality."]
    if facts.calibrated:
        lines.append("A calibrated method makes outputs more exact and single weights less, on purpose.")
    return [*lines, ""]


def _verify(facts: CardFacts) -> list[str]:
    source = facts.base_model if _is_hub_id(facts.base_model) else "SOURCE"
    return [
        "## Verify",
        "",
        "```sh",
        f"kizami verify THIS --against {source}{_at(facts)}",
        "```",
        "",
        "`THIS` is this folder. Every tensor is decoded by a second implementation and compared with the source.",
        "",
    ]


def _at(facts: CardFacts) -> str:
    revision = facts.revision
    return f"@{revision}" if revision and _is_hub_id(facts.base_model) and re.fullmatch(r"[\w.-]+", revision) else ""


def _serving(facts: CardFacts) -> list[str]:
    """What loads, by the rules of `kizami check`, and the commands of the engines that do."""
    lines = ["## Serving", "", "| engine | loads | tensor-parallel sizes | needs |", "|---|---|---|---|"]
    for engine in facts.engines:
        loads = "yes" if engine.error is None else f"no: {engine.error}"
        sizes = "" if engine.sizes is None or engine.error else ", ".join(map(str, engine.sizes)) or "none"
        row = (f"{engine.name} {engine.version}", loads, sizes, "; ".join(engine.needs))
        lines.append("| " + " | ".join(escape_markdown(cell, 400) for cell in row) + " |")
    lines += [
        "",
        f"Sizes tried: {', '.join(map(str, TP_SIZES))}, experts not spread over groups of ranks. Read from the",
    ]
    lines += ["engines' sources by `kizami check`; nothing was run on a GPU. `kizami serve` says more.", ""]
    commands = [line for engine in facts.engines if (line := _launch(engine)) is not None]
    lines += ["```sh", *commands, "```", ""] if commands else []
    if facts.has_negative_scales:
        lines.append("Some group scales are negative (W = q * scale): the reader must multiply, not take magnitudes.")
    lines += [_paragraph(note) for note in facts.notes]
    return [*lines, ""]


_LAUNCH = {
    "SGLang": "python -m sglang.launch_server --model-path {} --tp-size {}",
    "vLLM": "vllm serve {} --tensor-parallel-size {}",
}
_FLAG = "serve with --"


def _launch(engine: EngineFacts) -> str | None:
    """One node's command, with the flags that `needs` asks for."""
    sizes = [size for size in engine.sizes or () if size <= _ONE_NODE]
    if engine.error is not None or not sizes:
        return None
    flags = [" --" + need.removeprefix(_FLAG) for need in engine.needs if need.startswith(_FLAG)]
    return _LAUNCH[engine.name].format("<this model>", max(sizes)) + "".join(flags)


def _limits(facts: CardFacts) -> list[str]:
    made = (
        "with calibration data: what that lacks may have suffered"
        if facts.calibrated
        else "from the weights alone, with no calibration data"
    )
    return [
        "## Limits",
        "",
        f"This checkpoint was made {made}.",
        f"{NOT_EVALUATED} Compare it with the source on your own task.",
        "",
    ]


def _sources(facts: CardFacts) -> list[str]:
    if not facts.source_hashes:
        return []
    lines = ["## Source", "", f"| file | {escape_markdown(facts.hashed)} |", "|---|---|"]
    shown = facts.source_hashes[:_SOURCES_SHOWN]
    lines += [f"| {escape_markdown(file)} | {escape_markdown(digest)} |" for file, digest in shown]
    left = len(facts.source_hashes) - len(shown)
    return [*lines, *(["", f"... and {left:,} more in `kizami.json`."] if left else [])]


def _size(nbytes: int) -> str:
    """`419.94 GiB`, `11.32 MiB`."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
