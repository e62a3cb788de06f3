"""What a client is told when a request is not served: a status and OpenAI's error body.

ApiError                any of them
├── Invalid             400: the request's fault, with the field's name
├── Denied              401 or 403: a key or token is missing or wrong
└── Unavailable         503 + Retry-After: not now
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

RETRY_SECONDS = 1


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class Invalid(ApiError):
    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class Denied(ApiError):
    def __init__(self, status: int, message: str, code: str) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        super().__init__(status, message, code=code, headers=headers)


class Unavailable(ApiError):
    def __init__(self, message: str, code: str) -> None:
        super().__init__(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})
