"""Pictures of the report, as SVG: text stays text, and nothing is loaded from anywhere."""

import io
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from kizami.formats.errors import printable

if TYPE_CHECKING:
    from kizami.quantize.figures import ErrorMap, ExpertErrors
    from kizami.quantize.weight_figures import WeightFigures

# Okabe and Ito's colours, which people of all kinds of sight tell apart
BEFORE, AFTER, MARK = "#999999", "#0072b2", "#d55e00"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9.0, "axes.spines.top": False,
    "axes.spines.right": False, "svg.hashsalt": "kizami", "text.parse_math": False,
}  # fmt: skip
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # the usual one of log axes is in TeX, which is not parsed
MOST_ROWS = 40
LABEL = 40
GIB = 1 << 30
MIB = 1 << 20


def sizes(roles: Sequence[tuple[str, int, int]]) -> str:
    """Bytes before and after, by role: (role, before, after), the largest first."""
    unit, word = (GIB, "GiB") if max((max(a, b) for _, a, b in roles), default=0) >= GIB else (MIB, "MiB")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 0.6 + 0.36 * len(roles)), layout="constrained")
        axes = figure.subplots()
        at = np.arange(len(roles))[::-1]
        axes.barh(at + 0.19, [before / unit for _, before, _ in roles], 0.36, color=BEFORE, label="before")
        axes.barh(at - 0.19, [after / unit for *_, after in roles], 0.36, color=AFTER, label="after")
        axes.set_yticks(at, [_label(role) for role, *_ in roles])
        axes.set_xlabel(word)
        axes.legend(frameon=False, loc="lower right")
        return _svg(figure, "Bytes before and after, by role")


def heat_map(found: "ErrorMap", *, ratio: bool = False) -> str:
    """Relative error by module and layer; ratio: log2 of one's over another's instead."""
    what = "log2 of there / here" if ratio else "relative error"
    reach = float(np.nanmax(np.abs(found.errors), initial=1e-9)) if ratio else None
    colours: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -reach, "vmax": reach} if reach else {"cmap": "cividis"}
    modules, errors = found.modules[:MOST_ROWS], found.errors[:MOST_ROWS]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.0 + 0.26 * len(modules)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(errors, aspect="auto", interpolation="nearest", origin="upper", **colours)
        axes.set_yticks(range(len(modules)), [_label(module) for module in modules])
        step = max(1, -(-len(found.layers) // 20))
        axes.set_xticks(range(0, len(found.layers), step), [str(layer) for layer in found.layers[::step]])
        axes.set_xlabel("layer")
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, label=what, pad=0.01)
        return _svg(figure, f"{what.capitalize()} by module and layer")


def experts(found: "ExpertErrors") -> str:
    """The errors of each layer's experts: median, middle half, all; outliers as points."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 2.6), layout="constrained")
        axes = figure.subplots()
        layers = np.array(found.layers)
        low, first, middle, third, high = np.array([np.percentile(e, [0, 25, 50, 75, 100]) for e in found.errors]).T
        axes.fill_between(layers, low, high, color=AFTER, alpha=0.15, linewidth=0, label="all experts")
        axes.fill_between(layers, first, third, color=AFTER, alpha=0.4, linewidth=0, label="the middle half")
        axes.plot(layers, middle, color=AFTER, label="median")
        if found.outliers:
            at, errors = [one.layer for one in found.outliers], [one.rel_error for one in found.outliers]
            axes.scatter(at, errors, s=10, color=MARK, zorder=3, label="stand out")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="layer", ylabel="relative error")
        axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.22))
        return _svg(figure, "Relative error of experts by layer")


def weight(found: "WeightFigures") -> str:
    """Values before and after, codes, and scales of one weight."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 2.2), layout="constrained")
        values, codes, scales = figure.subplots(1, 3, width_ratios=(2, 1.2, 1.2))
        centres = (found.edges[1:] + found.edges[:-1]) / 2
        if found.before is not None:
            values.fill_between(centres, found.before, step="mid", color=BEFORE, alpha=0.7, label="before")
        values.step(centres, found.after, where="mid", color=AFTER, linewidth=1, label="after")
        values.set(xlabel="weight", ylabel="how many", yscale="log")
        values.yaxis.set_major_formatter(PLAIN)
        values.legend(frameon=False)
        codes.bar(range(-8, 8), found.codes / max(int(found.codes.sum()), 1), color=AFTER)
        codes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        codes.set(xlabel="code")
        scales.stairs(found.scales, found.scale_edges, fill=True, color=AFTER)
        scales.set(xlabel="log2 |scale|")
        return _svg(figure, "Values, codes and scales of one weight")


def headroom(layers: Sequence[int], room: Sequence[float]) -> str:
    """How many times larger the cache's values may become, by layer."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 2.2), layout="constrained")
        axes = figure.subplots()
        axes.bar(layers, room, color=[MARK if value < 1 else AFTER for value in room])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xlabel="layer", ylabel="headroom", yscale="log")
        axes.yaxis.set_major_formatter(PLAIN)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, "Headroom of an FP8 KV cache by layer")


def _label(name: str) -> str:
    """A name beside a picture that still leaves room for the picture."""
    return printable(name, LABEL)


def _svg(figure: Any, title: str) -> str:
    """The <svg> element alone: no prologue, no date, a title for those who do not see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{title}"', text, count=1)
    return _same_names(re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL))


def _same_names(svg: str) -> str:
    """Clip paths named by what they are: matplotlib names some by where they lie in memory, and the same report would
    give another file."""
    for name, path in re.findall(r'<clipPath id="(\w+)">(.*?)</clipPath>', svg, flags=re.DOTALL):
        svg = svg.replace(name, f"clip{sha256(path.encode()).hexdigest()[:12]}")
    return svg
