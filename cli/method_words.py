"""What summaries say of how scales and codes were chosen, and of what it cost."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kizami.cli.output import Ui, counted, figure

if TYPE_CHECKING:
    from kizami.quantize.report import Row

NAMES_SHOWN = 8


def method_body(rows: "list[Row]") -> dict[str, Any]:
    """The part of --json."""
    from kizami.formats.statistics import STARVED
    from kizami.quantize.report import experts_of_few_tokens, gptq_summary, weighted_error

    gptq = gptq_summary(rows)
    few = [{"name": name, "tokens": tokens} for name, tokens in experts_of_few_tokens(rows).items()]
    return {
        "weighted_rel_error": weighted_error(rows),
        "gptq": None if gptq is None else asdict(gptq),
        "few_tokens": {"below": STARVED, "experts": few},
    }


def method_lines(body: dict[str, Any]) -> Iterator[str]:
    """What a calibrated method makes small, and what it knew little of; nothing of the others."""
    if (gptq := body["gptq"]) is not None:
        line = f"GPTQ in {gptq['chosen']:,} of {counted(gptq['modules'], 'calibrated module')}"
        ratio = gptq["loss_ratio"]
        yield (
            line
            if ratio is None
            else (f"{line}; squared output error on held-out tokens {figure(ratio, 2)} of weighted's")
        )
    elif body["weighted_rel_error"] is not None:
        yield (
            f"relative error {body['weighted_rel_error']:.4f} where each weight counts as its input is loud, which "
            f"{body['method']} makes small; {figure(body['rel_error'])} where all count alike"
        )
    few = body["few_tokens"]
    if names := [expert["name"] for expert in few["experts"]]:
        yield (
            f"few tokens: their statistics are shrunk; {counted(len(names), 'expert')} with fewer than {few['below']} "
            f"fit tokens ({some(names)})"
        )


def show_fallbacks(ui: Ui, fallbacks: list[dict[str, str]], method: str) -> None:
    """`search in place of weighted: layer 5 (MTP: never calibrated): 24 modules (model.layers.5..., ...)`."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for entry in fallbacks:
        kinds.setdefault((entry.get("method", "search"), entry["reason"]), []).append(entry["name"])
    for (used, reason), names in kinds.items():
        ui.prose(f"{used} in place of {method}: {reason}: {counted(len(names), 'module')} ({some(names)})")


def some(names: list[str]) -> str:
    """The first of them, and how many more."""
    shown = ", ".join(names[:NAMES_SHOWN]) or "nothing"
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
