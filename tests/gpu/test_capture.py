"""One step of each method as one CUDA graph: captured once, replayed for a whole answer, equal to eager steps."""

from __future__ import annotations

import pytest
import torch

from pilotfish_engine.contract.speculation import PLAIN, Settings
from tests.engine.conformance.conftest import (  # noqa: F401 (fixtures)
    checkpoints,
    engine,
    prompts,
    settings_of,
    target,
    twin,
)
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

ROWS = [0, 1, 2]
STEPS = 5


def started(parts, num_steps, topk, temperature):
    """Three requests whose prompts are through, and the state after that."""
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    for prompt in prompts(3, seed=51):
        harness.submit(prompt, max_tokens=STEPS, ignore_eos=True, temperature=temperature, seed=7)
    harness.scheduler._admit()
    harness.scheduler._extend()
    harness.scheduler._collect()
    reserve = STEPS * (num_steps + 1) + parts.worker.reserve_tokens  # as each decode step does for itself
    decoding = harness.scheduler._decoding()
    assert [request.seat.row for request in decoding] == ROWS, "all find room, and keep it"
    for request in decoding:
        added = harness.scheduler._grow(request, reserve)
        if added is not None:
            parts.step.state.append_pages([added])
    return parts.step.state


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("method", "draft", "num_steps", "topk"), settings_of([(0, 1), (NUM_STEPS, 1), (NUM_STEPS, 4)], "equal", "random")
)
def test_a_step_is_one_graph(engine, method, draft, num_steps, topk, temperature):  # noqa: F811
    parts = engine(method, draft, 16)
    settings = PLAIN if num_steps == 0 else Settings(num_steps=num_steps, topk=topk, num_draft_tokens=8)
    rows = started(parts, num_steps, topk, temperature).rows(ROWS)
    eager = []
    with torch.inference_mode():
        for _ in range(STEPS):
            result = parts.step(rows, settings)
            eager.append((result.next_token_ids.tolist(), result.accept_lens.tolist()))
        started(parts, num_steps, topk, temperature)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            parts.step(rows, settings)  # warm-up: libraries make their workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = parts.step(rows, settings)
        started(parts, num_steps, topk, temperature)  # warm-up has moved the state on
        replayed = []
        for _ in range(STEPS):
            graph.replay()
            replayed.append((result.next_token_ids.tolist(), result.accept_lens.tolist()))
    assert replayed == eager
