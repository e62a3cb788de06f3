"""A run as a picture: throughput, latencies and acceptance over the levels, a baseline dashed beside them.

The only importer of matplotlib, which comes with the extra `train`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pilotfish_engine.bench.result import LevelResult, Result
from pilotfish_engine.bench.table import describe
from pilotfish_engine.errors import UsageError

PANEL_INCHES = (3.6, 3.2)
AXES = {"concurrency": "requests at once", "rate": "requests a second"}
Value = Callable[[LevelResult], float | None]


def _latency(key: str, percentile: str) -> Value:
    return lambda level: None if (values := getattr(level, key)) is None else float(getattr(values, percentile))


# title, and a line by its name for each of its values
PANELS: tuple[tuple[str, tuple[tuple[str, Value], ...]], ...] = (
    ("tokens/s", (("", lambda level: level.tokens_per_second),)),
    ("first token, ms", (("p50", _latency("first_token_ms", "p50")), ("p99", _latency("first_token_ms", "p99")))),
    ("per token, ms", (("p50", _latency("per_token_ms", "p50")), ("p99", _latency("per_token_ms", "p99")))),
    (
        "tokens of a speculative step",
        (("", lambda level: None if level.acceptance is None else level.acceptance.accept_length),),
    ),
)


def draw(result: Result, baseline: Result | None, file: Path) -> None:
    """A row for each kind of level. Levels in which requests failed are crosses. Raises UsageError where the file
    cannot be written, or is of no kind that is drawn."""
    kinds = [kind for kind in AXES if any(level.kind == kind for level in result.levels)]
    if not kinds:
        return
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(PANELS), height * len(kinds) + 0.6), layout="constrained")
    figure.suptitle(f"{result.model}: {describe(result)}", fontsize=10)
    for row, axes in zip(kinds, figure.subplots(len(kinds), len(PANELS), squeeze=False), strict=True):
        for panel, (title, lines) in zip(axes, PANELS, strict=True):
            _panel(panel, title, lines, row, result, baseline)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--picture {file} cannot be written ({error}); a .png, .svg or .pdf would work") from error


def _panel(
    axes: Axes,
    title: str,
    lines: tuple[tuple[str, Value], ...],
    kind: str,
    result: Result,
    baseline: Result | None,
) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(AXES[kind], fontsize=8)
    axes.set_xscale("log", base=2)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    highest: float | None = None
    runs = [(result, "-", "")] + ([(baseline, "--", "baseline ")] if baseline is not None else [])
    for run, dashes, prefix in runs:
        filled: Literal["full", "none"] = "full" if run is result else "none"
        levels = sorted((level for level in run.levels if level.kind == kind), key=lambda level: level.value)
        for number, (name, value) in enumerate(lines):
            points = [(level.value, y, level.whole) for level in levels if (y := value(level)) is not None]
            if not points:
                continue
            xs, ys, _ = zip(*points, strict=True)
            highest = max(highest or 0.0, *ys)
            label = f"{prefix}{name}".strip() or "this run"
            axes.plot(xs, ys, dashes, color=f"C{number}", label=label)
            for x, y, whole in points:
                axes.plot(x, y, "o" if whole else "x", color=f"C{number}", markersize=5, fillstyle=filled)
    if highest is not None:
        axes.set_ylim(0, 1.1 * highest or 1.0)
        if len(lines) > 1 or baseline is not None:
            axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes, fontsize=8)
