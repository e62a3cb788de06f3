"""A simulated cluster of one model: engines that come and go, a Service, and the operator's `decide` every few seconds.

The Service sends each request to any ready engine by chance, as a connection is. A new replica serves after its start
time; one that leaves ends what it has. What the operator sees of an engine is a report as a real one gives it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.speculation import Counters, EngineReport, Envelope
from pilotfish_operator import objects, plan
from pilotfish_operator.api import Spec
from pilotfish_operator.observe import Observed, Pod
from pilotfish_operator.scrape.findings import Seen
from pilotfish_operator.simulate.choosers import Chooser
from pilotfish_operator.simulate.engine import Answer, Engine
from pilotfish_operator.simulate.load import Arrival
from pilotfish_operator.simulate.machine import Machine

PERIOD = 3.0  # seconds between two looks of the operator
Replicas = Callable[[float], int]  # of a moment, by somebody who need not look


@dataclass(frozen=True)
class Trouble:
    """From `at` on for `seconds`: kind `lost` hides a pod's metrics, `failure` ends an engine with what it has. pod:
    counted from the oldest."""

    at: float
    kind: str
    seconds: float = 60.0
    pod: int = 0


@dataclass(frozen=True)
class Moment:
    """What was so at a look. wanted: replicas asked for."""

    at: float
    ready: int
    wanted: int
    concurrency: float
    tokens_per_second: float
    envelope: Envelope
    num_steps: int
    reasons: tuple[str, ...]


@dataclass
class Replica:
    uid: str
    engine: Engine
    ready_at: float
    leaving: bool = False


@dataclass
class Outcome:
    """pod_seconds: of all replicas, from their start to their end."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[Arrival] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    pod_seconds: float = 0.0
    tokens: float = 0.0
    changes: int = 0


class _Starts:
    """Makes replicas, each with dice of its own."""

    def __init__(
        self, machine: Machine, chooser: Callable[[Machine, Envelope], Chooser], seed: int, coarse: int
    ) -> None:
        self._machine, self._chooser, self._seed, self._coarse = machine, chooser, seed, coarse
        self._made = 0

    def replica(self, envelope: Envelope, ready_at: float) -> Replica:
        self._made += 1
        seed = self._seed * 1000 + self._made
        engine = Engine(self._machine, self._chooser(self._machine, envelope), seed, ready_at, self._coarse)
        return Replica(f"pod-{self._made}", engine, ready_at)


class Cluster:
    """chooser: makes one for each engine. replicas: None lets the operator decide them. coarse: as an Engine's."""

    def __init__(
        self,
        machine: Machine,
        spec: Spec,
        chooser: Callable[[Machine, Envelope], Chooser],
        seed: int,
        replicas: Replicas | None = None,
        coarse: int = 64,
    ) -> None:
        self._machine, self._spec, self._fixed = machine, spec, replicas
        self._starts, self._dice = _Starts(machine, chooser, seed, coarse), random.Random(seed)
        self._memory, self._envelope, self._now = plan.Memory(), objects.bounds(spec), 0.0
        self._replicas = list[Replica]()
        self._last_tokens = self._gone_tokens = 0.0
        self.outcome = Outcome()
        first = replicas(0.0) if replicas else spec.autoscaling.min_replicas if spec.autoscaling else spec.replicas or 1
        for _ in range(first):
            self._start(ready_at=0.0)

    def run(self, arrivals: Iterable[Arrival], seconds: float, troubles: Sequence[Trouble] = ()) -> Outcome:
        """Lives through a load, and then on until all is answered, an hour at most."""
        coming, pending = iter(arrivals), None
        while self._now < seconds or (self._busy() and self._now < seconds + 3600):
            end = self._now + PERIOD
            while (pending := pending or next(coming, None)) is not None and pending.at < end:
                self._route(pending)
                pending = None
            for replica in self._replicas:
                replica.engine.run(end)
                self._collect(replica)
            self._now = end
            self._end_what_left(troubles)
            self._look(troubles)
        self.outcome.pod_seconds += sum(self._now - r.ready_at + self._machine.start_seconds for r in self._replicas)
        return self.outcome

    def _busy(self) -> bool:
        return any(r.engine.running or r.engine.waiting or r.engine.inbox for r in self._replicas)

    def _start(self, ready_at: float) -> None:
        self._replicas.append(self._starts.replica(self._envelope, ready_at))

    def _ready(self) -> list[Replica]:
        return [r for r in self._replicas if r.ready_at <= self._now and not r.leaving]

    def _route(self, arrival: Arrival) -> None:
        ready = self._ready()
        if ready:
            self._dice.choice(ready).engine.inbox.append(arrival)
        else:
            self.outcome.failed.append(arrival)

    def _collect(self, replica: Replica) -> None:
        self.outcome.answers += replica.engine.answers
        replica.engine.answers.clear()

    def _end_what_left(self, troubles: Sequence[Trouble]) -> None:
        for trouble in troubles:
            if trouble.kind == "failure" and self._now - PERIOD <= trouble.at < self._now and self._ready():
                broken = self._ready()[min(trouble.pod, len(self._ready()) - 1)]
                self.outcome.failed += broken.engine.held()
                self._remove(broken)
                self._start(self._now + self._machine.start_seconds)
        for replica in list(self._replicas):
            engine = replica.engine
            if replica.leaving and not (engine.running or engine.waiting or engine.inbox):
                self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        self._gone_tokens += replica.engine.counts.tokens
        self.outcome.pod_seconds += self._now - replica.ready_at + self._machine.start_seconds

    def _look(self, troubles: Sequence[Trouble]) -> None:
        hidden = {t.pod for t in troubles if t.kind == "lost" and t.at <= self._now < t.at + t.seconds}
        ready = self._ready()
        reports = {r.uid: report(r.engine, self._envelope) for n, r in enumerate(ready) if n not in hidden}
        unread = {r.uid: "no answer" for n, r in enumerate(ready) if n in hidden}
        staying = [r for r in self._replicas if not r.leaving]
        pods = tuple(_pod(r, r in ready) for r in staying)
        observed = Observed(len(staying), len(pods), None, None, None, pods, True, None, Seen(reports, unread))
        self._memory = plan.learn(self._memory, observed, self._now)
        decision, self._memory = plan.decide(self._spec, observed, self._memory, self._now)
        wanted = self._fixed(self._now) if self._fixed else decision.replicas
        self._scale(staying, wanted)
        if decision.envelope != self._envelope and not self._fixed:
            self._envelope = decision.envelope
            self.outcome.changes += 1
        for replica in ready:
            chooser = replica.engine.chooser
            if isinstance(chooser, Controller) and chooser.envelope != self._envelope:
                chooser.set_envelope(self._envelope)
        self._note(decision, ready, wanted)

    def _scale(self, staying: list[Replica], wanted: int) -> None:
        for _ in range(wanted - len(staying)):
            self._start(self._now + self._machine.start_seconds)
        youngest = sorted(staying, key=lambda r: -r.ready_at)
        for replica in youngest[: max(0, len(staying) - wanted)]:
            replica.leaving = True
            if replica.ready_at > self._now:
                replica.ready_at = self._now  # it was never ready: what was paid is its start
                self._remove(replica)

    def _note(self, decision: plan.Decision, ready: list[Replica], wanted: int) -> None:
        tokens = self._gone_tokens + sum(r.engine.counts.tokens for r in self._replicas)
        runs = [r.engine.chooser.effective().num_steps for r in ready if isinstance(r.engine.chooser, Controller)]
        self.outcome.moments.append(
            Moment(
                at=self._now,
                ready=len(ready),
                wanted=wanted,
                concurrency=float(sum(r.engine.running + len(r.engine.waiting) for r in ready)),
                tokens_per_second=(tokens - self._last_tokens) / PERIOD,
                envelope=self._envelope,
                num_steps=max(runs, default=0),
                reasons=decision.reasons,
            )
        )
        self._last_tokens, self.outcome.tokens = tokens, tokens


def _pod(replica: Replica, ready: bool) -> Pod:
    return Pod(replica.uid, replica.uid, "simulated", 0, "", ready, False, None, 0, None)


def report(engine: Engine, envelope: Envelope) -> EngineReport:
    """What this engine would answer to the operator."""
    counts, controller = engine.counts, engine.chooser
    own = controller
    if not isinstance(own, Controller):
        own = Controller(Envelope(num_steps=0), engine.machine.profile, engine.machine.max_running_requests)
    return EngineReport(
        method="simulated",
        effective=own.effective(),
        envelope=own.envelope if own is controller else envelope,
        running=engine.running,
        waiting=len(engine.waiting),
        context_tokens=engine.context_tokens,
        max_running_requests=engine.machine.max_running_requests,
        concurrency_seconds_total=counts.concurrency_seconds,
        accept_length=own.accept_length,
        accept=own.accept,
        counters=Counters(
            steps=int(counts.steps), plain_steps=int(counts.plain_steps), emitted_tokens=int(counts.tokens)
        ),
        profile=engine.machine.told or engine.machine.profile,
        reason=own.reason,
        findings=own.findings,
        learned=own.learned if own is controller else None,
    )
