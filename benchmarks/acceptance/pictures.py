"""Rows of a section as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.acceptance.asked import KINDS
from benchmarks.acceptance.section import Row

STYLES = {0.0: "-", 1.0: "--"}  # by temperature


def draw(name: str, rows: Sequence[Row], path: Path) -> None:
    """Of a section that has one."""
    if name in DRAWINGS:
        DRAWINGS[name](rows).savefig(path, dpi=80)


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * panels, 3.8), layout="constrained")
    return figure, [figure.add_subplot(1, panels, number + 1) for number in range(panels)]


def _methods(rows: Sequence[Row]) -> Figure:
    """Acceptance length by kind of prompt, a panel for each temperature; and over all kinds at the lowest one, the
    share of steps that accept at least d drafts."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, panels = _figure(len(temperatures) + 1)
    names = list(dict.fromkeys((row["method"], row["settings"]) for row in rows))
    width = 0.85 / len(names)
    for number, (method, settings) in enumerate(names):
        of_name = [row for row in rows if (row["method"], row["settings"]) == (method, settings)]
        label, colour = f"{method}, {settings.split(',')[0]}", f"C{number}"
        for axes, temperature in zip(panels, temperatures, strict=False):
            found = [row for row in of_name if row["temperature"] == temperature and row["kind"] in KINDS]
            places = [place + (number - len(names) / 2) * width for place in range(len(found))]
            axes.bar(places, [row["accept_length"] for row in found], width, align="edge", color=colour, label=label)
        accept = next(row["accept"] for row in of_name if row["kind"] == "all")
        panels[-1].plot(range(1, len(accept) + 1), accept, marker="o", ms=3, color=colour)
    for axes, temperature in zip(panels, temperatures, strict=False):
        axes.set_xticks(range(len(KINDS)), list(KINDS.values()))
        axes.set(title=f"temperature {temperature:g}", ylabel="tokens a step", ylim=(1, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    panels[-1].set(
        title=f"temperature {temperatures[0]:g}", xlabel="drafts accepted, at least", ylabel="share of steps"
    )
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _nodes(rows: Sequence[Row]) -> Figure:
    """A panel for each temperature: tokens a step by budget, two standard errors as bars."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, panels = _figure(len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        for topk in dict.fromkeys(row["topk"] for row in rows):
            found = [row for row in rows if row["topk"] == topk and row["temperature"] == temperature]
            budgets, lengths = [row["budget"] for row in found], [row["accept_length"] for row in found]
            errors = [2 * row["error"] for row in found]
            label = "chain" if topk == 1 else f"tree, topk {topk}"
            axes.errorbar(budgets, lengths, errors, marker="o", ms=4, capsize=3, label=label)
        axes.set(title=f"temperature {temperature:g}", xlabel="nodes allowed, root included", ylabel="tokens a step")
        axes.legend(fontsize=8)
    return figure


def _split(rows: Sequence[Row]) -> Figure:
    """What one budget for the batch gains a request and step, by shape and budget, two standard errors as bars."""
    figure, (axes,) = _figure(1)
    names = list(dict.fromkeys((row["shape"], row["budget"]) for row in rows))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        found = [row for row in rows if row["temperature"] == temperature]
        places = [names.index((row["shape"], row["budget"])) + temperature / 8 for row in found]
        gains, errors = [row["gain"] for row in found], [2 * row["error"] for row in found]
        axes.errorbar(places, gains, errors, fmt="o", ms=4, capsize=3, label=f"temperature {temperature:g}")
    axes.axhline(0, color="0.7", lw=0.8)
    axes.set_xticks(range(len(names)), [f"{shape}\n{budget} nodes" for shape, budget in names])
    axes.set(ylabel="tokens a step more than split evenly")
    axes.legend(fontsize=8, loc="upper right")
    return figure


def _calibration(rows: Sequence[Row]) -> Figure:
    """A panel for each method: predicted against accepted, the larger the dot the more nodes; the diagonal is right."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = _figure(len(methods))
    for axes, method in zip(panels, methods, strict=True):
        axes.plot([0, 1], [0, 1], color="0.7", lw=0.8)
        for row in (row for row in rows if row["method"] == method):
            found = [one for one in row["bins"] if one[0]]
            nodes, predicted, accepted = zip(*found, strict=True)
            label = f"{row['shape']}, T {row['temperature']:g}, ECE {row['ece']:.3f}"
            (line,) = axes.plot(predicted, accepted, STYLES[row["temperature"]], lw=0.8, label=label)
            sizes = [5 + 100 * (count / max(nodes)) ** 0.5 for count in nodes]
            axes.scatter(predicted, accepted, sizes, color=line.get_color(), alpha=0.6)
        axes.set(title=method, xlabel="path probability by the draft", ylabel="share accepted")
        axes.legend(fontsize=7)
    return figure


def _speed(rows: Sequence[Row]) -> Figure:
    """Tokens/s by concurrency, and to plain."""
    figure, (left, right) = _figure(2)
    for name in dict.fromkeys(row["settings"] for row in rows):
        found = [row for row in rows if row["settings"] == name]
        levels = [row["at_once"] for row in found]
        left.plot(levels, [max(row["tokens_per_second"]) for row in found], marker="o", ms=4, label=name)
        right.plot(levels, [row["to_plain"] for row in found], marker="o", ms=4, label=name)
    for axes, title in ((left, "decode tokens/s, best"), (right, "to plain, median")):
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="requests at once")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(fontsize=8)
    return figure


DRAWINGS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "methods": _methods,
    "nodes": _nodes,
    "split": _split,
    "calibration": _calibration,
    "speed": _speed,
}
