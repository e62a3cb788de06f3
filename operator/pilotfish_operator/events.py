"""Records Kubernetes events on a SpeculativeModel, one for each change.

A failed event is logged and forgotten: it never fails what it tells of.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

from pilotfish_operator.kinds import EVENTS, MANAGER, MODELS
from pilotfish_operator.kube import Conflict, Kube, KubeError
from pilotfish_operator.objects import Object
from pilotfish_operator.status import Note

log = logging.getLogger(__name__)


async def record(kube: Kube, model: Object, notes: Iterable[Note], now: str) -> None:
    meta = model["metadata"]
    for note in notes:
        log.info("%s/%s %s: %s", meta["namespace"], meta["name"], note.reason, note.message)
        named = {"generateName": f"{meta['name']}."}
        if note.once:
            named = {"name": f"{meta['name']}.{hashlib.sha256((note.reason + note.once).encode()).hexdigest()[:16]}"}
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.name,
            "metadata": {**named, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": MODELS.api_version,
                "kind": MODELS.name,
                "name": meta["name"],
                "uid": meta["uid"],
                "namespace": meta["namespace"],
                "resourceVersion": meta["resourceVersion"],
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message[:1024],
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": MANAGER,
        }
        try:
            await kube.create(EVENTS, body)
        except Conflict:
            log.debug("the event %s was told before", note.reason)
        except KubeError as problem:
            log.warning(
                "the event %s on %s/%s was not recorded: %s", note.reason, meta["namespace"], meta["name"], problem
            )
