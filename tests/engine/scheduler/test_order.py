"""Who goes first: by priority, by arrival among equals, and nobody waits for more than their share of the work."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from pilotfish_engine.messages import Grammar, Output
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import Batch, CompiledGrammar, ForwardMode, GenerationBatchResult, Read, WorkerLimits
from tests.engine.scheduler.counting_worker import Counting, answer, drain, submit, tokens

ROOMY = WorkerLimits(max_running_requests=4, max_model_len=4096, page_size=16, num_pages=2048)
ONE_ROW = WorkerLimits(max_running_requests=1, max_model_len=128, page_size=4, num_pages=128)


def first_tokens(scheduler: Scheduler, limit: int = 2000) -> dict[str, int]:
    """The iteration in which each request got its first token, in that order."""
    found: dict[str, int] = {}
    for iteration in range(limit):
        if not scheduler.has_work:
            return found
        for output in scheduler.step():
            if output.token_ids:
                found.setdefault(output.request_id, iteration)
    raise AssertionError("stuck")


def test_by_priority_and_by_arrival_among_equals():
    scheduler = Scheduler(Counting(ONE_ROW), 16)
    for name, priority in [("a", 0), ("b", 5), ("c", -2), ("d", 0), ("e", -2), ("f", 5)]:
        submit(scheduler, name, 4, max_tokens=3, priority=priority)
    assert list(first_tokens(scheduler)) == ["c", "e", "a", "d", "b", "f"]


@pytest.mark.parametrize("overlap", [False, True])
def test_who_was_sent_back_comes_before_those_who_came_later(overlap):
    limits = WorkerLimits(max_running_requests=3, max_model_len=128, page_size=4, num_pages=128)
    scheduler = Scheduler(Counting(limits), 16, overlap=overlap)
    prompts = {name: submit(scheduler, name, 4, max_tokens=9) for name in "abcdef"}
    outputs: dict[str, list[Output]] = {name: [] for name in prompts}
    for _ in range(4):
        for output in scheduler.step():
            outputs[output.request_id].append(output)
    scheduler.retract_latest()
    scheduler.retract_latest()
    submit(scheduler, "urgent", 4, max_tokens=9, priority=-1)
    admitted = []
    while scheduler.has_work:
        for output in scheduler.step():
            outputs.setdefault(output.request_id, []).append(output)
        admitted += [r.request_id for r in scheduler.running if r.request_id not in admitted]
        scheduler.check()
    assert admitted == ["a", "urgent", "b", "c", "d", "e", "f"]
    assert all(tokens(outputs[name]) == answer(prompt, 9) for name, prompt in prompts.items())


def test_the_last_in_order_is_sent_back_whenever_it_came_in():
    limits = WorkerLimits(max_running_requests=3, max_model_len=128, page_size=4, num_pages=128)
    scheduler = Scheduler(Counting(limits), 16)
    submit(scheduler, "later", 4, max_tokens=30, priority=1)
    scheduler.step()
    for name in ("first", "second"):
        submit(scheduler, name, 4, max_tokens=30)
        scheduler.step()
    for left in (["first", "second"], ["first"]):
        scheduler.retract_latest()
        assert [request.request_id for request in scheduler.running] == left


def test_a_grammar_that_is_compiled_late_costs_no_place():
    compiling: list[Future[CompiledGrammar]] = []

    def compiler(grammar: Grammar) -> Future[CompiledGrammar]:
        compiling.append(Future())
        return compiling[-1]

    scheduler = Scheduler(Counting(ONE_ROW), 16, grammars=compiler)
    submit(scheduler, "running", 4, max_tokens=8)
    submit(scheduler, "guided", 4, max_tokens=8, grammar=Grammar("regex", "a"))
    submit(scheduler, "after", 4, max_tokens=8)
    scheduler.step()
    compiling[0].set_result(None)  # type: ignore[arg-type]
    assert list(first_tokens(scheduler)) == ["running", "guided", "after"]


@pytest.mark.parametrize("long_first", [True, False])
def test_long_prompts_and_short_ones_share_the_chunks(long_first):
    """A prompt of 2000 tokens and a stream of prompts of 20, chunks of 64: neither is kept waiting by the other."""
    scheduler = Scheduler(Counting(ROOMY), 64)
    if not long_first:
        submit(scheduler, "s0", 20, max_tokens=2)
        submit(scheduler, "s1", 20, max_tokens=2)
    submit(scheduler, "long", 2000, max_tokens=2)
    first: dict[str, int] = {}
    arrived: dict[str, int] = {"long": 0, "s0": 0, "s1": 0}
    for iteration in range(2000 // 32 + 4):
        name = f"s{iteration + 2}"
        submit(scheduler, name, 20, max_tokens=2)
        arrived[name] = iteration
        for output in scheduler.step():
            first.setdefault(output.request_id, iteration)
    assert max(at - arrived[name] for name, at in first.items() if name != "long") <= 2
    assert first["long"] <= 2000 // 32 + 2
    drain(scheduler)


def test_who_waits_behind_costs_nobody_anything():
    """When a request gets its first token depends on those before it alone."""

    def moments(behind: int) -> list[int]:
        scheduler = Scheduler(Counting(ROOMY), 64)
        for n in range(20):
            submit(scheduler, f"a{n}", 30, max_tokens=5)
        for n in range(behind):
            submit(scheduler, f"b{n}", 30, max_tokens=5)
        found = first_tokens(scheduler)
        return [found[f"a{n}"] for n in range(20)]

    alone = moments(0)
    assert moments(200) == alone
    # four rows: a place further back in the queue costs as much everywhere
    steps = [later - before for before, later in zip(alone[4:], alone[8:], strict=False)]
    assert max(steps) <= min(steps) + 1


def test_thousands_of_short_requests():
    """Of which a third leave while they wait; in a time that a walk through the queue for each would not allow."""
    worker = Counting(WorkerLimits(8, 64, 4, 256), tokens_a_step=2)
    scheduler = Scheduler(worker, 64)
    names = [f"r{n}" for n in range(6000)]
    for name in names:
        submit(scheduler, name, 3, max_tokens=3)
    ended = {output.request_id for output in scheduler.step() if output.finish_reason == "length"}
    for name in names[100::3]:
        scheduler.abort(name)
    for _ in range(6000):
        if not scheduler.has_work:
            break
        ended |= {output.request_id for output in scheduler.step() if output.finish_reason == "length"}
    assert ended == set(names) - set(names[100::3])
    scheduler.check()
    assert not worker.rows


def test_with_overlap_a_batch_is_read_behind_the_launch_of_the_next():
    """Chunks of prompts that come meanwhile too; only where nothing follows is a batch waited for."""
    events: list[str] = []

    class Told(Counting):
        def launch(self, batch: Batch) -> Read:
            number = len(self.batches)
            events.append(f"launch {number}")
            launched = super().launch(batch)

            def read() -> GenerationBatchResult:
                events.append(f"read {number}")
                return launched()

            return read

    worker = Told(ROOMY)
    scheduler = Scheduler(worker, 16, overlap=True)
    prompts = {"a": submit(scheduler, "a", 5, max_tokens=30)}
    outputs: dict[str, list[Output]] = {name: [] for name in "ab"}
    for iteration in range(60):
        if iteration == 6:
            prompts["b"] = submit(scheduler, "b", 100, max_tokens=9)
        for output in scheduler.step():
            outputs[output.request_id].append(output)
    assert [tokens(outputs[name]) for name in "ab"] == [answer(prompts["a"], 30), answer(prompts["b"], 9)]
    modes = [batch.mode for batch in worker.batches]
    assert ForwardMode.EXTEND in modes[8:], "chunks between the steps"
    reads = [event for event in events if event.startswith("read")]
    assert reads == [f"read {number}" for number in range(len(modes))]
    for number in range(len(modes) - 1):
        assert events.index(f"read {number}") > events.index(f"launch {number + 1}"), number
