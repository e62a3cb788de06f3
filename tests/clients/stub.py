"""A server that answers by rule and writes down what it was asked: clients' requests become fixtures."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.clients import canned
from tests.clients.canned import Answer, Json

CREATED = 1_700_000_000
MODEL = "small"
# What a request's fixture keeps: no authorisation, and nothing that depends on the machine.
KEPT_HEADERS = ("accept", "content-type", "user-agent", "x-request-id", "x-stainless-helper-method")


class Stub:
    """records: one for each request that was not told to come again."""

    def __init__(self) -> None:
        self.records: list[Json] = []
        self._scenario = ""
        self._busy: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/scenario/{name}", self._announce)
        app.router.add_route("*", "/{path:.*}", self._serve)
        return app

    async def _announce(self, request: web.Request) -> web.Response:
        self._scenario = request.match_info["name"]
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        if body is not None and self._sends_away(text):
            return _error(503, "busy", "server_busy", {"retry-after": "0"})
        answer = _answer_to(request, body)
        self.records.append({
            "scenario": self._scenario,
            "method": request.method,
            "path": request.path_qs,
            "headers": {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers},
            "body": body,
            "status": answer.status if isinstance(answer, web.Response) else 200,
        })  # fmt: skip
        if isinstance(answer, web.Response):
            answer.headers["x-request-id"] = request.headers.get("x-request-id", "1")
            return answer
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in answer:
            name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"{name}data: {data}\n\n".encode())
        return response

    def _sends_away(self, text: str) -> bool:
        """Whoever says that it is busy is sent away the first time."""
        if '"busy ' not in text or text in self._busy:
            return False
        self._busy.add(text)
        return True


def _answer_to(request: web.Request, body: Any) -> web.Response | Iterable[Json | str]:
    routes: dict[str, Callable[[Json], web.Response | Iterable[Json | str]]] = {
        "/v1/chat/completions": _chat,
        "/v1/completions": _completion,
        "/v1/responses": _response,
    }
    card = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "stub"}
    if request.method in ("GET", "HEAD"):
        known = {"/v1/models": {"object": "list", "data": [card]}, f"/v1/models/{MODEL}": card, "/health": {}}
        return web.json_response(known[request.path]) if request.path in known else _error(404, "no such page")
    if request.path in routes and "model" not in body:
        return _error(400, "model is missing")
    if request.path not in routes or body["model"] != MODEL:
        return _error(404, "no such page or model", "model_not_found")
    if canned.shows_pictures(body):
        return _error(400, "this model reads no pictures")
    if canned.is_too_long(body):
        return _error(400, "the prompt is too long", "context_length_exceeded")
    return routes[request.path](body)


def _error(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=headers)


def _usage(completion_tokens: int) -> Json:
    return {"prompt_tokens": 10, "completion_tokens": completion_tokens, "total_tokens": 10 + completion_tokens}


def _chat(body: Json) -> web.Response | Iterable[Json | str]:
    answer, size = canned.of_chat(body), body.get("n") or 1
    reason = "tool_calls" if answer.calls else "stop"
    logprobs = _chat_logprobs(answer, body.get("top_logprobs") or 0) if body.get("logprobs") else None
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    common = {"id": "chatcmpl-1", "created": CREATED, "model": MODEL}
    if body.get("stream"):
        return _chat_chunks(body, common | {"object": "chat.completion.chunk"}, answer, calls, reason)
    message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    choices = [
        {"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason} for i in range(size)
    ]
    usage = _usage(len(answer.tokens) * size)
    return web.json_response(common | {"object": "chat.completion", "choices": choices, "usage": usage})


def _chat_logprobs(answer: Answer, top: int) -> Json:
    def scored(token: str) -> Json:
        return {"token": token, "logprob": -0.5, "bytes": list(token.encode())}

    content = [scored(token) | {"top_logprobs": [scored(token)] * top} for token in answer.tokens]
    return {"content": content, "refusal": None}


def _chat_chunks(body: Json, common: Json, answer: Answer, calls: list[Json], reason: str) -> Iterable[Json | str]:
    def chunk(delta: Json, finish_reason: str | None = None) -> Json:
        return common | {
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
        }

    yield chunk({"role": "assistant", "content": ""})
    for token in answer.tokens if answer.text else []:
        yield chunk({"content": token})
    for index, call in enumerate(calls):
        opened = call | {"index": index, "function": call["function"] | {"arguments": ""}}
        yield chunk({"tool_calls": [opened]})
        for piece in _halves(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield common | {"choices": [], "usage": _usage(len(answer.tokens))}
    yield "[DONE]"


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _completion(body: Json) -> web.Response | Iterable[Json | str]:
    prompt, size = body["prompt"], body.get("n") or 1
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    common = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": MODEL}
    choices = [_completed(body, i, prompts[i // size]) for i in range(len(prompts) * size)]
    usage = _usage(len(choices))
    if not body.get("stream"):
        return web.json_response(common | {"choices": choices, "usage": usage})
    chunks: list[Json | str] = [common | {"choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(common | {"choices": [], "usage": usage})
    return [*chunks, "[DONE]"]


def _completed(body: Json, index: int, prompt: Any) -> Json:
    new = canned.SENTENCE.split(" ")[: 16 if body.get("max_tokens") is None else body["max_tokens"]]
    old = prompt.split(" ") if isinstance(prompt, str) else [str(token) for token in prompt]
    tokens = [*old, *new] if body.get("echo") else new
    logprobs = None
    if body.get("logprobs") is not None:
        values = [None if body.get("echo") and i == 0 else -0.5 for i in range(len(tokens))]
        top = [None if value is None else {token: value} for token, value in zip(tokens, values, strict=True)]
        offsets = [len(" ".join(tokens[:i])) for i in range(len(tokens))]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
    return {"index": index, "text": " ".join(tokens), "logprobs": logprobs, "finish_reason": "stop"}


def _response(body: Json) -> web.Response | Iterable[Json | str]:
    answer = canned.of_response(body)
    output: list[Json] = [
        {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name,
         "arguments": call.arguments, "status": "completed"}
        for call in answer.calls
    ]  # fmt: skip
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        )
    whole = {
        "id": "resp_1", "object": "response", "created_at": CREATED, "status": "completed", "model": MODEL,
        "output": output, "parallel_tool_calls": True, "tool_choice": body.get("tool_choice") or "auto",
        "tools": [{"strict": None, "description": None} | tool for tool in body.get("tools") or []],
        "error": None, "incomplete_details": None, "instructions": None,
        "metadata": {}, "temperature": 1, "top_p": 1, "completed_at": CREATED, "previous_response_id": None,
        "truncation": "disabled", "text": {"format": {"type": "text"}}, "presence_penalty": 0,
        "frequency_penalty": 0, "top_logprobs": 0, "reasoning": None, "max_output_tokens": None,
        "max_tool_calls": None, "store": False, "background": False, "service_tier": "default",
        "safety_identifier": None, "prompt_cache_key": None,
        "usage": {
            "input_tokens": 10, "output_tokens": 5, "total_tokens": 15,
            "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    return _numbered(_events(whole, output)) if body.get("stream") else web.json_response(whole)


def _numbered(events: Iterable[Json]) -> Iterable[Json | str]:
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _events(whole: Json, output: list[Json]) -> Iterable[Json]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(output):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "content": []}}  # fmt: skip
            yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
            for piece in _halves(part["text"]):
                yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            yield {"type": "response.output_item.added", "output_index": index,
                   "item": item | {"status": "in_progress", "arguments": ""}}  # fmt: skip
            for piece in _halves(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **place, "name": item["name"],
                   "arguments": item["arguments"]}  # fmt: skip
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


@asynccontextmanager
async def running(stub: Stub) -> AsyncIterator[str]:
    """The stub on a free port of the loopback; its URL."""
    runner = web.AppRunner(stub.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        _, port = runner.addresses[0][:2]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
