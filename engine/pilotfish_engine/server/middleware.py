"""What every request passes before a route sees it: a request id, the API key, and a bound on its body; and what
every answer says of its request.

Plain ASGI, so that streaming and disconnects go through untouched. Outermost: its errors are OpenAI's too.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish_engine.server.failures import ApiError, Denied, Invalid
from pilotfish_engine.server.incoming import Incoming
from pilotfish_engine.server.secret import SecretFile
from pilotfish_engine.server.streaming import ClientGone

OPEN = frozenset({"/health", "/ready", "/metrics", "/v1/speculation", "/v1/profile", "/flush_cache"})
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z", re.ASCII)


class Gate:
    """api_key: what clients of the API must send as a bearer token; None: nothing. Probes, metrics and the admin
    routes do not take it: those that change something have a token of their own. body_limits: in bytes, by method and
    path; of others no body is read. refused: told every status from 400."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        incoming: Incoming,
        body_limits: Mapping[tuple[str, str], int],
        refused: Callable[[int], None],
    ) -> None:
        self._app = app
        self._api_key = api_key
        self._incoming = incoming
        self._body_limits = body_limits
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
            body = await self._incoming.read(headers, receive, self._body_limits.get((asked_for, path), 0))
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except ClientGone:
            pass
        else:
            await self._app(scope, body, send_with_id)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._api_key is None or path in OPEN:
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
