"""A picture of what was measured: ``python -m benchmarks.plot FILE.png < FIGURES.json``, from what ``--json`` wrote.

Needs matplotlib; an environment of its own will do. A panel for each scenario, size and number of clients, a bar for
each backend: the median over the rounds, and from the slowest to the fastest one. The scale is logarithmic, since
stores differ by factors. The colour says what a power loss or a crash leaves of what was acknowledged. Where a scenario
pauses between its operations, their number a second means nothing, and the bar is an operation's median time.
"""

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TypedDict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from benchmarks.backends import BACKENDS, survives

_COLOURS = {"power loss": "#1f6f8b", "death of the process": "#e3a23c", "nothing": "#b4b8bd"}
_TIMED = ("wait", "adapter")
_SPREAD = {"ecolor": "#333333", "elinewidth": 1, "capsize": 2}


class Summary(TypedDict):
    """What the picture needs of one of the document's summaries."""

    scenario: str
    tasks: int
    clients: int
    backend: str
    per_second: tuple[float, float, float]
    p50_us: float


class Machine(TypedDict):
    """What the picture says of the machine."""

    processor: str
    cores: int
    flush_us: tuple[float, float, float]


class Document(TypedDict):
    """What the picture needs of the document."""

    machine: Machine
    summaries: list[Summary]


def draw(document: Document) -> Figure:
    """Draw a document of the benchmarks; ``Figure.savefig`` writes it."""
    panels = [
        (*setting, list(each))
        for setting, each in groupby(
            document["summaries"], key=lambda summary: (summary["scenario"], summary["tasks"], summary["clients"])
        )
    ]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    tallest = max(len(summaries) for *_, summaries in panels)
    figure = Figure(figsize=(5.2 * columns, rows * (1.1 + 0.32 * tallest) + 0.8), layout="constrained")
    for number, (scenario, tasks, clients, summaries) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        measure = "ms each" if scenario in _TIMED else "a second"
        size = f", {tasks:,} tasks" if tasks else ""
        title = f"{scenario}{size}, {clients} client{'s' if clients > 1 else ''}: {measure}"
        axes.set_title(title, loc="left", fontweight="bold", fontsize="medium")
        values = [
            (summary["p50_us"] / 1000,) * 3 if scenario in _TIMED else summary["per_second"] for summary in summaries
        ]
        _bars(axes, [summary["backend"] for summary in summaries], values)
    figure.legend(
        handles=[Patch(color=colour, label=f"survives {what}") for what, colour in _COLOURS.items()],
        loc="outside lower left",
        ncols=len(_COLOURS),
        frameon=False,
    )
    machine = document["machine"]
    middle, low, high = (each / 1000 for each in machine["flush_us"])
    figure.suptitle(
        f"median and range of the rounds; {machine['processor']}, {machine['cores']} cores, "
        f"flush {middle:.2f} ms ({low:.2f}-{high:.2f})",
        fontsize="small",
        x=0.01,
        ha="left",
    )
    return figure


def _bars(axes: Axes, names: Sequence[str], values: Sequence[tuple[float, float, float]]) -> None:
    middles, lows, highs = zip(*values, strict=True)
    spread = [
        [middle - low for middle, low in zip(middles, lows, strict=True)],
        [high - middle for middle, high in zip(middles, highs, strict=True)],
    ]
    colours = [_COLOURS[survives(BACKENDS[name])] for name in names]
    axes.barh(names, middles, xerr=spread, color=colours, error_kw=_SPREAD, height=0.7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    # Room on the left so that the slowest has a bar, and on the right for the number.
    axes.set_xlim(min(lows) / 3, max(highs) * 6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,g}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    for position, (name, middle, high) in enumerate(zip(names, middles, highs, strict=True)):
        weight = "bold" if BACKENDS[name].driver == "ours" else "normal"
        axes.annotate(
            f"{middle:,.0f}" if middle >= 10 else f"{middle:.2g}",
            (high, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            size="small",
            weight=weight,
        )
        axes.get_yticklabels()[position].set_fontweight(weight)


def main() -> None:
    """Read the document from the input and write the picture."""
    draw(json.load(sys.stdin)).savefig(sys.argv[1], dpi=150)


if __name__ == "__main__":
    main()
