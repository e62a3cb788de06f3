"""Chat templates rendered in a process of their own, whose time and memory the kernel bounds.

A template is foreign code, and Jinja's sandbox bounds neither: three nested loops, `"x" * 10**12` or `10 ** (10**10)`
would hold the server up for good, and no thread can be stopped. Here such a template ends its own process; its request
is refused, and the next one gets a new process. `python -m pilotfish_engine.server.rendering` is that process. It ends
with the one that started it: its input ends then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from pilotfish_engine.tokenizer.chat import ChatTemplate, Message, TemplateError, Tool

CPU_SECONDS = 2  # a long chat takes some milliseconds
MEMORY_BYTES = 512 << 20  # of address space; 60 MB are there before anything is rendered
_TOO_MUCH = "the chat template takes more time or memory than it may; another model, or other messages, would work"
_LENGTH = struct.Struct("<Q")


class Renderer:
    """One template. Renders one after the other, the first after starting the process; `close` ends it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "template")
        self._closed = False

    async def render(self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]) -> str:
        """As ChatTemplate.render. Raises TemplateError also where the template takes too long or too much memory."""
        work = json.dumps([messages, tools, variables]).encode()
        text, error = await asyncio.get_running_loop().run_in_executor(self._thread, self._render, work)
        if error is not None:
            raise TemplateError(error)
        return text

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _render(self, work: bytes) -> tuple[str, str | None]:
        """On the thread. The text, or why there is none. A process that has ended for another reason than this work is
        started anew."""
        for new in (self._process is None, True):
            process = self._started()
            try:
                _write(process.stdin, work)
                text, error = json.loads(_read(process.stdout))
                return text, error
            except (EOFError, BrokenPipeError):
                used_up = process.wait() == -signal.SIGXCPU
                self._end()
                if used_up or new or self._closed:
                    break
        return "", _TOO_MUCH

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pilotfish_engine.server.rendering"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            first = [self._template.source, self._template.special_tokens, self._template.tool_use]
            _write(self._process.stdin, json.dumps(first).encode())
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes and waits
                pass


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
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


def _rendered(template: ChatTemplate, messages: Any, tools: Any, variables: Any) -> tuple[str, str | None]:
    try:
        return template.render(messages, tools, variables), None
    except TemplateError as error:
        return "", str(error)
    except MemoryError:
        return "", _TOO_MUCH


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main() -> int:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    given, told = sys.stdin.buffer, sys.stdout.buffer
    try:
        template = ChatTemplate(*json.loads(_read(given)))
        while True:
            work = json.loads(_read(given))
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_SECONDS)
            _write(told, json.dumps(_rendered(template, *work)).encode())
    except (EOFError, BrokenPipeError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
