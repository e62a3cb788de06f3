"""HTTP to the engine pods: their reports, and the envelope put to them.

Short timeouts, no retries (the next tick is one), no redirects, no proxies. Knows nothing about decisions.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx
from pydantic import ValidationError

from pilotfish_engine.contract.speculation import EngineReport, Envelope, EnvelopeUpdate

TIMEOUT = httpx.Timeout(4.0, connect=1.0)  # an engine answers between two steps
PATH = "/v1/speculation"


class EngineError(Exception):
    """The engine did not answer, or not with what it should."""


class EnvelopeRefused(EngineError):
    """The engine answered that it cannot run within this envelope."""


class Engines:
    """One connection pool to all engines."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT, trust_env=False, transport=transport, limits=httpx.Limits(max_keepalive_connections=256)
        )

    async def __aenter__(self) -> Engines:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def report(self, address: str, port: int, token: str) -> EngineReport:
        """GET /v1/speculation. Raises EngineError."""
        answer = await self._request("GET", address, port, token)
        return _report(answer)

    async def put(self, address: str, port: int, token: str, envelope: Envelope) -> None:
        """PUT /v1/speculation, every field. Raises EnvelopeRefused on 4xx, EngineError on anything else."""
        body = EnvelopeUpdate.model_validate(envelope.model_dump()).model_dump(exclude_none=True)
        await self._request("PUT", address, port, token, body)

    async def _request(self, method: str, address: str, port: int, token: str, body: Any = None) -> httpx.Response:
        host = f"[{address}]" if ":" in address else address
        try:
            answer = await self._http.request(
                method, f"http://{host}:{port}{PATH}", json=body, headers={"Authorization": f"Bearer {token}"}
            )
        except httpx.TimeoutException as problem:
            raise EngineError(f"no answer from {host}:{port} within {TIMEOUT.read:g}s") from problem
        except httpx.HTTPError as problem:
            raise EngineError(f"{host}:{port} cannot be reached: {problem}") from problem
        if answer.is_success:
            return answer
        said = answer.text.strip()[:300]
        kind = EnvelopeRefused if method == "PUT" and 400 <= answer.status_code < 500 else EngineError
        raise kind(f"{host}:{port} answered {answer.status_code} to {method} {PATH}: {said}")


def _report(answer: httpx.Response) -> EngineReport:
    try:
        return EngineReport.model_validate_json(answer.content)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise EngineError(f"{answer.url.host} sent no report: {where}: {first['msg']}") from problem
