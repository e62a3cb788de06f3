"""`pilotfish top`: all models live in the terminal, by what their statuses say.

Keys: arrows or j and k choose a model, Enter opens and closes it, s sorts by the next column, r turns the order round,
q ends. Where the output is no terminal, one table is printed. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pilotfish_operator.kinds import MODELS
from pilotfish_operator.kube import Kube, KubeError
from pilotfish_operator.objects import Object

PERIOD = 2.0  # seconds between two looks
Cell = str | float | None


def _settings(part: Any) -> str:
    found = part or {}
    if "numSteps" not in found:
        return "?"
    threshold = found.get("disableThreshold", "-")
    return f"{found['numSteps']}/{found.get('topK', 1)}/{found.get('numDraftTokens', 1)}, {threshold}"


_COLUMNS: tuple[tuple[str, Callable[[Object, Object, Object], Cell]], ...] = (
    ("model", lambda model, _s, _p: f"{model['metadata']['namespace']}/{model['metadata']['name']}"),
    ("load", lambda _m, status, _p: (status.get("load") or {}).get("concurrency")),
    ("tok/s", lambda _m, status, _p: (status.get("load") or {}).get("tokensPerSecond")),
    ("ready", lambda _m, status, _p: status.get("readyReplicas")),
    ("replicas", lambda _m, status, _p: status.get("replicas")),
    ("method", lambda _m, _s, part: part.get("method")),
    ("bounds", lambda _m, _s, part: _settings(part.get("desired"))),
    ("runs", lambda _m, _s, part: _settings(part.get("effective"))),
    ("tokens/step", lambda _m, _s, part: part.get("acceptLength")),
    ("speed-up", lambda _m, _s, part: part.get("speedup")),
    ("reason", lambda _m, _s, part: part.get("reason")),
)
TITLES = tuple(title for title, _ in _COLUMNS)
NUMBERS = ("load", "tok/s", "ready", "replicas", "tokens/step", "speed-up")


@dataclass(frozen=True)
class Row:
    """A model's cells by title; what is not known is None. conditions: (type, status, message)."""

    cells: dict[str, Cell]
    conditions: tuple[tuple[str, str, str], ...]


def row(model: Object) -> Row:
    """Returns what the status of a model says, whatever of it is there."""
    status = model.get("status") or {}
    part = status.get("speculation") or {}
    conditions = tuple(
        (str(c.get("type")), str(c.get("status")), str(c.get("message"))) for c in status.get("conditions") or ()
    )
    return Row({title: take(model, status, part) for title, take in _COLUMNS}, conditions)


@dataclass(frozen=True)
class View:
    """What the person chose. selected: the name of a model, so that sorting does not move the choice."""

    sort: int = 0
    backwards: bool = False
    selected: str = ""
    opened: bool = False
    ended: bool = False

    def order(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in order; what is not known is last either way."""
        title = TITLES[self.sort]
        known = [one for one in rows if one.cells[title] is not None]
        rest = [one for one in rows if one.cells[title] is None]
        known.sort(key=lambda one: str(one.cells["model"]))
        if title in NUMBERS:
            known.sort(key=lambda one: float(one.cells[title] or 0), reverse=not self.backwards)
        else:
            known.sort(key=lambda one: str(one.cells[title]), reverse=self.backwards)
        return known + rest

    def after(self, key: str, rows: Sequence[Row]) -> View:
        """The view after a key."""
        names = [str(one.cells["model"]) for one in self.order(rows)]
        at = names.index(self.selected) if self.selected in names else -1
        match key:
            case "q" | "\x03":
                return replace(self, ended=True)
            case "s":
                return replace(self, sort=(self.sort + 1) % len(TITLES))
            case "r":
                return replace(self, backwards=not self.backwards)
            case "\r" | "\n":
                return replace(self, opened=not self.opened, selected=names[max(at, 0)] if names else "")
            case "j" | "\x1b[B":
                return replace(self, selected=names[min(at + 1, len(names) - 1)] if names else "")
            case "k" | "\x1b[A":
                return replace(self, selected=names[max(at - 1, 0)] if names else "")
        return self


def drawn(rows: Sequence[Row], view: View, trouble: str = "") -> RenderableType:
    """The table, the opened model below it, and what went wrong."""
    table = Table(expand=True, box=None, header_style="bold")
    for number, title in enumerate(TITLES):
        mark = (" ▲" if view.backwards else " ▼") if number == view.sort else ""
        table.add_column(title + mark, justify="right" if title in NUMBERS else "left", no_wrap=title != "reason")
    parts: list[RenderableType] = [table]
    for one in view.order(rows):
        chosen = one.cells["model"] == view.selected
        table.add_row(*(_text(one.cells[title]) for title in TITLES), style="reverse" if chosen else "")
        if chosen and view.opened:
            below = Table(box=None, show_header=False)
            for kind, status, message in one.conditions:
                below.add_row(kind, status, Text(message))
            parts += [Text(f"\n{one.cells['model']}", style="bold"), Text(str(one.cells["reason"] or "")), below]
    if not rows:
        parts.append(Text("no SpeculativeModel is there"))
    if trouble:
        parts.append(Text(trouble, style="red"))
    return Group(*parts)


def _text(cell: Cell) -> Text:
    return Text("?" if cell is None else f"{cell:g}" if isinstance(cell, int | float) else cell)


@contextlib.contextmanager
def _keys(pressed: asyncio.Queue[str]) -> Iterator[None]:
    """Puts each key that is pressed meanwhile in the queue; the terminal is as before afterwards."""
    import os
    import termios
    import tty

    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: pressed.put_nowait(os.read(number, 16).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


async def top(api: Kube, namespace: str | None) -> None:
    """Shows the models until q is pressed. Raises KubeError where they cannot be read the first time."""
    items, _ = await api.list(MODELS, namespace, "")
    rows, view, console = [row(item) for item in items], View(), Console()
    if not (sys.stdin.isatty() and console.is_terminal):
        Console(width=max(console.width, 200)).print(drawn(rows, view))
        return
    pressed: asyncio.Queue[str] = asyncio.Queue()
    trouble, due = "", asyncio.get_running_loop().time() + PERIOD
    with _keys(pressed), Live(drawn(rows, view), console=console, screen=True, auto_refresh=False) as live:
        while not view.ended:
            try:
                left = due - asyncio.get_running_loop().time()
                view = view.after(await asyncio.wait_for(pressed.get(), max(0.0, left)), rows)
            except TimeoutError:
                try:
                    items, _ = await api.list(MODELS, namespace, "")
                    rows, trouble = [row(item) for item in items], ""
                except KubeError as problem:
                    trouble = f"what is shown is old: {problem}"
                due = asyncio.get_running_loop().time() + PERIOD
            live.update(drawn(rows, view, trouble), refresh=True)
