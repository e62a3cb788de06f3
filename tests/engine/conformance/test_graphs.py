"""Steps by StepGraphs, with a recorder that any machine has: what it replays is the step's tensor code with the host's
view of the batch that was recorded. So the host plans nothing within a step, and padded batches answer the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from pilotfish_engine.engine import Parts
from pilotfish_engine.worker import graphs
from pilotfish_engine.worker.graphs import Recorder, StepGraphs, bucket
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import NUM_STEPS, Harness, fixed

Result = TypeVar("Result")


class Again:
    """Records by calling again."""

    def __init__(self) -> None:
        self.replayed = 0

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        def again() -> Result:
            self.replayed += 1
            return run()

        return again


def recorded(parts: Parts, recorder: Recorder) -> Parts:
    worker = copy.copy(parts.worker)
    worker._run_step = StepGraphs(parts.step, recorder)
    return replace(parts, worker=worker)


def kept(parts: Parts) -> int:
    """How many graphs there are."""
    assert isinstance(parts.worker._run_step, StepGraphs)
    return len(parts.worker._run_step._graphs)


SETTINGS = settings_of([(0, 1), (NUM_STEPS, 1), (NUM_STEPS, 4)], "equal", "random")


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), SETTINGS)
def test_recorded_steps_answer_as_plain_decoding(engine, greedy, method, draft, num_steps, topk):
    """Five requests of different lengths, so that batches of each size come, most of them padded."""
    again = Again()
    harness = Harness(recorded(engine(method, draft, 16), again))
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    asked = prompts(5, seed=61)
    lengths = [40, 31, 22, 13, 4]
    ids = [harness.submit(p, max_tokens=n, ignore_eos=True) for p, n in zip(asked, lengths, strict=True)]
    harness.drain()
    for request_id, prompt, length in zip(ids, asked, lengths, strict=True):
        assert harness.answers[request_id].token_ids == greedy(prompt, length)
    assert again.replayed > 5


@pytest.mark.parametrize(("method", "draft", "num_steps", "topk"), [case for case in SETTINGS if case[2] > 0])
def test_recorded_steps_draw_what_others_draw(engine, method, draft, num_steps, topk):
    """Rows that are sampled, filtered, penalised, biased and scored, plain steps between drafted ones."""
    parts = engine(method, draft, 16)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 12},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logit_bias": [(5, 1.5)], "min_tokens": 8},
        {"logprobs": 2},
    ]

    def run(parts: Parts) -> list[list[int]]:
        harness = Harness(parts)
        ids = [
            harness.submit(prompt, max_tokens=30 - 3 * number, seed=number, **kind)
            for number, (prompt, kind) in enumerate(zip(prompts(5, seed=62), kinds, strict=True))
        ]
        for number in range(200):
            if not harness.scheduler.has_work:
                break
            harness.scheduler.set_envelope(fixed(*((0, 1) if number % 7 < 3 else (num_steps, topk))))
            harness.step()
        return [harness.answers[request_id].token_ids for request_id in ids]

    again = Again()
    assert run(recorded(parts, again)) == run(parts)
    assert again.replayed > 0


def test_a_step_that_cannot_be_recorded_runs_as_it_is(engine, greedy, caplog):
    asked: list[object] = []

    def refuse(run: Callable[[], Result]) -> Callable[[], Result]:
        asked.append(run)
        raise torch.OutOfMemoryError("no room for a graph")

    harness = Harness(recorded(engine("NGRAM", "", 16), refuse))
    harness.scheduler.set_envelope(fixed(NUM_STEPS, 4))
    (prompt,) = prompts(1, seed=64)
    assert harness.run([prompt], max_tokens=30, ignore_eos=True) == [greedy(prompt, 30)]
    assert len(asked) == 1, "asked once a kind"
    assert "no room for a graph" in caplog.text


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
    assert kept(parts) == 2


@pytest.mark.parametrize("most", [1, 5, 6, 64, 100])
def test_a_third_of_a_bucket_at_most_is_padding(most):
    sizes = [bucket(batch, most) for batch in range(1, most + 1)]
    assert sizes == sorted(sizes)
    for batch, size in enumerate(sizes, start=1):
        assert batch <= size <= most
        assert 2 * size <= 3 * batch, (batch, size)
    assert len(set(sizes)) <= 2 * most.bit_length()
