"""Rule 12: num_steps, topk, budget and plain change in any order between steps, and no greedy token changes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish_engine.contract.speculation import EnvelopeUpdate
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness

BATCH = prompts(5, seed=31)


def updates(most_steps, most_topk):
    return st.builds(
        EnvelopeUpdate,
        num_steps=st.integers(0, most_steps),
        topk=st.integers(1, most_topk),
        num_draft_tokens=st.integers(2, 12),
        tuning=st.sampled_from(["Fixed", "Adaptive"]),
        disable_threshold=st.sampled_from([1, 3, 1000, "Auto"]),
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 4)], "equal"))
def test_switching_changes_no_token(engine, greedy, method, draft, num_steps, topk, overlap):
    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(updates(num_steps, topk), st.integers(1, 4)), min_size=2, max_size=8))
    def run(script):
        harness = Harness(engine(method, draft, 16), chunk_size=9, overlap=overlap)
        ids = [harness.submit(p, max_tokens=25, ignore_eos=True) for p in BATCH]
        for update, steps in script:
            harness.scheduler.set_envelope(update)
            for _ in range(steps):
                harness.step()
        harness.drain()
        assert [harness.answers[i].token_ids for i in ids] == [greedy(p, 25) for p in BATCH]

    run()
