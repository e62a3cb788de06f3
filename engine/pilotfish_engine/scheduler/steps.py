"""Decode steps in order: one at a time, or with overlap one under way while the next is planned.

With overlap the worker runs in a thread of its own. A step is started before the one before it is committed: device
state is always ahead of the host's, and what the host does not know yet (how many tokens came, who ended) it learns
one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pilotfish_engine.messages import TokenLogprob
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import Batch, GenerationBatchResult, LogprobArrays, Worker

Done = tuple[Sequence[Request], GenerationBatchResult]


class DecodeSteps:
    """At most one step is under way. `requests`: those in it; empty when none is."""

    def __init__(self, worker: Worker, overlap: bool) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "decode") if overlap else None
        self.requests: Sequence[Request] = ()
        self._result: Callable[[], GenerationBatchResult] | None = None

    def next(self, requests: Sequence[Request], batch: Batch) -> Done | None:
        """Starts a step of `requests` (none: starts nothing), and returns the one to commit now, if there is one.

        Raises what the step to commit raised.
        """
        if self._thread is None:
            return (requests, self._worker.forward_batch_generation(batch)) if requests else None
        before, result_before = self._take()
        if requests:
            self.requests = requests
            self._result = self._thread.submit(self._worker.forward_batch_generation, batch).result
        return (before, result_before()) if result_before is not None else None

    def collect(self) -> Done | None:
        """Waits for the step under way and returns it for committing; None when there is none. Raises what it
        raised."""
        requests, result = self._take()
        return (requests, result()) if result is not None else None

    def abandon(self) -> Sequence[Request]:
        """Waits for the step under way, forgets its result, and returns its requests."""
        requests, result = self._take()
        if result is not None:
            try:
                result()
            except Exception:  # its requests are ended by the caller for the failure before it
                return requests
        return requests

    def _take(self) -> tuple[Sequence[Request], Callable[[], GenerationBatchResult] | None]:
        """The step under way, which from here on is the caller's to wait for."""
        taken = self.requests, self._result
        self.requests, self._result = (), None
        return taken


def logprobs(result: GenerationBatchResult, place: int, count: int, wanted: int | None) -> list[TokenLogprob] | None:
    """Of the first `count` tokens of the request at `place`, with `wanted` alternatives each; None: not asked for."""
    if wanted is None or result.logprobs is None:
        return None
    first = place * result.num_draft_tokens
    return _token_logprobs(result.logprobs, range(first, first + count), wanted)


def score_prompt(request: Request, start: int, found: LogprobArrays | None) -> None:
    """found: of the prompt's tokens from number start + 1 on. Those that a retraction repeats are known already."""
    if found is not None:
        known = len(request.prompt_logprobs) - start
        places = range(known, len(found.chosen))
        request.prompt_logprobs += _token_logprobs(found, places, request.params.logprobs or 0)


def _token_logprobs(found: LogprobArrays, places: Iterable[int], wanted: int) -> list[TokenLogprob]:
    return [
        TokenLogprob(found.chosen[at], list(zip(found.top_ids[at][:wanted], found.top[at][:wanted], strict=True)))
        for at in places
    ]
