"""What a soak asks for: requests of every kind, drawn by a seed, and the answer that each has alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch

from pilotfish_engine.batch.rows import Rows
from pilotfish_engine.contract.speculation import EnvelopeUpdate
from pilotfish_engine.engine import Parts
from pilotfish_engine.messages import Grammar, SamplingParams, TokenLogprob
from pilotfish_engine.tokenizer import StopStrings, Tokenizer
from pilotfish_engine.tokenizer.pieces import Pieces as Decoding
from tests.engine.conformance.conftest import EOS, prompts
from tests.engine.conformance.harness import MAX_MODEL_LEN, Harness
from tests.engine.conformance.test_processors import GRAMMARS, LONE_DIGITS, PAIRS

KINDS = [PAIRS, LONE_DIGITS, Grammar("regex", "[ -Z]{0,9}")]
PROMPTS = prompts(24, seed=5, shortest=4, longest=24) + prompts(8, seed=6, shortest=40, longest=MAX_MODEL_LEN - 2)
TIE = 2e-4  # of a logit: rounding may decide between tokens as near as that
MOST_KEPT = 4096  # answers


class Pieces:
    """A tokenizer's bytes: letters, and halves of a character that the next token may complete or break."""

    decoding = Decoding((), {}, fallback=False)
    broken_bytes = "replace"

    def piece(self, token_id: int) -> bytes:
        letter = bytes([97 + token_id % 26])
        return [letter, b"\xc3", b"\xa9" + letter, letter * 2][token_id % 4]


def stop_text(params: SamplingParams) -> StopStrings:
    return StopStrings(cast(Tokenizer, Pieces()), params.stop)


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Answered:
    """close: places of the answer at which another token is as good up to rounding."""

    token_ids: list[int]
    finish_reason: str | None
    text_end: int | None
    logprobs: list[TokenLogprob | None]
    close: frozenset[int] = frozenset()


def draw(random: Random) -> Asked:
    """Mostly plain requests; each extra is there in a part of them."""
    prompt = random.choice(PROMPTS)
    if random.random() < 0.5:  # the beginning of another one, and an end of its own
        other = random.choice(PROMPTS)
        prompt = other[: random.randrange(len(other))] + prompt[3 : random.randrange(4, 12)] or prompt
    values: dict[str, Any] = {
        "max_tokens": random.choice([1, 2, 5, 12, 25, 60]),
        "temperature": random.choice([0.0, 0.0, 0.6, 1.1]),
        "seed": random.randrange(4),
        "ignore_eos": random.random() < 0.3,
    }
    extras: list[dict[str, Any]] = [
        {"top_k": 5, "top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": ((9, 4.0), (EOS, 3.0))},
        {"min_tokens": 6},
        {"stop": ("ab", "é", "\ufffdk")},
        {"stop_token_ids": (10, 33, 47)},
        {"logprobs": random.choice([0, 3])},
        {"grammar": random.choice(KINDS)},
    ]
    for extra in extras:
        if random.random() < 0.15:
            values |= extra
    return Asked(tuple(prompt[: MAX_MODEL_LEN - 1]), SamplingParams(**values))


def envelope(random: Random, most_steps: int, most_topk: int) -> EnvelopeUpdate:
    return EnvelopeUpdate(
        num_steps=random.randint(0, most_steps),
        topk=random.randint(1, most_topk),
        num_draft_tokens=random.randint(2, 10),
        tuning=random.choice(["Fixed", "Adaptive"]),
        disable_threshold=random.choice([1, 3, 1000, "Auto"]),
    )


class Alone:
    """Plain decoding of one request at a time, with all the room there is."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: OrderedDict[Asked, Answered] = OrderedDict()
        self._close: list[int] = []
        state = parts.step.state
        state.choose = self._watched(state.choose)  # type: ignore[method-assign]

    def answer(self, asked: Asked) -> Answered:
        if asked not in self._known:
            self._known[asked] = self._run(asked)
        self._known.move_to_end(asked)
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return self._known[asked]

    def _run(self, asked: Asked) -> Answered:
        harness = Harness(self._parts, stop_text=stop_text, grammars=GRAMMARS.compile)
        self._close.clear()
        request_id = harness.submit_params(asked.prompt, asked.params)
        harness.drain()
        found = harness.answers[request_id]
        assert found.last is not None
        close = frozenset(position - len(asked.prompt) for position in self._close)
        return Answered(found.token_ids, found.finish_reason, found.last.text_end, found.logprobs, close)

    def _watched(self, choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(
            logits: torch.Tensor, rows: Rows, positions: torch.Tensor, *others: Any, **more: Any
        ) -> torch.Tensor:
            drawn = choose(logits, rows, positions, *others, **more)
            less = torch.full((len(drawn), 1), -TIE)
            again = choose(logits.scatter_add(1, drawn.unsqueeze(1), less), rows, positions, *others, **more)
            self._close += positions[again != drawn].tolist()
            return drawn

        return watched


def difference(found: Answered, alone: Answered, whole: bool) -> str | None:
    """What an answer has that it has not alone, or None. `whole`: it came to its end."""
    pairs = list(zip(found.token_ids, alone.token_ids, strict=False))
    for place, (token, expected) in enumerate(pairs):
        if token != expected:
            return None if place in alone.close else f"token {place} is {token}, alone {expected}"
    if len(found.token_ids) > len(alone.token_ids):
        return f"goes on after its end, for {len(found.token_ids) - len(alone.token_ids)} tokens"
    ends = [(a.token_ids, a.finish_reason, a.text_end) for a in (found, alone)]
    if whole and ends[0] != ends[1]:
        return f"ends with {ends[0][1:]} after {len(found.token_ids)} tokens, alone with {ends[1][1:]}"
    for place, (given, expected_logprob) in enumerate(zip(found.logprobs, alone.logprobs, strict=False)):
        if given is None or expected_logprob is None:
            if given is not expected_logprob:
                return f"has no log-probability at {place}, or one too many"
            continue
        values = [given.logprob, *(value for _, value in given.top)]
        others = [expected_logprob.logprob, *(value for _, value in expected_logprob.top)]
        if len(values) != len(others) or max(abs(a - b) for a, b in zip(values, others, strict=True)) > TIE:
            return f"log-probabilities at {place} are {values}, alone {others}"
    return None
