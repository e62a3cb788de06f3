"""Rule 13 over NCCL, and the step of a rank as one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.types import Batch, ForwardMode
from pilotfish_engine.worker.leader import Run
from tests.engine.conformance import models
from tests.engine.conformance.conftest import checkpoints, engine, target, twin, variants  # noqa: F401 (fixtures)
from tests.engine.conformance.harness import NUM_STEPS
from tests.engine.conformance.test_ranks import test_ranks_commit_the_same_tokens, two  # noqa: F401
from tests.gpu.test_capture import ROWS, STEPS, started


@pytest.mark.parametrize(("method", "draft"), variants("random", "equal"))
def test_a_rank_s_step_is_one_graph(two, checkpoints, method, draft):  # noqa: F811
    """The other rank runs its steps eagerly: it cannot tell."""
    num_steps, topk = models.within(method, draft, NUM_STEPS, 4)
    parts = two.load(checkpoints(method, draft), method, num_steps, topk)
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=8)
    batch = Batch(ForwardMode.DECODE, rows=ROWS)

    def told() -> None:
        two.followers.send(Run(batch, settings.num_steps, settings.topk, settings.num_draft_tokens))

    rows = started(parts, num_steps, topk, 0.0).rows(ROWS)
    eager, replayed = [], []
    with torch.inference_mode():
        for _ in range(STEPS):
            told()
            result = parts.step(rows, settings)
            eager.append((result.next_token_ids.tolist(), result.accept_lens.tolist()))
        started(parts, num_steps, topk, 0.0)
        with torch.cuda.stream(torch.cuda.Stream()):
            told()
            parts.step(rows, settings)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads call CUDA meanwhile
            result = parts.step(rows, settings)
        started(parts, num_steps, topk, 0.0)
        for _ in range(STEPS):
            told()
            graph.replay()
            replayed.append((result.next_token_ids.tolist(), result.accept_lens.tolist()))
    assert replayed == eager
    two.written(0)
