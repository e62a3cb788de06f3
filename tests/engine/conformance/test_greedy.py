"""Rules 1, 3, 4, 8, 9, 11: greedy speculation gives the reference library's tokens, whatever happens on the way."""

from __future__ import annotations

import pytest

from tests.engine.conformance.conftest import VOCAB, prompts, settings_of, variants
from tests.engine.conformance.harness import MAX_MODEL_LEN, MAX_RUNNING, NUM_STEPS, Harness, fixed
from tests.engine.conformance.models import within

VARIANTS = variants()
SETTINGS = [(1, 1), (NUM_STEPS, 1), (NUM_STEPS, 2), (3, 4)]


def drafting(steps_and_topk, *without, levels=""):
    """Parametrises `drafting`: (method, draft, num_steps, topk)."""
    cases = [case for case in settings_of(steps_and_topk, *without) if case[1].endswith(levels)]
    return pytest.mark.parametrize("drafting", cases, ids=["-".join(map(str, case)) for case in cases])


def start(engine, drafting, page_size, chunk_size=512, overlap=False):
    method, draft, num_steps, topk = drafting
    harness = Harness(engine(method, draft, page_size), chunk_size, overlap)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    return harness


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
@drafting(SETTINGS)
def test_tokens_equal_the_reference(engine, greedy, drafting, page_size, overlap):
    """A batch larger than the rows, of different lengths and ends; then again, from the prefix cache."""
    harness = start(engine, drafting, page_size, overlap=overlap)
    batch = prompts(MAX_RUNNING + 3, seed=1)
    limits = [1 + 3 * i for i in range(len(batch))]
    for _ in range(2):
        ids = [harness.submit(p, max_tokens=n, ignore_eos=True) for p, n in zip(batch, limits, strict=True)]
        harness.drain()
        for request_id, prompt, limit in zip(ids, batch, limits, strict=True):
            assert harness.answers[request_id].token_ids == greedy(prompt, limit)
            assert harness.answers[request_id].finish_reason == "length"


@pytest.mark.parametrize("chunk_size", [1, 5])
@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (16, True)])
@pytest.mark.parametrize(("method", "draft"), VARIANTS)
def test_chunked_prefill(engine, greedy, method, draft, page_size, overlap, chunk_size):
    drafting = (method, draft, *within(method, draft, NUM_STEPS, 2))
    harness = start(engine, drafting, page_size, chunk_size, overlap)
    batch = prompts(4, seed=2)
    assert harness.run(batch, max_tokens=12, ignore_eos=True) == [greedy(p, 12) for p in batch]


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False), (16, True)])
@drafting([(NUM_STEPS, 1), (NUM_STEPS, 4)], "equal")
def test_retraction_under_pressure(engine, greedy, drafting, page_size, overlap):
    """Once the first have their rows, another holder takes what is free, so that they are retracted and resume."""
    harness = start(engine, drafting, page_size, 16, overlap)
    pool = harness.scheduler.room.pool
    batch = prompts(6, seed=3, shortest=20)
    ids = [harness.submit(p, max_tokens=40, ignore_eos=True) for p in batch]
    taken: list[int] = []
    for _ in range(2000):
        if not harness.scheduler.has_work:
            break
        for output in harness.scheduler.step():
            harness.answers[output.request_id].token_ids += output.token_ids
        if not taken:
            taken = pool.allocate(pool.num_free) or []
        pool.check([*harness.scheduler.held_pages(), taken])
    assert harness.scheduler.tally.retractions > 0
    assert [harness.answers[i].token_ids for i in ids] == [greedy(p, 40) for p in batch]
    pool.release(taken)
    harness.scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", [1, 2, 4])
@drafting([(NUM_STEPS, 2)], "equal")
def test_abort_frees_all_and_disturbs_nobody(engine, greedy, drafting, when, overlap):
    harness = start(engine, drafting, 16, 8, overlap)
    batch = prompts(4, seed=4, shortest=12)
    ids = [harness.submit(p, max_tokens=20, ignore_eos=True) for p in batch]
    for _ in range(when):
        harness.step()
    harness.scheduler.abort(ids[1])
    harness.scheduler.check()
    harness.drain()
    for number in (0, 2, 3):
        assert harness.answers[ids[number]].token_ids == greedy(batch[number], 20)
    assert (
        harness.scheduler.room.pool.num_free + harness.scheduler.room.prefix.num_cached
        == harness.scheduler.room.pool.num_pages
    )


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
@drafting([(NUM_STEPS, 1)])
def test_boundaries(engine, greedy, drafting, page_size, overlap):
    harness = start(engine, drafting, page_size, overlap=overlap)
    one, longest = [5], prompts(1, seed=5, shortest=MAX_MODEL_LEN - 1, longest=MAX_MODEL_LEN)[0]
    assert len(longest) == MAX_MODEL_LEN - 1
    assert harness.run([one], max_tokens=10, ignore_eos=True) == [greedy(one, 10)]
    assert harness.run([longest], max_tokens=10, ignore_eos=True) == [greedy(longest, 1)]  # the context ends it
    assert harness.run([one] * MAX_RUNNING, max_tokens=1, ignore_eos=True) == [greedy(one, 1)] * MAX_RUNNING
    for left in range(1, NUM_STEPS + 2):  # num_steps larger than what is left
        assert harness.run([[7, 9, 7, 9]], max_tokens=left, ignore_eos=True) == [greedy([7, 9, 7, 9], left)]
    first = harness.submit([8, 8, 8], max_tokens=3, ignore_eos=True)
    while harness.answers[first].finish_reason is None:  # a request that arrives as the last one finishes
        harness.step()
    assert harness.run([[9, 9]], max_tokens=5, ignore_eos=True) == [greedy([9, 9], 5)]


@pytest.mark.parametrize("disturbed", ["", "chunks", "prefix hit", "retracted", "disabled"])
@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False), (16, True)])
@drafting([(NUM_STEPS, 1)], levels="equal")
def test_a_draft_equal_to_the_target_is_always_accepted(engine, greedy, drafting, page_size, overlap, disturbed):
    _, _, num_steps, topk = drafting
    chunk_size = 5 if disturbed == "chunks" else 512
    harness = start(engine, drafting, page_size, chunk_size, overlap)
    prompt = prompts(1, seed=6, shortest=30, longest=31)[0]
    if disturbed == "prefix hit":
        harness.run([[*prompt, 3]], max_tokens=2)
    request_id = harness.submit(prompt, max_tokens=40, ignore_eos=True)
    other = harness.submit(prompt[:7], max_tokens=40, ignore_eos=True)
    if disturbed:
        for _ in range(3):
            harness.step()
    if disturbed == "retracted":
        harness.scheduler.retract_latest()
        harness.scheduler.retract_latest()
    if disturbed == "disabled":
        harness.scheduler.set_envelope(fixed(0, 1))
        for _ in range(7):
            harness.step()
        harness.scheduler.set_envelope(fixed(num_steps, topk))
    harness.worker.steps.clear()
    harness.drain()
    assert harness.answers[request_id].token_ids == greedy(prompt, 40)
    assert harness.answers[other].token_ids == greedy(prompt[:7], 40)
    assert harness.worker.steps
    if disturbed == "prefix hit":
        unusable = page_size + harness.worker.limits.lookahead
        assert harness.answers[request_id].last.cached_tokens >= len(prompt) - unusable
    for _, result in harness.worker.steps:
        assert result.num_draft_tokens == num_steps + 1
        assert set(result.accept_lens) == {num_steps + 1}


def test_the_tiny_vocabulary_is_the_reference_s(reference):
    assert reference.config.vocab_size == VOCAB
