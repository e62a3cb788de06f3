"""Rule 7: log-probabilities equal those of scoring the finished text by prefill, here by the reference library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pilotfish_engine.messages import MAX_LOGPROBS
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

SETTINGS = settings_of([(NUM_STEPS, 1), (NUM_STEPS, 4)])
MEMBERS: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"logprobs": MAX_LOGPROBS, "temperature": 0.9, "top_p": 0.8, "seed": 7},
    {"logprobs": 0, "repetition_penalty": 1.5, "logit_bias": ((9, 5.0),)},
    {},
    {"logprobs": 2, "max_tokens": 1},
    {"logprobs": 3, "stop_token_ids": tuple(range(30, 40))},
    {"logprobs": 1, "temperature": 1.5, "seed": 8},
]
BATCH = prompts(len(MEMBERS), seed=61)


def start(engine, method, draft, num_steps, topk, overlap=False):
    harness = Harness(engine(method, draft, 16), chunk_size=9, overlap=overlap)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


def collect(harness, retract_at=None):
    found: dict[str, list[Any]] = {request_id: [] for request_id in harness.answers}
    for count in range(1000):
        if not harness.scheduler.has_work:
            return found
        if count == retract_at:
            harness.scheduler.retract_latest()
        for output in harness.step():
            found[output.request_id] += [None] * len(output.token_ids) if output.logprobs is None else output.logprobs
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    raise AssertionError("stuck")


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), SETTINGS)
def test_they_are_those_of_scoring_the_finished_text(engine, reference, method, draft, num_steps, topk):
    """The model's own: temperature, filters, penalties and bias change the answer, not what is said of it."""
    harness = start(engine, method, draft, num_steps, topk, overlap=topk == 1)
    ids = [
        harness.submit(prompt, **{"max_tokens": 14, "ignore_eos": True} | params)
        for prompt, params in zip(BATCH, MEMBERS, strict=True)
    ]
    found = collect(harness, retract_at=5 if topk > 1 else None)
    for request_id, prompt, params in zip(ids, BATCH, MEMBERS, strict=True):
        answer, wanted = harness.answers[request_id].token_ids, params.get("logprobs")
        assert len(found[request_id]) == len(answer)
        if wanted is None:
            assert set(found[request_id]) == {None}
            continue
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=1)
        for row, token, given in zip(expected, answer, found[request_id], strict=True):
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
