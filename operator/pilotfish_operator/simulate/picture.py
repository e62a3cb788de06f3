"""Draws a study: the curve over users, and a load with what was decided. Imports matplotlib when asked to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish_operator.simulate.cluster import Outcome
from pilotfish_operator.simulate.study import Point


class PictureError(Exception):
    """matplotlib is not installed."""


def _plots() -> Any:
    try:
        import matplotlib
    except ImportError as problem:
        raise PictureError("a picture needs matplotlib; pip install 'pilotfish[train]' brings it") from problem
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def curve(rows: Sequence[Point], title: str, path: Path) -> None:
    """Draws tokens/s over users: Pilotfish as a wide band, the settings that it chooses from as lines upon it."""
    plots = _plots()
    figure, axes = plots.subplots(figsize=(7.5, 4.5), layout="constrained")
    users = [row.users for row in rows]
    for name in rows[0].rates:
        style = {"oracle": ":", "plain": "--"}.get(name, "-")
        rates = [row.rates[name] for row in rows]
        if name == "pilotfish":
            axes.plot(users, rates, linewidth=9, color="tab:blue", alpha=0.35, zorder=1, label="Pilotfish")
        else:
            axes.plot(users, rates, style, linewidth=1.4, color="black" if name == "plain" else None, label=name)
    axes.set(xscale="log", xlabel="users at once", ylabel="tokens/s of all of them", title=title)
    axes.set_xticks(users, [str(number) for number in users])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=140)


def trajectory(outcome: Outcome, title: str, path: Path) -> None:
    """Load, replicas and settings over time, one above the other."""
    plots = _plots()
    figure, (load, replicas, settings) = plots.subplots(3, sharex=True, figsize=(8.5, 6.5), layout="constrained")
    at = [moment.at / 60 for moment in outcome.moments]
    load.plot(at, [moment.concurrency for moment in outcome.moments], linewidth=0.8)
    load.set(ylabel="requests at once", title=title)
    replicas.step(at, [moment.wanted for moment in outcome.moments], where="post", label="asked for")
    replicas.step(at, [moment.ready for moment in outcome.moments], where="post", label="ready")
    replicas.set(ylabel="replicas")
    replicas.legend()
    settings.step(at, [moment.num_steps for moment in outcome.moments], where="post", label="draft steps run")
    settings.step(at, [m.envelope.num_steps for m in outcome.moments], where="post", label="bound")
    settings.set(ylabel="draft steps", xlabel="minutes")
    settings.legend()
    for axes in (load, replicas, settings):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=140)
