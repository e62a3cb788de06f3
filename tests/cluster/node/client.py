"""The node's connection to the API server: JSON in, JSON out, and a watch.

Every call raises ApiError for an answer that is an error, and Unreachable when there is no answer.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused. ``status`` is the HTTP code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Unreachable(Exception):
    """The API server did not answer."""


class Client:
    """Use as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self.server: str = cluster["server"]
        self.authority = Path(cluster["certificate-authority"])
        self._token = config["users"][0]["user"]["token"]

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            base_url=self.server,
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(self.authority)), limit=200),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(
        self, method: str, path: str, body: Object | None = None, content_type: str = "application/json"
    ) -> Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with self._session.request(method, path, data=data, headers=headers, timeout=timeout) as response:
                answer = await response.read()
                if response.status >= 400:
                    raise ApiError(response.status, _message(answer))
                decoded: Object = json.loads(answer)
                return decoded
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error

    async def get(self, path: str) -> Object:
        return await self.call("GET", path)

    async def find(self, path: str) -> Object | None:
        """None when the object is not there."""
        try:
            return await self.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events until the server closes the stream. An ERROR event raises ApiError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=330)
        try:
            async with self._session.get(path, params={**params, "watch": "1"}, timeout=timeout) as response:
                if response.status >= 400:
                    raise ApiError(response.status, _message(await response.read()))
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event: Object = json.loads(line)
                        if event["type"] == "ERROR":
                            raise ApiError(event["object"].get("code", 500), event["object"].get("message", ""))
                        yield event
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:500].decode(errors="replace")
