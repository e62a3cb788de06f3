"""One container's life: start, probe, end, wait, start again.

Knows its pod only through ``Surroundings``. Changes its View and says so; writes nothing to the API server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.node import probes
from tests.cluster.node.environment import TERMINATION_PATH, MissingReference
from tests.cluster.node.runtime import Exit, Run, runs
from tests.cluster.node.status import View

Object = dict[str, Any]
MESSAGE_BYTES, MESSAGE_LINES = 2048, 80  # of the log, when it stands in for a termination message
RETRY = 2.0  # seconds between two tries to start something whose references are missing
BACKOFF_LIMIT = 300.0  # seconds
BACKOFF_RESET = 600.0  # a run this long is not part of a crash loop


class ImageUnknown(Exception):
    """The node has no environment for this image."""


class Launch(NamedTuple):
    """All that a process is started with, and all that its probes need."""

    argv: list[str]
    target: probes.Target


class Surroundings(NamedTuple):
    """What a container asks of its pod.

    ``prepare`` may raise ImageUnknown or MissingReference. ``stopping`` is set when nothing may be started any more.
    """

    folder: Path  # holds the runs by number, and root/
    logs: Path  # holds N.log
    world: Path
    restart: Callable[[Exit], bool]
    grace: float
    backoff_base: float
    prepare: Callable[[Object], Awaitable[Launch]]
    changed: Callable[[], None]
    event: Callable[[str, str, str], None]  # Normal | Warning, reason, message
    stopping: asyncio.Event
    describe: str  # the pod, in messages


class Container:
    def __init__(self, spec: Object, around: Surroundings, before: Object | None = None) -> None:
        """``before``: the container's status that an earlier agent wrote, for a container that may still run."""
        self.spec, self._around = spec, around
        self.view = View(spec["name"], spec["image"])
        self.view.waiting("ContainerCreating")
        self.run: Run | None = None
        self._launch: Launch | None = None
        self._backoff = 0.0
        self._before = before or {}

    async def live(self) -> None:
        """Returns when the container has ended for good, or ``stopping`` is set and it has ended."""
        found = runs(self._around.folder)
        self.view.restarts = max(len(found) - 1, 0)
        if found:
            self.view.last = self._before.get("lastState", {})
            await self._adopt(Run.find(found[-1]))
        elif not await self._start():
            return
        while True:
            ended = await self._supervise()
            self.view.terminated(ended, self._message(ended))
            self.run = None
            self._around.changed()
            if self._around.stopping.is_set() or not self._around.restart(ended):
                self.view.over = True
                self._around.changed()
                return
            await self._back_off(ended)
            if not await self._start():
                return

    async def stop(self, remaining: Callable[[], float]) -> None:
        """preStop, SIGTERM, and SIGKILL when ``remaining()`` seconds are used up; returns when it has ended."""
        run, launch = self.run, self._launch
        if run is None:
            return
        self._around.event("Normal", "Killing", f"Stopping container {self.view.name}")
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook and launch:
            outcome = await probes.check(hook, launch.target, max(remaining(), 0.1))
            if not outcome.passed:
                self._around.event("Warning", "FailedPreStopHook", outcome.message)
        run.terminate()
        floor = time.monotonic() + (2.0 if hook else 0.0)  # a hook that took all of the grace leaves 2 s for the rest
        waiting = asyncio.ensure_future(run.wait())
        while not waiting.done() and (remaining() > 0 or time.monotonic() < floor):
            await asyncio.wait([waiting], timeout=max(0.01, min(0.2, remaining())))
        if not waiting.done():
            run.kill()
        await waiting

    async def _start(self) -> bool:
        """False when ``stopping`` was set before it could be started."""
        while not self._around.stopping.is_set():
            try:
                self._launch = await self._around.prepare(self.spec)
            except ImageUnknown as error:
                pulled = "ImagePullBackOff" if self._waits("ErrImagePull", "ImagePullBackOff") else "ErrImagePull"
                self._wait_for(pulled, str(error))
            except MissingReference as error:
                self._wait_for("CreateContainerConfigError", str(error))
            else:
                if self._around.stopping.is_set():
                    break
                await self._spawn(self._launch)
                return True
            await self._sleep(RETRY)
        self.view.over = True
        return False

    def _waits(self, *reasons: str) -> bool:
        return bool(self.view.state.get("waiting", {}).get("reason") in reasons)

    def _wait_for(self, reason: str, message: str) -> None:
        if not self._waits(reason):
            self._around.event("Warning", "Failed", f"Error: {reason}: {message}")
        self.view.waiting(reason, message)
        self._around.changed()

    async def _spawn(self, launch: Launch) -> None:
        number = len(runs(self._around.folder))
        self._termination_file.parent.mkdir(parents=True, exist_ok=True)
        self._termination_file.write_bytes(b"")
        self.run = await Run.start(
            self._around.folder / str(number), self._around.world, launch.argv, launch.target.env,
            launch.target.cwd, self._around.logs / f"{number}.log",
        )  # fmt: skip
        self.view.restarts = number
        self._becomes_running(self.run, started=not self.spec.get("startupProbe"))
        self._around.event("Normal", "Started", f"Started container {self.view.name}")

    async def _adopt(self, run: Run) -> None:
        """Takes over what an earlier agent started; what it had found out by probing still holds."""
        self.run = run
        self._becomes_running(run, started=bool(self._before.get("started")))
        self.view.ready = bool(self._before.get("ready"))
        try:
            self._launch = await self._around.prepare(self.spec)
        except (ImageUnknown, MissingReference) as error:
            self._around.event("Warning", "Failed", f"runs on without probes: {error}")
        self._around.changed()

    def _becomes_running(self, run: Run, started: bool) -> None:
        self.view.container_id = f"process://{run.folder.parent.parent.parent.name}/{self.view.name}/{run.folder.name}"
        self.view.running(run.started_at or time.time())
        self.view.started = started
        self.view.ready = started and "readinessProbe" not in self.spec
        self._around.changed()

    async def _supervise(self) -> Exit:
        """Probes the running container until it ends."""
        assert self.run
        probing = asyncio.ensure_future(self._probe(self.run, self._launch)) if self._launch else None
        try:
            return await self.run.wait()
        finally:
            if probing:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self, run: Run, launch: Launch) -> None:
        def age() -> float:
            return time.time() - run.started_at

        def failed(kind: str) -> Callable[[str], None]:
            return lambda message: self._around.event("Warning", "Unhealthy", f"{kind} probe failed: {message}")

        async def kill(kind: str, message: str) -> bool:
            self._around.event(
                "Normal", "Killing", f"Container {self.view.name} failed {kind} probe, will be restarted"
            )
            probe = self.spec[f"{kind}Probe"]
            deadline = time.monotonic() + probe.get("terminationGracePeriodSeconds", self._around.grace)
            await asyncio.shield(asyncio.ensure_future(self.stop(lambda: deadline - time.monotonic())))
            return True

        async def started(passed: bool, message: str) -> bool:
            if not passed:
                return await kill("startup", message)
            self.view.started = True
            self.view.ready = "readinessProbe" not in self.spec
            self._around.changed()
            return True

        async def ready(passed: bool, message: str) -> bool:
            if self.view.ready != passed:
                self.view.ready = passed
                self._around.changed()
            return False

        async def live(passed: bool, message: str) -> bool:
            return not passed and await kill("liveness", message)

        if "startupProbe" in self.spec and not self.view.started:
            await probes.watch(self.spec["startupProbe"], launch.target, age(), started, failed("Startup"))
        loops = [
            probes.watch(self.spec[f"{kind.lower()}Probe"], launch.target, age(), verdict, failed(kind))
            for kind, verdict in (("Readiness", ready), ("Liveness", live))
            if f"{kind.lower()}Probe" in self.spec
        ]
        await asyncio.gather(*loops)

    async def _back_off(self, ended: Exit) -> None:
        """The first restart is at once, each later one waits twice as long as the one before."""
        if ended.finished_at - ended.started_at >= BACKOFF_RESET:
            self._backoff = 0.0
        delay = self._backoff - (time.time() - ended.finished_at)
        self._backoff = min(self._backoff * 2 or self._around.backoff_base, BACKOFF_LIMIT)
        self.view.last = self.view.state
        if delay <= 0:
            return
        message = f"back-off {delay:.0f}s restarting failed container={self.view.name} pod={self._around.describe}"
        self.view.waiting("CrashLoopBackOff", message)
        self._around.event("Warning", "BackOff", f"Back-off restarting failed container {self.view.name}")
        self._around.changed()
        await self._sleep(delay)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._around.stopping.wait()
        except TimeoutError:
            pass

    @property
    def _termination_file(self) -> Path:
        return termination_file(self._around.folder, self.spec)

    def _message(self, ended: Exit) -> str:
        """The termination message: why it did not start, what it wrote, or its last words."""
        if ended.failure:
            return f"failed to start: {ended.failure}"
        try:
            text = self._termination_file.read_bytes()[:4096].decode(errors="replace")
        except OSError:
            text = ""
        if text or ended.exit_code == 0 or self.spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return text
        return last_words(self._around.logs / f"{self.view.restarts}.log")


def termination_file(folder: Path, spec: Object) -> Path:
    path: str = spec.get("terminationMessagePath") or TERMINATION_PATH
    return folder / "root" / path.lstrip("/")


def last_words(log: Path) -> str:
    """The end of a log, as much as a status has room for."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MESSAGE_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-MESSAGE_LINES:])
    except FileNotFoundError:
        return ""


def named_ports(spec: Object) -> Mapping[str, int]:
    return {port["name"]: port["containerPort"] for port in spec.get("ports", []) if "name" in port}
