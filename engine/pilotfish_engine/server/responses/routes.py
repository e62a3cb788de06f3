"""The routes of the Responses API: one that answers, one that counts, and a clear no for what would need storage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pilotfish_engine.server import delivery
from pilotfish_engine.server.api import start_chat
from pilotfish_engine.server.failures import ApiError
from pilotfish_engine.server.openapi import GENERATING, NAMED, answers
from pilotfish_engine.server.responses.answer import Answer
from pilotfish_engine.server.responses.output import Output
from pilotfish_engine.server.responses.request import ResponsesRequest
from pilotfish_engine.server.responses.schema import ResponseObject
from pilotfish_engine.server.service import Service

# what a chat calls its fields: what they are called here
_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}


class Responses:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.router = APIRouter()
        answer = answers(ResponseObject, *GENERATING, streamed=NAMED)
        self.router.add_api_route("/v1/responses", self.respond, methods=["POST"], responses=answer)
        self.router.add_api_route(
            "/v1/responses/{rest:path}", _stored, methods=["GET", "POST", "DELETE"], include_in_schema=False
        )

    async def respond(self, body: ResponsesRequest, request: Request) -> Response:
        service = self._service
        request.state.ignored_fields = service.ignored(body)
        with _own_words():
            generation = await start_chat(service, body.as_chat())
            tokenizer = service.loaded()[0] if body.wants_logprobs else None
            output = Output(tokenizer, seals="reasoning.encrypted_content" in (body.include or []))
            response_id = "resp_" + request.state.request_id
            answer = Answer(body, response_id, service.name, output, in_own_words)
            if body.stream:
                return await delivery.streamed(
                    request, generation, lambda first, pieces: answer.events(generation, first, pieces)
                )
            return await delivery.whole(request, generation, answer.whole(generation))


async def _stored(rest: str) -> Any:
    raise ApiError(
        404,
        f"/v1/responses/{rest[:200]} is not here: no response is stored, to be read, cancelled or deleted later; "
        "POST /v1/responses answers at once, and its input takes a conversation's items",
        code="not_found",
    )


@contextmanager
def _own_words() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise in_own_words(error) from error


def in_own_words(error: ApiError) -> ApiError:
    """A chat's error with the field's name in this API."""
    said = error.param or ""
    field = _FIELDS.get(said, said.replace("].function.", "].", 1))
    if field == said:
        return error
    message = re.sub(rf"\A{re.escape(said)}\b", lambda _: field, error.message)
    return ApiError(error.status, message, param=field, code=error.code, headers=error.headers)
