"""A request comes in when there is room for it and for what is still to come, so that few are sent back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.scheduler.policy import Outlook, peak_growth
from pilotfish_engine.scheduler.room import FIRST_GUESS, KEPT, AnswerLengths, Room
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.types import WorkerLimits
from tests.engine.scheduler.counting_worker import Counting, answer, drain, prompt_of, submit, tokens

TIGHT = WorkerLimits(max_running_requests=16, max_model_len=128, page_size=4, num_pages=64)


@given(st.lists(st.builds(Outlook, st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_the_peak_is_that_of_going_through_it_page_by_page(outlooks):
    alive, peak = list(outlooks), 0
    needed = 0
    for time in range(10):
        needed -= sum(outlook.own + outlook.to_come for outlook in alive if outlook.to_come < time)
        alive = [outlook for outlook in alive if outlook.to_come >= time]
        needed += len(alive) if time else 0
        peak = max(peak, needed)
    assert peak_growth(outlooks) == peak


def test_what_is_to_come_is_learnt_from_the_answers_of_late():
    lengths = AnswerLengths()
    assert lengths.to_come(0) == FIRST_GUESS
    assert lengths.to_come(FIRST_GUESS + 44) == FIRST_GUESS + 44
    for _ in range(KEPT):
        lengths.ended(10)
        lengths.ended(30)
    assert lengths.to_come(0) == 20
    assert lengths.to_come(10) == 20
    assert lengths.to_come(29) == 1
    assert lengths.to_come(30) == 30


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens_a_step", [1, 4])
def test_where_the_limit_says_how_long_answers_are_nobody_is_sent_back(overlap, tokens_a_step):
    worker = Counting(TIGHT, tokens_a_step)
    scheduler = Scheduler(worker, 32, overlap=overlap)
    prompts = {f"r{n}": submit(scheduler, f"r{n}", 8, max_tokens=40) for n in range(40)}
    outputs = drain(scheduler)
    assert {name: tokens(outputs[name]) for name in prompts} == {n: answer(p, 40) for n, p in prompts.items()}
    assert scheduler.tally.retractions == 0
    assert worker.extended == 40 * 8
    # the pool holds 256 tokens, five whole requests of 48: many more than five would not fit, fewer were a waste
    rows = [len(batch.rows) for batch in worker.batches if batch.rows]
    assert sum(rows) / len(rows) > (4 if tokens_a_step == 1 else 3)


def stopping(scheduler: Scheduler, name: str, length: int) -> list[int]:
    """A request that may answer for as long as the context goes on and stops after `length` tokens. Its answer."""
    expected = answer(prompt_of(name, 8), length)
    submit(scheduler, name, 8, max_tokens=120, stop_token_ids=(expected[-1],))
    return expected


def test_answers_that_end_early_let_more_requests_in():
    """max_tokens 120 with a prompt of 8 would let two in at a time; the answers have 6 tokens."""
    worker = Counting(TIGHT)
    scheduler = Scheduler(worker, 64)
    for wave in range(8):
        expected = {name: stopping(scheduler, name, 6) for name in (f"w{wave}-{n}" for n in range(16))}
        worker.batches.clear()
        outputs = drain(scheduler)
        assert {name: tokens(outputs[name]) for name in expected} == expected
    assert max(len(batch.rows) for batch in worker.batches) >= 10
    assert scheduler.tally.retractions == 0


def test_wrong_expectations_cost_little():
    """Short answers of late, then long ones: what came in too early is sent back once or twice, not at every step."""
    worker = Counting(TIGHT)
    scheduler = Scheduler(worker, 64)
    for n in range(KEPT):
        submit(scheduler, f"short{n}", 4, max_tokens=2)
    drain(scheduler)
    worker.extended = 0
    prompts = {f"long{n}": submit(scheduler, f"long{n}", 8, max_tokens=64) for n in range(16)}
    outputs = drain(scheduler, limit=1000)
    assert {name: tokens(outputs[name]) for name in prompts} == {n: answer(p, 64) for n, p in prompts.items()}
    assert 0 < scheduler.tally.retractions <= 2 * len(prompts)
    assert worker.extended <= len(prompts) * (8 + 64)


def test_a_prefix_in_use_stays_while_others_give_way():
    """Every other request begins with the same pages; the long prompts between them fill the pool many times over."""
    scheduler = Scheduler(Counting(TIGHT), 64)
    cached = []
    for wave in range(12):
        submit(scheduler, "same", 13)
        first = submit(scheduler, f"once{wave}", 60, max_tokens=4)
        outputs = drain(scheduler)
        assert tokens(outputs["same"]) == answer(prompt_of("same", 13), 8)
        assert tokens(outputs[f"once{wave}"]) == answer(first, 4)
        cached.append(outputs["same"][-1].cached_tokens)
    assert cached == [0] + [12] * 11
    assert 2 * TIGHT.num_pages * TIGHT.page_size < 12 * 60


def test_where_there_is_room_for_the_longest_what_is_to_come_need_not_be_asked(monkeypatch):
    """Whenever the short answer is yes, the long one is too; it is asked for only where the short one is no."""
    enter, short = Room.enter, []

    def both(room, request, running):
        wanted = room._wanted(request)
        short.append(room._ample(len(running) + 1))
        if short[-1]:
            spare = room.pool.num_free + room.prefix.num_evictable - wanted
            assert room._lasts(spare, request, wanted, running)
        return enter(room, request, running)

    monkeypatch.setattr(Room, "enter", both)
    scheduler = Scheduler(Counting(replace(TIGHT, num_pages=256)), 64)
    for n in range(30):
        submit(scheduler, f"r{n}", 4 + n % 9, max_tokens=20 + 3 * n)
    drain(scheduler)
    assert set(short) == {True, False}
