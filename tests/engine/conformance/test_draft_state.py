"""A draft's state after any history is that of a fresh prefill: what it would draft next is the same, token for token.

So acceptance right after speculation comes back, after a prefix hit or a retraction, is that of an engine that never
did anything else.
"""

from __future__ import annotations

import pytest
import torch

from pilotfish_engine.speculation.unread import CATCH_UP
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

HISTORIES = ["accepts", "plain then accepts", "long plain", "prefix hit", "retracted", "chunks", "switched"]


def drafted(harness, num_steps, topk):
    """Tokens and scores of what the only running request would draft now."""
    parts, (request,) = harness.parts, harness.scheduler.running
    settings = fixed(num_steps, topk).applied_to(parts.worker.speculation_report().envelope)
    rows = parts.step.state.rows([request.seat.row])
    with torch.inference_mode():
        parts.step.catch_up(rows, settings)
        found = parts.step.proposer.propose(rows, settings)
    real = found.scores[0] > -torch.inf
    return found.token_ids[0][real], found.scores[0][real]


def lived(engine, method, draft, num_steps, topk, history):
    """An engine whose request has been through something."""
    harness = Harness(engine(method, draft, 16), chunk_size=5 if history == "chunks" else 512)
    speculative = fixed(num_steps, topk)
    prompt = prompts(1, seed=71, shortest=36, longest=37)[0]
    harness.scheduler.set_envelope(speculative)
    if history == "prefix hit":
        harness.run([[*prompt[:33], 9, 8, 7]], max_tokens=3, ignore_eos=True)
    harness.submit(prompt, max_tokens=50, ignore_eos=True)
    for _ in range(12 if history == "chunks" else 3):
        harness.step()
    if history in ("plain then accepts", "long plain", "switched"):
        harness.scheduler.set_envelope(fixed(0, 1))
        for _ in range(CATCH_UP + 3 if history == "long plain" else 3):
            harness.step()
    if history == "retracted":
        harness.scheduler.retract_latest()
        harness.step()
    if history == "switched":
        harness.scheduler.set_envelope(fixed(1, 1))
        harness.step()
    harness.scheduler.set_envelope(speculative)
    if history != "long plain":
        harness.step()
    return harness


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    ("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1), (NUM_STEPS, 3)], "equal", "random")
)
def test_what_would_be_drafted_is_what_a_fresh_prefill_would_draft(
    engine, greedy, method, draft, num_steps, topk, history
):
    harness = lived(engine, method, draft, num_steps, topk, history)
    (request,) = harness.scheduler.running
    known = list(request.token_ids)
    token_ids, scores = drafted(harness, num_steps, topk)
    harness.scheduler.abort(request.request_id)
    fresh = Harness(harness.parts)
    fresh.scheduler.set_envelope(fixed(num_steps, topk))
    fresh.submit(known[:-1], max_tokens=50, ignore_eos=True)
    fresh.scheduler._admit()
    fresh.scheduler._extend()
    fresh.scheduler._collect()
    (again,) = fresh.scheduler.running
    assert again.token_ids == known, "greedy: the prefill draws the token that the other engine knows"
    assert again.counts.cached_tokens == 0
    expected_ids, expected_scores = drafted(fresh, num_steps, topk)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(scores, expected_scores, rtol=1e-3, atol=1e-3)
    fresh.scheduler.abort(again.request_id)
