"""How a generation reaches a client: in one object, or as events, and no longer than somebody listens.

Knows nothing about how an answer is written down.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from pilotfish_engine.server.generation import Generation, Piece
from pilotfish_engine.server.streaming import Event, EventStream, unless_gone

Pieces = AsyncGenerator[Piece, None]


async def whole(request: Request, generation: Generation, collected: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """Answers with the object that `collected` makes of the generation. Raises ClientGone, ApiError."""
    try:
        return JSONResponse(await unless_gone(request.receive, collected))
    finally:
        generation.close()


async def streamed(
    request: Request, generation: Generation, told: Callable[[Piece, Pieces], AsyncGenerator[bytes | Event, None]]
) -> Response:
    """Answers with events; `told` makes them of the first piece and those after it. Raises ClientGone, ApiError."""
    pieces = generation.pieces()
    try:  # what is wrong with a request shows with its first output: before the status is sent
        first = await unless_gone(request.receive, _next(pieces))
    except BaseException:
        generation.close()
        raise
    return EventStream(told(first, pieces), generation.close)


async def _next(pieces: Pieces) -> Piece:
    return await anext(pieces)
