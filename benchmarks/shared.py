"""Engines over the same weights, where two are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pilotfish_engine.engine import Parts


@contextmanager
def target_of(parts: Parts) -> Iterator[None]:
    """Engines that are assembled within read this one's target, which must be theirs. A second copy lies differently in
    memory, and its twin was seen to be 12% faster."""
    with patch("pilotfish_engine.engine.load", lambda *_, **__: parts.step.target):
        yield
