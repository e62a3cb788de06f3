"""The pair of sockets between the two processes: typed, in order, and bounded on the side of whoever is faster."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from pilotfish_engine import messages
from pilotfish_engine.core import HIGH_WATER_MARK, Socket
from pilotfish_engine.server.link import MAX_CALLS, Link
from tests.engine.server.serving import wait_until

MANY = 4 * HIGH_WATER_MARK
LARGE = list(range(70_000, 71_000))  # five bytes each: buffers of the kernel hold few of these


def output(number: int) -> messages.Outputs:
    return messages.Outputs([messages.Output(request_id=str(number), token_ids=LARGE)])


def test_a_model_process_waits_for_a_http_process_that_reads_nothing_and_loses_nothing(tmp_path: Path) -> None:
    context = zmq.Context()
    reader = context.socket(zmq.DEALER)
    reader.set_hwm(HIGH_WATER_MARK)
    reader.bind(f"ipc://{tmp_path}/core")
    sent: list[int] = []
    all_came = threading.Event()

    def send_all() -> None:
        sender = Socket(f"ipc://{tmp_path}/core")
        for number in range(MANY):
            sender.send(output(number))
            sent.append(number)
        all_came.wait(60)
        sender.close()

    sending = threading.Thread(target=send_all, daemon=True)
    sending.start()
    try:
        wait_until(lambda: stands_still(sent), 60)
        assert HIGH_WATER_MARK <= len(sent) < MANY - HIGH_WATER_MARK, "twice the mark, and what the kernel holds"
        for number in range(MANY):
            assert msgspec.msgpack.decode(reader.recv(), type=messages.FromCore) == output(number)
    finally:
        all_came.set()
        sending.join(10)
        context.destroy(linger=0)


def stands_still(sent: list[int]) -> bool:
    before = len(sent)
    threading.Event().wait(1.0)
    return len(sent) == before > 0


async def test_what_a_model_process_does_not_take_keeps_its_place(tmp_path: Path) -> None:
    """A client that asks and leaves, again and again, cannot pile up messages behind a model process that stands."""
    link = Link(f"ipc://{tmp_path}/core")
    try:
        request = messages.Submit(request_id="r", prompt=[1], params=messages.SamplingParams(max_tokens=1))
        for number in range(2 * HIGH_WATER_MARK):
            link.submit([msgspec.structs.replace(request, request_id=str(number))])
            link.let_go([str(number)])
        assert link.in_flight >= 2 * HIGH_WATER_MARK, "one of each pair's two messages"
    finally:
        link.close()


async def test_questions_to_a_model_process_that_stands_are_bounded(tmp_path: Path) -> None:
    link = Link(f"ipc://{tmp_path}/core")
    try:
        asked = [asyncio.ensure_future(link.call(messages.AskReport)) for _ in range(MAX_CALLS + 5)]
        done, waiting = await asyncio.wait(asked, timeout=1)
        assert len(waiting) == MAX_CALLS
        assert all("questions" in str(task.exception()) for task in done)
        link.end("over")
        await asyncio.wait(waiting, timeout=5)
        assert {str(task.exception()) for task in waiting} == {"over"}
    finally:
        link.close()


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Run"}), b"\x93\x01\x02\x03"])
def test_what_is_no_message_is_an_error_not_a_guess(message: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(message, type=messages.ToCore)
