"""One turn of one model: observe → learn → decide → plan → apply → status → events.

Level-triggered: each turn starts from what is, never from what happened. Only the memory of load windows outlives a
turn, and a turn without it is careful instead of wrong. A status is written whatever failed before it. Knows nothing
about watches and queues, and waits for no engine: `scrape` reads them.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from pilotfish_engine.contract.methods import NO_METHOD
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator import autoscale, plan, status
from pilotfish_operator.api import Spec
from pilotfish_operator.apply import Applier, NotLeading, Outcome, Problem
from pilotfish_operator.cache import Cache, Key
from pilotfish_operator.config import Config
from pilotfish_operator.events import record
from pilotfish_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, MODELS, PODS, SECRETS
from pilotfish_operator.kube import Kube, KubeError, NotFound
from pilotfish_operator.metrics import Metrics
from pilotfish_operator.objects import TOKEN_KEY, Object, Owner
from pilotfish_operator.observe import Observed, observe, owner_of
from pilotfish_operator.record import Decided, Entry, Inputs, Log
from pilotfish_operator.scrape.findings import Target
from pilotfish_operator.scrape.rounds import Rounds
from pilotfish_operator.status import Note
from pilotfish_operator.workqueue import Retry

STATUS_PERIOD = 10.0  # seconds between writes of a status in which only loads moved
LASTING = 4  # periods after which settings that a pod does not hold are a condition
log = logging.getLogger(__name__)


@dataclass
class _Track:
    """What this process remembers of one model."""

    uid: str
    memory: plan.Memory = field(default_factory=plan.Memory)
    status_at: float = float("-inf")
    envelope: Envelope | None = None
    finished: frozenset[str] = frozenset()


class Reconciler:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        rounds: Rounds[Key],
        leads: Callable[[], bool],
        settings: Config,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._cache, self._rounds, self._leads = kube, cache, rounds, leads
        self._image, self._resync = settings.engine_image, settings.resync_seconds
        self._metrics, self._clock = metrics, clock
        self._patience = plan.Patience(settings.again_seconds, settings.rollout_seconds)
        self._applier = Applier(kube, cache, leads, clock, 5 * self._resync)
        self._tracks: dict[Key, _Track] = {}
        self._log = Log(settings.record) if settings.record else None

    def forget_all(self) -> None:
        """Somebody else acts: what is remembered here grows old."""
        self._tracks.clear()
        self._rounds.forget_all()

    async def turn(self, key: Key) -> float | None:
        """Bring one model nearer to its spec; seconds until it must be looked at again, None when it is gone."""
        if not self._leads():
            return None
        model = self._cache.get(MODELS, key)
        if model is None or "deletionTimestamp" in model["metadata"]:
            self._tracks.pop(key, None)
            self._rounds.forget(key)
            self._applier.forget(*key)
            self._metrics.forget(key)
            return None
        try:
            with self._metrics.turns.time():
                failed = await self._turn(key, model)
        except NotLeading:
            return None
        except NotFound:
            log.info("%s/%s went away in the middle of its turn", *key)
            return self._resync
        except KubeError as problem:
            failed = problem
        if failed:
            self._metrics.errors.labels(type(failed).__name__).inc()
            raise Retry(f"{type(failed).__name__}: {failed.message}", failed.retry_after) from failed
        return self._resync

    async def _turn(self, key: Key, model: Object) -> KubeError | None:
        """What failed and may work at another try, once the status says so."""
        owner, stamp = owner_of(model), _now()
        last = status.Last(model.get("status") or {}, model["metadata"]["generation"], stamp)
        track = self._tracks.get(key)
        if track is None or track.uid != owner.uid:
            track = self._tracks[key] = _Track(owner.uid)
        try:
            spec = Spec.model_validate(model["spec"])
        except ValidationError as problem:
            first = problem.errors()[0]
            text = f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
            await self._write_status(model, track, status.invalid(text, last), stamp)
            return None
        try:
            new, notes, failed = await self._act(key, owner, spec, track, last)
        except (NotLeading, KubeError):
            raise
        except Exception as bug:  # said where the user looks; the queue tries again and logs it
            text = f"the operator failed on this model and tries again ({type(bug).__name__}: {bug})"
            await self._write_status(model, track, status.failed(text, last), stamp)
            raise
        await self._write_status(model, track, new, stamp, notes)
        return failed

    async def _act(
        self, key: Key, owner: Owner, spec: Spec, track: _Track, last: status.Last
    ) -> tuple[Object, list[Note], KubeError | None]:
        blind = self._cache.blind(owner.namespace)
        observed = self._observe(key, owner, track)
        decision = self._decide(key, spec, observed, track, last.status.get("replicas"))
        made = plan.plan(owner, spec, observed, decision, self._image, time.time(), self._patience)
        problems: list[Problem] = [("CannotRead", text) for text in blind.values()]
        secret = Outcome()
        if made.objects and SECRETS not in blind:
            secret = await self._applier.keep_token(owner, not made.needs_token)
        unsure = DEPLOYMENTS in blind or PODS in blind  # what is unknown is not absent
        outcome = await self._applier.apply(
            owner, tuple(o for o in made.objects if not (unsure and o["kind"] == DEPLOYMENTS.name)), blind.keys()
        )
        if not unsure and CONFIG_MAPS not in blind:
            await self._applier.prune(owner, made.prune)
        problems += [*secret.problems, *outcome.problems]
        notes = [] if unsure else self._decided(spec, observed, track, made)
        observed = observe(owner, self._cache.family(key), self._rounds.seen(key))
        self._follow(key, owner, observed, None if unsure else decision.envelope)
        notes += self._finished(track, observed)
        lasting = tuple(
            f"{pod.name} {drift.why}"
            for pod in observed.pods
            if (drift := observed.drift.get(pod.uid)) and self._clock() - drift.since > LASTING * self._resync
        )
        new = status.compose(owner, spec, observed, made, status.Trouble(problems, lasting, unsure), last)
        self._metrics.show(key, observed, made)
        return new, [*notes, *secret.notes, *outcome.notes], secret.failed or outcome.failed

    def _decide(self, key: Key, spec: Spec, observed: Observed, track: _Track, former: int | None) -> plan.Decision:
        """What to do, kept with what it came from."""
        now, before = self._clock(), track.memory
        decision, track.memory = plan.decide(spec, observed, before, now, former)
        if self._log:
            self._log.write(
                Entry(
                    time=time.time(),
                    namespace=key[0],
                    name=key[1],
                    at=now,
                    spec=spec,
                    inputs=Inputs.of(observed),
                    memory=before,
                    former=former,
                    decided=Decided.of(decision),
                )
            )
        return decision

    def _observe(self, key: Key, owner: Owner, track: _Track) -> Observed:
        """What is, and what the engines said since the last turn."""
        observed = observe(owner, self._cache.family(key), self._rounds.seen(key))
        for time_round in self._rounds.learn(key):
            scale = autoscale.measure(track.memory.scale, time_round.serving, time_round.reports, time_round.at)
            track.memory = replace(track.memory, scale=scale)
        return observed

    def _follow(self, key: Key, owner: Owner, observed: Observed, envelope: Envelope | None) -> None:
        targets = [
            Target(pod.uid, pod.name, pod.address, pod.port, pod.restarts)
            for pod in observed.pods
            if pod.serves and pod.address
        ]
        secret = self._cache.get(SECRETS, (owner.namespace, owner.secret)) or {}
        token = base64.b64decode((secret.get("data") or {}).get(TOKEN_KEY, "")).decode()
        self._rounds.follow(key, targets, token, envelope)

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

    @staticmethod
    def _finished(track: _Track, observed: Observed) -> list[Note]:
        """An event for each pod that ended for good; it counts for nothing else."""
        new = [pod for pod in observed.finished if pod.uid not in track.finished]
        track.finished = frozenset(pod.uid for pod in observed.finished)
        return [Note("Warning", "PodFinished", f"pod {pod.name} {pod.why}", pod.uid) for pod in new]

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
