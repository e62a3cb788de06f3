"""The loop's one iteration: admit waiting requests, run a batch of prompt chunks, run a decode step, commit what came.

Knows nothing about tensors, HTTP or methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pilotfish_engine.contract.speculation import EngineReport, EnvelopeUpdate
from pilotfish_engine.errors import HandoverError, RequestError
from pilotfish_engine.messages import Output, Submit
from pilotfish_engine.scheduler.faults import Failures, fault
from pilotfish_engine.scheduler.handover import Handover, handover_of, resume
from pilotfish_engine.scheduler.policy import PrefillWork, plan_chunks
from pilotfish_engine.scheduler.preparing import GrammarCompiler, Preparing
from pilotfish_engine.scheduler.request import Request, Seat
from pilotfish_engine.scheduler.room import Room
from pilotfish_engine.scheduler.steps import Launched, Steps, logprobs, score_prompt
from pilotfish_engine.scheduler.stops import End, StopTextFactory
from pilotfish_engine.scheduler.suspects import Suspects
from pilotfish_engine.scheduler.tally import Tally, context_tokens
from pilotfish_engine.scheduler.waiting import Waiting
from pilotfish_engine.types import Admission, Batch, ForwardMode, GenerationBatchResult, NewPages, Worker, WorkerLimits


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
        self._steps = Steps(worker, overlap)
        self._chunk_size = chunk_size
        self._stop_text = stop_text
        self.room = Room(worker)
        self._free_rows = list(range(worker.limits.max_running_requests - 1, -1, -1))
        self._preparing = Preparing(grammars)
        self._waiting = Waiting()
        self._suspects = Suspects()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}  # all of these, by id, until they end
        self._outputs: list[Output] = []
        self.tally = Tally(clock)
        self._failures = Failures()

    @property
    def limits(self) -> WorkerLimits:
        return self._worker.limits

    @property
    def method(self) -> str:
        return self._worker.speculation_report().method

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._running or self._outputs)

    @property
    def running(self) -> tuple[Request, ...]:
        """Those that have a row."""
        return tuple(self._running)

    @property
    def unready(self) -> str | None:
        return self._failures.unready

    def submit(self, submit: Submit) -> None:
        """The prompt has 1 … max_model_len tokens. A request that cannot ever fit is answered with an error."""
        self._enter(submit, self._waiting.request(submit, self.limits, self._stop_text))

    def take_over(self, handover: Handover) -> None:
        """As `submit`, of a request that another engine has begun: only what comes now is put out. Where its state does
        not fit this engine it is answered with an error."""
        request = self._waiting.request(handover.submit, self.limits, self._stop_text)
        resume(request, handover)
        self._enter(handover.submit, request)

    def hand_over(self, request_id: str) -> Handover:
        """Ends a request here, without an output, for another engine to go on with it. Raises HandoverError where it
        has ended, or its state cannot leave; then nothing changes."""
        self._collect()
        request = self._requests.get(request_id)
        if request is None:
            raise HandoverError(f"no request {request_id} is here; one that has not ended would work")
        written = self._worker.write_out(request.seat.row) if request.seat.decoding else request.written
        self.abort(request_id)
        return handover_of(request, written)

    def _enter(self, submit: Submit, request: Request) -> None:
        self.tally.time(len(self._requests))
        self._requests[request.request_id] = request
        reason = fault(submit, self.limits.vocab_size) or self.room.why_never(request)
        if reason is not None:
            self._fail(request, reason)
        elif request.params.grammar is None:
            self._waiting.add(request)
        else:
            self._preparing.add(request)

    def abort(self, request_id: str) -> None:
        """Frees what the request holds, at once or when the step under way ends. Unknown ids are requests that have
        just ended."""
        request = self._requests.get(request_id)
        if request is not None:
            request.end = End("abort")
            self._retire(request)

    def step(self) -> list[Output]:
        """One iteration. Returns what it committed and which requests it ended. With overlap its last batch is left to
        the next one: the device has that to do until more is launched."""
        before = self._steps.launched
        self._suspects.let_pass()
        self._take_prepared()
        (self._admit_suspects if self._suspects else self._admit)()
        self._extend()
        if not self._steps.overlap:
            self._collect()
        self._decode()
        self._collect(leave=int(self._steps.overlap and self._steps.launched > before))
        outputs, self._outputs = self._outputs, []
        return outputs

    def report(self) -> EngineReport:
        self.tally.time(len(self._requests))
        return self.tally.report(self._worker, self._running, waiting=len(self._waiting) + len(self._preparing))

    def set_envelope(self, update: EnvelopeUpdate) -> EngineReport:
        """Takes effect with the next step. Raises EnvelopeError, and nothing changes, on what the method cannot do."""
        self._collect()
        self._worker.set_envelope(update.applied_to(self._worker.speculation_report().envelope))
        if update.learned is not None:
            self._worker.learn(update.learned)
        return self.report()

    def flush_cache(self) -> None:
        self.room.prefix.flush()

    def check(self) -> None:
        """Raises PageError unless free + used + cached = all, every reference accounted for."""
        self.room.prefix.check()
        self.room.pool.check(self.held_pages())

    def held_pages(self) -> list[list[int]]:
        """The pages of every holder: each running request, and the prefix cache."""
        return [*(request.seat.pages for request in self._running), list(self.room.prefix.pages())]

    def retract_latest(self) -> None:
        """Sends the last in order of those running back to its place in the queue. It goes through again from its
        tokens; what the prefix cache keeps of it is a gain."""
        self._collect()
        for request in sorted(self._running, key=lambda request: request.place)[-1:]:
            self._leave(request)
            self._waiting.add(request)
            self.tally.retractions += 1

    # --- admission and pages

    def _take_prepared(self) -> None:
        for request, failure in self._preparing.take(idle=not (self._waiting or self._running)):
            if failure is None:
                self._waiting.add(request)
            else:
                self._fail(request, failure)

    def _admit(self) -> None:
        while self._free_rows and (request := self._waiting.first()) is not None:
            if self.room.enter(request, self._running):
                self._waiting.take_first()
                self._start(request)
            elif self._running:
                return
            else:
                self._waiting.take_first()
                self._fail(request, self.room.too_large(request))

    def _admit_suspects(self) -> None:
        """Those whose turn it is; others, who stand still meanwhile, give their room where that is needed."""
        for request in self._suspects.waiting():
            while not (self._free_rows and self.room.enter(request, self._running)):
                if any(self._suspects.may_run(other) for other in self._running):
                    return
                if not self._running:
                    self._fail(request, self.room.too_large(request))
                    break
                self.retract_latest()
            else:
                self._waiting.discard(request)
                self._start(request)

    def _start(self, request: Request) -> None:
        """A row for a request that has its pages."""
        request.seat.row = self._free_rows.pop()
        self._running.append(request)
        admission = Admission(
            row=request.seat.row,
            token_ids=request.token_ids,
            cached_len=request.seat.computed_len,
            pages=request.seat.pages,
            params=request.params,
            seed=request.seed,
            prompt_len=request.prompt_len,
            end_token_ids=sorted(request.stops.stop_token_ids),
            grammar=None if request.grammar is None else request.grammar.result(),
        )
        try:
            self._worker.admit(admission)
            if request.written is not None:
                self._worker.read_in(request.seat.row, request.written)
                request.written, request.seat.decoding = None, True
                request.seat.computed_len = len(request.token_ids) - 1
        except Exception as error:  # parameters that cannot be, or no memory for what they need
            request.seat.spoiled = True
            self._fail(request, error)

    def _grow(self, request: Request, reserve: int) -> NewPages | None:
        """Pages for the next step of a decoding request; others are retracted, the last in order first, until they are
        there."""
        while request.running:
            # what steps under way commit is not known yet
            missing = self.room.missing(request, reserve * (1 + self._steps.count(request)))
            if missing == 0:
                return None
            if (fresh := self.room.take(missing)) is not None:
                added = NewPages(request.seat.row, len(request.seat.pages), fresh)
                request.seat.pages = request.seat.pages + fresh
                return added
            if self._steps:  # what ends in steps under way gives its pages back
                self._collect()
            elif len(self._running) == 1:
                self._fail(request, self.room.too_large(request))
            else:
                self.retract_latest()
        return None

    # --- running batches

    def _extend(self) -> None:
        todo = [r for r in self._running if not r.seat.decoding and r.end is None and self._suspects.may_run(r)]
        todo.sort(key=lambda request: request.place)
        chunks = plan_chunks(
            [PrefillWork(r.seat.row, r.seat.computed_len, len(r.token_ids)) for r in todo], self._chunk_size
        )
        if not chunks:
            return
        by_row = {request.seat.row: request for request in todo}
        requests = [by_row[chunk.row] for chunk in chunks]
        if self._launch(Batch(ForwardMode.EXTEND, chunks=chunks), requests):
            for chunk, request in zip(chunks, requests, strict=True):
                request.seat.computed_len = chunk.end
                request.seat.decoding = chunk.last

    def _decode(self) -> None:
        reserve = self._worker.reserve_tokens
        new_pages = [added for request in self._decoding() if (added := self._grow(request, reserve)) is not None]
        requests = self._decoding()
        if not requests:
            return
        rows = [request.seat.row for request in requests]
        members = set(rows)  # a request may have grown and then been retracted for another
        batch = Batch(
            ForwardMode.DECODE,
            rows=rows,
            new_pages=[added for added in new_pages if added.row in members],
            context_tokens=context_tokens(requests),
        )
        self._launch(batch, requests)

    def _decoding(self) -> list[Request]:
        may_run = self._suspects.may_run
        return [r for r in self._running if r.seat.decoding and r.end is None and may_run(r)]

    def _collect(self, leave: int = 0) -> None:
        """Commits the batches that are under way but for the last `leave`; with none of these the host knows from here
        on what the device knows."""
        while len(self._steps) > leave:
            requests = self._steps.oldest()
            try:
                launched, result = self._steps.take()
            except Exception as error:
                for request in requests:  # what is under way for them goes on from what this batch left
                    request.seat.spoiled = True
                self._isolate(requests, error)
            else:
                self._commit_batch(launched, result)

    def _launch(self, batch: Batch, requests: Sequence[Request]) -> bool:
        """False: it failed, and nothing is under way."""
        try:
            self._steps.launch(batch, requests)
        except Exception as error:
            self._isolate(requests, error)
            return False
        return True

    def _isolate(self, requests: Sequence[Request], error: Exception) -> None:
        """A batch failed. A request that was alone in it ends; several go back to the queue, to go on from their tokens
        in smaller groups until it shows whose fault it was."""
        self._failures.count(error, alone=len(requests) == 1)
        self._collect()
        sent_back: list[Request] = []
        for request in [request for request in requests if request.running]:  # some may be sent back already
            request.seat.spoiled = True
            if request.end is not None:  # it had ended, and waited for this batch
                self._retire(request)
            elif len(requests) == 1:
                self._fail(request, f"the step failed ({self._failures.last})")
            else:
                self._leave(request)
                self._waiting.add(request)
                sent_back.append(request)
        self._suspects.accuse(sent_back)

    def _commit_batch(self, launched: Launched, result: GenerationBatchResult) -> None:
        self._failures.end()
        batch, requests = launched
        decodes, plain = batch.mode is ForwardMode.DECODE, result.num_draft_tokens == 1
        steps = zip(requests, result.committed(), result.draft_lens, strict=True)
        for place, (request, tokens, drafted) in enumerate(steps):
            if request.end is not None:  # it ended while this batch was under way
                self._retire(request)
                continue
            if request.seat.spoiled:  # it is about to be sent back
                continue
            try:
                if decodes:
                    request.counts.drafted_tokens += drafted
                    self.tally.step(plain, drafted)
                else:
                    score_prompt(request, batch.chunks[place].start, result.prompt_logprobs.get(place))
                if tokens:
                    self._commit(request, tokens, result, place)
            except Exception as error:  # what reads its tokens cannot
                request.seat.spoiled = True
                self._fail(request, f"its answer could not be read ({type(error).__name__}: {error})")

    def _commit(self, request: Request, tokens: list[int], result: GenerationBatchResult, place: int) -> None:
        """Appends a step's tokens up to the earliest end."""
        if (error := result.errors.get(place)) is not None:
            request.seat.spoiled = not isinstance(error, RequestError)
            self._fail(request, error)
            return
        kept, end = request.stops.push(tokens, len(request.token_ids))
        accepted = min(kept, len(tokens) - 1)  # the last token of a step is the target's own
        request.token_ids += tokens[:kept]
        request.counts.accepted_tokens += accepted
        self.tally.tokens(kept, accepted)
        request.seat.computed_len = len(request.token_ids) - 1
        if end is not None:
            request.end = end
        scores = logprobs(result, place, kept, request.params.logprobs)
        self._outputs.append(request.output(tokens[:kept], scores))
        if end is not None:
            self.room.lengths.ended(len(request.token_ids) - request.prompt_len)
            self._retire(request)

    # --- the end of a request

    def _retire(self, request: Request) -> None:
        """Ends what has an `end`. A request in batches under way leaves when the last of them is committed."""
        self.tally.time(len(self._requests))
        self._requests.pop(request.request_id, None)
        if self._steps.count(request):
            return
        if request.running:
            self._leave(request)
        self._waiting.discard(request)
        self._preparing.discard(request)

    def _leave(self, request: Request) -> None:
        """Gives back row and pages. Where the KV is right, its full pages enter the prefix cache."""
        right = min(request.seat.computed_len, len(request.token_ids) - 1)
        if request.seat.spoiled and request.seat.found_pages:  # what it found may have been at fault
            self.room.prefix.flush()
        self.room.leave(request, 0 if request.seat.spoiled else self._worker.reusable_len(request.seat.row, right))
        self._worker.release(request.seat.row)
        self._free_rows.append(request.seat.row)
        self._running.remove(request)
        request.seat = Seat()

    def _fail(self, request: Request, reason: str | BaseException) -> None:
        field = reason.field if isinstance(reason, RequestError) else None
        request.end = End("error", error=str(reason), field=field)
        self._outputs.append(request.output([]))
        self._retire(request)
