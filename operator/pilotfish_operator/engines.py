"""HTTP to the engine pods: their reports, and the envelope put to them.

Short timeouts, no retries (the next tick is one), no redirects, no proxies. Knows nothing about decisions.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import aiohttp
from pydantic import ValidationError

from pilotfish_engine.contract.speculation import EngineReport, Envelope, EnvelopeUpdate

TIMEOUT = aiohttp.ClientTimeout(total=4.0, sock_connect=1.0)  # an engine answers between two steps
PATH = "/v1/speculation"


class EngineError(Exception):
    """The engine did not answer, or not with what it should."""


class EnvelopeRefused(EngineError):
    """The engine answered that it cannot run within this envelope."""


class Engines:
    """One connection pool to all engines."""

    async def __aenter__(self) -> Engines:
        self._http = aiohttp.ClientSession(
            timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def report(self, address: str, port: int, token: str) -> EngineReport:
        """GET /v1/speculation. Raises EngineError."""
        return _report(address, await self._request("GET", address, port, token))

    async def put(self, address: str, port: int, token: str, envelope: Envelope) -> None:
        """PUT /v1/speculation, every field. Raises EnvelopeRefused on 4xx, EngineError on anything else."""
        body = EnvelopeUpdate.model_validate(envelope.model_dump()).model_dump(exclude_none=True)
        await self._request("PUT", address, port, token, body)

    async def _request(self, method: str, address: str, port: int, token: str, body: Any = None) -> bytes:
        host = f"[{address}]" if ":" in address else address
        url, headers = f"http://{host}:{port}{PATH}", {"Authorization": f"Bearer {token}"}
        try:
            async with self._http.request(method, url, json=body, headers=headers, allow_redirects=False) as answer:
                text = await answer.read()
        except TimeoutError as problem:
            raise EngineError(f"no answer from {host}:{port} within {TIMEOUT.total:g}s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise EngineError(f"{host}:{port} cannot be reached: {problem}") from problem
        if 200 <= answer.status < 300:
            return text
        said = text.decode(errors="replace").strip()[:300]
        kind = EnvelopeRefused if method == "PUT" and 400 <= answer.status < 500 else EngineError
        raise kind(f"{host}:{port} answered {answer.status} to {method} {PATH}: {said}")


def _report(address: str, text: bytes) -> EngineReport:
    try:
        return EngineReport.model_validate_json(text)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise EngineError(f"{address} sent no report: {where}: {first['msg']}") from problem
