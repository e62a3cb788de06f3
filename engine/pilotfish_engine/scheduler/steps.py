"""Batches in the order of launching: without overlap each is read at once, with it behind the launch of the next.

Device state is always ahead of the host's: what the host does not know yet (how many tokens came, who ended) it learns
one iteration later, and what it plans holds for whatever came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pilotfish_engine.messages import TokenLogprob
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import Batch, GenerationBatchResult, LogprobArrays, Read, Worker

Launched = tuple[Batch, Sequence[Request]]  # the batch, and its requests in its order


class Steps:
    """Those under way, which are launched and not read, the oldest first. overlap: one is, from one iteration to the
    next."""

    def __init__(self, worker: Worker, overlap: bool) -> None:
        self._worker = worker
        self.overlap = overlap
        self._under_way: deque[tuple[Launched, Read]] = deque()
        self.launched = 0  # ever

    def __len__(self) -> int:
        return len(self._under_way)

    def count(self, request: Request) -> int:
        """In how many of those under way the request is."""
        return sum(request in requests for (_, requests), _ in self._under_way)

    def oldest(self) -> Sequence[Request]:
        return self._under_way[0][0][1]

    def launch(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Raises what the worker raises; then nothing is under way that was not before."""
        self._under_way.append(((batch, requests), self._worker.launch(batch)))
        self.launched += 1

    def take(self) -> tuple[Launched, GenerationBatchResult]:
        """Waits for the oldest, which is under way no longer. Raises what it raised."""
        launched, read = self._under_way.popleft()
        return launched, read()


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
