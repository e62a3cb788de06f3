"""The model process: messages in, steps, outputs out. `python -m pilotfish_engine.core ENDPOINT PARENT_PID
LAST_WORDS`, its configuration as JSON on standard input.

Knows nothing about HTTP, text or tensors: what a step is, only the `Core` knows. It never outlives its parent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from pilotfish_engine import messages
from pilotfish_engine.config import CONFIG, EngineConfig, share_cores
from pilotfish_engine.contract.speculation import EngineReport, EnvelopeUpdate
from pilotfish_engine.distributed.children import Say, die_with, settle
from pilotfish_engine.errors import RequestError, UsageError
from pilotfish_engine.types import WorkerLimits

HEARTBEAT_SECONDS = 1.0
HIGH_WATER_MARK = 4096  # messages; past it the faster side waits for the slower
LAST_WORDS_BYTES = 2048
_DRAIN_AT_ONCE = 256  # messages taken between two steps, so that a flood of requests cannot stop the running ones


class Core(Protocol):
    """The scheduler with its worker, as its loop sees it."""

    @property
    def limits(self) -> WorkerLimits: ...

    @property
    def method(self) -> str: ...

    @property
    def unready(self) -> str | None:
        """Why no new request should come here, or None."""
        ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: messages.Submit) -> None:
        """Raises RequestError when this request can never be served."""
        ...

    def abort(self, request_id: str) -> None:
        """Unknown and finished requests are ignored. No output follows."""
        ...

    def step(self) -> list[messages.Output]:
        """One iteration of the loop; returns at once when there is nothing to do."""
        ...

    def report(self) -> EngineReport: ...

    def set_envelope(self, update: EnvelopeUpdate) -> EngineReport:
        """Raises EnvelopeError; then nothing has changed."""
        ...

    def flush_cache(self) -> None:
        """Raises RequestError when the prefix cache cannot be dropped now."""
        ...


Build = Callable[[EngineConfig, Say], Core]


class Socket:
    """The model process's end of the pair; the other end is server.link."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(messages.ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: messages.FromCore) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> list[messages.ToCore]:
        """What has come, after waiting for the first of it."""
        if not self._socket.poll(int(wait_seconds * 1000)):
            return []
        received: list[messages.ToCore] = []
        while len(received) < _DRAIN_AT_ONCE:
            try:
                received.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return received

    def close(self) -> None:
        """Waits a second at most for what was sent to be taken."""
        self._context.destroy()


def run(config: EngineConfig, endpoint: str, build: Build, say: Say) -> int:
    """Builds the engine and loops until killed. Returns an error's exit code when it cannot be built."""
    socket = Socket(endpoint)
    try:
        socket.send(messages.Heartbeat(unready="the model is loading"))
        core = build(config, say)
        limits = core.limits
        socket.send(
            messages.CoreReady(
                max_model_len=limits.max_model_len,
                max_running_requests=limits.max_running_requests,
                method=core.method,
                vocab_size=limits.vocab_size,
                memory_sum=limits.memory_sum,
            )
        )
        _loop(core, socket)
    except UsageError as error:
        socket.send(messages.CoreFailed(str(error)))
        return error.exit_code
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        raise
    finally:
        socket.close()
    return 0


def _loop(core: Core, socket: Socket) -> None:
    next_beat = time.monotonic()
    while True:
        if (now := time.monotonic()) >= next_beat:
            socket.send(messages.Heartbeat(core.unready))
            next_beat = now + HEARTBEAT_SECONDS
        for message in socket.receive(0.0 if core.has_work else max(0.0, next_beat - now)):
            reply = _handle(core, message)
            if reply is not None:
                socket.send(reply)
        outputs = core.step()
        if outputs:
            socket.send(messages.Outputs(outputs))


def _handle(core: Core, message: messages.ToCore) -> messages.FromCore | None:
    match message:
        case messages.Submit():
            try:
                core.submit(message)
            except Exception as error:  # whatever it is, it is this request's
                field = error.field if isinstance(error, RequestError) else None
                failed = messages.Output(
                    request_id=message.request_id, token_ids=[], finish_reason="error", error=str(error), field=field
                )
                return messages.Outputs([failed])
            return None
        case messages.Abort():
            core.abort(message.request_id)
            return None
        case messages.AskReport() | messages.SetEnvelope() | messages.FlushCache():
            try:
                return messages.Answer(message.call_id, body=_answer(core, message))
            except RequestError as error:
                return messages.Answer(message.call_id, error=str(error), field=error.field)


def _answer(core: Core, message: messages.AskReport | messages.SetEnvelope | messages.FlushCache) -> bytes:
    match message:
        case messages.AskReport():
            return core.report().model_dump_json().encode()
        case messages.SetEnvelope():
            update = EnvelopeUpdate.model_validate_json(message.update)
            return core.set_envelope(update).model_dump_json().encode()
        case messages.FlushCache():
            core.flush_cache()
            return b""


def main(build: Build, arguments: list[str]) -> int:
    """arguments: the endpoint, the parent's process id, and the descriptor of the file for the last words."""
    endpoint, parent, last_words = arguments
    die_with(int(parent))
    config = CONFIG.validate_json(sys.stdin.buffer.read())
    return run(config, endpoint, build, lambda sentence: _write(int(last_words), sentence))


def _write(file: int, sentence: str) -> None:
    os.write(file, sentence.encode(errors="replace") + b"\n")


def _build(config: EngineConfig, say: Say) -> Core:
    share_cores()
    # after the first heartbeat: these take a while
    from pilotfish_engine.source import resolve
    from pilotfish_engine.tokenizer import apart

    for source in (config.model.source, config.speculation.draft):
        if source is not None:
            apart.check(resolve(source))
    if config.capacity.tensor_parallel_size > 1:
        from pilotfish_engine import group

        core = group.build(config, say)
    else:
        from pilotfish_engine import engine

        core = engine.build(config)
    settle()
    return core


if __name__ == "__main__":
    sys.exit(main(_build, sys.argv[1:]))
