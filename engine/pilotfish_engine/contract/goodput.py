"""Cost profile + acceptance → the settings, threshold, speed and capacity to expect. Pure arithmetic over plain data.

Used by each engine's controller at every few steps and by the operator for a whole model, so that both decide alike.
Knows nothing about time, engines, pods or how the numbers were measured. Milliseconds of a step at batch `b` with
`context_tokens` KV rows read in all, for `num_steps` k, `topk` t and `num_draft_tokens` n (root included):

    plain step   verify_ms(b) + kv_ms_per_token · context_tokens + plain_overhead_ms                       1 token each
    spec step    k · draft_ms(b·t) + verify_ms(b·n) + kv_ms_per_token · context_tokens
                 + extend_ms(b·(k+1)) + overhead_ms                                         1 + expected_yield each

Rates are tokens per second of the whole batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from pilotfish_engine.contract import reason
from pilotfish_engine.contract.speculation import PLAIN, CostProfile, Envelope, Settings

MARGIN = 0.01  # speculation must beat plain by more than this share: below it the estimates' noise decides
SIBLINGS = 0.5
_TOPKS = (1, 2, 4, 8)
_TREE_SIZES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Acceptance:
    """accept[d-1]: probability that a step of one request accepts at least d draft tokens of a chain (topk 1), a step
    that found nothing to draft counting as none accepted. Depths past the end keep the last conditional probability.

    siblings: how much the further candidates of a depth catch. Where the first alone is accepted with probability a,
    one of the best t is with 1 - (1 - a)^(1 + siblings · ln t); 0 says that they catch nothing.

    Values are clipped to [0, 1] and made non-increasing. Raises ValueError on NaN or a negative `siblings`.
    """

    accept: tuple[float, ...]
    siblings: float = SIBLINGS

    def __post_init__(self) -> None:
        if any(math.isnan(p) for p in self.accept) or not self.siblings >= 0:
            raise ValueError(f"acceptance {self.accept} with siblings {self.siblings}: probabilities and a number ≥ 0")
        clipped = (min(1.0, max(0.0, p)) for p in self.accept)
        object.__setattr__(self, "accept", tuple(accumulate(clipped, min)))

    @classmethod
    def from_length(cls, accept_length: float, depth: int = 8) -> Acceptance:
        """The geometric curve whose chain of `depth` drafts commits `accept_length` tokens a step, bonus included."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            if 1 + sum(middle**d for d in range(1, depth + 1)) < accept_length:
                low = middle
            else:
                high = middle
        return cls(tuple(high**d for d in range(1, depth + 1)))

    def at_least(self, depth: int) -> float:
        """Probability that a chain has `depth` ≥ 1 or more draft tokens accepted."""
        known = len(self.accept)
        if depth <= known:
            return self.accept[depth - 1]
        if not known:
            return 0.0
        return self.accept[-1] * self.conditional(known) ** (depth - known)

    def conditional(self, depth: int) -> float:
        """Probability that the draft at `depth` is accepted, given that those before it were."""
        depth = min(depth, len(self.accept))
        if depth == 0 or self.accept[depth - 1] == 0:
            return 0.0
        return self.accept[depth - 1] / self.accept[depth - 2] if depth > 1 else self.accept[0]


class Costs(Protocol):
    """What steps take: a profile's formulas, or those corrected by what was measured since."""

    def step_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        """Returns the milliseconds of one step of `settings`. It is a plain one where they have no steps."""
        ...


@dataclass(frozen=True)
class Option:
    """One setting and the tokens/s of the whole batch to expect of it."""

    settings: Settings
    tokens_per_second: float


@dataclass(frozen=True)
class Choice:
    """What to run for `running` requests within `envelope`, beside plain and the (up to) two best of the options not
    taken, best first.

    speedup: tokens_per_second over plain's; 1.0 when plain was chosen.
    """

    settings: Settings
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    rejected: tuple[Option, ...]
    running: int
    envelope: Envelope

    @property
    def reason(self) -> str:
        """All of it in one of the forms for people."""
        plain, told = self.plain_tokens_per_second, (self.settings, self.tokens_per_second)
        if is_disabled(self.envelope, self.running):
            return reason.disabled(plain, self.running, self.envelope)
        if self.envelope.tuning == "Fixed" and self.envelope.disable_threshold != "Auto" and self.settings != PLAIN:
            return reason.fixed(told, self.running, plain, self.envelope)
        other = next(((option.settings, option.tokens_per_second) for option in self.rejected), None)
        return reason.chose(told, self.running, plain, other, self.envelope)


def is_disabled(envelope: Envelope, batch: int) -> bool:
    """Returns whether so many running requests reach the envelope's threshold, if it has a number."""
    return envelope.disable_threshold != "Auto" and batch >= envelope.disable_threshold


def plain_step_ms(profile: CostProfile | Costs, batch: int, context_tokens: int) -> float:
    return costs(profile).step_ms(PLAIN, batch, context_tokens)


def spec_step_ms(profile: CostProfile | Costs, batch: int, context_tokens: int, settings: Settings) -> float:
    """Of a speculative step; of a plain one when `settings` has no steps."""
    return costs(profile).step_ms(settings, batch, context_tokens)


def expected_yield(acceptance: Acceptance, settings: Settings) -> float:
    """Draft tokens that one request's step accepts, the bonus token not counted.

    A chain: the sum of P(at least d accepted) over the depths verified. A tree: the sum of the path probabilities of
    its num_draft_tokens - 1 likeliest nodes, where a depth keeps its topk likeliest nodes as frontier (EAGLE-2) and
    the candidate of rank r is right with the probability that `Acceptance.siblings` gives to rank r.
    """
    if settings.num_steps == 0:
        return 0.0
    best_nodes = _node_sums(acceptance, settings.topk).of(settings.num_steps)
    return best_nodes[min(settings.num_draft_tokens - 1, len(best_nodes) - 1)]


def plain_rate(profile: CostProfile | Costs, batch: int, context_tokens: int) -> float:
    """Tokens/s of the batch under plain decoding."""
    return 1000 * batch / plain_step_ms(profile, batch, context_tokens)


def spec_rate(
    profile: CostProfile | Costs, acceptance: Acceptance, batch: int, context_tokens: int, settings: Settings
) -> float:
    """Tokens/s of the batch under `settings`; plain_rate when it has no steps."""
    committed = batch * (1 + expected_yield(acceptance, settings))
    return 1000 * committed / spec_step_ms(profile, batch, context_tokens, settings)


@lru_cache(maxsize=256)
def candidates(envelope: Envelope) -> tuple[Settings, ...]:
    """The speculative settings that the envelope allows, fewest verified tokens first. Fixed: exactly its own.

    Adaptive: every num_steps; topk 1 with all of the chain verified, and topk 2, 4, 8 with num_draft_tokens from a
    small ladder, large enough for one path to the last depth and at most the frontiers of all depths together.
    """
    if envelope.num_steps == 0:
        return ()
    bound = envelope.num_draft_tokens
    if envelope.tuning == "Fixed":
        return (Settings(num_steps=envelope.num_steps, topk=envelope.topk, num_draft_tokens=bound),)
    found = set()
    for num_steps in range(1, min(envelope.num_steps, bound - 1) + 1):
        found.add((num_steps + 1, num_steps, 1))
        for topk in (t for t in _TOPKS if 1 < t <= envelope.topk):
            largest = min(bound, 1 + topk * num_steps)
            sizes = {*_TREE_SIZES, largest}
            found |= {(n, num_steps, topk) for n in sizes if num_steps + 1 < n <= largest}
    return tuple(Settings(num_steps=k, topk=t, num_draft_tokens=n) for n, k, t in sorted(found))


def best(
    profile: CostProfile | Costs,
    acceptance: Acceptance,
    batch: int,
    context_tokens: int,
    envelope: Envelope,
    margin: float = MARGIN,
) -> Choice:
    """What an engine with this envelope runs at this load: the fastest candidate, or plain unless that one beats it by
    more than `margin`. From a numeric disable_threshold on it is plain; Fixed below a numeric one is the envelope's
    settings, whatever they are worth. Ties go to the option that verifies fewer tokens.

    Raises ValueError on batch < 1 or an unusable profile.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; a step has at least 1 request")
    plain = Option(PLAIN, plain_rate(profile, batch, context_tokens))
    disabled = is_disabled(envelope, batch)
    options = [] if disabled else _ranked(profile, acceptance, batch, context_tokens, envelope)
    forced = envelope.tuning == "Fixed" and envelope.disable_threshold != "Auto"
    wins = bool(options) and (forced or options[0].tokens_per_second > plain.tokens_per_second * (1 + margin))
    chosen = options.pop(0) if wins else plain
    rejected = sorted([*options[:2], *([plain] if wins else [])], key=lambda option: -option.tokens_per_second)[:2]
    speedup = chosen.tokens_per_second / plain.tokens_per_second
    return Choice(
        chosen.settings, chosen.tokens_per_second, plain.tokens_per_second, speedup, tuple(rejected), batch, envelope
    )


def disable_threshold(
    profile: CostProfile | Costs,
    acceptance: Acceptance,
    context_per_request: float,
    envelope: Envelope,
    max_batch: int,
    margin: float = MARGIN,
) -> int | None:
    """Returns the fewest requests from which drafts no longer pay. That is the smallest b ≥ 1 such that at no batch
    from b to max_batch a candidate of the envelope beats plain by more than `margin`; None when one still does at
    max_batch. The envelope's own disable_threshold is not looked at.
    """
    priced, by_size = costs(profile), candidates(envelope)
    committed = {settings: 1 + expected_yield(acceptance, settings) for settings in by_size}
    for batch in range(max_batch, 0, -1):
        context = int(context_per_request * batch)
        bar = (1 + margin) / priced.step_ms(PLAIN, batch, context)
        if any(committed[settings] > bar * priced.step_ms(settings, batch, context) for settings in by_size):
            return batch + 1 if batch < max_batch else None
    return 1


def capacity(
    profile: CostProfile | Costs,
    acceptance: Acceptance,
    context_per_request: float,
    envelope: Envelope,
    slo_tokens_per_second_per_user: float | None,
    max_batch: int,
) -> int:
    """Returns the most requests at which each gets what was promised. That is the largest b ≤ max_batch at which each
    of b users gets the SLO's tokens/s under the settings that `best` runs at that b; max_batch without an SLO, 0 when
    one user alone would get less.
    """
    if slo_tokens_per_second_per_user is None:
        return max_batch
    for batch in range(max_batch, 0, -1):
        choice = best(profile, acceptance, batch, int(context_per_request * batch), envelope)
        if choice.tokens_per_second >= slo_tokens_per_second_per_user * batch:
            return batch
    return 0


def _ranked(
    profile: CostProfile | Costs, acceptance: Acceptance, batch: int, context_tokens: int, envelope: Envelope
) -> list[Option]:
    """Candidates, fastest first; the stable sort leaves the smaller one first among equals."""
    priced = costs(profile)
    options = [
        Option(s, 1000 * batch * (1 + expected_yield(acceptance, s)) / priced.step_ms(s, batch, context_tokens))
        for s in candidates(envelope)
    ]
    return sorted(options, key=lambda option: -option.tokens_per_second)


class _NodeSums:
    """Summed path probabilities of the likeliest nodes of one draft's trees, depth by depth as it is asked for."""

    def __init__(self, acceptance: Acceptance, topk: int) -> None:
        self._acceptance, self._topk = acceptance, topk
        self._frontier = [1.0]
        self._nodes: list[float] = []
        self._sums: list[tuple[float, ...]] = []

    def of(self, num_steps: int) -> tuple[float, ...]:
        """[j]: of the j likeliest nodes of a tree of num_steps ≥ 1 steps, j ≤ 63."""
        while len(self._sums) < num_steps:
            self._grow(len(self._sums) + 1)
        return self._sums[num_steps - 1]

    def _grow(self, depth: int) -> None:
        acceptance, topk = self._acceptance, self._topk
        miss = 1 - (acceptance.at_least(depth) if topk == 1 else acceptance.conditional(depth))
        if topk == 1:
            level = [1 - miss]
        else:
            missed = [1.0] + [miss ** (1 + acceptance.siblings * math.log(rank)) for rank in range(1, topk + 1)]
            ranks = [missed[r] - missed[r + 1] for r in range(topk)]
            level = sorted((path * rank for path in self._frontier for rank in ranks), reverse=True)
        self._frontier = level[:topk]
        self._nodes = sorted(self._nodes + level, reverse=True)[:63]
        self._sums.append(tuple(accumulate(self._nodes, initial=0.0)))


@lru_cache(maxsize=64)
def _node_sums(acceptance: Acceptance, topk: int) -> _NodeSums:
    return _NodeSums(acceptance, topk)


class _Table:
    """(size, ms) points, read linearly between them, flat before the first, on with the last slope after the last.

    Measurement noise never makes more work cheaper: each point counts at least what a smaller size costs.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        ordered = sorted(points)
        self._sizes = [size for size, _ in ordered]
        self._ms: Sequence[float] = list(accumulate((ms for _, ms in ordered), max))

    def __call__(self, n: float) -> float:
        sizes, ms = self._sizes, self._ms
        if not sizes:
            return 0.0
        if n <= sizes[0]:
            return ms[0]
        if len(sizes) == 1:
            return ms[0] * n / sizes[0]
        right = min(bisect_right(sizes, n), len(sizes) - 1)
        left = right - 1
        return ms[left] + (ms[right] - ms[left]) * (n - sizes[left]) / (sizes[right] - sizes[left])


class _ProfileCosts:
    """The formulas of the module's docstring over one profile's tables."""

    def __init__(self, profile: CostProfile) -> None:
        if not profile.verify_ms or not all(size > 0 and ms > 0 for size, ms in profile.verify_ms):
            raise ValueError(f"verify_ms is {profile.verify_ms}; it needs at least one point, sizes and times above 0")
        self._verify = _Table(profile.verify_ms)
        self._draft = _Table(profile.draft_ms)
        self._extend = _Table(profile.extend_ms)
        self._kv = profile.kv_ms_per_token
        self._overhead = profile.overhead_ms
        self._plain_overhead = profile.plain_overhead_ms
        self._without_context: dict[tuple[int, int, int, int], float] = {}  # asked for again and again

    def step_ms(self, settings: Settings, batch: int, context_tokens: int) -> float:
        key = (settings.num_steps, settings.topk, settings.num_draft_tokens, batch)
        ms = self._without_context.get(key)
        if ms is None:
            ms = self._without_context[key] = self._measure(*key)
        return ms + self._kv * context_tokens

    def _measure(self, num_steps: int, topk: int, num_draft_tokens: int, batch: int) -> float:
        if num_steps == 0:
            return self._verify(batch) + self._plain_overhead
        draft = num_steps * self._draft(batch * topk) + self._extend(batch * (num_steps + 1))
        return draft + self._verify(batch * num_draft_tokens) + self._overhead


def costs(profile: CostProfile | Costs) -> Costs:
    """Returns a profile's formulas. Raises ValueError on an unusable profile."""
    return _by_profile(profile) if isinstance(profile, CostProfile) else profile


@lru_cache(maxsize=64)
def _by_profile(profile: CostProfile) -> Costs:
    return _ProfileCosts(profile)
