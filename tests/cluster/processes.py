"""Processes that outlive the command that started them, and that can still all be found and ended.

A process is named by its id *and* start time, so a recycled id is never signalled. Every process of a world carries a
mark in its environment that names the world's state folder: the marked, their descendants and the sessions that they
lead are what ``sweep`` ends.
A zombie counts as ended: whoever is its parent may reap late. Knows nothing about Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARKER = "PILOTFISH_SANDBOX"


def world_mark(state: Path) -> str:
    """The NAME=VALUE that every process of the world in this folder has in its environment."""
    return f"{MARKER}={state}"


class Process(NamedTuple):
    """One process for ever: ``start`` is field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start: int


class Stat(NamedTuple):
    parent: int
    session: int
    start: int


def stat(pid: int) -> Stat | None:
    """What the kernel says of a living process; None for an ended one, zombies included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command may hold spaces and parentheses
    if fields[0] in "ZX":
        return None
    return Stat(parent=int(fields[1]), session=int(fields[3]), start=int(fields[19]))


def identify(pid: int) -> Process | None:
    found = stat(pid)
    return Process(pid, found.start) if found else None


def alive(process: Process) -> bool:
    return identify(process.pid) == process


def send(process: Process, number: signal.Signals) -> bool:
    """Signals exactly this process; False when it has ended."""
    if not alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait(process: Process, timeout: float) -> bool:
    """True as soon as the process has ended, False after ``timeout`` seconds."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not alive(process):
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(handle)


def spawn(argv: Sequence[str], *, cwd: Path, log: Path, environment: Mapping[str, str]) -> Process:
    """Starts a program in a session of its own, not as our child, its output appended to ``log``.

    The shell in between ends at once, so that the program is never left as our zombie.
    """
    script = 'log=$1; shift; "$@" >>"$log" 2>&1 </dev/null & echo $!'
    shell = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(log), *argv],
        cwd=cwd, env=dict(environment), start_new_session=True, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    pid = int(shell.stdout)
    return identify(pid) or Process(pid, -1)


def marked(mark: str) -> set[int]:
    """The living processes with ``mark`` in their environment, their descendants, and the sessions that these lead.

    A program may have written over its own environment: then its parents and its session tell.
    """
    table = dict(_table())
    found: set[int] = set()
    more = {pid for pid in table if mark.encode() in _environment(pid)}
    while more:
        found |= more
        more = {pid for pid, s in table.items() if pid not in found and (s.parent in found or s.session in found)}
    return found - {os.getpid()}


def sweep(mark: str) -> int:
    """Kills everything with this mark but ourselves and our ancestors; returns how many there were."""
    keep = set(_ancestors(os.getpid()))
    killed: set[int] = set()
    while left := marked(mark) - keep:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
        time.sleep(0.02)
    return len(killed)


def _table() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := stat(int(name))):
            yield int(name), found


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return []


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        found = stat(pid)
        pid = found.parent if found else 0
