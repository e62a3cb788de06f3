"""The node's own endpoint: what the API server asks it for when someone calls ``kubectl logs``.

Answers only to processes of the same user, which is who the API server is; the address is a loopback one.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PERIOD = 0.2  # seconds between two looks at a log that is followed


class Places(NamedTuple):
    """Where a pod's logs are, and where its containers' runs are."""

    logs: Path
    containers: Path


Finder = Callable[[str, str], Places | None]  # namespace, pod


async def serve(address: str, port: int, pki: Path, find: Finder) -> tuple[web.AppRunner, int]:
    """Starts serving, on another port when ``port`` is taken; returns what to clean up and the port."""
    application = web.Application(middlewares=[_same_user])
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", _logs(find))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
    try:
        await web.TCPSite(runner, address, port, ssl_context=context, shutdown_timeout=1).start()
    except OSError:
        await web.TCPSite(runner, address, 0, ssl_context=context, shutdown_timeout=1).start()
    return runner, runner.addresses[0][1]


@web.middleware
async def _same_user(request: web.Request, handler: Handler) -> web.StreamResponse:
    assert request.transport
    host, port = request.transport.get_extra_info("peername")
    if socket_owner(host, port) != os.getuid():
        raise web.HTTPForbidden(text="only the user who runs this world may read its logs\n")
    return await handler(request)


def socket_owner(host: str, port: int) -> int | None:
    """The user id behind a local TCP socket, as the kernel's table has it."""
    number = int.from_bytes(bytes(int(part) for part in host.split(".")), "little")
    local = f"{number:08X}:{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == local:
            return int(fields[7])
    return None


def _logs(find: Finder) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        names, query = request.match_info, request.query
        places = find(names["namespace"], names["pod"])
        files = log_files(places.logs / names["container"]) if places else []
        if query.get("previous") == "true":
            files = files[:-1]
        if not places or not files:
            raise web.HTTPNotFound(text=f"no log of container {names['container']} in pod {names['pod']}\n")
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        position = start_of_tail(files[-1], int(query["tailLines"]) if "tailLines" in query else None)
        run = places.containers / names["container"] / files[-1].stem
        limit = int(query.get("limitBytes", 0)) or float("inf")
        with files[-1].open("rb") as file:
            file.seek(position)
            while limit > 0:
                over = query.get("follow") != "true" or (run / "exit.json").exists() or not run.exists()
                data = file.read(int(min(limit, 65536)))
                limit -= len(data)
                if data:
                    await response.write(data)
                elif over:
                    break
                else:
                    await asyncio.sleep(PERIOD)
        await response.write_eof()
        return response

    return answer


def log_files(folder: Path) -> list[Path]:
    """One file a run, oldest first."""
    return sorted(folder.glob("*.log"), key=lambda path: int(path.stem))


def start_of_tail(path: Path, lines: int | None) -> int:
    """Where in the file its last ``lines`` lines begin."""
    if lines is None:
        return 0
    data = path.read_bytes()
    position = len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, max(position - 1, 0)) + 1
        if position == 0:
            break
    return position
