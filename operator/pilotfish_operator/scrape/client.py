"""HTTP to the engine pods: their reports, and the envelope put to them.

An answer has TIMEOUT seconds in all and MAX_BYTES, and is taken only as it stands: nothing packed is unpacked, no
redirect is followed, no proxy is asked. Each refusal is an error of its own, since each asks for something else:

    EngineError                what came is no answer; asked again with back-off
    ├── BadReport              the engine answered with what is no report, or one out of its ranges
    ├── TokenRefused  401, 403 it holds another admin token, or none
    ├── NoRoute       404, 405 what listens there has no /v1/speculation
    ├── Busy          429, 503 asked again when it says, `retry_after` seconds
    ├── Broken        5xx      the engine failed
    └── EnvelopeRefused  4xx   it cannot run within this envelope: asking the same again is useless
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import aiohttp
from pydantic import ValidationError

from pilotfish_engine.contract.speculation import EngineReport, Envelope, EnvelopeUpdate, Learned

TIMEOUT = aiohttp.ClientTimeout(total=2.0, sock_connect=1.0)  # an engine answers between two steps
MAX_BYTES = 256 * 1024  # the largest honest report has a few KB
PATH = "/v1/speculation"


class EngineError(Exception):
    retry_after: float | None = None


class BadReport(EngineError): ...


class TokenRefused(EngineError): ...


class NoRoute(EngineError): ...


class Busy(EngineError): ...


class Broken(EngineError): ...


class EnvelopeRefused(EngineError): ...


_BY_STATUS: dict[int, type[EngineError]] = {
    401: TokenRefused, 403: TokenRefused, 404: NoRoute, 405: NoRoute, 429: Busy, 503: Busy,
}  # fmt: skip


class Engines:
    """One connection pool to all engines."""

    async def __aenter__(self) -> Engines:
        self._http = aiohttp.ClientSession(
            timeout=TIMEOUT,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def report(self, address: str, port: int) -> EngineReport:
        """GET /v1/speculation. Raises EngineError."""
        return parse_report(address, await self._request("GET", address, port))

    async def put(self, address: str, port: int, token: str, envelope: Envelope) -> None:
        """PUT /v1/speculation, every field. Raises EngineError."""
        body = EnvelopeUpdate.model_validate(envelope.model_dump()).model_dump(exclude_none=True)
        await self._request("PUT", address, port, token, body)

    async def tell(self, address: str, port: int, token: str, learned: Learned) -> None:
        """PUT /v1/speculation, what another engine has measured alone. Raises EngineError."""
        await self._request("PUT", address, port, token, {"learned": learned.model_dump(mode="json")})

    async def _request(self, method: str, address: str, port: int, token: str | None = None, body: Any = None) -> bytes:
        host = f"[{address}]" if ":" in address else address
        url, headers = f"http://{host}:{port}{PATH}", {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self._http.request(method, url, json=body, headers=headers, allow_redirects=False) as answer:
                packing = answer.headers.get("Content-Encoding", "identity")
                if packing != "identity":
                    raise BadReport(f"{host}:{port} sent its answer packed ({_plain(packing)[:40]}), unasked")
                text = await _bounded(answer, host)
        except TimeoutError as problem:
            raise EngineError(f"no answer from {host}:{port} within {TIMEOUT.total:g}s") from problem
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            raise EngineError(f"{host}:{port} cannot be reached: {_plain(str(problem))}") from problem
        if 200 <= answer.status < 300:
            return text
        said = _plain(text.decode(errors="replace"))[:300]
        error = _error(method, answer.status)(f"{host}:{port} answered {answer.status} to {method} {PATH}: {said}")
        after = answer.headers.get("Retry-After", "")
        error.retry_after = min(float(after), 3600.0) if after.isdecimal() and len(after) < 8 else None
        raise error


def _error(method: str, status: int) -> type[EngineError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return Broken
    return EnvelopeRefused if method == "PUT" and 400 <= status < 500 else BadReport


async def _bounded(answer: aiohttp.ClientResponse, host: str) -> bytes:
    text = bytearray()
    async for piece in answer.content.iter_any():
        text += piece
        if len(text) > MAX_BYTES:
            answer.close()
            raise BadReport(f"{host} sent more than {MAX_BYTES // 1024} KiB, which no report has")
    return bytes(text)


def _plain(text: str) -> str:
    """Printable, in one line: it goes into logs and status."""
    return "".join(c if c.isprintable() else " " for c in text[:2000]).strip()


def parse_report(address: str, text: bytes) -> EngineReport:
    """Raises BadReport, naming the field and the value that breaks its range."""
    try:
        return EngineReport.model_validate_json(text)
    except (ValidationError, RecursionError) as problem:
        if isinstance(problem, RecursionError):
            raise BadReport(f"{address} sent no report: it is nested too deeply") from problem
        first = problem.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        value = f" ({_plain(repr(first['input']))[:60]})" if where else ""
        raise BadReport(
            f"{address} sent no report: {_plain(where)[:80] or 'the body'}: {first['msg']}{value}"
        ) from problem
