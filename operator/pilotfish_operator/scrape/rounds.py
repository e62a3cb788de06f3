"""Goes round the pods of each model: reads them, judges what they say, puts the settings that they should hold.

Each model has a task of its own and each pod a back-off of its own, so that what hangs delays its own model by one
limit of time, ever more seldom, and others by nothing. Reconciling says whom to read (`follow`) and takes what was
learnt (`seen`). Knows nothing about Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pilotfish_engine.contract.speculation import EngineReport, Envelope, Learned
from pilotfish_operator.scrape.client import BadReport, EngineError, Engines, EnvelopeRefused, TokenRefused
from pilotfish_operator.scrape.findings import Drift, Round, Seen, Target
from pilotfish_operator.scrape.trust import History, judge

Key = TypeVar("Key", bound=Hashable)
LAST_DELAY = 60.0  # seconds between two tries to read a pod that does not answer, at most
SHARED_STEPS = 256  # an engine that has run fewer is told what another one of its kind knows, if that is as many
UNLEARNT = 20  # rounds kept for a model whose turn does not come
log = logging.getLogger(__name__)


@dataclass
class _Pod:
    """`misses`: answers in a row that did not come or were of no use. `refused`: the envelope not to ask again."""

    target: Target
    history: History | None = None
    report: EngineReport | None = None
    misses: int = 0
    why: str = ""
    doubted: bool = False
    due: float = 0.0
    put_due: float = 0.0
    puts_failed: int = 0
    refused: Envelope | None = None
    told: bool = False
    drift: Drift | None = None


@dataclass
class _Model:
    task: asyncio.Task[None] | None = None
    pods: dict[str, _Pod] = field(default_factory=dict)
    token: str = ""
    envelope: Envelope | None = None
    rounds: list[Round] = field(default_factory=list)
    learned: dict[str, Learned] = field(default_factory=dict)  # by kind: what outlives an engine
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Rounds(Generic[Key]):
    """`changed(key)` is called after each time round; `may_put()` is asked before anything is put, and `took()` tells
    that an engine took it."""

    def __init__(
        self,
        engines: Engines,
        period: float,
        changed: Callable[[Key], None],
        may_put: Callable[[], bool],
        took: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._period, self._clock = engines, period, clock
        self._changed, self._may_put, self._took = changed, may_put, took
        self._models: dict[Key, _Model] = {}

    def follow(self, key: Key, targets: Sequence[Target], token: str, envelope: Envelope | None) -> None:
        """Reads these pods of the model from now on. They are to hold the envelope (None: leave them as they are)."""
        model = self._models.setdefault(key, _Model())
        pods = {target.uid: self._kept(model.pods.get(target.uid), target) for target in targets}
        news = pods.keys() - model.pods.keys() or (envelope, token) != (model.envelope, model.token)
        if token != model.token:
            for pod in pods.values():
                pod.put_due = 0.0
        model.pods, model.token, model.envelope = pods, token, envelope
        if pods and (model.task is None or model.task.done()):
            model.task = asyncio.create_task(self._go_round(key, model))
        elif news:
            model.wake.set()

    @staticmethod
    def _kept(known: _Pod | None, target: Target) -> _Pod:
        if known is None or known.target.restarts != target.restarts or known.target.address != target.address:
            return _Pod(target)
        known.target = target
        return known

    def forget(self, key: Key) -> None:
        model = self._models.pop(key, None)
        if model and model.task:
            model.task.cancel()

    def forget_all(self) -> None:
        for key in list(self._models):
            self.forget(key)

    def seen(self, key: Key) -> Seen:
        model = self._models.get(key) or _Model()
        pods = model.pods
        return Seen(
            {uid: pod.report for uid, pod in pods.items() if pod.report is not None},
            {uid: pod.why for uid, pod in pods.items() if pod.report is None and pod.why and not pod.doubted},
            {uid: pod.why for uid, pod in pods.items() if pod.why and pod.doubted},
            {uid: pod.drift for uid, pod in pods.items() if pod.drift is not None},
        )

    def learn(self, key: Key) -> list[Round]:
        """The rounds since this was last asked, in order."""
        model = self._models.get(key)
        if model is None:
            return []
        rounds, model.rounds = model.rounds, []
        return rounds

    async def _go_round(self, key: Key, model: _Model) -> None:
        await asyncio.sleep(self._period * random.random() / 10)  # models that start together part
        while model.pods:
            started = self._clock()
            model.wake.clear()
            pods = list(model.pods.values())
            due = [pod for pod in pods if pod.due <= started]
            try:
                await asyncio.gather(*(self._visit(pod, model) for pod in due))
            except Exception:  # a bug here must not end the reading of a model unsaid
                log.exception("the round of %s failed", key)
            now = self._clock()
            fresh = {pod.target.uid: pod.report for pod in due if pod.report is not None and not pod.misses}
            model.rounds = [*model.rounds, Round(now, tuple(pod.target.uid for pod in pods), fresh)][-UNLEARNT:]
            self._changed(key)
            with contextlib.suppress(TimeoutError):  # no wait_for: Python 3.11's may forget that it was cancelled
                async with asyncio.timeout(max(0.05, started + self._period - now)):
                    await model.wake.wait()
                await asyncio.sleep(0.05)

    async def _visit(self, pod: _Pod, model: _Model) -> None:
        report = await self._read(pod)
        if report is None:
            return
        await self._share(pod, report, model)
        wanted = model.envelope
        if wanted is None or report.method == "None" or report.envelope == wanted:
            pod.drift, pod.refused, pod.puts_failed, pod.put_due = None, None, 0, 0.0
            return
        if pod.refused != wanted and pod.put_due <= self._clock() and self._may_put():
            await self._put(pod, wanted, model.token)

    async def _share(self, pod: _Pod, report: EngineReport, model: _Model) -> None:
        """Keeps the times that the engine has measured, or tells it those that another one has, once."""
        own = report.learned
        if own is None:
            return
        known = model.learned.get(own.key)
        if known is None or own.steps > known.steps:
            model.learned[own.key] = own
        elif own.steps < SHARED_STEPS <= known.steps and not pod.told and self._may_put():
            pod.told = True
            try:
                await self._engines.tell(pod.target.address, pod.target.port, model.token, known)
            except EngineError as problem:
                log.warning("%s: what its siblings measured did not arrive: %s", pod.target.name, problem)

    async def _read(self, pod: _Pod) -> EngineReport | None:
        """What the pod says, when it is believed. One missed answer is no outage: the report before it stands."""
        report: EngineReport | None
        doubt: str | None
        try:
            report = await self._engines.report(pod.target.address, pod.target.port)
            doubt, pod.history = judge(pod.target.uid, report, pod.history, self._clock())
        except BadReport as problem:
            report, doubt = None, str(problem)
        except EngineError as problem:
            pod.misses, pod.doubted, pod.why = pod.misses + 1, False, str(problem)
            pod.due = self._clock() + (problem.retry_after or self._delay(pod.misses))
            if pod.misses > 1:
                pod.report = None
            return None
        if doubt or report is None:
            pod.report, pod.misses, pod.doubted, pod.why, pod.due = None, pod.misses + 1, True, doubt or "", 0.0
            return None
        pod.report, pod.misses, pod.doubted, pod.why, pod.due = report, 0, False, "", 0.0
        return report

    def _delay(self, misses: int) -> float:
        """The first miss is followed up at once, later ones ever more seldom."""
        return 0.0 if misses < 3 else min(LAST_DELAY, self._period * 2.0 ** (misses - 2)) * (0.75 + random.random() / 2)

    async def _put(self, pod: _Pod, wanted: Envelope, token: str) -> None:
        target, now = pod.target, self._clock()
        drift = pod.drift or Drift(now, "")
        try:
            await self._engines.put(target.address, target.port, token, wanted)
            self._took()
            pod.puts_failed = 0
            if (report := await self._read(pod)) and report.envelope == wanted:
                pod.drift = None
            else:
                pod.drift = replace(drift, why=f"{target.name} took the settings and reports others")
                pod.put_due = now + self._delay(3)
        except EnvelopeRefused as problem:
            pod.refused, pod.drift = wanted, replace(drift, why=f"it refuses them: {problem}")
        except EngineError as problem:
            pod.puts_failed += 1
            pod.put_due = now + (problem.retry_after or self._delay(pod.puts_failed + 1))
            pod.drift = replace(drift, why=_meaning(problem))
        if pod.drift and pod.drift.why != drift.why:
            log.warning("%s holds other settings than it should: %s", target.name, pod.drift.why)


def _meaning(problem: EngineError) -> str:
    if isinstance(problem, TokenRefused):
        return f"it holds another admin token than the Secret, and reads the Secret again within minutes: {problem}"
    return str(problem)
