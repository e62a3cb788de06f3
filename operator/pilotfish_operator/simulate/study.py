"""Holds Pilotfish beside plain decoding, every static setting, and an oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.goodput import Acceptance, candidates, costs
from pilotfish_engine.contract.speculation import PLAIN, Envelope, Settings
from pilotfish_operator import objects
from pilotfish_operator.api import Spec
from pilotfish_operator.simulate.choosers import Chooser, Oracle, Static
from pilotfish_operator.simulate.cluster import Cluster, Outcome, Trouble
from pilotfish_operator.simulate.engine import Engine
from pilotfish_operator.simulate.figures import Figures, Promise, aligned, figures
from pilotfish_operator.simulate.load import Arrival, Kind, request
from pilotfish_operator.simulate.machine import Machine

TURNS = 6  # of each user at least
LEFT_OUT = 2.0  # seconds at a steady point before it is measured: what learning takes


def short(settings: Settings) -> str:
    """Returns `plain`, `K3` of a chain, `K3 top-2 8` of a tree."""
    if settings == PLAIN:
        return "plain"
    chain = settings.topk == 1 and settings.num_draft_tokens == settings.num_steps + 1
    tree = "" if chain else f" top-{settings.topk} {settings.num_draft_tokens}"
    return f"K{settings.num_steps}{tree}"


@dataclass(frozen=True)
class Point:
    """Tokens/s with so many users at once, by the name of the policy. promised: the controller's own last word."""

    users: int
    accepted: float
    rates: dict[str, float]
    promised: float

    @property
    def best_static(self) -> float:
        return max(rate for name, rate in self.rates.items() if name not in ("pilotfish", "oracle"))

    @property
    def of_best_static(self) -> float:
        return self.rates["pilotfish"] / self.best_static


@dataclass(frozen=True)
class Traffic:
    """accepted: the probability that a draft token is right, given that those before it were. prompt: tokens."""

    accepted: float
    prompt: int = 128


def steady(
    machine: Machine,
    envelope: Envelope,
    users: int,
    traffic: Traffic,
    seconds: float,
    seed: int,
    statics: bool = True,
) -> Point:
    """Returns what every policy gives, exactly: step by step."""
    accepted = traffic.accepted
    kind = Kind("steady", traffic.prompt, 400, Acceptance(tuple(accepted**d for d in range(1, 9))), 0.5)
    controller = Controller(envelope, machine.told or machine.profile, machine.max_running_requests)
    oracle = Oracle(costs(machine.profile), envelope, machine.host_ms)
    options = (PLAIN, *candidates(envelope)) if statics else (PLAIN,)
    choosers: dict[str, Chooser] = {short(settings): Static(settings) for settings in options}
    choosers |= {"oracle": oracle, "pilotfish": controller}
    rates = {name: closed(machine, chooser, kind, users, seconds, seed) for name, chooser in choosers.items()}
    choice = controller.choice
    return Point(users, accepted, rates, choice.tokens_per_second if choice else 0.0)


def closed(machine: Machine, chooser: Chooser, kind: Kind, users: int, seconds: float, seed: int) -> float:
    """Returns the tokens/s of so many users. Each asks again when answered."""
    dice = random.Random(seed)
    coarse = 1 if isinstance(chooser, Controller) else 16
    engine = Engine(machine, chooser, seed, coarse=coarse, again=lambda now: request(kind, now, dice))
    for number in range(users):  # as if they had begun at different times
        begun = Arrival(0.0, kind.prompt, kind.output - number * (kind.output - 10) // users, kind)
        engine.inbox.append(begun)
    engine.run(LEFT_OUT)
    before, since = engine.counts.tokens, engine.now
    engine.run(LEFT_OUT + seconds)
    while len(engine.answers) < TURNS * users:  # each asks in waves, and a part of one says little
        engine.run(engine.now + 1)
    return (engine.counts.tokens - before) / (engine.now - since)


def points(rows: Sequence[Point]) -> str:
    """Returns steady points one a line. says: the controller, of decoding alone, without the time that prompts take."""
    names = list(rows[0].rates)
    cells = [["users", "accepted", *names, "of best static", "of oracle", "says"]]
    cells += [
        [str(row.users), f"{row.accepted:g}", *(f"{row.rates[name]:.0f}" for name in names),
         f"{row.of_best_static:.3f}", f"{row.rates['pilotfish'] / row.rates['oracle']:.3f}", f"{row.promised:.0f}"]
        for row in rows
    ]  # fmt: skip
    return aligned(cells)


@dataclass(frozen=True)
class Study:
    """A machine, the resource that is served on it, and the requests. coarse: as an Engine's."""

    machine: Machine
    spec: Spec
    requests: Sequence[Arrival]
    seconds: float
    promise: Promise
    seed: int = 0
    coarse: int = 64
    troubles: tuple[Trouble, ...] = ()

    @property
    def _envelope(self) -> Envelope:
        return objects.bounds(self.spec)

    def pilotfish(self) -> Outcome:
        """The engines' controller and the operator's `decide`."""

        def make(machine: Machine, envelope: Envelope) -> Chooser:
            return Controller(envelope, machine.told or machine.profile, machine.max_running_requests)

        cluster = Cluster(self.machine, self.spec, make, self.seed, coarse=self.coarse)
        return cluster.run(self.requests, self.seconds, self.troubles)

    def fixed(self, settings: Settings, replicas: int) -> Outcome:
        """Settings and replicas as flags and a manifest have them."""
        cluster = Cluster(
            self.machine, self.spec, lambda _m, _e: Static(settings), self.seed, lambda _: replicas, self.coarse
        )
        return cluster.run(self.requests, self.seconds, self.troubles)

    def same_replicas(self, outcome: Outcome, settings: Settings | None) -> Outcome:
        """The replicas of another outcome at each moment, and settings: None are an oracle's."""
        moments = outcome.moments

        def make(machine: Machine, envelope: Envelope) -> Chooser:
            return Static(settings) if settings else Oracle(costs(machine.profile), self._envelope, machine.host_ms)

        def replicas(moment: float) -> int:
            return moments[min(len(moments) - 1, max(0, round(moment / 3.0) - 1))].wanted

        cluster = Cluster(self.machine, self.spec, make, self.seed, replicas, self.coarse)
        return cluster.run(self.requests, self.seconds, self.troubles)

    def rows(self, statics: bool = True) -> tuple[list[Figures], Outcome]:
        """Pilotfish; oracle, plain and each static setting with Pilotfish's replicas; and fixed configurations: each
        static setting with the fewest replicas that keep the promise as often."""
        own, gpus = self.pilotfish(), self.machine.gpus
        found = [figures("pilotfish", own, self.promise, gpus)]
        found.append(figures("oracle, same replicas", self.same_replicas(own, None), self.promise, gpus))
        options = (PLAIN, *candidates(self._envelope)) if statics else (PLAIN,)
        for settings in options:
            there = self.same_replicas(own, settings)
            found.append(figures(f"{short(settings)}, same replicas", there, self.promise, gpus))
        bars = found[0].attained
        most = self.spec.autoscaling.max_replicas if self.spec.autoscaling else self.spec.replicas or 1
        for settings in options:
            for replicas in range(1, most + 1):
                row = figures(f"{short(settings)} × {replicas}", self.fixed(settings, replicas), self.promise, gpus)
                if row.attained >= bars or replicas == most:
                    found.append(row)
                    break
        return found, own
