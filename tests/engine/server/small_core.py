"""A model process without a model: every answer repeats its prompt, then ends. Three tokens a step, as if two drafts of
three were accepted. Run as the model process by serve_small.py, with its behaviour in the first argument.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import msgspec

from pilotfish_engine import core, messages
from pilotfish_engine.config import EngineConfig
from pilotfish_engine.contract.speculation import CostProfile, Counters, Effective, EngineReport, EnvelopeUpdate
from pilotfish_engine.distributed.children import Say
from pilotfish_engine.errors import EnvelopeError, MethodError, RequestError
from pilotfish_engine.server.connection import Patience
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import StopStrings, load
from pilotfish_engine.types import WorkerLimits

EOS = 2
CRASH = 16  # a prompt with this token kills the loop
REFUSED = 15  # a prompt with this token is refused by the scheduler
TOKENS_A_STEP = 3
DRAFTED_A_STEP = 3


class Behaviour(msgspec.Struct):
    step_seconds: float = 0.002
    load_seconds: float = 0.0
    usage_error: str | None = None
    unready: str | None = None
    crash_while_loading: bool = False
    patience: Patience = Patience()


class Running:
    def __init__(self, request: messages.Submit, stops: StopStrings) -> None:
        self.request = request
        self.stops = stops
        self.made = 0
        self.drafted = self.accepted = 0

    def next_token(self) -> int:
        prompt = [token for token in self.request.prompt if token > EOS]
        if self.made < len(prompt) or self.request.params.ignore_eos:
            return prompt[self.made % len(prompt)]
        return EOS


class SmallCore:
    def __init__(self, config: EngineConfig, behaviour: Behaviour) -> None:
        self._config = config
        self._behaviour = behaviour
        self._tokenizer = load(resolve(config.model.source))
        self._waiting: deque[messages.Submit] = deque()
        self._running: dict[str, Running] = {}
        self._counters = Counters()
        self._envelope = config.speculation.envelope
        self.flushed = 0

    @property
    def limits(self) -> WorkerLimits:
        capacity, longest = self._config.capacity, self._config.model.max_model_len or 512
        return WorkerLimits(capacity.max_running_requests, longest, capacity.page_size, 4096)

    @property
    def method(self) -> str:
        return "ECHO"

    @property
    def unready(self) -> str | None:
        return self._behaviour.unready

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: messages.Submit) -> None:
        if REFUSED in request.prompt:
            raise RequestError("this prompt can never fit")
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)

    def step(self) -> list[messages.Output]:
        if not self.has_work:
            return []
        time.sleep(self._behaviour.step_seconds)
        while self._waiting and len(self._running) < self.limits.max_running_requests:
            request = self._waiting.popleft()
            assert CRASH not in request.prompt, "asked to crash"
            stops = StopStrings.of(self._tokenizer, request.params)
            self._running[request.request_id] = Running(request, stops)
        return [self._advance(running) for running in list(self._running.values())]

    def _advance(self, running: Running) -> messages.Output:
        tokens: list[int] = []
        reason: messages.FinishReason | None = None
        text_end = None
        params = running.request.params
        first = running.made == 0
        for _ in range(1 if first else TOKENS_A_STEP):
            token = running.next_token()
            running.made += 1
            tokens.append(token)
            stopped = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
            if stopped or (text_end := running.stops.append(token)) is not None:
                reason = "stop"
            elif running.made == params.max_tokens:
                reason = "length"
            if reason is not None:
                break
        if not first:
            running.drafted += DRAFTED_A_STEP
            running.accepted += len(tokens) - 1
        self._count(len(tokens), not first)
        if reason is not None:
            del self._running[running.request.request_id]
        return messages.Output(
            request_id=running.request.request_id,
            token_ids=tokens,
            finish_reason=reason,
            text_end=text_end,
            cached_tokens=len(running.request.prompt) // 2,
            drafted_tokens=running.drafted,
            accepted_tokens=running.accepted,
        )

    def _count(self, emitted: int, speculative: bool) -> None:
        before = self._counters
        self._counters = Counters(
            steps=before.steps + speculative,
            plain_steps=before.plain_steps + (not speculative),
            drafted_tokens=before.drafted_tokens + DRAFTED_A_STEP * speculative,
            accepted_tokens=before.accepted_tokens + (emitted - 1) * speculative,
            emitted_tokens=before.emitted_tokens + emitted,
        )

    def report(self) -> EngineReport:
        return EngineReport(
            method=self.method,
            effective=Effective(
                num_steps=self._envelope.num_steps, topk=1, num_draft_tokens=4, disable_threshold=None, active=True
            ),
            envelope=self._envelope,
            running=len(self._running),
            waiting=len(self._waiting),
            context_tokens=sum(len(running.request.prompt) + running.made for running in self._running.values()),
            max_running_requests=self.limits.max_running_requests,
            concurrency_seconds_total=1.5,
            accept_length=3.0,
            accept=(0.9, 0.8),
            counters=self._counters,
            profile=CostProfile(verify_ms=((1, 1.0),)),
            reason="it echoes",
        )

    def set_envelope(self, update: EnvelopeUpdate) -> EngineReport:
        if update.topk is not None and update.topk > 4:
            raise EnvelopeError(f"topk {update.topk} is more than ECHO can; at most 4 would work", "topk")
        self._envelope = update.applied_to(self._envelope)
        return self.report()

    def flush_cache(self) -> None:
        self.flushed += 1


def main() -> int:
    behaviour = msgspec.json.decode(sys.argv[1], type=Behaviour)

    def build(config: EngineConfig, say: Say) -> core.Core:
        time.sleep(behaviour.load_seconds)
        assert not behaviour.crash_while_loading, "asked to crash"
        if behaviour.usage_error is not None:
            raise MethodError(behaviour.usage_error)
        return SmallCore(config, behaviour)

    return core.main(build, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
