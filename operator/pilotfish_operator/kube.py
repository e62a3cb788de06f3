"""Requests to the Kubernetes API as plain dictionaries, its refusals as typed errors; sole importer of its client.

Knows nothing about models or engines. The errors:

    KubeError                 status, message; retry_after seconds
    ├── Unauthorized   401    the token is bad or old: it is read again, retry
    ├── Forbidden      403    a right, quota or admission says no: tell the user, retry slowly
    ├── NotFound       404    the object or its kind is gone: forget it
    ├── Conflict       409    somebody was first: read again, retry soon
    ├── Gone           410    the version asked for is too old: list again
    ├── Invalid        400, 422  the object is wrong: tell the user, retrying the same is useless
    ├── TooMany        429    wait as told
    └── Unavailable    5xx, no connection: back off, retry
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from pilotfish_operator.config import ClusterAccess
from pilotfish_operator.kinds import MANAGER, Kind

Object = dict[str, Any]
LIST_TIMEOUT = 30.0
TIMEOUT = 4.0  # begun within lease.RENEW_DEADLINE, a write has ended before anybody else may lead


class KubeError(Exception):
    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


class Unauthorized(KubeError): ...


class Forbidden(KubeError): ...


class NotFound(KubeError): ...


class Conflict(KubeError): ...


class Gone(KubeError): ...


class Invalid(KubeError): ...


class TooMany(KubeError): ...


class Unavailable(KubeError): ...


_BY_STATUS: Mapping[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooMany,
}


def error(status: int, body: str, headers: Mapping[str, str] | None = None) -> KubeError:
    """The typed error of an answer; the message is the API server's own when it gave one."""
    message = body.strip() or f"HTTP {status}"
    with contextlib.suppress(ValueError, AttributeError):
        message = json.loads(body).get("message") or message
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else KubeError)
    if status == 500 and "failed to create typed patch object" in message:
        kind = Invalid  # a field that the kind does not have, in a server-side apply
    retry_after = (headers or {}).get("Retry-After", "")
    return kind(status, message, float(retry_after) if retry_after.isdigit() else None)


@dataclass(frozen=True)
class Credentials:
    """What a client needs to be let in."""

    server: str
    ca_path: str | None
    token: str | None
    certificate_path: str | None
    key_path: str | None
    insecure: bool


class _TokenFile:
    """The pod's token, read again whenever the file changes (the kubelet rotates it)."""

    def __init__(self, path: str) -> None:
        self._path, self._seen, self._value = path, (0.0, 0), ""

    def __call__(self) -> str:
        stat = os.stat(self._path)
        if (stat.st_mtime, stat.st_ino) != self._seen:
            with open(self._path, encoding="utf-8") as file:
                self._value = file.read().strip()
            self._seen = stat.st_mtime, stat.st_ino
        return self._value


async def configuration(access: ClusterAccess) -> client.Configuration:
    """The client's configuration. Raises KubeError when neither a service account nor a kubeconfig is there."""
    result = client.Configuration()
    if access.server is None:
        try:
            await config.load_kube_config(config_file=access.kubeconfig, client_configuration=result)
        except (config.ConfigException, OSError) as problem:
            message = f"no way to the cluster: this is no pod, and the kubeconfig failed: {problem}"
            raise KubeError(0, message) from problem
        return result
    token = _TokenFile(os.path.join(access.folder, "token"))

    def refresh(target: client.Configuration, *_: Any) -> None:
        target.api_key["BearerToken"] = f"Bearer {token()}"

    result.host, result.ssl_ca_cert = access.server, os.path.join(access.folder, "ca.crt")
    result.refresh_api_key_hook = refresh  # type: ignore[assignment]  # declared as None
    refresh(result)
    return result


async def credentials(access: ClusterAccess) -> Credentials:
    """The same as plain data, for a watcher with a client of its own."""
    found = await configuration(access)
    header = await found.get_api_key_with_prefix("BearerToken")
    bearer = header.removeprefix("Bearer ") if header else None
    return Credentials(
        found.host or "", found.ssl_ca_cert, bearer, found.cert_file, found.key_file, not found.verify_ssl
    )


def _object(text: str, asked: str) -> Object:
    """An answer's JSON object. Raises Unavailable: what is between us and the API server answers in HTML."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise Unavailable(0, f"{asked} was answered with what is no JSON object: {text.strip()[:200]!r}")


class Kube:
    """One connection pool to the API server."""

    def __init__(self, settings: client.Configuration) -> None:
        self._api = client.ApiClient(settings)
        self._answered = time.monotonic()
        self.last_failure = "nothing was asked yet"

    @classmethod
    async def connect(cls, access: ClusterAccess) -> Kube:
        return cls(await configuration(access))

    def silence(self) -> float:
        """Seconds since a request was answered as one that may be made: there, not there, or overtaken by another."""
        return time.monotonic() - self._answered

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[list[Object], str]:
        """Returns every object of the kind and the version of the list. They come from the API server's watch cache."""
        query = [("resourceVersion", "0"), *([("labelSelector", selector)] if selector else [])]
        answer = await self._call("GET", kind.path(namespace), query=query, timeout=LIST_TIMEOUT)
        items = [{"apiVersion": kind.api_version, "kind": kind.name} | item for item in answer["items"]]
        return items, answer["metadata"]["resourceVersion"]

    async def create(self, kind: Kind, manifest: Object) -> Object:
        return await self._call("POST", kind.path(manifest["metadata"]["namespace"]), manifest)

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        """Fails with Conflict unless metadata.resourceVersion is the stored one."""
        meta = manifest["metadata"]
        return await self._call("PUT", kind.path(meta["namespace"], meta["name"]), manifest)

    async def apply(self, kind: Kind, manifest: Object, subresource: str = "") -> Object:
        """Server-side apply as the one field manager, taking over fields that others changed."""
        meta = manifest["metadata"]
        return await self._call(
            "PATCH",
            kind.path(meta["namespace"], meta["name"], subresource),
            manifest,
            query=[("fieldManager", MANAGER), ("force", "true")],
            content="application/apply-patch+yaml",
        )

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        await self._call("DELETE", kind.path(namespace, name))

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        """Merge patch (RFC 7386) as the one field manager."""
        return await self._patch(kind, namespace, name, body, "application/merge-patch+json")

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Object]) -> Object:
        """JSON patch (RFC 6902) as the one field manager."""
        return await self._patch(kind, namespace, name, operations, "application/json-patch+json")

    async def _patch(self, kind: Kind, namespace: str, name: str, body: Any, content: str) -> Object:
        query = [("fieldManager", MANAGER)]
        return await self._call("PATCH", kind.path(namespace, name), body, query=query, content=content)

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows the kind."""
        try:
            answer = await self._call("GET", f"/apis/{kind.group}/{kind.version}")
        except NotFound:
            return False
        return any(resource["name"] == kind.plural for resource in answer.get("resources", ()))

    async def proxy(self, namespace: str, pod: str, port: str, path: str) -> Object:
        """GET a pod's JSON through the API server, for callers outside the cluster's network."""
        return await self._call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}")

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Any = None,
        content: str = "application/json",
        timeout: float = TIMEOUT,
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": content}
        try:
            _, url, headers, text, _ = await self._api.param_serialize(
                method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            within = aiohttp.ClientTimeout(total=timeout)
            answer = await self._api.call_api(method, url, headers, text, _request_timeout=within)
            said = (await answer.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            self.last_failure = f"{method} {path}: {str(problem) or type(problem).__name__}"
            raise Unavailable(0, self.last_failure) from problem
        if 200 <= answer.status < 300 or answer.status in (404, 409):
            self._answered = time.monotonic()
        if not 200 <= answer.status < 300:
            refusal = error(answer.status, said or answer.reason or "", answer.headers)
            self.last_failure = f"{method} {path}: {answer.status} {refusal.message[:300]}"
            raise refusal
        return _object(said, f"{method} {path}")
