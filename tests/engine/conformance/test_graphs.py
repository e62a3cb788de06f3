"""Steps by StepGraphs, with a recorder that any machine has: what it replays is the step's tensor code with the host's
view of the batch that was recorded. So the host plans nothing within a step, and padded batches answer the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
import torch

from pilotfish_engine.contract.speculation import PLAIN, Settings
from pilotfish_engine.engine import Parts
from pilotfish_engine.worker import graphs
from pilotfish_engine.worker.ahead import record_ahead
from pilotfish_engine.worker.graphs import StepGraphs, bucket
from pilotfish_engine.worker.recording import TRY_AGAIN_AFTER, Recorder
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed
from tests.engine.conformance.test_processors import GRAMMARS, LONE_DIGITS, PAIRS

Result = TypeVar("Result")


class Again:
    """Records by calling again: as a graph does, into the tensors of the first result."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        self.recorded += 1
        kept: list[Result] = []

        def again() -> Result:
            self.replayed += 1
            result = run()
            if kept:
                overwrite(kept[0], result)
            else:
                kept.append(result)
            return kept[0]

        return again


def overwrite(kept: Any, result: Any) -> None:
    """Every tensor of a dataclass, at any depth."""
    if isinstance(kept, torch.Tensor):
        kept.copy_(result)
    elif is_dataclass(kept):
        for part in fields(kept):
            overwrite(getattr(kept, part.name), getattr(result, part.name))


def recorded(parts: Parts, recorder: Recorder) -> Parts:
    worker = copy.copy(parts.worker)
    worker._graphs = StepGraphs(parts.step, recorder)
    return replace(parts, worker=worker)


def graphs_of(parts: Parts) -> StepGraphs:
    assert parts.worker._graphs is not None
    return parts.worker._graphs


SETTINGS = settings_of([(0, 1), (NUM_STEPS, 1), (NUM_STEPS, 4)], "equal", "random")


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), SETTINGS)
def test_recorded_steps_answer_as_plain_decoding(engine, greedy, method, draft, num_steps, topk):
    """Five requests of different lengths, so that batches of each size come, most of them padded. Half of the cases
    with overlap: a result is read when the next replay has overwritten it."""
    again = Again()
    harness = Harness(recorded(engine(method, draft, 16), again), overlap=topk == 4 or num_steps == 0)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    asked = prompts(5, seed=61)
    lengths = [40, 31, 22, 13, 4]
    ids = [harness.submit(p, max_tokens=n, ignore_eos=True) for p, n in zip(asked, lengths, strict=True)]
    harness.drain()
    for request_id, prompt, length in zip(ids, asked, lengths, strict=True):
        assert harness.answers[request_id].token_ids == greedy(prompt, length)
    assert again.replayed > 5


DRAFTED = [case for case in SETTINGS if case[2] > 0]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 12},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": [(5, 1.5)], "min_tokens": 8},
    {"logprobs": 2},
]
GUIDED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 0.9, "grammar": PAIRS},
    {"grammar": LONE_DIGITS, "min_tokens": 8},
    {"logprobs": 2},
]


def drawn(parts: Parts, kinds: list[dict[str, Any]], num_steps: int, topk: int) -> list[list[int]]:
    """A request of each kind, shorter and shorter, with plain steps between drafted ones."""
    harness = Harness(parts, grammars=GRAMMARS.compile)
    ids = [
        harness.submit(prompt, max_tokens=30 - 3 * number, seed=number, **kind)
        for number, (prompt, kind) in enumerate(zip(prompts(len(kinds), seed=62), kinds, strict=True))
    ]
    for number in range(200):
        if not harness.scheduler.has_work:
            break
        harness.scheduler.set_envelope(fixed(*((0, 1) if number % 7 < 3 else (num_steps, topk))))
        harness.step()
    return [harness.answers[request_id].token_ids for request_id in ids]


@pytest.mark.parametrize("kinds", [KINDS, GUIDED], ids=["free", "guided"])
@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), DRAFTED)
def test_recorded_steps_draw_what_others_draw(engine, method, draft, num_steps, topk, kinds):
    """Rows that are sampled, filtered, penalised, biased, scored and guided."""
    parts = engine(method, draft, 16)
    again = Again()
    assert drawn(recorded(parts, again), kinds, num_steps, topk) == drawn(parts, kinds, num_steps, topk)
    assert again.replayed > again.recorded > 0


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 1)], "near", "random"))
def test_what_plain_steps_left_is_read_by_graphs(engine, greedy, method, draft, num_steps, topk):
    """By two requests, of which one begins later: so they are behind by different numbers of tokens."""
    parts = recorded(engine(method, draft, 16), again := Again())
    harness, (first, second) = Harness(parts), prompts(2, seed=65)
    ids = [harness.submit(first, max_tokens=50, ignore_eos=True)]
    for number in range(60):
        if number == 2:
            ids.append(harness.submit(second, max_tokens=45, ignore_eos=True))
        if harness.scheduler.has_work:
            harness.scheduler.set_envelope(fixed(*((num_steps, topk) if number % 5 == 4 else (0, 1))))
            harness.step()
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == [greedy(first, 50), greedy(second, 45)]
    assert again.replayed > again.recorded
    if hasattr(parts.step.proposer, "_unread"):
        assert len(graphs_of(parts).catch_ups) > 0
    if "equal" in draft:  # all that is drafted right behind plain steps is accepted
        drafted = [result for batch, result in harness.worker.steps if result.num_draft_tokens > 1][1:-2]
        assert all(n == num_steps + 1 for result in drafted for n in result.accept_lens)


def test_with_a_grammar_a_step_is_three_graphs(engine):
    """And one from the step on in which nobody has one."""
    harness = Harness(recorded(engine("NGRAM", "", 16), again := Again()), grammars=GRAMMARS.compile)
    harness.scheduler.set_envelope(fixed(NUM_STEPS, 4))
    guided = harness.submit([0, 0, 0, 5, 6], max_tokens=30, grammar=PAIRS, ignore_eos=True)
    harness.drain()
    steps = len(harness.worker.steps)
    assert steps > 3, harness.answers[guided]
    assert (again.recorded, again.replayed) == (3, 3 * (steps - 1)), "the first step runs as it is"
    harness.run([[0, 0, 0, 5, 6]], max_tokens=30, ignore_eos=True)
    others = len(harness.worker.steps) - steps
    assert (again.recorded, again.replayed) == (4, 3 * (steps - 1) + others - 1)


def test_a_step_that_cannot_be_recorded_runs_as_it_is(engine, greedy, caplog):
    asked: list[object] = []

    def refuse(run: Callable[[], Result]) -> Callable[[], Result]:
        asked.append(run)
        raise torch.OutOfMemoryError("no room for a graph")

    harness = Harness(recorded(engine("NGRAM", "", 16), refuse))
    harness.scheduler.set_envelope(fixed(NUM_STEPS, 4))
    (prompt,) = prompts(1, seed=64)
    assert harness.run([prompt], max_tokens=30, ignore_eos=True) == [greedy(prompt, 30)]
    assert len(asked) == 1, "not again at once"
    assert "no room for a graph" in caplog.text


def test_what_failed_to_be_recorded_is_tried_again(engine, greedy):
    again, failing = Again(), [True]

    def record(run: Callable[[], Result]) -> Callable[[], Result]:
        if failing:
            raise torch.OutOfMemoryError("no room for a graph")
        return again(run)

    harness = Harness(parts := recorded(engine("NGRAM", "", 16), record))
    harness.scheduler.set_envelope(fixed(0, 1))
    (prompt,) = prompts(1, seed=64)
    assert harness.run([prompt], max_tokens=30, ignore_eos=True) == [greedy(prompt, 30)]
    failing.clear()
    recordings = graphs_of(parts).recordings
    assert (recordings.made, recordings.failures) == (0, 1)
    for _ in range(TRY_AGAIN_AFTER // 29 + 1):
        assert harness.run([prompt], max_tokens=30, ignore_eos=True) == [greedy(prompt, 30)]
    assert (recordings.made, recordings.failures) == (1, 1)
    assert again.replayed > 0
    assert parts.worker.speculation_report().device.recording_failures == 1


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), settings_of([(NUM_STEPS, 4)], "equal", "random"))
def test_steps_recorded_ahead_are_the_first_ones_too(engine, greedy, method, draft, num_steps, topk):
    """And leave no trace in what is answered."""
    parts = recorded(engine(method, draft, 16), again := Again())
    subject, state = graphs_of(parts), parts.step.state
    harness = Harness(parts)
    harness.scheduler.set_envelope(update := fixed(num_steps, topk))
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=update.num_draft_tokens or 0)
    wanted = [(size, kind) for size in subject.sizes() for kind in (PLAIN, settings)]
    record_ahead(subject, state, wanted)
    assert again.recorded == 2 * len(wanted) == len(subject.steps)
    asked = prompts(5, seed=71)
    lengths = [30, 25, 16, 9, 4]
    ids = [harness.submit(p, max_tokens=n, ignore_eos=True) for p, n in zip(asked, lengths, strict=True)]
    sampled = harness.submit(asked[0], max_tokens=6, temperature=0.7, seed=3, ignore_eos=True)
    harness.drain()
    assert [harness.answers[i].token_ids for i in ids] == [greedy(p, n) for p, n in zip(asked, lengths, strict=True)]
    assert len(harness.answers[sampled].token_ids) == 6
    assert len(subject.steps) == 2 * len(wanted), "each of these steps was there"


def test_graphs_that_are_not_used_make_room(engine, greedy, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    again = Again()
    parts = recorded(engine("NGRAM", "", 16), again)
    prompt = prompts(1, seed=63)[0]
    for _ in range(3):
        for num_steps in (0, 1, 2, 3):
            harness = Harness(parts)
            harness.scheduler.set_envelope(fixed(num_steps, 1))
            assert harness.run([prompt], max_tokens=20, ignore_eos=True) == [greedy(prompt, 20)]
    assert len(graphs_of(parts).steps) == 2


def test_what_recording_costs_is_said_until_it_is_done(engine):
    parts = engine("NGRAM", "", 16)
    clock = iter(range(0, 1000, 5))  # 5 s a call
    subject = StepGraphs(parts.step, Again(), clock=lambda: next(clock))
    state = parts.step.state
    row = state.rows([0])

    def run(settings: Settings) -> bool:
        subject(row, settings)
        return subject.replayed

    chain = Settings(num_steps=2, topk=1, num_draft_tokens=3)
    with torch.inference_mode():
        before = subject.preparing([0])(PLAIN)
        assert before == 2 * graphs.FIRST_STEP_MS
        assert [run(PLAIN) for _ in range(4)] == [False, False, True, True]
        price = subject.preparing([0])
        assert (price(PLAIN), price(chain)) == (0, 2 * 5000)
        assert not run(chain)
        assert subject.preparing([0])(chain) == 5000
    assert subject.preparing([0, 1])(PLAIN) > 0, "two rows are another kind"


@pytest.mark.parametrize("most", [1, 5, 6, 64, 100])
def test_a_third_of_a_bucket_at_most_is_padding(most):
    sizes = [bucket(batch, most) for batch in range(1, most + 1)]
    assert sizes == sorted(sizes)
    for batch, size in enumerate(sizes, start=1):
        assert batch <= size <= most
        assert 2 * size <= 3 * batch, (batch, size)
    assert len(set(sizes)) <= 2 * most.bit_length()
