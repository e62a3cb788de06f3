"""One turn of one model: observe → learn → decide → plan → apply → push → status → events.

Level-triggered: each turn starts from what is, never from what happened. Only the memory of load windows outlives a
turn, and a turn without it is careful instead of wrong. Knows nothing about watches and queues.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from pilotfish_engine.contract.methods import NO_METHOD
from pilotfish_engine.contract.speculation import EngineReport, Envelope
from pilotfish_operator import plan, status
from pilotfish_operator.api import Spec
from pilotfish_operator.apply import Applier, NotLeading
from pilotfish_operator.cache import Cache, Key
from pilotfish_operator.engines import EngineError, Engines, EnvelopeRefused
from pilotfish_operator.events import record
from pilotfish_operator.kinds import MODELS, SECRETS
from pilotfish_operator.kube import Kube, KubeError, NotFound
from pilotfish_operator.metrics import Metrics
from pilotfish_operator.objects import TOKEN_KEY, Object, Owner
from pilotfish_operator.observe import Observed, Pod, observe, owner_of
from pilotfish_operator.status import Note
from pilotfish_operator.workqueue import Retry

STATUS_PERIOD = 10.0  # seconds between writes of a status in which only loads moved
log = logging.getLogger(__name__)


@dataclass
class _Track:
    """What this process remembers of one model."""

    uid: str
    memory: plan.Memory = field(default_factory=plan.Memory)
    reports: dict[str, EngineReport] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    read_at: float = float("-inf")
    status_at: float = float("-inf")
    refused: dict[str, tuple[Envelope, str]] = field(default_factory=dict)
    envelope: Envelope | None = None


class Reconciler:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        engines: Engines,
        leads: Callable[[], bool],
        image: str,
        resync: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._cache, self._engines, self._leads = kube, cache, engines, leads
        self._image, self._resync, self._metrics, self._clock = image, resync, metrics, clock
        self._applier = Applier(kube, cache, leads, clock)
        self._tracks: dict[Key, _Track] = {}

    def forget_all(self) -> None:
        """Somebody else acts: what is remembered here grows old."""
        self._tracks.clear()

    async def turn(self, key: Key) -> float | None:
        """Bring one model nearer to its spec; seconds until it must be looked at again, None when it is gone."""
        if not self._leads():
            return None
        model = self._cache.get(MODELS, key)
        if model is None or "deletionTimestamp" in model["metadata"]:
            self._tracks.pop(key, None)
            self._applier.forget(*key)
            self._metrics.forget(key)
            return None
        try:
            with self._metrics.turns.time():
                await self._turn(key, model)
        except NotLeading:
            return None
        except NotFound:
            log.info("%s/%s went away in the middle of its turn", *key)
            return self._resync
        except KubeError as problem:
            self._metrics.errors.labels(type(problem).__name__).inc()
            raise Retry(f"{type(problem).__name__}: {problem.message}", problem.retry_after) from problem
        return self._resync

    async def _turn(self, key: Key, model: Object) -> None:
        owner, old, stamp = owner_of(model), model.get("status") or {}, _now()
        track = self._tracks.get(key)
        if track is None or track.uid != owner.uid:
            track = self._tracks[key] = _Track(owner.uid)
        generation = model["metadata"]["generation"]
        try:
            spec = Spec.model_validate(model["spec"])
        except ValidationError as problem:
            first = problem.errors()[0]
            text = f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
            await self._write_status(model, track, status.invalid(text, old, generation, stamp), stamp)
            return
        observed = await self._observe(owner, track)
        now = self._clock()
        decision, track.memory = plan.decide(spec, observed, track.memory, now, old.get("replicas"))
        made = plan.plan(owner, spec, observed, decision, self._image)
        problems: list[tuple[str, str]] = []
        if made.needs_token:
            taken = await self._applier.create_token(owner)
            problems += [taken] if taken else []
        problems += await self._applier.apply(owner, made.objects)
        notes = self._decided(spec, observed, track, made)
        await self._push(owner, track, made)
        observed = observe(owner, self._cache.family(key), track.reports, track.unread)
        new = status.compose(owner, spec, observed, made, problems, old, generation, stamp)
        self._say_refused(track, new)
        self._metrics.show(key, observed, made)
        await self._write_status(model, track, new, stamp, notes)

    async def _observe(self, owner: Owner, track: _Track) -> Observed:
        """What is. The engines are read once a period, whatever the events; one missed answer is no outage yet."""
        observed = observe(owner, self._cache.family((owner.namespace, owner.name)))
        serving = [pod for pod in observed.pods if pod.serves]
        if self._clock() - track.read_at >= 0.8 * self._resync:
            track.read_at, token = self._clock(), self._token(owner)
            answers = await asyncio.gather(*(self._read(pod, token) for pod in serving))
            fresh = {pod.uid: a for pod, a in zip(serving, answers, strict=True) if isinstance(a, EngineReport)}
            failed = {pod.uid: a for pod, a in zip(serving, answers, strict=True) if isinstance(a, str)}
            again = failed.keys() & track.missed
            held = {uid: report for uid, report in track.reports.items() if uid in failed.keys() - again}
            track.reports, track.missed = fresh | held, set(failed)
            track.unread = {uid: why for uid, why in failed.items() if uid not in held}
            track.memory = plan.learn(track.memory, replace(observed, reports=fresh), self._clock())
            self._metrics.unread.inc(len(failed))
        alive = {pod.uid for pod in serving}
        track.reports = {uid: report for uid, report in track.reports.items() if uid in alive}
        return replace(observed, reports=track.reports, unread=track.unread)

    async def _read(self, pod: Pod, token: str) -> EngineReport | str:
        try:
            return await self._engines.report(pod.address or "", pod.port, token)
        except EngineError as problem:
            return str(problem)

    def _token(self, owner: Owner) -> str:
        secret = self._cache.get(SECRETS, (owner.namespace, owner.secret)) or {}
        return base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY, "")).decode()

    def _decided(self, spec: Spec, observed: Observed, track: _Track, made: plan.Plan) -> list[Note]:
        """What changed by this turn's decision."""
        notes, before, tuning = [], observed.replicas, made.decision.tuning
        if before is not None and before != made.replicas:
            why = made.blocked[1] if made.blocked else made.decision.scale.reason
            notes.append(Note("Normal", "Scaled", f"replicas {before} -> {made.replicas}: {why}"))
        if track.envelope is not None and tuning.envelope != track.envelope and spec.speculation.method != NO_METHOD:
            notes.append(Note("Normal", "SpeculationChanged", tuning.changed or tuning.reason))
        track.envelope = tuning.envelope
        return notes

    async def _push(self, owner: Owner, track: _Track, made: plan.Plan) -> None:
        """Put the envelope to the engines that hold another one; one that refused it is not asked the same again."""
        envelope, token = made.decision.envelope, self._token(owner)

        async def one(pod: Pod) -> None:
            if track.refused.get(pod.uid, (None, ""))[0] == envelope:
                return
            try:
                await self._engines.put(pod.address or "", pod.port, token, envelope)
                report = await self._engines.report(pod.address or "", pod.port, token)
            except EnvelopeRefused as problem:
                track.refused[pod.uid] = envelope, str(problem)
                log.warning("%s/%s: %s", owner.namespace, pod.name, problem)
            except EngineError as problem:
                log.warning(
                    "%s/%s: the envelope did not arrive, again next time: %s", owner.namespace, pod.name, problem
                )
            else:
                track.refused.pop(pod.uid, None)
                track.reports[pod.uid] = report
                self._metrics.pushes.inc()

        if not self._leads():
            raise NotLeading
        await asyncio.gather(*(one(pod) for pod in made.push))
        track.refused = {uid: held for uid, held in track.refused.items() if uid in track.reports}

    def _say_refused(self, track: _Track, new: dict[str, Any]) -> None:
        if track.refused and "speculation" in new:
            _, why = next(iter(track.refused.values()))
            new["speculation"]["reason"] = f"{len(track.refused)} engines refuse the settings: {why}"

    async def _write_status(
        self, model: Object, track: _Track, new: Object, stamp: str, notes: list[Note] | None = None
    ) -> None:
        old, meta = model.get("status") or {}, model["metadata"]
        now = self._clock()
        turned = status.material(old) != status.material(new)
        if turned or (old != new and now - track.status_at >= STATUS_PERIOD):
            if not self._leads():
                raise NotLeading
            body = {
                "apiVersion": MODELS.api_version,
                "kind": MODELS.name,
                "status": new,
                "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            }
            self._cache.put(MODELS, await self._kube.apply(MODELS, body, "status"))
            track.status_at = now
        await record(self._kube, model, [*(notes or ()), *status.changes(old, new)] if turned or notes else (), stamp)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
