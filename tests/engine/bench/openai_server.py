"""A server of OpenAI's API that answers as a test tells it to, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class OpenAIServer:
    """bodies: of the requests for an answer, in the order of their arrival. at_once: the most that were answered at the
    same time. routes: further GET routes, path → status, content type and body, or what makes them."""

    answer: Answer
    routes: dict[str, Callable[[], tuple[int, str, str]]] = field(default_factory=dict)
    models: tuple[str, ...] = ("first", "second")
    vocabulary: list[int] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
    at_once: int = 0
    url: str = ""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.paths.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            return await self.answer(request, body)
        finally:
            self.running -= 1

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.vocabulary is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"tokens": self.vocabulary, "count": len(self.vocabulary)})

    async def tell(self, request: web.Request) -> web.Response:
        if request.path not in self.routes:
            return web.Response(status=404)
        status, kind, text = self.routes[request.path]()
        return web.Response(status=status, content_type=kind, text=text)


@contextmanager
def serving(answer: Answer, **settings: Any) -> Iterator[OpenAIServer]:
    server = OpenAIServer(answer, **settings)
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.post("/v1/chat/completions", server.respond),
            web.post("/v1/completions", server.respond),
            web.post("/tokenize", server.tokenize),
            web.get("/v1/models", server.list_models),
            web.get("/{path:.*}", server.tell),
        ]
    )
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


async def stream(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async for event in events:
        await response.write(event)
    return response


def chunk(**event: Any) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {"content": text, **fields}, "finish_reason": finish}])


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return chunk(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **details})


DONE = b"data: [DONE]\n\n"


def answers(*events: bytes | float) -> Answer:
    """The same for everybody: bytes are sent, numbers are seconds in which nothing is."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        async def parts() -> AsyncIterator[bytes]:
            for event in events:
                if isinstance(event, bytes):
                    yield event
                else:
                    await asyncio.sleep(event)

        return await stream(request, parts())

    return answer


GOOD = answers(
    delta("", role="assistant"), delta("one"), 0.02, delta(" two three"), delta(None, "stop"), usage(7, 3), DONE
)


async def overloaded(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "1024 requests wait; try later"}}, status=503)
