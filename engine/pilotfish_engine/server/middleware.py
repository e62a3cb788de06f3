"""What every request passes before a route sees it: a request id, the API key, and a bound on its body; and what
every answer says of its request.

Plain ASGI, so that streaming and disconnects go through untouched. Outermost: its errors are OpenAI's too.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish_engine.server.failures import ApiError, Denied, Invalid
from pilotfish_engine.server.secret import SecretFile
from pilotfish_engine.server.streaming import ClientGone

MAX_BODY_BYTES = 8 << 20
_OPEN = frozenset({"/health", "/ready", "/metrics", "/v1/speculation", "/v1/profile", "/flush_cache"})
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z", re.ASCII)


class TooLarge(ApiError):
    def __init__(self) -> None:
        super().__init__(
            413, f"the body is larger than {MAX_BODY_BYTES} bytes; a smaller one would work", code="body_too_large"
        )


class TooSlow(ApiError):
    def __init__(self, seconds: float) -> None:
        super().__init__(
            408, f"the body was not complete within {seconds:g} s; send it faster", code="body_too_slow",
            headers={"Connection": "close"},
        )  # fmt: skip


class Gate:
    """api_key: what clients of the API must send as a bearer token; None: nothing. Probes, metrics and the admin
    routes do not take it: those that change something have a token of their own. refused: told every status from
    400."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, body_seconds: float, refused: Callable[[int], None]
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._body_seconds = body_seconds
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # /v1/models/ and //v1/models are /v1/models, and who asks for the head of an answer is given that of GET
        path = re.sub(r"//+", "/", scope["path"]).rstrip("/") or "/"
        asked_for = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "path": path, "method": asked_for}
        headers = Headers(scope=scope)
        if not {"content-type", "origin"} & set(headers.keys()):  # a browser page must say it: CORS stands on that
            scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]
        sent = headers.get("x-request-id", "")
        request_id = sent if _REQUEST_ID.match(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    answered["x-ignored-fields"] = ignored
                if message["status"] >= 400:
                    self._refused(message["status"])
            await send(message)

        try:
            self._check_key(path, headers)
            _check_encoding(headers)
            async with asyncio.timeout(self._body_seconds):
                body = await _whole_body(headers, receive)
        except TimeoutError:
            await TooSlow(self._body_seconds).response()(scope, receive, send_with_id)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except ClientGone:
            pass
        else:
            await self._app(scope, _replay(body, receive), send_with_id)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._api_key is None or path in _OPEN:
            return
        if not same_bearer(headers, self._api_key):
            raise Denied(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key"
            )


def _check_encoding(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Invalid(
            f"the body has the Content-Encoding {encoding[:40]}, which is not read here; one without would work",
            None,
            "unsupported_encoding",
        )


def same_bearer(headers: Headers, secret: str) -> bool:
    """Compares in constant time, with what the secret's file holds by now."""
    if isinstance(secret, SecretFile):
        secret = secret.now()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), secret.encode())


async def _whole_body(headers: Headers, receive: Receive) -> bytes:
    """Raises TooLarge: at once when the length is announced, else when too much has come."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise TooLarge
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and then what comes: the disconnect."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return replayed
