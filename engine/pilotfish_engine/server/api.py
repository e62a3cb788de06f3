"""The routes of OpenAI's API, and the two that turn text into tokens and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pilotfish_engine.server import shapes
from pilotfish_engine.server.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    TokenizeRequest,
)
from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.generation import Generation, check_choices, check_prompt, sampling_params
from pilotfish_engine.server.service import Service
from pilotfish_engine.server.streaming import EventStream, unless_gone

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


class Api:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = int(time.time())
        self.router = APIRouter()
        route: Callable[..., None] = self.router.add_api_route
        route("/v1/chat/completions", self.chat, methods=["POST"])
        route("/v1/completions", self.complete, methods=["POST"])
        route("/v1/models", self.models, methods=["GET"])
        route("/v1/models/{name:path}", self.model, methods=["GET"])
        route("/tokenize", self.tokenize, methods=["POST"])
        route("/detokenize", self.detokenize, methods=["POST"])

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._service.check_model(body.model)
        prompts = [await self._service.encode_chat(body.messages)]
        longest = body.max_completion_tokens or body.max_tokens
        return await self._generate(body, request, prompts, longest, shapes.Chat())

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        self._service.check_model(body.model)
        check_choices(len(body.prompt), body.n or 1)
        prompts = [await self._service.encode(prompt, "prompt") for prompt in body.prompt]
        longest = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        return await self._generate(body, request, prompts, longest, shapes.Completion())

    async def _generate(
        self, body: Generate, request: Request, prompts: list[list[int]], longest: int | None, shape: shapes.Shape
    ) -> Response:
        service = self._service
        tokenizer, limits = service.loaded()
        room = limits.max_model_len - max(map(len, prompts))
        params = sampling_params(body, min(longest or room, room))
        n = body.n or 1
        service.admit(len(prompts) * n)
        generation = Generation(service.link, tokenizer, service.metrics, prompts, params, n)
        writer = shapes.Writer(shape, request.state.request_id, service.name)
        if body.stream:
            with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(_events(writer, generation, with_usage), generation.close)
        try:
            return JSONResponse(await unless_gone(request.receive, _collect(writer, generation)))
        finally:
            generation.close()

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._service.check_model(name)
        return self._card()

    def _card(self) -> dict[str, Any]:
        limits = self._service.link.ready
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._began,
            "owned_by": "pilotfish",
            "max_model_len": None if limits is None else limits.max_model_len,
        }

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self._service.check_model(body.model)
        tokenizer, limits = self._service.loaded()
        if body.messages is not None:
            tokens = await self._service.encode_chat(body.messages)
        else:
            text = body.prompt or ""
            tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        self._service.check_model(body.model)
        tokenizer, _ = self._service.loaded()
        if body.tokens:
            check_prompt(body.tokens, len(body.tokens) + 1, tokenizer.vocab_size, "tokens")
        return {"prompt": tokenizer.decode(body.tokens)}


async def _collect(writer: shapes.Writer, generation: Generation) -> dict[str, Any]:
    texts, reasons = [""] * generation.size, [""] * generation.size
    async for piece in generation.pieces():
        texts[piece.index] += piece.text
        reasons[piece.index] = piece.finish_reason or ""
    choices = [writer.shape.whole(i, text, reasons[i]) for i, text in enumerate(texts)]
    return writer.whole(choices, generation.usage())


async def _events(writer: shapes.Writer, generation: Generation, with_usage: bool) -> AsyncGenerator[bytes, None]:
    def chunk(choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        written = writer.chunk(choice)
        return msgspec.json.encode(written | {"usage": usage} if with_usage else written)

    try:
        for index in range(generation.size):
            if (opening := writer.shape.opening(index)) is not None:
                yield chunk(opening)
        async for piece in generation.pieces():
            yield chunk(writer.shape.part(piece))
        if with_usage:
            yield chunk(None, shapes.usage_json(generation.usage()))
        yield b"[DONE]"
    except ApiError as error:  # the status was sent long ago: clients know an error by its chunk
        yield msgspec.json.encode(error.body)
