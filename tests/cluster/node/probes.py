"""Probes and lifecycle handlers: one check, and the loop that turns checks into a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

Object = dict[str, Any]


class Target(NamedTuple):
    """What a check needs to know of a running container."""

    address: str
    ports: Mapping[str, int]  # by name
    env: Mapping[str, str]
    cwd: Path
    rewrite: Callable[[str], str]


class Outcome(NamedTuple):
    passed: bool
    message: str  # empty when passed


class Verdict:
    """Counts outcomes until a threshold is reached. Pure."""

    def __init__(self, probe: Object) -> None:
        self._thresholds = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        self._last, self._count = False, 0

    def add(self, passed: bool) -> bool | None:
        """The verdict once enough equal outcomes came in a row, else None."""
        self._count = self._count + 1 if passed == self._last else 1
        self._last = passed
        return passed if self._count >= self._thresholds[passed] else None


async def watch(
    probe: Object,
    target: Target,
    age: float,
    verdict: Callable[[bool, str], Awaitable[bool]],
    failed: Callable[[str], None],
) -> None:
    """Probes for ever, or until ``verdict(passed, message)`` returns True; ``failed`` sees each failed check.

    ``age``: seconds since the container started, which the initial delay is counted from.
    """
    count = Verdict(probe)
    await asyncio.sleep(max(0.0, probe.get("initialDelaySeconds", 0) - age))
    while True:
        outcome = await check(probe, target, probe.get("timeoutSeconds", 1))
        if not outcome.passed:
            failed(outcome.message)
        reached = count.add(outcome.passed)
        if reached is not None and await verdict(reached, outcome.message):
            return
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def check(handler: Object, target: Target, timeout: float) -> Outcome:
    """Carries out a probe's or a lifecycle hook's action once. Never raises."""
    try:
        async with asyncio.timeout(timeout):
            if "httpGet" in handler:
                return await _http(handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _tcp(handler["tcpSocket"], target)
            if "exec" in handler:
                return await _exec(handler["exec"]["command"], target)
            if "sleep" in handler:
                await asyncio.sleep(handler["sleep"]["seconds"])
                return Outcome(True, "")
            return Outcome(
                False, f"the sandbox has no probe of kind {', '.join(handler)}: use httpGet, tcpSocket, exec"
            )
    except TimeoutError:
        return Outcome(False, f"no answer within {timeout:g} s")
    except (OSError, aiohttp.ClientError, ValueError) as error:
        return Outcome(False, str(error) or type(error).__name__)


def _port(value: int | str, target: Target) -> int:
    if isinstance(value, str) and not value.isdigit():
        if value not in target.ports:
            raise ValueError(f"no port is called {value!r}; there are {', '.join(target.ports) or 'none'}")
        return target.ports[value]
    return int(value)


async def _http(action: Object, target: Target) -> Outcome:
    host = action.get("host") or target.address
    url = f"{action.get('scheme', 'HTTP').lower()}://{host}:{_port(action['port'], target)}{action.get('path', '/')}"
    headers = {"User-Agent": "kube-probe/sandbox", "Connection": "close"}
    headers |= {header["name"]: header["value"] for header in action.get("httpHeaders", [])}
    connector = aiohttp.TCPConnector(ssl=False, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers=headers, allow_redirects=False) as response,
    ):
        if 200 <= response.status < 400:
            return Outcome(True, "")
        body = (await response.content.read(200)).decode(errors="replace").strip()
        return Outcome(False, f"HTTP probe failed with statuscode: {response.status}: {body}")


async def _tcp(action: Object, target: Target) -> Outcome:
    host = action.get("host") or target.address
    _, writer = await asyncio.open_connection(host, _port(action["port"], target))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Outcome(True, "")


async def _exec(command: list[str], target: Target) -> Outcome:
    # Found on the container's PATH, not the agent's, and killed with all its children on a timeout.
    argv = ["/usr/bin/env", *(target.rewrite(text) for text in command)]
    process = await asyncio.create_subprocess_exec(
        *argv, env=dict(target.env), cwd=target.cwd, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode == 0:
        return Outcome(True, "")
    return Outcome(False, f"exit code {process.returncode}: {output[-500:].decode(errors='replace').strip()}")
