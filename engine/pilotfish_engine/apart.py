"""Runs foreign work in a process of its own. The kernel bounds its time and memory.

No thread can be stopped, and no library promises that it neither overflows its stack nor takes all memory; here such
work ends its own process and its request is refused. Such a process ends with the one that started it: its input ends
then. It is spoken with by JSON, each piece behind its length.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from pilotfish_engine.errors import UsageError

_LENGTH = struct.Struct("<Q")


class Apart:
    """One process, started with the first work, and the thread that speaks with it."""

    def __init__(self, module: str, arguments: Sequence[str], name: str, begun: Callable[[Any], None]) -> None:
        """module: run as `python -m`; its first word is given to begun, which may raise UsageError; None: it ended
        without one."""
        self.thread = ThreadPoolExecutor(1, name)
        self._command = [sys.executable, "-m", module, *arguments]
        self._begun = begun
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> subprocess.Popen[bytes]:
        """Raises what `begun` raises."""
        if self._process is None:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                word = json.loads(read(process.stdout))
            except EOFError:
                word = None
            try:
                self._begun(word)
            except UsageError:
                self._end()
                raise
        return self._process

    def do(self, work: bytes, too_much: str) -> tuple[Any, str | None]:
        """What came of it, or why there is nothing. A process that has ended for another reason than this work is
        started anew."""
        for new in (self._process is None, True):
            try:
                process = self.start()
                write(process.stdin, work)
                done, error = json.loads(read(process.stdout))
                return done, error
            except UsageError as error:
                return None, str(error)
            except (EOFError, BrokenPipeError):
                used_up = self._end() == -signal.SIGXCPU
                if used_up or new or self._closed:
                    break
        return None, too_much

    def close(self) -> None:
        self._closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> int | None:
        """How it ended, be it by this."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that has closed its pipe is about to end
            process.wait(0 if self._closed else 1)
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits
            pass
        return process.returncode


def write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read(pipe: IO[bytes] | None) -> bytes:
    """Raises EOFError."""
    assert pipe is not None
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


# ---- in the process ------------------------------------------------------------------------------------------------


def limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def limit_time(seconds: float) -> None:
    limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))


def serve(do: Callable[[Any], tuple[Any, str | None]], seconds: Callable[[int], float]) -> None:
    """Works off what comes, until nothing does. seconds: of the CPU that a piece of so many bytes may take."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            work = read(sys.stdin.buffer)
            limit_time(seconds(len(work)))
            write(sys.stdout.buffer, json.dumps(do(json.loads(work))).encode())
