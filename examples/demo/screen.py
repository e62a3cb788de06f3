"""What the demo shows: steps with the time they began, commands as a person would type them, one live line of progress.

Knows nothing about Kubernetes. Without a terminal the live line becomes a line now and then.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

_started = time.monotonic()
_live_width = 0
_last_live = ("", 0.0)
QUIET_SECONDS = 10.0  # between two lines of progress in which nothing turned, where there is no terminal


def elapsed() -> float:
    """Seconds since the demo began."""
    return time.monotonic() - _started


def say(text: str = "") -> None:
    """A line of its own."""
    _end_live()
    print(text, flush=True)


def step(title: str) -> None:
    say(f"\n{_bold(f'[{elapsed():5.1f}s] {title}')}")


def command(argv: Sequence[str]) -> None:
    say(f"$ {shlex.join(argv)}")


def note(text: str) -> None:
    """Something that happened, with its time."""
    say(f"[{elapsed():5.1f}s]   {text}")


def live(turning: str, moving: str) -> None:
    """Progress on a line that overwrites itself. `moving` changes all the time, `turning` when something happened."""
    global _live_width, _last_live
    text = f"[{elapsed():5.1f}s]   {turning} · {moving}"
    if sys.stdout.isatty():
        print("\r" + text.ljust(_live_width), end="", flush=True)
        _live_width = len(text)
    elif turning != _last_live[0] or elapsed() - _last_live[1] > QUIET_SECONDS:
        print(text, flush=True)
        _last_live = (turning, elapsed())


def piece(text: str) -> None:
    """Part of a streamed answer."""
    _end_live()
    print(text, end="", flush=True)


def _end_live() -> None:
    global _live_width
    if _live_width:
        print(flush=True)
        _live_width = 0


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text
