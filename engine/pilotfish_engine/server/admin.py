"""Routes for operators: probes, metrics, the speculation report and envelope, the cost profile, the prefix cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pilotfish_engine import messages
from pilotfish_engine.contract.speculation import CostProfile, EngineReport
from pilotfish_engine.server.bodies import SpeculationUpdate
from pilotfish_engine.server.failures import ApiError, Denied, Unavailable
from pilotfish_engine.server.link import CoreGone
from pilotfish_engine.server.middleware import same_bearer
from pilotfish_engine.server.openapi import ADMIN_TOKEN, CHANGING, PROBED, UPDATED, Flushed, answers
from pilotfish_engine.server.service import Service


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.router = APIRouter()
        route: Callable[..., None] = self.router.add_api_route
        token = {"dependencies": [ADMIN_TOKEN]}
        route("/health", self.health, methods=["GET"], responses=PROBED)
        route("/ready", self.ready, methods=["GET"], responses=PROBED)
        route("/metrics", self.metrics, methods=["GET"], response_class=PlainTextResponse)
        route("/v1/speculation", self.report, methods=["GET"], responses=answers(EngineReport, 503))
        route(
            "/v1/speculation", self.set_envelope, methods=["PUT"], **token,
            responses=answers(EngineReport, *CHANGING), openapi_extra=UPDATED,
        )  # fmt: skip
        route("/v1/profile", self.profile, methods=["GET"], responses=answers(CostProfile, 404, 503))
        route("/flush_cache", self.flush_cache, methods=["POST"], **token, responses=answers(Flushed, *CHANGING))

    async def health(self) -> Response:
        """Live: a restart would not help. True while the model loads."""
        return _probe(self._service.why_not_live())

    async def ready(self) -> Response:
        """Routable: a request sent now would be served."""
        return _probe(self._service.why_not_ready())

    async def metrics(self) -> Response:
        """With the last report known when the model process does not answer in time."""
        if self._service.link.ready is not None:
            with contextlib.suppress(CoreGone):
                self._service.metrics.report = await self._ask()
        return Response(self._service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def report(self) -> Response:
        return _json(self._service.signed(await self._loaded_report()).model_dump_json())

    async def profile(self) -> Response:
        """The cost profile that this engine measured at its start."""
        profile = (await self._loaded_report()).profile
        if profile is None:
            raise ApiError(404, "this engine has measured no cost profile", code="no_profile")
        return _json(profile.model_dump_json())

    async def set_envelope(self, request: Request) -> Response:
        """The report after the change. The token is looked at before the body."""
        self._check_token(request)
        self._check_loaded()
        update = SpeculationUpdate.model_validate_json(await request.body())
        body = await self._service.link.call(messages.SetEnvelope, update=update.model_dump_json().encode())
        return _json(self._service.signed(EngineReport.model_validate_json(body)).model_dump_json())

    async def flush_cache(self, request: Request) -> Response:
        self._check_token(request)
        self._check_loaded()
        await self._service.link.call(messages.FlushCache)
        return JSONResponse({"flushed": True})

    async def _ask(self) -> EngineReport:
        return EngineReport.model_validate_json(await self._service.link.call(messages.AskReport))

    async def _loaded_report(self) -> EngineReport:
        self._check_loaded()
        return await self._ask()

    def _check_loaded(self) -> None:
        if self._service.link.ready is None:
            raise Unavailable("the model is loading; try again", "not_ready")

    def _check_token(self, request: Request) -> None:
        if self._service.admin_token is None:
            raise Denied(403, "no admin token is set; start the engine with --admin-token-file", "admin_disabled")
        if not same_bearer(request.headers, self._service.admin_token):
            raise Denied(
                401, "the admin token is missing or wrong; send it as Authorization: Bearer TOKEN", "invalid_token"
            )


def _probe(trouble: str | None) -> Response:
    status = {"status": "ok"} if trouble is None else {"status": "unavailable", "reason": trouble}
    return JSONResponse(status, 200 if trouble is None else 503)


def _json(text: str | bytes) -> Response:
    return Response(text, media_type="application/json")
