"""SIGKILL to one of an engine's processes while it answers, and what must be gone afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.engine.server.serving import NAME, Engine, alive, children, wait_until

NOTICED_SECONDS = 1.0  # by those who are left
SLOWER = 3.0  # CI's machine than any person's


def kill_within_a_stream(started: Engine, victim: int) -> bytes:
    """The stream's end. All of the engine is gone soon after, with whatever it kept outside itself."""
    everyone = processes(started)
    assert [in_shared_memory(pid) for pid in everyone] == [[] for _ in everyone]
    parts = stream(started)
    next(parts)
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    last = rest(parts)
    wait_until(lambda: not any(map(alive, everyone)), 20)
    assert time.monotonic() - killed_at < NOTICED_SECONDS * SLOWER
    assert list(started.folder.iterdir()) == []
    return last


def processes(started: Engine) -> list[int]:
    """The engine's own and all below it."""
    found = [started.process.pid]
    for pid in found:
        found += children(pid)
    return found


def in_shared_memory(pid: int) -> list[str]:
    """Files of /dev/shm that a process has open or mapped; what is never there cannot be left there."""
    opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [name for name in opened + mapped if name.startswith("/dev/shm")]


def stream(started: Engine) -> Iterator[bytes]:
    """The raw bytes of an answer that does not end by itself soon."""
    body = {"model": NAME, "prompt": "abc", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", started.url + "/v1/completions", json=body, timeout=30, verify=False) as reply:
        assert reply.status_code == 200
        yield from reply.iter_raw()


def rest(parts: Iterator[bytes]) -> bytes:
    """What comes of a stream until it ends or breaks."""
    received = b""
    try:
        for part in parts:
            received += part
    except httpx.TransportError:
        pass
    return received
