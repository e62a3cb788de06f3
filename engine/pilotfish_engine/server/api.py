"""The routes of OpenAI's API, and the two that turn text into tokens and back."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pilotfish_engine.server import delivery, shapes
from pilotfish_engine.server.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    StreamOptions,
    TokenizeRequest,
)
from pilotfish_engine.server.failures import ApiError, Invalid
from pilotfish_engine.server.generation import (
    Asked,
    Generation,
    Piece,
    check_choices,
    check_copies,
    check_tokens,
    sampling_params,
)
from pilotfish_engine.server.openapi import (
    CHUNKS,
    GENERATING,
    ChatCompletion,
    Completion,
    Detokenized,
    Model,
    Models,
    Tokens,
    answers,
)
from pilotfish_engine.server.parts import ContentReader
from pilotfish_engine.server.reading import Reading, read_chat
from pilotfish_engine.server.service import Service
from pilotfish_engine.server.streaming import Event, obfuscated

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


class Api:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = int(time.time())
        self.router = APIRouter()
        route: Callable[..., None] = self.router.add_api_route
        chat = answers(ChatCompletion, *GENERATING, streamed=CHUNKS)
        route("/v1/chat/completions", self.chat, methods=["POST"], responses=chat)
        completion = answers(Completion, *GENERATING, streamed=CHUNKS)
        route("/v1/completions", self.complete, methods=["POST"], responses=completion)
        route("/v1/models", self.models, methods=["GET"], responses=answers(Models, 401))
        route("/v1/models/{name:path}", self.model, methods=["GET"], responses=answers(Model, 401, 404))
        route("/tokenize", self.tokenize, methods=["POST"], responses=answers(Tokens, *GENERATING))
        route("/detokenize", self.detokenize, methods=["POST"], responses=answers(Detokenized, *GENERATING))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        request.state.ignored_fields = self._service.ignored(body)
        generation = await start_chat(self._service, body)
        tokenizer = None if body.alternatives is None else self._service.loaded()[0]
        shape = shapes.Chat(tokenizer, body.n or 1)
        return await self._answer(body, request, generation, shape)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        request.state.ignored_fields = self._service.ignored(body)
        service, n = self._service, body.n or 1
        service.check_model(body.model)
        check_choices(len(body.prompt), n)
        many = len(body.prompt) > 1
        longest = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = [
            await service.encode(prompt, f"prompt[{index}]" if many else "prompt", answered=longest > 0)
            for index, prompt in enumerate(body.prompt)
        ]
        tokenizer, _ = service.loaded()
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompt]
        echoes = [
            shapes.Echo(text, prompt) if body.echo else None
            for text, prompt in zip(texts, prompts, strict=True)
            for _ in range(n)
        ]
        shape = shapes.Completion(None if body.alternatives is None else tokenizer, echoes)
        generation = _start(service, body, prompts, longest, _plainly(body))
        return await self._answer(body, request, generation, shape)

    async def _answer(self, body: Generate, request: Request, generation: Generation, shape: shapes.Shape) -> Response:
        service = self._service
        writer = shapes.Writer(shape, request.state.request_id, service.name, service.fingerprint)
        if not body.stream:
            return await delivery.whole(request, generation, _collect(writer, generation))
        options = body.stream_options or StreamOptions()
        return await delivery.streamed(
            request, generation, lambda first, pieces: _events(writer, generation, first, pieces, options)
        )

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

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        request.state.ignored_fields = self._service.ignored(body)
        self._service.check_model(body.model)
        _, limits = self._service.loaded()
        if body.messages is not None:
            tokens = await self._service.encode_chat(body.messages, body.tools or [], body.variables)
        else:
            tokens = await self._service.tokens_of(
                body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens
            )
        return {"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens}

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        request.state.ignored_fields = self._service.ignored(body)
        self._service.check_model(body.model)
        tokenizer, limits = self._service.loaded()
        if len(body.tokens) > limits.max_model_len:
            raise Invalid(
                f"tokens has {len(body.tokens)} ids, and the context holds {limits.max_model_len}; "
                f"at most {limits.max_model_len} would work",
                "tokens",
            )
        check_tokens(body.tokens, tokenizer.vocab_size, "tokens")
        return {"prompt": tokenizer.decode(body.tokens)}


async def start_chat(service: Service, body: ChatRequest) -> Generation:
    """The answers to a chat. Raises ApiError when the request cannot be taken."""
    service.check_model(body.model)
    text = await service.render_chat(body.messages, body.offered_tools, body.variables)
    reading = read_chat(body, service.formats(tools=bool(body.offered_tools)), text)
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = await service.encode_rendered(text, answered=longest != 0)
    return _start(service, body, [prompt], longest, reading)


def _start(
    service: Service, body: Generate, prompts: list[list[int]], longest: int | None, reading: Reading
) -> Generation:
    """longest: tokens of each answer; None: what the context leaves beside its prompt."""
    tokenizer, _ = service.loaded()
    rooms = [service.context - len(prompt) for prompt in prompts]
    params = [
        sampling_params(
            body,
            room if longest is None else min(longest, room),
            service.vocab_size,
            reading.grammar,
            reading.visible,
            reading.thought,
        )
        for room in rooms
    ]
    n = body.n or 1
    service.admit(len(prompts) * n)
    asked = Asked(prompts, params, n, body.priority or 0, {"grammar": reading.field})
    check_copies(asked)
    return Generation(service.link, tokenizer, service.metrics, asked, reading.new_reader)


def _plainly(body: Generate) -> Reading:
    """Of an answer that is all content."""
    if body.structured_outputs is not None:
        return Reading(ContentReader, (), body.structured_outputs.as_grammar(), "structured_outputs")
    return Reading(ContentReader, (), body.answer_format)


async def _collect(writer: shapes.Writer, generation: Generation) -> dict[str, Any]:
    async for piece in generation.pieces():
        writer.shape.part(piece)
    return writer.whole(generation.size, generation.usage())


async def _events(
    writer: shapes.Writer,
    generation: Generation,
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
    options: StreamOptions,
) -> AsyncGenerator[bytes | Event, None]:
    def chunk(choice: dict[str, Any] | None) -> bytes:
        written = writer.chunk(choice)
        if choice is None or options.continuous_usage_stats:
            written["usage"] = shapes.usage_json(generation.usage())
        elif options.include_usage:
            written["usage"] = None
        return obfuscated(written) if options.include_obfuscation else msgspec.json.encode(written)

    try:
        for index in range(generation.size):
            if (opening := writer.shape.opening(index)) is not None:
                yield chunk(opening)
        if (part := writer.shape.part(first)) is not None:
            yield chunk(part)
        async for piece in pieces:
            if (part := writer.shape.part(piece)) is not None:
                yield chunk(part)
        if options.include_usage:
            yield chunk(None)
        yield b"[DONE]"
    except ApiError as error:  # the status was sent long ago: clients know an error by its chunk
        yield msgspec.json.encode(error.body)
