"""Engines made of a cost profile and an acceptance: time is what the profile says, drafts are accepted by dice."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.goodput import (
    Acceptance,
    candidates,
    expected_yield,
    spec_rate,
    spec_step_ms,
)
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, Envelope, Settings

CONTEXT = 500  # tokens of each request

H200 = CostProfile(
    verify_ms=(
        (1, 4.084), (2, 4.095), (4, 4.084), (8, 4.112), (16, 4.159), (32, 4.253), (64, 4.380), (128, 4.894),
        (256, 7.091), (512, 12.495), (1024, 23.549),
    ),
    draft_ms=((1, 0.2), (64, 0.3), (256, 0.6)),
    extend_ms=((1, 0.2), (1024, 0.8)),
    kv_ms_per_token=3e-5,
    overhead_ms=0.2,
)  # fmt: skip
# an 8B model in bfloat16 as its steps were measured, attention and what the host does between them included
H200_8B = CostProfile(
    verify_ms=(
        (1, 4.54), (16, 4.64), (32, 4.77), (64, 4.96), (128, 5.6), (256, 8.06), (512, 13.97), (1024, 26.05),
        (1536, 38.0),
    ),
    draft_ms=((1, 0.23), (256, 0.48)),
    extend_ms=((1, 0.25), (1536, 1.2)),
    kv_ms_per_token=3.28e-5,
    overhead_ms=0.9,
    plain_overhead_ms=0.4,
)  # fmt: skip
CPU_NGRAM = CostProfile(
    verify_ms=((1, 12.0), (2, 14.0), (4, 17.0), (8, 24.0), (16, 40.0), (32, 70.0), (64, 130.0), (256, 500.0)),
    overhead_ms=0.3,
)
SMALL = CostProfile(
    verify_ms=(
        (1, 0.6), (4, 0.61), (8, 0.62), (16, 0.65), (32, 0.68), (64, 0.75), (128, 0.9), (256, 1.3), (512, 2.0),
        (1024, 3.5), (4096, 13.0),
    ),
    draft_ms=((1, 0.07), (64, 0.08), (256, 0.12)),
    extend_ms=((1, 0.09), (1024, 0.3)),
    kv_ms_per_token=1e-6,
    overhead_ms=0.1,
    plain_overhead_ms=0.05,
)  # fmt: skip
PROFILES = {"h200": H200, "cpu_ngram": CPU_NGRAM}


def traffic(accept_length: float) -> Acceptance:
    """Drafts of which a chain of five commits `accept_length` tokens a step."""
    return Acceptance.from_length(accept_length, 5) if accept_length > 1 else Acceptance((0.0,))


@dataclass(frozen=True)
class Step:
    settings: Settings
    ms: float
    tokens: int


class Prepared:
    """Steps as graphs: the first two of given settings take `step_ms` each beside their own time."""

    def __init__(self, step_ms: float) -> None:
        self._step_ms = step_ms
        self._runs: Counter[Settings] = Counter()

    def missing_ms(self, settings: Settings) -> float:
        return self._step_ms * max(0, 2 - self._runs[settings])

    def run(self, settings: Settings) -> float:
        missing = self._step_ms if self._runs[settings] < 2 else 0.0
        self._runs[settings] += 1
        return missing


class Blind(Prepared):
    """Of which the controller is not told."""

    def missing_ms(self, settings: Settings) -> float:
        return 0.0


@dataclass(frozen=True)
class Host:
    """What is beside the steps. ms: between two. prepared: what was recorded before; None: nothing has to be. delay: by
    how many steps results come late."""

    ms: float | None = None
    prepared: Prepared | None = None
    delay: int = 0


NO_HOST = Host()


def simulate(
    controller: Controller,
    profile: CostProfile,
    acceptance: Callable[[int], Acceptance],
    batch: int,
    steps: int,
    seed: int = 0,
    host: Host = NO_HOST,
) -> list[Step]:
    """`steps` decode steps of an engine whose true costs are `profile`."""
    dice, done, late = random.Random(seed), list[Step](), []
    prepared = host.prepared or Prepared(0.0)
    for index in range(steps):
        settings = controller.choose(batch, batch * CONTEXT, prepared.missing_ms)
        extra = prepared.run(settings)
        ms = spec_step_ms(profile, batch, batch * CONTEXT, settings)
        accept_lens = [accept_len(dice, acceptance(index), settings) for _ in range(batch)]
        late.append((settings, batch * CONTEXT, accept_lens, None if extra else ms, host.ms))
        if len(late) > host.delay:
            controller.observe(*late.pop(0))
        done.append(Step(settings, ms + extra + (host.ms or 0.0), sum(accept_lens)))
    return done


def accept_len(dice: random.Random, acceptance: Acceptance, settings: Settings) -> int:
    for depth in range(1, settings.num_steps + 1):
        miss = 1 - acceptance.conditional(depth)
        if dice.random() < miss ** (1 + acceptance.siblings * math.log(settings.topk)):
            return depth
    return settings.num_steps + 1


def regret(
    controller: Controller | Settings,
    true: CostProfile,
    acceptance: Acceptance,
    batch: int,
    tokens: tuple[int, int],
    seed: int = 0,
) -> tuple[float, float]:
    """Tokens/s, without the dice's luck, while each request grows from tokens[0] to tokens[1]; and those promised at
    the end over those then. A step's time varies by a hundredth. controller: or settings that never change."""
    dice, made, took, length = random.Random(seed), 0.0, 0.0, float(tokens[0])
    promised = now = 1.0
    while length < tokens[1]:
        context = int(length * batch)
        chosen = controller if isinstance(controller, Settings) else controller.choose(batch, context)
        ms, each = spec_step_ms(true, batch, context, chosen), 1 + expected_yield(acceptance, chosen)
        if isinstance(controller, Controller):
            accept_lens = [accept_len(dice, acceptance, chosen) for _ in range(batch)]
            controller.observe(chosen, context, accept_lens, ms * dice.gauss(1, 0.01))
            settings, choice = controller.effective(), controller.choice
            if choice is not None and chosen.num_steps == settings.num_steps == choice.settings.num_steps:
                promised, now = choice.tokens_per_second, 1000 * batch * each / ms
        made, took, length = made + batch * each, took + ms, length + each
    return 1000 * made / took, promised / now


def rate(steps: list[Step]) -> float:
    """Tokens/s."""
    return 1000 * sum(step.tokens for step in steps) / sum(step.ms for step in steps)


def best_static(profile: CostProfile, acceptance: Acceptance, batch: int, envelope: Envelope) -> float:
    """Tokens/s of the best single setting, plain included, to somebody who knows costs and acceptance."""
    settings = (PLAIN, *candidates(envelope))
    return max(spec_rate(profile, acceptance, batch, batch * CONTEXT, s) for s in settings)
