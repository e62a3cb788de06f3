"""What an engine learns of its drafts from the steps it runs: acceptance by depth, and what siblings add in a tree.

Pure counting over the results of steps, without tensors or clock. Knows nothing about costs or about what is run next.

A step of one request is one observation. Whether it found a draft or not, it paid for the verification: a request
without a draft counts as none accepted, so the probabilities are those of a step, not those of a draft that was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pilotfish_engine.contract.goodput import SIBLINGS, Acceptance
from pilotfish_engine.contract.speculation import MAX_NUM_STEPS, Settings

# An observation loses half its weight over this many request-steps (plain ones too), but not in fewer steps than these:
# a large batch could be followed within a step, and would then follow noise.
HALF_LIFE_REQUEST_STEPS = 96
HALF_LIFE_STEPS = 16
# Before anything was seen a draft token is accepted with this probability, worth so many observations. Hopeful, since
# a wrong hope is corrected within a few steps and a wrong despair only by probes.
PRIOR = 0.6
PRIOR_OBSERVATIONS = 4.0
# Old observations never fade below this weight, so that a rare probe moves an estimate without replacing it.
MEMORY = 8.0
# How far a probability may be above its estimate: so many standard deviations of what was seen lately, which is
# forgotten with this half-life in steps of any kind, so that what has not been tried for long is hoped for again.
_HOPE = 1.5
_HOPE_HALF_LIFE_STEPS = 128
_HOPE_SPREAD = 0.25  # of a probability that was never seen to vary
_SIBLINGS_HOPE = 0.3
_SIBLINGS_HALF_LIFE = 1024
_SIBLINGS_OBSERVATIONS = 32.0


class AcceptanceEstimate:
    """Exponential averages of P(draft at depth d accepted | those before it were), d = 1 … MAX_NUM_STEPS.

    Chains are counted directly. Of a tree step it is only known how deep it got, not by which sibling: the success is
    split by the model of `contract.goodput.Acceptance`, whose `siblings` is learnt from the first depth of chains and
    trees, once both have been run.
    """

    def __init__(self) -> None:
        self._trials = [PRIOR_OBSERVATIONS] * MAX_NUM_STEPS
        self._successes = [PRIOR_OBSERVATIONS * PRIOR] * MAX_NUM_STEPS
        self._fresh = [0.0] * MAX_NUM_STEPS
        self._committed = self._steps = 0.0
        self._first: dict[int, tuple[float, float]] = {}  # topk: successes and trials of depth 1, slowly fading
        self._siblings = SIBLINGS

    @property
    def accept_length(self) -> float | None:
        """Recent mean of tokens that a speculative step commits, bonus included; None before the first such step."""
        return self._committed / self._steps if self._steps else None

    @property
    def acceptance(self) -> Acceptance:
        """Of a chain of MAX_NUM_STEPS; depths never tried hold the prior."""
        accept, product = [], 1.0
        for successes, trials in zip(self._successes, self._trials, strict=True):
            product *= successes / trials
            accept.append(product)
        return Acceptance(tuple(accept), self._siblings)

    @property
    def hope(self) -> Acceptance:
        """The best that the drafts may be by what was seen lately. Where little was, that is far above the estimate."""
        accept, product = [], 1.0
        for successes, trials, fresh in zip(self._successes, self._trials, self._fresh, strict=True):
            chance = successes / trials
            spread = math.sqrt((chance * (1 - chance) + _HOPE_SPREAD) / (fresh + 0.5))
            product *= min(1.0, chance + _HOPE * spread)
            accept.append(product)
        tried = [seen for wide, (_, seen) in self._first.items() if wide > 1]
        unsure = max(tried, default=0.0) < _SIBLINGS_OBSERVATIONS
        return Acceptance(tuple(accept), self._siblings + _SIBLINGS_HOPE * unsure)

    def observe(self, settings: Settings, accept_lens: Sequence[int]) -> None:
        """A step of `settings` committed accept_lens[i] ≥ 1 tokens of each request."""
        batch = len(accept_lens)
        fade = math.pow(0.5, min(batch / HALF_LIFE_REQUEST_STEPS, 1 / HALF_LIFE_STEPS))
        for depth, trials in enumerate(self._trials):
            kept = max(trials * fade, min(trials, MEMORY))
            self._trials[depth], self._successes[depth] = kept, self._successes[depth] * kept / trials
        fresh = math.pow(0.5, 1 / _HOPE_HALF_LIFE_STEPS)
        self._fresh = [seen * fresh for seen in self._fresh]
        if settings.num_steps == 0:
            return
        self._committed = self._committed * fade + sum(accept_lens)
        self._steps = self._steps * fade + batch
        reached = [sum(length > depth for length in accept_lens) for depth in range(settings.num_steps + 1)]
        self._observe_siblings(settings.topk, reached[1], batch)
        for depth in range(settings.num_steps):
            share = self._share_of_first(depth, settings.topk)
            self._trials[depth] += reached[depth]
            self._fresh[depth] += reached[depth]
            self._successes[depth] += reached[depth + 1] * share

    def _share_of_first(self, depth: int, topk: int) -> float:
        """Of the successes at a depth, the part that the first candidate alone would have had."""
        chain = self._successes[depth] / self._trials[depth]
        if topk == 1 or chain == 0 or chain >= 1:
            return 1.0
        # log1p and expm1: a chain that never succeeds fades towards 0, where 1 - chain is 1
        return chain / -math.expm1((1 + self._siblings * math.log(topk)) * math.log1p(-chain))

    def _observe_siblings(self, topk: int, successes: int, trials: int) -> None:
        fade = math.pow(0.5, trials / _SIBLINGS_HALF_LIFE)
        for seen, (s, n) in self._first.items():
            self._first[seen] = (s * fade, n * fade)
        s, n = self._first.get(topk, (0.0, 0.0))
        self._first[topk] = (s + successes, n + trials)
        chain_successes, chain_trials = self._first.get(1, (0.0, 0.0))
        found, weight = 0.0, 0.0
        for wide, (s, n) in self._first.items():
            chain = chain_successes / chain_trials if chain_trials else 0.0
            if wide > 1 and min(n, chain_trials) >= _SIBLINGS_OBSERVATIONS and 0 < chain < 1 and s < n:
                gain = math.log(1 - s / n) / math.log(1 - chain)
                found += n * max(0.0, (gain - 1) / math.log(wide))
                weight += n
        if weight:
            self._siblings = found / weight
