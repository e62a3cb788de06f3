"""Containers' processes: start, find again after a restart of the agent, signal, wait for.

A run is one start of one container and lies in a folder: spec.json, shim.json, run.json, exit.json. The folders are
the truth; this module keeps nothing that it could not read from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import processes
from tests.cluster.node.shim import write
from tests.cluster.processes import Process

CONTAINER_MARKER = "PILOTFISH_SANDBOX_CONTAINER"


@dataclass(frozen=True)
class Exit:
    """How a run ended. ``failure`` says why it never started, if so. Times are seconds since the epoch."""

    exit_code: int
    signal: int
    started_at: float
    finished_at: float
    failure: str = ""


class Run:
    """One start of one container."""

    def __init__(self, folder: Path, shim: Process) -> None:
        self.folder, self._shim = folder, shim

    @classmethod
    async def start(
        cls, folder: Path, world: Path, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> Run:
        """Returns when the program has replaced its shim's child, or has failed to."""
        folder.mkdir(parents=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {**env, processes.MARKER: str(world), CONTAINER_MARKER: str(folder)}
        spec = {"argv": list(argv), "env": env, "cwd": str(cwd), "world": str(world / "world.json")}
        write(folder / "spec.json", spec)
        shim = [sys.executable, "-S", "-m", "tests.cluster.node.shim", str(folder)]
        environment = os.environ | {CONTAINER_MARKER: str(folder)}
        process = await asyncio.to_thread(processes.spawn, shim, cwd=cwd, log=log, environment=environment)
        run = cls(folder, process)
        write(folder / "shim.json", process)
        while processes.alive(process) and not (folder / "run.json").exists():
            await asyncio.sleep(0.005)
        return run

    @classmethod
    def find(cls, folder: Path) -> Run:
        """The run that an earlier agent started in this folder, whether or not it has ended."""
        with contextlib.suppress(FileNotFoundError):
            return cls(folder, Process(*json.loads((folder / "shim.json").read_text())))
        return cls(folder, Process(0, 0))

    @property
    def started_at(self) -> float:
        return float(self._read("run.json").get("startedAt", 0.0))

    async def wait(self) -> Exit:
        """Returns within milliseconds of the end."""
        await _ended(self._shim)
        if not (self.folder / "exit.json").exists():  # the shim was killed, and the kernel killed its child
            processes.sweep(f"{CONTAINER_MARKER}={self.folder}")
            write(self.folder / "exit.json", {"exitCode": 137, "signal": 9, "finishedAt": time.time(), "failure": ""})
        report = self._read("exit.json")
        started = self.started_at or report["finishedAt"]
        return Exit(report["exitCode"], report["signal"], started, report["finishedAt"], report["failure"])

    def terminate(self) -> None:
        """SIGTERM to the program alone, as a container runtime does."""
        if main := main_process(self.folder):
            processes.send(main, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the program; its shim then ends all its descendants."""
        main = main_process(self.folder)
        processes.send(main or self._shim, signal.SIGKILL)

    def _read(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            value: dict[str, Any] = json.loads((self.folder / name).read_text())
            return value
        return {}


def main_process(folder: Path) -> Process | None:
    with contextlib.suppress(FileNotFoundError):
        pid, start = json.loads((folder / "run.json").read_text())["process"]
        return Process(pid, start)
    return None


def runs(container: Path) -> list[Path]:
    """The folders of a container's runs, oldest first; their names are their numbers."""
    return sorted((path for path in container.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def terminate_all(pods: Path, grace: float) -> None:
    """SIGTERM to every container's program under ``pods``, and up to ``grace`` seconds to end; needs no agent."""
    found = [main_process(path.parent) for path in pods.glob("*/containers/*/*/run.json")]
    living = [process for process in found if process and processes.send(process, signal.SIGTERM)]
    deadline = time.monotonic() + grace
    for process in living:
        processes.wait(process, max(0.0, deadline - time.monotonic()))


async def _ended(process: Process) -> None:
    """Waits without polling, for our own child and for another agent's."""
    try:
        handle = os.pidfd_open(process.pid) if process.pid else None
    except ProcessLookupError:
        return
    if handle is None:
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(handle, resolve)
    try:
        if processes.alive(process):
            await done
    finally:
        loop.remove_reader(handle)
        os.close(handle)
