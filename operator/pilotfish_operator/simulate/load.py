"""Makes loads: when requests come, how long they are, and how well a draft guesses their answers. Seeded dice.

A load is phases behind each other. In each, requests come at random at a rate that goes from one number to another, of
kinds that are mixed by weight. Or a number of users who always ask anew (`users`), for points that are steady.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from pilotfish_engine.contract.goodput import Acceptance


@dataclass(frozen=True)
class Kind:
    """Requests that are alike. prompt, output: mean tokens. spread: of their logarithm, 0 all equal, 1 heavy tails.
    acceptance: of a draft for them."""

    name: str
    prompt: int
    output: int
    acceptance: Acceptance
    spread: float = 0.0


@dataclass(frozen=True)
class Phase:
    """seconds long; requests a second from `start` to `end`, or `users` at once. kinds: with their weights."""

    seconds: float
    kinds: tuple[tuple[Kind, float], ...]
    start: float = 0.0
    end: float = 0.0
    users: int = 0

    def rate(self, since: float) -> float:
        return self.start + (self.end - self.start) * since / self.seconds

    def draw(self, dice: random.Random) -> Kind:
        return dice.choices([kind for kind, _ in self.kinds], [weight for _, weight in self.kinds])[0]


@dataclass(frozen=True)
class Load:
    name: str
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def at(self, moment: float) -> tuple[Phase, float]:
        """Returns the phase of a moment and the seconds since its begin; the last one goes on for ever."""
        for phase in self.phases:
            if moment < phase.seconds:
                return phase, moment
            moment -= phase.seconds
        return self.phases[-1], self.phases[-1].seconds

    def rate(self, moment: float) -> float:
        phase, since = self.at(moment)
        return phase.rate(since)


@dataclass(frozen=True)
class Arrival:
    """at: seconds. prompt, output: tokens."""

    at: float
    prompt: int
    output: int
    kind: Kind


def request(kind: Kind, at: float, dice: random.Random) -> Arrival:
    """Returns one of a kind: a log-normal length around its means."""
    long = [
        max(1, round(mean * math.exp(kind.spread * dice.gauss(0, 1) - kind.spread**2 / 2))) if kind.spread else mean
        for mean in (kind.prompt, kind.output)
    ]
    return Arrival(at, long[0], long[1], kind)


def arrivals(load: Load, seed: int) -> Iterator[Arrival]:
    """Yields the requests of the open phases in order of time. They come by thinning a Poisson process."""
    dice, begin = random.Random(seed), 0.0
    for phase in load.phases:
        most, at = max(phase.start, phase.end), 0.0
        while most > 0:
            at += dice.expovariate(most)
            if at >= phase.seconds:
                break
            if dice.random() * most <= phase.rate(at):
                yield request(phase.draw(dice), begin + at, dice)
        begin += phase.seconds


def recorded(lines: Iterable[str], kind: Kind) -> list[Arrival]:
    """Returns the requests of JSON lines {"at": seconds, "prompt": tokens, "output": tokens}. Raises ValueError with
    the line's number; times that run backwards are refused too."""
    found: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            arrival = Arrival(float(entry["at"]), int(entry["prompt"]), int(entry["output"]), kind)
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"line {number} is no request: {problem}") from problem
        if not 0 <= arrival.at < math.inf or arrival.prompt < 1 or arrival.output < 1:
            raise ValueError(f"line {number}: at {arrival.at}, {arrival.prompt} and {arrival.output} tokens cannot be")
        if found and arrival.at < found[-1].at:
            raise ValueError(f"line {number}: at {arrival.at} is before the line above")
        found.append(arrival)
    return found


CHAT = Kind("chat", 250, 200, Acceptance.from_length(2.0), 0.6)
CODE = Kind("code", 800, 250, Acceptance.from_length(3.2), 0.6)
POOR = Kind("poor", 250, 200, Acceptance((0.15, 0.02)), 0.6)
_HOURS = (0.15, 0.1, 0.07, 0.05, 0.05, 0.08, 0.15, 0.3, 0.55, 0.8, 0.95, 1.0, 0.9, 0.92, 1.0, 0.97, 0.9, 0.8, 0.75, 0.7,
          0.6, 0.45, 0.3, 0.2)  # fmt: skip


def _only(kind: Kind) -> tuple[tuple[Kind, float], ...]:
    return ((kind, 1.0),)


def _steps(peak: float) -> Load:
    return Load("steps", tuple(Phase(600, _only(CHAT), peak * s, peak * s) for s in (0.1, 1.0, 0.3, 0.6, 0.1)))


def _ramp(peak: float) -> Load:
    return Load("ramp", (Phase(1200, _only(CHAT), 0.05 * peak, peak), Phase(1200, _only(CHAT), peak, 0.05 * peak)))


def _bursts(peak: float) -> Load:
    low, high = Phase(300, _only(CHAT), 0.1 * peak, 0.1 * peak), Phase(60, _only(CHAT), peak, peak)
    return Load("bursts", (low, high) * 6)


def _day(peak: float) -> Load:
    around = zip(_HOURS, (*_HOURS[1:], _HOURS[0]), strict=True)
    mix = ((CHAT, 0.7), (CODE, 0.3))
    return Load("day", tuple(Phase(3600, mix, peak * a, peak * b) for a, b in around))


def _tails(peak: float) -> Load:
    heavy = replace(CHAT, name="heavy", spread=1.4)
    return Load("tails", (Phase(3600, _only(heavy), 0.6 * peak, 0.6 * peak),))


def _mixed(peak: float) -> Load:
    mix = ((CHAT, 0.4), (CODE, 0.3), (POOR, 0.3))
    return Load("mixed", (Phase(1800, mix, 0.2 * peak, peak), Phase(1800, mix, peak, 0.2 * peak)))


def _noon(peak: float) -> Load:
    half = peak / 2
    return Load("noon", (Phase(1800, _only(CODE), half, half), Phase(1800, _only(POOR), half, half)))


LOADS: dict[str, Callable[[float], Load]] = {
    "steps": _steps, "ramp": _ramp, "bursts": _bursts, "day": _day, "tails": _tails, "mixed": _mixed, "noon": _noon,
}  # fmt: skip


def users(number: int, kind: Kind, seconds: float) -> Load:
    """Returns a steady load: so many users, each of whom asks again when answered."""
    return Load(f"{number} users", (Phase(seconds, _only(kind), users=number),))
