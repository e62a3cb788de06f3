"""/healthz and /metrics over HTTP.

Healthy until a part of the operator stands still: the answer names each part that does. Knows nothing about the parts.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest


async def serve(host: str, port: int, troubles: Callable[[], list[str]], registry: CollectorRegistry) -> web.AppRunner:
    """Start serving; `cleanup()` of the result ends it. Raises OSError when the port is taken."""

    async def healthz(_: web.Request) -> web.Response:
        found = troubles()
        return web.Response(status=500 if found else 200, text="\n".join(found or ["ok"]) + "\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
