"""One simulated engine: admits, puts prompts through in chunks, and decodes a batch step by step.

Between two events (a request comes or ends) many steps are alike. Then one stands for several: its settings hold, and
the controller hears of it once. Right after anything has changed every step is one, then they double up to `coarse`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pilotfish_engine.contract.goodput import Acceptance, costs, expected_yield
from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_operator.simulate.choosers import Chooser, Oracle
from pilotfish_operator.simulate.load import Arrival
from pilotfish_operator.simulate.machine import Machine


@dataclass(slots=True, eq=False)
class Active:
    """A request in an engine. unread: prompt tokens to put through; ends_at: of its lane's progress."""

    arrival: Arrival
    unread: int
    admitted_at: float = 0.0
    first_at: float = -1.0
    ends_at: float = 0.0

    @property
    def size(self) -> int:
        return self.arrival.prompt + self.arrival.output


class Lane:
    """The decoding requests whose drafts are accepted alike, and so all move on equally fast. progress: tokens that
    one of them would have been given since the engine's start."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.progress = 0.0
        self._ends: list[tuple[float, int, Active]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, one: Active) -> None:
        self._added += 1
        one.ends_at = self.progress + one.arrival.output - 1
        heappush(self._ends, (one.ends_at, self._added, one))

    @property
    def to_come(self) -> float:
        """Tokens of the one that ends first."""
        return self._ends[0][0] - self.progress if self._ends else math.inf

    def ended(self) -> list[Active]:
        found = []
        while self._ends and self._ends[0][0] <= self.progress + 1e-9:
            found.append(heappop(self._ends)[2])
        return found

    def all(self) -> list[Active]:
        return [one for _, _, one in self._ends]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request got, in seconds of simulated time."""

    arrival: Arrival
    admitted_at: float
    first_at: float
    ended_at: float


@dataclass
class Counts:
    """Since the start. seconds: of decode steps, by the settings that ran."""

    tokens: float = 0.0
    steps: float = 0.0
    plain_steps: float = 0.0
    concurrency_seconds: float = 0.0
    seconds: dict[Settings, float] = field(default_factory=dict)


@dataclass
class _Rows:
    """KV rows. held: for all that was admitted; read: by the next step."""

    held: int = 0
    read: float = 0.0


@dataclass
class _Stride:
    """Steps that are taken at once while nothing happens: ever more, to so many."""

    most: int
    now: int = 1


class Engine:
    """again: returns the next request of a user who was just answered, for closed loads. coarse: 1 is exact."""

    def __init__(
        self,
        machine: Machine,
        chooser: Chooser,
        seed: int,
        now: float = 0.0,
        coarse: int = 64,
        again: Callable[[float], Arrival | None] | None = None,
    ) -> None:
        self.machine, self.chooser, self.now = machine, chooser, now
        self.counts, self.answers = Counts(), list[Answer]()
        self.waiting, self.inbox = deque[Active](), deque[Arrival]()
        self._prompts, self._lanes = list[Active](), dict[str, Lane]()
        self._costs, self._dice, self._again = costs(machine.profile), random.Random(seed), again
        self._rows, self._stride = _Rows(), _Stride(coarse)

    @property
    def running(self) -> int:
        return len(self._prompts) + self._decoding

    @property
    def context_tokens(self) -> int:
        return int(self._rows.read)

    @property
    def _decoding(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def held(self) -> list[Arrival]:
        """Returns what it would lose if it ended now."""
        decoding = [one for lane in self._lanes.values() for one in lane.all()]
        return [*(one.arrival for one in (*self._prompts, *decoding, *self.waiting)), *self.inbox]

    def run(self, until: float) -> None:
        """Lives on to a moment; a step that is under way there ends behind it."""
        while self.now < until:
            self._take_in()
            if self._prompts:
                self._extend()
            elif not self._decoding:
                self._pass((min(until, self.inbox[0].at) if self.inbox else until) - self.now)
                continue
            if self._decoding:
                self._decode(until)

    def _pass(self, seconds: float) -> None:
        self.counts.concurrency_seconds += seconds * (self.running + len(self.waiting))
        self.now += seconds

    def _take_in(self) -> None:
        while self.inbox and self.inbox[0].at <= self.now:
            arrival = self.inbox.popleft()
            self.waiting.append(Active(arrival, arrival.prompt))
        most, room = self.machine.max_running_requests, self.machine.kv_tokens
        while self.waiting and self.running < most:
            first = self.waiting[0]
            if self.running and self._rows.held + first.size > room:
                return
            self._rows.held += first.size
            first.admitted_at = self.now
            self._prompts.append(self.waiting.popleft())

    def _extend(self) -> None:
        """A pass over prompts: half of a chunk is the oldest one's, the rest the least left's, as in the engine."""
        budget, tokens, first = self.machine.chunk_size, 0, self._prompts[0]
        shares = [(first, (budget + 1) // 2), *((one, budget) for one in sorted(self._prompts, key=lambda o: o.unread))]
        for one, most in shares:
            share = min(one.unread, most, budget)
            one.unread -= share
            budget -= share
            tokens += share
        self._rows.read += tokens
        self._pass(self._costs.step_ms(PLAIN, tokens, self.context_tokens) * self._luck() / 1000)
        for one in [one for one in self._prompts if not one.unread]:
            self._prompts.remove(one)
            one.first_at, self.counts.tokens, self._rows.read = self.now, self.counts.tokens + 1, self._rows.read + 1
            kind = one.arrival.kind
            if kind.name not in self._lanes:
                self._lanes[kind.name], self._stride.now = Lane(kind.acceptance), 1
            self._lanes[kind.name].add(one)
            self._retire(self._lanes[kind.name])

    def _decode(self, until: float) -> None:
        lanes = [lane for lane in self._lanes.values() if len(lane)]
        batch, context = sum(len(lane) for lane in lanes), self.context_tokens
        if isinstance(self.chooser, Oracle):
            self.chooser.acceptance = mixed([(lane.acceptance, len(lane)) for lane in lanes])
        settings = self.chooser.choose(batch, context)
        ms = self._costs.step_ms(settings, batch, context) * self._luck()
        each = [1 + expected_yield(lane.acceptance, settings) for lane in lanes]
        step = (ms + self.machine.host_ms) / 1000
        steps = self._alike(settings, min(lane.to_come / e for lane, e in zip(lanes, each, strict=True)), step, until)
        accepted = self._accepted(settings, lanes)
        self._pass(steps * step)
        counts = self.counts
        counts.seconds[settings] = counts.seconds.get(settings, 0.0) + steps * step
        if settings.num_steps:
            counts.steps += steps * batch
        else:
            counts.plain_steps += steps * batch
        for lane, tokens in zip(lanes, each, strict=True):
            counts.tokens += steps * tokens * len(lane)
            self._rows.read += steps * tokens * len(lane)
            lane.progress += steps * tokens
            self._retire(lane)
        self.chooser.observe(settings, context, accepted, ms, self.machine.host_ms)

    def _alike(self, settings: Settings, first_end: float, step: float, until: float) -> int:
        """Returns how many steps from here on are alike. first_end: steps until a request ends."""
        if self._stride.most == 1 or self._prompts:
            return 1
        self._stride.now = min(self._stride.most, self._stride.now * 2) if settings in self.counts.seconds else 1
        event = min(until, self.inbox[0].at) if self.inbox else until
        return max(1, min(self._stride.now, math.ceil(first_end), math.ceil((event - self.now) / step)))

    def _retire(self, lane: Lane) -> None:
        for one in lane.ended():
            over = lane.progress - one.ends_at
            self.counts.tokens -= over
            self._rows.read -= one.size + over
            self._rows.held -= one.size
            self.answers.append(Answer(one.arrival, one.admitted_at, one.first_at, self.now))
            if self._again and (follows := self._again(self.now)) is not None:
                self.inbox.append(follows)

    def _accepted(self, settings: Settings, lanes: Sequence[Lane]) -> list[int]:
        found: list[int] = []
        for lane in lanes:
            if settings.num_steps == 0:
                found += [1] * len(lane)
            else:
                lengths, weights = curve(lane.acceptance, settings)
                found += self._dice.choices(lengths, weights, k=len(lane))
        return found

    def _luck(self) -> float:
        return max(0.5, self._dice.gauss(1, self.machine.jitter))


_CURVES: dict[tuple[Acceptance, Settings], tuple[list[int], list[float]]] = {}


def curve(acceptance: Acceptance, settings: Settings) -> tuple[list[int], list[float]]:
    """Returns the lengths that a step may commit and their probabilities. Their mean is 1 + expected_yield."""
    found = _CURVES.get((acceptance, settings))
    if found is None:
        depth = settings.num_steps
        base = [acceptance.at_least(d) for d in range(1, depth + 1)]
        if settings.topk > 1:
            width = 1 + acceptance.siblings * math.log(settings.topk)
            reach, base = 1.0, []
            for d in range(1, depth + 1):
                reach *= 1 - (1 - acceptance.conditional(d)) ** width
                base.append(reach)
            total, wanted = sum(base), expected_yield(acceptance, settings)
            base = [p * wanted / total for p in base] if total else base
        ends = [*(a - b for a, b in zip([1.0, *base], base, strict=False)), base[-1]]
        found = _CURVES[acceptance, settings] = (list(range(1, depth + 2)), [max(0.0, p) for p in ends])
    return found


def mixed(mix: Sequence[tuple[Acceptance, int]]) -> Acceptance:
    """Returns the mean of several, by their numbers."""
    total = sum(number for _, number in mix) or 1
    depths = range(1, 9)
    return Acceptance(tuple(sum(a.at_least(d) * n for a, n in mix) / total for d in depths))
