"""Runs prompts with fixed settings, and tells what each step drafted and accepted.

The engine's own scheduler and step run; only the proposer stands behind one that listens. Takes no times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.acceptance.asked import Prompt
from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.methods import Limits
from pilotfish_engine.contract.speculation import CostProfile, EnvelopeUpdate, Settings
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import Output, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.speculation.proposer import Proposer, TargetHidden
from pilotfish_engine.speculation.tree import ABSENT, Candidates, cut
from pilotfish_engine.speculation.verify import Verdict
from pilotfish_engine.worker.target import Speculation, TargetWorker

COUNTED = CostProfile(verify_ms=((1, 1.0),))  # of no matter where settings are fixed


@dataclass(frozen=True)
class Drafted:
    """The nodes past the roots of a step, [B, W − 1] each: `chance` float32, the path probability by the draft's own
    scores; `accepted`, `real` bool. committed: int64 [B], tokens, bonus included."""

    chance: Tensor
    accepted: Tensor
    real: Tensor
    committed: Tensor


@dataclass(frozen=True)
class Watched:
    """A decode step, by request: the kind of its prompt, and its tokens, bonus included, of which none is behind the
    answer's end."""

    kinds: list[str]
    tokens: list[int]
    drafted: Drafted


class Listener:
    """A proposer that keeps what it offered and what came of it. evenly: each request has a budget of its own."""

    def __init__(self, proposer: Proposer) -> None:
        self.evenly = True
        self._proposer = proposer
        self._offered: Candidates | None = None
        self._drafted: Drafted | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, rows: Rows, settings: Settings) -> Candidates:
        offered = self._proposer.propose(rows, settings)
        if settings.topk == 1:
            offered = offered.as_chain()
        self._offered = own_best(offered, settings.num_draft_tokens - 1) if self.evenly else offered
        return self._offered

    def accepted(self, rows: Rows, settings: Settings, verdict: Verdict, target: TargetHidden) -> None:
        assert self._offered is not None, "a step proposes before it accepts"
        self._drafted = drafted(self._offered, settings, verdict)
        self._proposer.accepted(rows, settings, verdict, target)

    def take(self) -> Drafted | None:
        """Of the step since the last call, if there was one."""
        found, self._drafted = self._drafted, None
        return found


def own_best(candidates: Candidates, each: int) -> Candidates:
    """The even split: of every request its best `each` candidates, ties as the engine's cut breaks them. The cut of a
    batch then finds no more than its budget, and takes them all."""
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
    scores = torch.full_like(candidates.scores, ABSENT)
    best = order[:, :each]
    return replace(candidates, scores=scores.scatter(1, best, candidates.scores.gather(1, best)))


def drafted(offered: Candidates, settings: Settings, verdict: Verdict) -> Drafted:
    """What the engine's cut took of the candidates, and what became of it."""
    numbers = torch.arange(offered.token_ids.shape[1], device=offered.token_ids.device).expand_as(offered.token_ids)
    numbered = replace(offered, token_ids=numbers)  # so that the tree says which candidate each node is
    tree = cut(torch.zeros_like(numbers[:, 0]), numbered, settings.num_draft_tokens, settings.num_steps)
    scores = offered.scores.gather(1, tree.token_ids[:, 1:])
    accepted = torch.zeros_like(tree.real).scatter(1, verdict.path, True)
    real = tree.real[:, 1:]
    return Drafted(
        chance=torch.where(real, scores.exp(), 0.0).cpu(),
        accepted=accepted[:, 1:].cpu(),
        real=real.cpu(),
        committed=verdict.accept_lens.cpu(),
    )


def fixed(settings: Settings) -> EnvelopeUpdate:
    """These at every load."""
    return EnvelopeUpdate(**settings.model_dump(), tuning="Fixed", disable_threshold=1 << 20)


class Counted:
    """An engine whose steps are counted. Its prompts stay in the prefix cache from one run to the next."""

    def __init__(self, parts: Parts) -> None:
        assert parts.step.proposer is not None, "plain decoding drafts nothing"
        report, limits = parts.worker.speculation_report(), parts.worker.limits
        self._rows = limits.max_running_requests
        self._listener = Listener(parts.step.proposer)
        worker = TargetWorker(
            replace(parts.step, proposer=cast(Proposer, self._listener)),
            Controller(report.envelope, COUNTED, self._rows),
            limits,
            Speculation(report.method, Limits(), profile=None),
        )
        self._scheduler = Scheduler(worker, parts.chunk_size)
        self._known: dict[Hashable, list[Watched]] = {}

    def follow(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        tokens: int,
        temperature: float,
        evenly: bool = True,
        at_once: int | None = None,
    ) -> list[Watched]:
        """Every decode step of the answers, of `tokens` tokens at most. evenly: as if each request ran alone; else with
        the engine's own budget over the batch. at_once: requests that run together, all that there is room for. What is
        asked a second time is not run again."""
        asked = (tuple(prompts), settings, tokens, temperature, evenly, at_once)
        if asked not in self._known:
            self._listener.evenly = evenly
            self._scheduler.set_envelope(fixed(settings))
            room = min(at_once or self._rows, self._rows)
            self._known[asked] = list(self._steps(prompts, tokens, temperature, room))
        return self._known[asked]

    def _steps(self, prompts: Sequence[Prompt], tokens: int, temperature: float, room: int) -> Iterator[Watched]:
        waiting = list(enumerate(prompts))[::-1]
        while waiting or self._scheduler.has_work:
            while waiting and room > 0:
                number, prompt = waiting.pop()
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number)
                self._scheduler.submit(Submit(request_id=str(number), prompt=[*prompt.token_ids], params=params))
                room -= 1
            outputs = self._scheduler.step()
            room += sum(output.finish_reason is not None for output in outputs)
            drafted = self._listener.take()
            if drafted is not None:
                decoded = outputs[-len(drafted.committed) :]  # they stand behind those of prompts
                kinds = [prompts[int(output.request_id)].kind for output in decoded]
                yield Watched(kinds, [*map(_tokens, decoded, drafted.committed.tolist())], drafted)


def _tokens(output: Output, committed: int) -> int:
    """Where the target ends the answer, the rest of an accepted path is none of it. Where the answer is only cut off it
    is, or short answers would look worse than they are."""
    if output.error is not None:
        raise RuntimeError(f"an answer failed: {output.error}")
    return len(output.token_ids) if output.finish_reason == "stop" else committed


@dataclass
class Counts:
    """Steps of single requests. lengths: how many committed so many tokens, bonus included; nodes: drafts verified;
    expected: tokens that the draft's own scores promised, bonus included."""

    lengths: Counter[int] = field(default_factory=Counter)
    nodes: int = 0
    expected: float = 0.0

    def add(self, step: Watched, kind: str | None = None) -> None:
        """kind: only requests of this."""
        nodes, expected = step.drafted.real.sum(dim=1).tolist(), step.drafted.chance.sum(dim=1).tolist()
        for number, found in enumerate(step.kinds):
            if kind in (None, found):
                self.lengths[step.tokens[number]] += 1
                self.nodes += nodes[number]
                self.expected += 1 + expected[number]

    @property
    def steps(self) -> int:
        return self.lengths.total()

    @property
    def accept_length(self) -> float:
        return sum(length * steps for length, steps in self.lengths.items()) / max(1, self.steps)

    @property
    def error(self) -> float:
        """Standard error of the acceptance length."""
        mean = self.accept_length
        squares = sum(steps * (length - mean) ** 2 for length, steps in self.lengths.items())
        return math.sqrt(squares) / max(1, self.steps)

    @property
    def plus_minus(self) -> str:
        return f"{self.accept_length:.2f} ±{2 * self.error:.2f}"

    def accept(self, depths: int) -> list[float]:
        """accept[d − 1]: share of the steps that accepted at least d drafts."""
        return [
            sum(steps for length, steps in self.lengths.items() if length > depth) / max(1, self.steps)
            for depth in range(1, depths + 1)
        ]

    def figures(self, depths: int) -> dict[str, Any]:
        """As they go into the JSON of a section."""
        return {
            "steps": self.steps,
            "accept_length": round(self.accept_length, 4),
            "error": round(self.error, 4),
            "accept": [round(share, 4) for share in self.accept(depths)],
            "rate": round((self.accept_length - 1) * self.steps / max(1, self.nodes), 4),
            "nodes": round(1 + self.nodes / max(1, self.steps), 3),
            "expected": round(self.expected / max(1, self.steps), 4),
        }


def describe(settings: Settings) -> str:
    if settings.topk == 1:
        return f"chain of {settings.num_steps}"
    return f"tree of {settings.num_draft_tokens}, topk {settings.topk}, depth {settings.num_steps}"
