"""Events about pods, as ``kubectl describe`` shows them: repeated ones are counted, none is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

from tests.cluster.node.client import MERGE, ApiError, Client, Unreachable
from tests.cluster.node.status import timestamp

Object = dict[str, Any]
REMEMBERED = 1000  # different events that can still be counted up


class Events:
    """Call ``emit`` at any time; ``send`` runs beside. What cannot be sent is dropped: events are best effort."""

    def __init__(self, client: Client, node: str) -> None:
        self._client, self._node = client, node
        self._queue: asyncio.Queue[tuple[Object, str, str, str]] = asyncio.Queue(maxsize=REMEMBERED)
        self._sent: dict[tuple[str, str, str], tuple[str, int]] = {}  # (uid, reason, message) → path, count

    def emit(self, pod: Object, kind: str, reason: str, message: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait((pod["metadata"], kind, reason, message))

    async def send(self) -> None:
        while True:
            meta, kind, reason, message = await self._queue.get()
            with contextlib.suppress(ApiError, Unreachable):
                await self._send(meta, kind, reason, message[:1000])

    async def _send(self, meta: Object, kind: str, reason: str, message: str) -> None:
        key, now = (meta["uid"], reason, message), timestamp(time.time())
        if key in self._sent:
            path, count = self._sent[key]
            self._sent[key] = path, count + 1
            await self._client.call("PATCH", path, {"count": count + 1, "lastTimestamp": now}, MERGE)
            return
        collection = f"/api/v1/namespaces/{meta['namespace']}/events"
        name = f"{meta['name']}.{uuid.uuid4().hex[:16]}"
        pod = {"apiVersion": "v1", "kind": "Pod"} | {key: meta[key] for key in ("namespace", "name", "uid")}
        event = {
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": pod,
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "sandbox", "host": self._node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._client.call("POST", collection, event)
        if len(self._sent) >= REMEMBERED:
            self._sent.clear()
        self._sent[key] = f"{collection}/{name}", 1
