"""The work queue: serial per key, nothing forgotten, failures retried."""

from __future__ import annotations

import asyncio
from collections import Counter

from pilotfish_operator.workqueue import Retry, WorkQueue


async def run_for(queue: WorkQueue[str], seconds: float) -> None:
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_key_never_runs_twice_at_once_and_an_add_during_its_turn_brings_another() -> None:
    running, most, turns = Counter[str](), 0, Counter[str]()

    async def process(key: str) -> None:
        nonlocal most
        running[key] += 1
        most = max(most, running[key])
        turns[key] += 1
        if turns[key] == 1:
            for _ in range(50):
                queue.add(key)
        await asyncio.sleep(0.02)
        running[key] -= 1

    queue = WorkQueue(process, workers=4)
    for key in "abcabcabc":
        queue.add(key)
    await run_for(queue, 0.3)
    assert most == 1
    assert turns == {"a": 2, "b": 2, "c": 2}
    assert queue.depth() == 0


async def test_no_more_turns_at_once_than_workers() -> None:
    now = most = 0

    async def process(key: str) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    queue = WorkQueue(process, workers=3)
    for i in range(20):
        queue.add(str(i))
    await run_for(queue, 0.3)
    assert most == 3


async def test_failures_are_retried_and_do_not_hold_up_others() -> None:
    seen: list[str] = []

    async def process(key: str) -> None:
        seen.append(key)
        if key == "bad" and seen.count("bad") < 3:
            raise Retry("known") if seen.count("bad") == 1 else ValueError("unknown")

    queue = WorkQueue(process, first_delay=0.02)
    queue.add("bad")
    queue.add("good")
    await run_for(queue, 0.4)
    assert seen.count("bad") == 3
    assert seen.count("good") == 1


async def test_the_result_says_when_the_next_turn_is() -> None:
    turns = 0

    async def process(key: str) -> float | None:
        nonlocal turns
        turns += 1
        return 0.02 if turns < 4 else None

    queue = WorkQueue(process)
    queue.add("a")
    await run_for(queue, 0.3)
    assert turns == 4


async def test_an_earlier_time_wins_and_a_retry_after_is_obeyed() -> None:
    now = 0.0
    queue: WorkQueue[str] = WorkQueue(lambda key: asyncio.sleep(0, None), clock=lambda: now)
    queue.add("a", after=10)
    queue.add("a", after=5)
    queue.add("a", after=20)
    assert queue.depth() == 0
    now = 5.0
    assert queue.depth() == 1


def test_delays_double_with_jitter_and_end() -> None:
    queue: WorkQueue[str] = WorkQueue(lambda key: asyncio.sleep(0, None), jitter=lambda: 1.0)
    assert [queue.retry_delay(n) for n in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 60.0]
    low: WorkQueue[str] = WorkQueue(lambda key: asyncio.sleep(0, None), jitter=lambda: 0.0)
    assert low.retry_delay(1) == 0.25


async def test_a_turn_that_hangs_shows() -> None:
    now = 0.0

    async def process(key: str) -> None:
        await asyncio.Event().wait()

    queue = WorkQueue(process, clock=lambda: now)
    queue.add("a")
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(0.01)
    now = 200.0
    assert queue.stuck() == 200.0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_ends_when_it_is_told_to_whatever_comes_in_that_moment():
    async def process(key: str) -> float | None:
        await asyncio.sleep(0)
        return 0.0

    for turns in range(12):
        queue = WorkQueue(process)
        working = asyncio.create_task(queue.run())
        await asyncio.sleep(0)
        queue.add("a", after=60)
        for _ in range(turns):
            await asyncio.sleep(0)
        queue.add("b")
        working.cancel()
        done, _ = await asyncio.wait([working], timeout=5)
        assert done, f"{turns} turns of the loop"
        assert working.cancelled()
