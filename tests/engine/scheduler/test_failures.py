"""What cannot be served ends with a sentence, frees what it held, and the others go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from pilotfish_engine.contract.speculation import Effective, Envelope
from pilotfish_engine.messages import Output, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import MAX_FAILED_STEPS, Scheduler
from pilotfish_engine.types import Batch, ForwardMode, GenerationBatchResult, SpeculationReport, WorkerLimits


@dataclass
class Numbers:
    values: list[int]

    def tolist(self):
        return self.values


@dataclass
class Counting:
    """A Worker that answers 7 for every row; `broken` raises instead."""

    limits: WorkerLimits = field(default_factory=lambda: WorkerLimits(4, 64, 4, 8))
    reserve_tokens: int = 1
    broken: bool = False

    def admit(self, admission):
        pass

    def release(self, row):
        pass

    def reusable_len(self, row, seq_len):
        return seq_len

    def set_envelope(self, envelope):
        pass

    def forward_batch_generation(self, batch: Batch) -> GenerationBatchResult:
        if self.broken:
            raise RuntimeError("no memory")
        extend = batch.mode is ForwardMode.EXTEND
        accept = [int(chunk.last) for chunk in batch.chunks] if extend else [1] * len(batch.rows)
        return GenerationBatchResult(Numbers([7] * len(accept)), Numbers(accept), Numbers([0] * len(accept)), 1)

    def speculation_report(self):
        effective = Effective(num_steps=0, topk=1, num_draft_tokens=1, disable_threshold=None, active=False)
        return SpeculationReport("None", effective, Envelope(), None, (), None, "")


def submit(scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 8) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    scheduler.submit(Submit(request_id=name, prompt=[1] * prompt_len, params=params))


def drain(scheduler: Scheduler) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(200):
        if not scheduler.has_work:
            return outputs
        for output in scheduler.step():
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.check()
    raise AssertionError("stuck")


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
    now = [0.0]
    scheduler = Scheduler(Counting(), 16, clock=lambda: now[0])
    now[0] = 5.0
    submit(scheduler, "a", 4)
    now[0] = 7.0
    submit(scheduler, "b", 4)
    now[0] = 8.0
    assert scheduler.report().concurrency_seconds_total == 2.0 * 1 + 1.0 * 2
