"""The FastAPI application: its routes, and every failure in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pilotfish_engine.errors import RequestError
from pilotfish_engine.server import openapi
from pilotfish_engine.server.admin import Admin
from pilotfish_engine.server.api import Api
from pilotfish_engine.server.body import written
from pilotfish_engine.server.failures import ApiError, Invalid, Unavailable
from pilotfish_engine.server.incoming import MAX_BODY_BYTES, MAX_SETTING_BYTES, Incoming
from pilotfish_engine.server.link import CoreGone
from pilotfish_engine.server.middleware import OPEN, Gate
from pilotfish_engine.server.responses.routes import Responses
from pilotfish_engine.server.service import Service
from pilotfish_engine.server.streaming import ClientGone

log = logging.getLogger(__name__)

NOT_FOUND = 404
METHOD_NOT_ALLOWED = 405
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it keeps the count of what happened true


def create(service: Service, api_key: str | None, body_seconds: float, origins: Sequence[str] = ()) -> ASGIApp:
    """origins: whose pages may call this from a browser."""
    app = FastAPI(title="Pilotfish engine", docs_url=None, redoc_url=None, redirect_slashes=False)
    key = [openapi.API_KEY] if api_key is not None else []
    app.include_router(Api(service).router, dependencies=key)
    app.include_router(Responses(service).router, dependencies=key)
    app.include_router(Admin(service).router)
    document = openapi.describe(app, service.name)
    app.openapi = lambda: document  # type: ignore[method-assign]
    for kind in (ApiError, RequestValidationError, ValidationError, RequestError, CoreGone, HTTPException, ClientGone):
        app.add_exception_handler(kind, _respond)
    app.add_exception_handler(Exception, _respond)
    gate = Gate(
        app,
        api_key,
        Incoming(body_seconds),
        _body_limits(document["paths"]),
        lambda status: service.metrics.refusals.labels(str(status)).inc(),
    )
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Ignored-Fields", "X-Request-Id"],
    )


def _body_limits(paths: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """In bytes, by method and path, of the routes that take a body. paths: the OpenAPI document's."""
    return {
        (method.upper(), path): MAX_SETTING_BYTES if path in OPEN else MAX_BODY_BYTES
        for path, methods in paths.items()
        for method, route in methods.items()
        if "requestBody" in route
    }


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    told = _as_api_error(error)
    if isinstance(error, HTTPException) and told.status == NOT_FOUND:
        path = request.url.path[:200]
        told.message = f"{path} is not served here; POST /v1/chat/completions is, and what else, /openapi.json tells"
    if told.status == METHOD_NOT_ALLOWED:  # Starlette tells the methods of one of the path's routes
        known = request.app.openapi()["paths"].get(request.url.path, ())
        told.headers["Allow"] = ", ".join(sorted(map(str.upper, known))) or told.headers["Allow"]
    return told.response()


def _as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError() | ValidationError():
            return _invalid(cast("Sequence[Mapping[str, Any]]", error.errors()))
        case RequestError():
            return Invalid(str(error), error.field)
        case CoreGone():
            return Unavailable(str(error), "engine_gone")
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    return ApiError(500, "the engine failed on this request; its log says why", code="internal_error")


def _invalid(errors: Sequence[Mapping[str, Any]]) -> Invalid:
    """The first thing wrong, as a sentence with the field's name."""
    error = errors[0]
    location = [part for part in error["loc"] if part != "body"]
    text = str(error["msg"])
    if error["type"] == "json_invalid":
        return Invalid(f"the body is not valid JSON: {error.get('ctx', {}).get('error', text)}", None, "invalid_json")
    if error["type"] == "field":
        path = written([*location, error["ctx"]["field"]])
        return Invalid(f"{path} {text}", path)
    if not location:
        return Invalid("the body must be a JSON object, sent with Content-Type: application/json", None)
    path = written(location)
    if error["type"] == "missing":
        return Invalid(f"{path} is required", path, "missing_field")
    if error["type"] == "extra_forbidden":
        return Invalid(f"{path} is not a known field; leave it out", path, "unknown_field")
    return Invalid(f"{path} cannot be {_shown(error['input'])}: {text[0].lower()}{text[1:]}", path)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
