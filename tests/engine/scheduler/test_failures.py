"""What cannot be served ends with a sentence, frees what it held, and the others go on."""

from __future__ import annotations

import pytest

from pilotfish_engine.messages import Output
from pilotfish_engine.scheduler.faults import MAX_FAILED_STEPS
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import Batch, ForwardMode, WorkerLimits
from tests.engine.scheduler.counting_worker import Counting, answer, drain, prompt_of, submit, tokens


def test_a_request_larger_than_the_cache_is_refused_by_its_numbers():
    scheduler = Scheduler(Counting(), 16)
    submit(scheduler, "huge", 40)
    submit(scheduler, "small", 4)
    outputs = drain(scheduler)
    assert outputs["huge"][-1].finish_reason == "error"
    assert "40 tokens" in str(outputs["huge"][-1].error)
    assert "32 tokens" in str(outputs["huge"][-1].error)
    assert outputs["small"][-1].finish_reason == "length"


def test_a_request_that_outgrows_the_cache_alone_is_ended_and_the_next_is_served():
    scheduler = Scheduler(Counting(), 16)
    submit(scheduler, "growing", 20, max_tokens=40)
    submit(scheduler, "later", 4)
    outputs = drain(scheduler)
    assert outputs["growing"][-1].finish_reason == "error"
    assert sum(len(o.token_ids) for o in outputs["growing"]) > 8
    assert outputs["later"][-1].finish_reason == "length"


def test_a_failing_step_ends_its_requests_and_three_in_a_row_make_the_engine_unready():
    worker = Counting(broken=True)
    scheduler = Scheduler(worker, 16)
    for number in range(MAX_FAILED_STEPS):
        assert scheduler.unready is None
        submit(scheduler, str(number), 4)
        assert "no memory" in str(drain(scheduler)[str(number)][-1].error)
    assert scheduler.unready is not None
    assert "no memory" in scheduler.unready
    worker.broken = False
    submit(scheduler, "after", 4)
    assert drain(scheduler)["after"][-1].finish_reason == "length"
    assert scheduler.unready is None


def test_concurrency_is_integrated_over_time():
    """Whatever waits or runs counts for as long as it does."""
    now = [0.0]
    scheduler = Scheduler(Counting(), 16, clock=lambda: now[0])
    now[0] = 5.0
    submit(scheduler, "a", 4)
    now[0] = 7.0
    submit(scheduler, "b", 4, max_tokens=1)
    now[0] = 8.0
    assert scheduler.report().concurrency_seconds_total == 2.0 * 1 + 1.0 * 2
    now[0] = 10.0
    scheduler.step()  # b ends
    now[0] = 13.0
    assert scheduler.report().concurrency_seconds_total == 4.0 + 2.0 * 2 + 3.0 * 1
    scheduler.abort("a")
    now[0] = 20.0
    assert scheduler.report().concurrency_seconds_total == 11.0


def played(worker: Counting, overlap: bool) -> tuple[Scheduler, dict[str, list[int]], dict[str, list[Output]]]:
    scheduler = Scheduler(worker, 5, overlap=overlap)
    prompts = {name: submit(scheduler, name, 3 + at, max_tokens=2 + 3 * at) for at, name in enumerate("abcdef")}
    return scheduler, prompts, drain(scheduler)


@pytest.mark.parametrize("mode", list(ForwardMode)[:2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_fails_once_ends_nobody_who_had_company(mode, overlap):
    """A call fails at every place in turn: with overlap it may be one that others wait for, and one of whose requests
    have ended already."""
    for failing in range(12):
        calls: list[Batch] = []

        def call(batch: Batch, failing: int = failing, calls: list[Batch] = calls) -> None:
            if batch.mode is mode:
                calls.append(batch)
                if len(calls) == failing + 1:
                    raise RuntimeError("lost")

        worker = Counting(WorkerLimits(3, 64, 4, 64), tokens_a_step=2, before_call=call)
        scheduler, prompts, outputs = played(worker, overlap)
        failed = {name for name in prompts if outputs[name][-1].finish_reason == "error"}
        for at, (name, prompt) in enumerate(prompts.items()):
            got = tokens(outputs[name])
            assert got == answer(prompt, 2 + 3 * at)[: len(got)]
            assert sum(output.finish_reason is not None for output in outputs[name]) == 1
            assert name in failed or len(got) == 2 + 3 * at
        if len(calls) > failing:  # else the run was over before
            assert len(failed) == (len(calls[failing].rows) + len(calls[failing].chunks) == 1)
        assert not worker.rows
        assert scheduler.room.pool.num_free + scheduler.room.prefix.num_cached == 64


@pytest.mark.parametrize("mode", list(ForwardMode)[:2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("culprits", ["a", "d", "f", "be", "ace", "abcdef"])
@pytest.mark.parametrize("pages", [64, 12])
def test_who_makes_batches_fail_ends_alone(mode, overlap, culprits, pages):
    worker = Counting(WorkerLimits(3, 64, 4, pages), tokens_a_step=2)
    first = {prompt_of(name, 1)[0] for name in culprits}

    def call(batch: Batch) -> None:
        rows = [*batch.rows, *(chunk.row for chunk in batch.chunks)]
        if batch.mode is mode and any(worker.rows[row].tokens[0] in first for row in rows if row in worker.rows):
            raise RuntimeError("lost")

    worker.before_call = call
    scheduler, prompts, outputs = played(worker, overlap)
    for at, (name, prompt) in enumerate(prompts.items()):
        last, got = outputs[name][-1], tokens(outputs[name])
        if name in culprits:
            assert last.finish_reason == "error" or mode is ForwardMode.DECODE, "it never ran"
        else:
            assert (last.finish_reason, got) == ("length", answer(prompt, 2 + 3 * at))
        assert got == answer(prompt, 2 + 3 * at)[: len(got)]
    assert not worker.rows
    assert scheduler.room.pool.num_free + scheduler.room.prefix.num_cached == pages
    assert scheduler.unready is None or len(culprits) > 2
