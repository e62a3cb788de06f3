"""Rule 7: log-probabilities equal those of scoring the finished text by prefill, here by the reference library,
whatever changed the answer or ended it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pilotfish_engine.messages import MAX_LOGPROBS
from tests.engine.conformance.conftest import EOS, prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed
from tests.engine.conformance.test_processors import GRAMMARS, PAIRS


def character(token_id: int) -> str:
    return chr(200 + token_id)


class Characters:
    """A text of one character a token."""

    def __init__(self, params):
        self.stops, self.text = params.stop, ""

    def append(self, token_id):
        self.text += character(token_id)
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        return min(found) if found else None


SETTINGS = settings_of([(NUM_STEPS, 1), (NUM_STEPS, 4)])
MEMBERS: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"logprobs": MAX_LOGPROBS, "temperature": 0.9, "top_p": 0.8, "seed": 7},
    {"logprobs": 0, "repetition_penalty": 1.5, "logit_bias": ((9, 5.0),)},
    {},
    {"logprobs": 2, "max_tokens": 1},
    {"logprobs": 3, "stop_token_ids": tuple(range(30, 40))},
    {"logprobs": 1, "temperature": 1.5, "seed": 8},
    {"logprobs": 2, "presence_penalty": 1.5, "frequency_penalty": 0.5, "stop": ("abc", *map(character, range(20, 28)))},
    {"logprobs": 4, "repetition_penalty": 1.3, "logit_bias": ((EOS, 6.0),), "min_tokens": 5, "ignore_eos": False},
    {"logprobs": 3, "temperature": 0.8, "seed": 9, "frequency_penalty": 1.0, "stop_token_ids": tuple(range(40, 44))},
    {"logprobs": 1, "grammar": PAIRS},
]
BATCH = prompts(len(MEMBERS), seed=61)


def start(engine, method, draft, num_steps, topk, overlap=False):
    harness = Harness(engine(method, draft, 16), 9, overlap, stop_text=Characters, grammars=GRAMMARS.compile)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), SETTINGS)
def test_they_are_those_of_scoring_the_finished_text(engine, reference, method, draft, num_steps, topk):
    """The model's own: temperature, filters, penalties and bias change the answer, not what is said of it."""
    harness = start(engine, method, draft, num_steps, topk, overlap=topk == 1)
    ids = [
        harness.submit(prompt, **{"max_tokens": 14, "ignore_eos": True} | params)
        for prompt, params in zip(BATCH, MEMBERS, strict=True)
    ]
    if topk > 1:
        for _ in range(5):
            harness.step()
        harness.scheduler.retract_latest()
    harness.drain()
    ended = {harness.answers[request_id].finish_reason for request_id in ids}
    assert ended == {"stop", "length"}
    for request_id, prompt, params in zip(ids, BATCH, MEMBERS, strict=True):
        answer, wanted = harness.answers[request_id].token_ids, params.get("logprobs")
        found = harness.answers[request_id].logprobs
        if wanted is None:
            assert set(found) == {None}
            continue
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=1)
        for row, token, given in zip(expected, answer, found, strict=True):
            assert given.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert len(given.top) == wanted
            assert [value for _, value in given.top] == pytest.approx(row.topk(wanted).values.tolist(), abs=1e-4)
            assert [value for _, value in given.top] == pytest.approx([float(row[t]) for t, _ in given.top], abs=1e-4)
            assert len({t for t, _ in given.top}) == wanted


def test_a_batch_in_which_nobody_asks_computes_none(engine):
    method, draft, num_steps, topk = SETTINGS[0]
    harness = start(engine, method, draft, num_steps, topk)
    harness.run(BATCH[:2], max_tokens=6)
    assert all(result.logprobs is None for _, result in harness.worker.steps)
    harness.worker.steps.clear()
    harness.submit(BATCH[0], max_tokens=6, logprobs=0)
    harness.drain()
    assert all(result.logprobs is not None for _, result in harness.worker.steps)
