"""What every section is given, and the form of what it gives: rows, which are printed as they come and kept as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.acceptance.asked import Asked, Prompt
from benchmarks.acceptance.engines import Engines

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """tokens: of an answer at most. at_once: how many requests are timed together; None: all levels."""

    engines: Engines
    asked: Asked
    tokens: int
    at_once: Sequence[int] | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)

    @property
    def prompts(self) -> list[Prompt]:
        return list(self.asked.mixed())


class Table:
    """Columns of fixed widths; negative: to the left."""

    def __init__(self, columns: dict[str, int]) -> None:
        self._widths = list(columns.values())
        self.row(*columns)

    def row(self, *cells: object) -> None:
        shown = [
            f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
            for cell, width in zip(map(str, cells), self._widths, strict=True)
        ]
        print("  ".join(shown).rstrip(), flush=True)


def working(what: str) -> None:
    """On a terminal's line that the next row overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="\r", file=sys.stderr, flush=True)


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.0%}" for value in values)
