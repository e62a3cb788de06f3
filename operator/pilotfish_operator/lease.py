"""Leader election: of all operators that name the same Lease, the one that holds it acts.

`next_move` is pure. A holder stops acting `RENEW_DEADLINE` after its last successful renewal was *sent*, well before
others may take over, so two never act at once even when one hangs. Other machines' clocks are not trusted: a Lease has
expired when this process has seen it unchanged for its whole duration. Knows nothing about what leading means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pilotfish_operator.kinds import LEASES
from pilotfish_operator.kube import Conflict, Kube, KubeError, NotFound, Unavailable

DURATION = 15
RENEW_DEADLINE = 10.0
PERIOD = 3.0
log = logging.getLogger(__name__)
Object = dict[str, Any]


@dataclass(frozen=True)
class Sighting:
    """The Lease's version as last seen to change, and when (monotonic seconds of this process)."""

    version: str
    since: float


def next_move(
    lease: Object | None, seen: Sighting | None, identity: str, now: float
) -> tuple[Literal["create", "renew", "take", "wait"], Sighting | None]:
    """What to do about the Lease as just read. With it, the sighting to bring next time."""
    if lease is None:
        return "create", None
    spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
    seen = seen if seen is not None and seen.version == version else Sighting(version, now)
    holder = spec.get("holderIdentity")
    if holder == identity:
        return "renew", seen
    if not holder or now - seen.since >= float(spec.get("leaseDurationSeconds") or DURATION):
        return "take", seen
    return "wait", seen


class Leadership:
    """Holds, seeks or releases one Lease."""

    def __init__(
        self, kube: Kube, namespace: str, name: str, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube, self._namespace, self._name, self._identity, self._clock = kube, namespace, name, identity, clock
        self._seen: Sighting | None = None
        self._renewed = float("-inf")
        self._answered = clock()
        self.last_failure = "it was never asked for"
        self._was_leading = False

    def leads(self) -> bool:
        """Whether this process may act now."""
        return self._clock() - self._renewed < RENEW_DEADLINE

    def stale(self, patience: float) -> bool:
        """Whether the Lease could be neither renewed nor read for so long."""
        return self._clock() - self._answered > patience

    async def run(self, changed: Callable[[bool], None]) -> None:
        """Seek and renew until cancelled, then release. `changed` hears of every change of `leads()`."""
        try:
            while True:
                await self._once()
                if self.leads() != self._was_leading:
                    self._was_leading = self.leads()
                    log.info(
                        "%s the Lease %s/%s as %s",
                        "holding" if self._was_leading else "lost",
                        self._namespace,
                        self._name,
                        self._identity,
                    )
                    changed(self._was_leading)
                await asyncio.sleep(PERIOD)
        finally:
            await self._release()

    async def _once(self) -> None:
        started = self._clock()
        try:
            try:
                lease: Object | None = await self._kube.get(LEASES, self._namespace, self._name)
            except NotFound:
                lease = None
            move, self._seen = next_move(lease, self._seen, self._identity, started)
            if move == "wait":
                self._renewed, self._answered = float("-inf"), started
                return
            if lease is None:
                await self._kube.create(LEASES, self._body({}, self._identity))
            else:
                await self._kube.replace(LEASES, self._body(lease, self._identity))
            self._renewed = self._answered = started
        except Conflict:
            self._renewed, self._answered = float("-inf"), started
        except KubeError as problem:
            self.last_failure = str(problem)
            level = logging.INFO if isinstance(problem, Unavailable) else logging.WARNING
            log.log(level, "the Lease %s/%s cannot be renewed: %s", self._namespace, self._name, problem)

    async def _release(self) -> None:
        """Let the next operator act at once."""
        if not self.leads():
            return
        self._renewed = float("-inf")
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
            if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._kube.replace(LEASES, self._body(lease, ""))
        except KubeError as problem:
            log.info("the Lease was not released, it will run out: %s", problem)

    def _body(self, lease: Object, holder: str) -> Object:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old = lease.get("spec") or {}
        same = old.get("holderIdentity") == holder
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.name,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                **({"resourceVersion": lease["metadata"]["resourceVersion"]} if lease else {}),
            },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": DURATION,
                "renewTime": now,
                "acquireTime": old.get("acquireTime", now) if same else now,
                "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if same else 1),
            },
        }
