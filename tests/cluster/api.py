"""The few blocking calls to a Kubernetes API that starting, judging and resetting a world need."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]


class Api:
    """A connection with the rights of one kubeconfig that ``control.write_credentials`` wrote."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._client = httpx.Client(
            base_url=cluster["server"],
            headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}"},
            verify=ssl.create_default_context(cafile=cluster["certificate-authority"]),
            timeout=10,
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Object | None:
        """The object or list at ``path``; None when there is none, or the server cannot be reached."""
        try:
            response = self._client.get(path)
        except httpx.TransportError:
            return None
        if response.status_code == 404:
            return None
        return self._object(response)

    def delete(self, path: str) -> None:
        body = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        response = self._client.request("DELETE", path, json=body)
        if response.status_code not in (404, 409):
            response.raise_for_status()

    def release(self, path: str) -> None:
        """Takes the finalizers off, so that a deleted object goes though its controller has gone or is slow."""
        parent, name = path.rsplit("/", 1)
        if parent == "/api/v1/namespaces":
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}, "spec": {"finalizers": []}}
            response = self._client.put(f"{path}/finalize", json=body)
        else:
            headers = {"Content-Type": "application/merge-patch+json"}
            response = self._client.patch(path, content=b'{"metadata":{"finalizers":null}}', headers=headers)
        if response.status_code not in (404, 409):
            response.raise_for_status()

    def collections(self) -> list[str]:
        """Paths of all namespaced kinds that can be listed and deleted, with ``{namespace}`` to fill in."""
        groups = self._object(self._client.get("/apis"))["groups"]
        roots = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
        found = []
        for root in roots:
            response = self._client.get(root)
            if response.status_code != 200:  # a CRD that is just going away
                continue
            for resource in response.json()["resources"]:
                if resource["namespaced"] and {"list", "delete"} <= set(resource["verbs"]):
                    found.append(f"{root}/namespaces/{{namespace}}/{resource['name']}")
        return found

    @staticmethod
    def _object(response: httpx.Response) -> Object:
        response.raise_for_status()
        decoded: Object = response.json()
        return decoded
