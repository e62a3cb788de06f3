"""Engines whose targets bring their own prediction heads: at every moment they draft what a forward of the whole
sequence does, and their answers are the reference library's, token for token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.errors import EnvelopeError, MethodError
from tests.engine.conformance.harness import Harness, fixed, load
from tests.engine.speculation.mtp_checkpoints import KINDS, VOCAB, Reference

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

VARIANTS = [("mimo", 1), ("mimo", 3), ("deepseek", 1), ("deepseek", 3), ("glm", 1), ("glm", 3), ("qwen", 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    return cache(lambda kind, count: Reference(KINDS[kind], count, tmp_path_factory.mktemp(f"{kind}{count}")))


@pytest.fixture(scope="module")
def engine(made: Callable[[str, int], Reference]) -> Callable[..., Harness]:
    @cache
    def parts(kind: str, count: int, page_size: int):
        return load(made(kind, count).folder, "MTP", None, page_size, num_steps=3, topk=1)

    def start(kind: str, count: int, page_size: int = 4, num_steps: int = 3, topk: int = 1, **options) -> Harness:
        harness = Harness(parts(kind, count, page_size), **options)
        harness.scheduler.set_envelope(fixed(num_steps, topk))
        return harness

    return start


def prompts(count: int, seed: int, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def judge_drafts(harness: Harness, reference: Reference, num_steps: int) -> int:
    """Compares what the running rows would draft now; returns how many they are."""
    step = harness.parts.step
    running = [request for request in harness.scheduler.running if request.seat.decoding]
    rows = [request.seat.row for request in running]
    if not rows:
        return 0
    settings = Settings(num_steps=num_steps, topk=1, num_draft_tokens=num_steps + 1)
    with torch.inference_mode():
        assert step.proposer is not None
        members = step.state.rows(rows)
        step.catch_up(members, settings)
        found = step.proposer.propose(members, settings)
    for request, ids in zip(running, found.token_ids.tolist(), strict=True):
        assert ids == reference.drafts(request.token_ids, num_steps), f"after {len(request.token_ids)} tokens"
    return len(rows)


@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 3), (4, 512)])
@pytest.mark.parametrize(("kind", "count"), VARIANTS)
def test_drafts_equal_a_forward_of_the_whole_sequence(made, engine, kind, count, page_size, chunk_size):
    """After prompts in chunks, prefix hits, speculative and plain steps, a retraction."""
    harness, reference, judged = engine(kind, count, page_size, chunk_size=chunk_size), made(kind, count), 0
    batch = prompts(2, seed=1)
    batch.append(batch[-1] + [3, 4, 5])
    for prompt in batch:
        harness.submit(prompt, max_tokens=14, ignore_eos=True)
        harness.step()
    judged += judge_drafts(harness, reference, 3)
    for num_steps in (3, 0, 0, 2, 1):
        harness.scheduler.set_envelope(fixed(num_steps, 1))
        harness.step()
        judged += judge_drafts(harness, reference, 3)
    harness.scheduler.retract_latest()
    harness.step()
    harness.step()
    judged += judge_drafts(harness, reference, 3)
    harness.drain()
    again = harness.submit(batch[0] + reference.greedy(batch[0], 9), max_tokens=6, ignore_eos=True)
    while harness.answers[again].last is None:
        harness.step()
    judged += judge_drafts(harness, reference, 3)
    harness.drain()
    assert page_size > 1 or harness.answers[again].last.cached_tokens >= len(batch[0])
    assert judged > 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("kind", "count", "num_steps", "topk"), [(*v, 3, 1) for v in VARIANTS] + [("mimo", 1, 3, 4)])
def test_answers_equal_plain_greedy_decoding(made, engine, kind, count, num_steps, topk, overlap):
    harness = engine(kind, count, num_steps=num_steps, topk=topk, overlap=overlap)
    batch = prompts(3, seed=2)
    assert harness.run(batch, max_tokens=10, ignore_eos=True) == [made(kind, count).greedy(p, 10) for p in batch]
    assert any(result.num_draft_tokens > 1 for _, result in harness.worker.steps)


def test_an_update_of_the_envelope_stays_within_the_heads(made, engine):
    harness = engine("mimo", 3)
    with pytest.raises(EnvelopeError, match=r"num_steps is 4, but .* holds 3 MTP heads.* at most 3 would work"):
        harness.scheduler.set_envelope(fixed(4, 1))
    with pytest.raises(EnvelopeError, match=r"topk is 2, but .* draft a chain.* at most 1 would work"):
        harness.scheduler.set_envelope(fixed(3, 2))
    assert harness.scheduler.report().envelope.num_steps == 3
    engine("mimo", 1).scheduler.set_envelope(fixed(8, 8))
    with pytest.raises(MethodError, match=r"num_steps is 4, but .* holds 3 MTP heads"):
        load(made("mimo", 3).folder, "MTP", None, 4, num_steps=4, topk=1)
