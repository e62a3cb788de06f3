"""The loop's one iteration: admit waiting requests, run a batch of prompt chunks, run a decode step, commit what came.

Knows nothing about tensors, HTTP or methods. Time comes in through `clock` and is used for the concurrency integral
only.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from pilotfish_engine.contract.speculation import Counters, EngineReport, EnvelopeUpdate
from pilotfish_engine.errors import RequestError
from pilotfish_engine.kv.pages import PagePool
from pilotfish_engine.kv.prefix import PrefixCache
from pilotfish_engine.messages import Output, Submit
from pilotfish_engine.scheduler.policy import PrefillWork, missing_pages, pages_for, plan_chunks, too_large
from pilotfish_engine.scheduler.preparing import GrammarCompiler, Preparing
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.scheduler.steps import DecodeSteps, logprobs
from pilotfish_engine.scheduler.stops import End, StopChecker, StopTextFactory
from pilotfish_engine.types import (
    Admission,
    Batch,
    ForwardMode,
    GenerationBatchResult,
    NewPages,
    Worker,
    WorkerLimits,
)

MAX_FAILED_STEPS = 3  # in a row, before the engine calls itself unready


class Scheduler:
    """Implements the model process's Core. chunk_size: prompt tokens that one iteration puts through at most."""

    def __init__(
        self,
        worker: Worker,
        chunk_size: int,
        stop_text: StopTextFactory | None = None,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._worker = worker
        self._steps = DecodeSteps(worker, overlap)
        self._chunk_size = chunk_size
        self._stop_text = stop_text
        self._clock = clock
        limits = worker.limits
        self.pool = PagePool(limits.num_pages)
        self.prefix = PrefixCache(self.pool, limits.page_size, limits.lookahead)
        self._free_rows = list(range(limits.max_running_requests - 1, -1, -1))
        self._preparing = Preparing(grammars)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._outputs: list[Output] = []
        self._counts: Counter[str] = Counter()
        self._concurrency_seconds = 0.0
        self._counted_at = clock()
        self.retractions = 0
        self._at_work: list[Request] = []  # in the call that may fail now
        self._failed_steps = 0
        self._last_failure = ""

    @property
    def limits(self) -> WorkerLimits:
        return self._worker.limits

    @property
    def method(self) -> str:
        return self._worker.speculation_report().method

    @property
    def has_work(self) -> bool:
        return bool(self._queued or self._running or self._outputs or self._steps.requests)

    @property
    def _queued(self) -> int:
        return len(self._waiting) + len(self._preparing.requests)

    @property
    def unready(self) -> str | None:
        if self._failed_steps < MAX_FAILED_STEPS:
            return None
        return f"{self._failed_steps} steps in a row failed, the last one with: {self._last_failure}"

    def submit(self, submit: Submit) -> None:
        """The prompt has 1 … max_model_len − 1 tokens. A request that cannot ever fit is answered with an error."""
        self._count_time()
        limits, params = self.limits, submit.params
        endless = params.ignore_eos and params.grammar is None
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if endless else limits.eos_token_ids)
        text = self._stop_text(params.stop) if params.stop and self._stop_text is not None else None
        request = Request(
            request_id=submit.request_id,
            prompt_len=len(submit.prompt),
            token_ids=list(submit.prompt),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stops=StopChecker(stop_ids, text, min(len(submit.prompt) + params.max_tokens, limits.max_model_len)),
        )
        self._requests[request.request_id] = request
        if self._pages_wanted(request) > limits.num_pages:
            self._fail(request, self._too_large(request))
        elif params.grammar is None:
            self._waiting.append(request)
        else:
            self._preparing.add(request)

    def abort(self, request_id: str) -> None:
        """Frees what the request holds, at once or when the step that is under way ends. Unknown ids are requests that
        have just ended."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._retire(request)

    def step(self) -> list[Output]:
        """One iteration. Returns what it committed and which requests it ended."""
        self._take_prepared()
        self._admit()
        self._run(self._extend)
        self._run(self._decode)
        self._count_time()
        outputs, self._outputs = self._outputs, []
        return outputs

    def report(self) -> EngineReport:
        self._count_time()
        speculation = self._worker.speculation_report()
        return EngineReport(
            method=speculation.method,
            effective=speculation.effective,
            envelope=speculation.envelope,
            running=len(self._running),
            waiting=self._queued,
            context_tokens=self._context_tokens(self._running),
            max_running_requests=self.limits.max_running_requests,
            concurrency_seconds_total=self._concurrency_seconds,
            accept_length=speculation.accept_length,
            accept=speculation.accept,
            counters=Counters(**self._counts),
            profile=speculation.profile,
            reason=speculation.reason,
        )

    def set_envelope(self, update: EnvelopeUpdate) -> EngineReport:
        """Takes effect with the next step. Raises EnvelopeError, and nothing changes, on what the method cannot do."""
        self._run(self._collect)
        self._worker.set_envelope(update.applied_to(self._worker.speculation_report().envelope))
        return self.report()

    def flush_cache(self) -> None:
        self.prefix.flush()

    def check(self) -> None:
        """Raises PageError unless free + used + cached = all, every reference accounted for."""
        self.prefix.check()
        self.pool.check(self.held_pages())

    def held_pages(self) -> list[list[int]]:
        """The pages of every holder: each running request, and the prefix cache."""
        return [*(request.pages for request in self._running), list(self.prefix.pages())]

    def retract_latest(self) -> None:
        """The request admitted last goes back to the head of the queue, to go through again from its tokens; what the
        prefix cache keeps of it is a gain."""
        self._collect()
        request = self._running[-1]
        self._leave(request)
        self._waiting.appendleft(request)
        self.retractions += 1

    # --- admission and pages

    def _take_prepared(self) -> None:
        for request, failure in self._preparing.take(idle=not (self._waiting or self._running)):
            if failure is None:
                self._waiting.append(request)
            else:
                self._fail(request, failure)

    def _admit(self) -> None:
        if self._waiting and self._free_rows:
            self._run(self._collect)  # rows and pages change only between steps
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            cached = self.prefix.match(request.token_ids, len(request.token_ids) - 1)
            fresh = self._allocate(self._pages_wanted(request) - len(cached))
            if fresh is None:
                self.pool.release(cached)
                if not self._running:
                    self._waiting.popleft()
                    self._fail(request, self._too_large(request))
                    continue
                return
            self._waiting.popleft()
            request.row = self._free_rows.pop()
            request.pages = cached + fresh
            request.computed_len = len(cached) * self.limits.page_size
            if request.admissions == 0:
                request.cached_tokens = request.computed_len
            request.admissions += 1
            request.decoding = False
            self._running.append(request)
            admission = Admission(
                row=request.row,
                token_ids=request.token_ids,
                cached_len=request.computed_len,
                pages=request.pages,
                params=request.params,
                seed=request.seed,
                prompt_len=request.prompt_len,
                end_token_ids=sorted(request.stops.stop_token_ids),
                grammar=None if request.grammar is None else request.grammar.result(),
            )
            try:
                self._worker.admit(admission)
            except Exception as error:  # parameters that cannot be, or no memory for what they need
                self._fail(request, error, keep=False)

    def _pages_wanted(self, request: Request) -> int:
        """For all known tokens, the one to come, and a first step."""
        return pages_for(len(request.token_ids) + 1 + self._worker.reserve_tokens, self.limits.page_size)

    def _allocate(self, n: int) -> list[int] | None:
        short = n - self.pool.num_free
        if short > 0:
            self.prefix.evict(short)
        return self.pool.allocate(n)

    def _grow(self, request: Request) -> NewPages | None:
        """Pages for the next step of a decoding request; others are retracted, the latest first, until they are
        there."""
        while True:
            reserve = self._worker.reserve_tokens * (1 + (request in self._steps.requests))  # may be under way
            missing = missing_pages(len(request.token_ids), reserve, self.limits.page_size, len(request.pages))
            if missing == 0 or not request.running:
                return None
            if (fresh := self._allocate(missing)) is not None:
                break
            if self._steps.requests:  # what ends in the step under way gives its pages back
                self._collect()
                continue
            latest = self._running[-1]
            if latest is request and len(self._running) == 1:
                self._fail(request, self._too_large(request))
                return None
            self.retract_latest()
            if latest is request:
                return None
        added = NewPages(request.row, len(request.pages), fresh)
        request.pages = request.pages + fresh
        return added

    def _too_large(self, request: Request) -> str:
        return too_large(len(request.token_ids), self.limits.num_pages * self.limits.page_size)

    # --- running batches

    def _run(self, part: Callable[[], None]) -> None:
        """A step that fails ends the requests that were in it, and no others."""
        self._at_work = []
        try:
            part()
        except Exception as error:
            self._failed_steps += 1
            self._last_failure = f"{type(error).__name__}: {error}"
            failed = [*self._at_work, *self._steps.abandon()]
            for request in [r for r in self._running if r in failed]:
                self._fail(request, f"the step failed ({self._last_failure})", keep=False)

    def _extend(self) -> None:
        self._at_work = [request for request in self._running if not request.decoding]
        work = [PrefillWork(r.row, r.computed_len, len(r.token_ids)) for r in self._at_work]
        chunks = plan_chunks(work, self._chunk_size)
        if not chunks:
            return
        self._collect()
        result = self._worker.forward_batch_generation(Batch(ForwardMode.EXTEND, chunks=chunks))
        self._failed_steps = 0
        by_row = {request.row: request for request in self._running}
        for place, (chunk, tokens) in enumerate(zip(chunks, result.committed(), strict=True)):
            request = by_row[chunk.row]
            request.computed_len = chunk.end
            if chunk.last:
                request.decoding = True
                self._commit(request, tokens, result, place)

    def _decode(self) -> None:
        """Starts the next step, then commits what the one before it gave; without overlap that is the same step."""
        new_pages = []
        for request in self._decoding():
            added = self._grow(request) if request.running else None
            if added is not None:
                new_pages.append(added)
        self._at_work = self._decoding()
        rows = [request.row for request in self._at_work]
        batch = Batch(
            ForwardMode.DECODE,
            rows=rows,
            new_pages=[added for added in new_pages if added.row in rows],
            context_tokens=self._context_tokens(self._at_work),
        )
        done = self._steps.next(self._at_work, batch)
        if done is not None:
            self._commit_step(*done)

    def _decoding(self) -> list[Request]:
        return [request for request in self._running if request.decoding and request.finish_reason is None]

    def _collect(self) -> None:
        """Commits the step that is under way, if one is: from here on the host knows what the device knows."""
        done = self._steps.collect()
        if done is not None:
            self._commit_step(*done)

    def _commit_step(self, requests: Sequence[Request], result: GenerationBatchResult) -> None:
        self._failed_steps = 0
        plain = result.num_draft_tokens == 1
        steps = zip(requests, result.committed(), result.draft_lens.tolist(), strict=True)
        for place, (request, tokens, drafted) in enumerate(steps):
            if request.finish_reason is not None:  # it ended while this step was under way
                self._retire(request)
                continue
            request.drafted_tokens += drafted
            self._commit(request, tokens, result, place)
            self._counts.update(steps=not plain, plain_steps=plain, drafted_tokens=drafted)

    def _commit(self, request: Request, tokens: Sequence[int], result: GenerationBatchResult, place: int) -> None:
        """Appends a step's tokens up to the earliest end."""
        if place in result.errors:
            self._fail(request, result.errors[place])
            return
        kept: list[int] = []
        end: End | None = None
        for token in tokens:
            request.token_ids.append(token)
            kept.append(token)
            end = request.stops.push(token, len(request.token_ids))
            if end is not None:
                break
        accepted = min(len(kept), len(tokens) - 1)  # the last token of a step is the target's own
        request.accepted_tokens += accepted
        self._counts.update(emitted_tokens=len(kept), accepted_tokens=accepted)
        request.computed_len = len(request.token_ids) - 1
        if end is not None:
            request.finish_reason, request.text_end = end.reason, end.text_end
        scores = logprobs(result, place, len(kept), request.params.logprobs)
        self._outputs.append(request.output(kept, scores))
        if end is not None:
            self._retire(request)

    # --- the end of a request

    def _retire(self, request: Request) -> None:
        """Ends what has a finish_reason. A request in a step that is under way leaves when the step is committed."""
        self._requests.pop(request.request_id, None)
        if request in self._steps.requests:
            return
        if request.running:
            self._leave(request)
        for queue in (self._waiting, self._preparing.requests):
            if request in queue:
                queue.remove(request)

    def _leave(self, request: Request, keep: bool = True) -> None:
        """Gives back row and pages. `keep`: the KV is right, and its full pages enter the prefix cache."""
        if keep:
            right = self._worker.reusable_len(request.row, min(request.computed_len, len(request.token_ids) - 1))
            self.prefix.insert(request.token_ids, request.pages, right)
        self._worker.release(request.row)
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        self._running.remove(request)
        request.row, request.pages, request.computed_len, request.decoding = -1, [], 0, False

    def _fail(self, request: Request, reason: str | BaseException, keep: bool = True) -> None:
        request.finish_reason, request.error = "error", str(reason)
        request.fault = reason.field if isinstance(reason, RequestError) else None
        self._outputs.append(request.output([]))
        if request.running and request not in self._steps.requests:
            self._leave(request, keep)
        self._retire(request)

    # --- counting

    def _count_time(self) -> None:
        now = self._clock()
        self._concurrency_seconds += (now - self._counted_at) * (len(self._running) + len(self._waiting))
        self._counted_at = now

    def _context_tokens(self, requests: Sequence[Request]) -> int:
        return sum(request.computed_len for request in requests)
