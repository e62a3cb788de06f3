"""Who gets KV pages: out of the prefix cache, off the free list, or by evicting what only the cache holds.

A request comes in only where its known tokens, a step and what is still to come of all answers find room together, so
that it need not be sent back soon. Knows what a request holds and nothing of rows, steps or the order of requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from pilotfish_engine.kv.pages import PagePool
from pilotfish_engine.kv.prefix import PrefixCache
from pilotfish_engine.scheduler.policy import Outlook, missing_pages, pages_for, peak_growth, too_large
from pilotfish_engine.scheduler.request import Request
from pilotfish_engine.types import Worker

KEPT = 64  # answers whose lengths are known
FIRST_GUESS = 256  # tokens of an answer, while nothing is known


class AnswerLengths:
    """How long answers have lately been, and so how much of one is still to come."""

    def __init__(self) -> None:
        self._recent = deque([FIRST_GUESS], maxlen=KEPT)
        self._ascending = [FIRST_GUESS]

    def ended(self, tokens: int) -> None:
        """An answer came to its end, by itself or by its limit."""
        self._recent.append(tokens)
        self._ascending = sorted(self._recent)

    def to_come(self, so_far: int) -> int:
        """Tokens that an answer of `so_far` goes on for: what is right on average for those of late that were longer;
        one longer than all of them is as likely to end before as after it has doubled."""
        longer = self._ascending[bisect_right(self._ascending, so_far) :]
        return max(1, sum(longer) // len(longer) - so_far if longer else so_far)


class Room:
    """lengths: of answers that ended, which the scheduler tells."""

    def __init__(self, worker: Worker) -> None:
        limits = worker.limits
        self._worker = worker
        self._page_size = limits.page_size
        self.pool = PagePool(limits.num_pages)
        self.prefix = PrefixCache(self.pool, limits.page_size, limits.lookahead)
        self.lengths = AnswerLengths()

    def why_never(self, request: Request) -> str | None:
        """Why the request does not fit even alone, or None."""
        return None if self._wanted(request) <= self.pool.num_pages else self.too_large(request)

    def too_large(self, request: Request) -> str:
        return too_large(len(request.token_ids), self.pool.num_pages * self._page_size)

    def enter(self, request: Request, running: Sequence[Request]) -> bool:
        """Gives the request its pages, those of a cached prefix first. Says in computed_len how much they hold
        already. False, and nothing has changed: it must wait until others have gone."""
        apart = request.scores_prompt or request.written is not None
        found = [] if apart else self.prefix.match(request.token_ids, len(request.token_ids) - 1)
        wanted = self._wanted(request) - len(found)
        spare = self.pool.num_free + self.prefix.num_evictable - wanted
        enough = self._ample(len(running) + 1) or self._lasts(spare, request, wanted, running)
        fresh = self.take(wanted) if enough else None
        if fresh is None:
            self.pool.release(found)
            return False
        request.seat.pages, request.seat.found_pages = found + fresh, len(found)
        request.seat.computed_len = len(found) * self._page_size
        if request.counts.admissions == 0:
            request.counts.cached_tokens = request.seat.computed_len
        request.counts.admissions += 1
        return True

    def _ample(self, requests: int) -> bool:
        """Whether so many have room together even as the longest that there may be; then `_lasts` holds."""
        longest = pages_for(self._worker.limits.max_model_len + self._worker.reserve_tokens, self._page_size)
        return requests * longest <= self.pool.num_pages

    def _lasts(self, spare: int, request: Request, wanted: int, running: Sequence[Request]) -> bool:
        others = [self._outlook(other, len(other.seat.pages) - other.seat.found_pages) for other in running]
        return not others or spare >= peak_growth([*others, self._outlook(request, wanted)])

    def missing(self, request: Request, reserve: int) -> int:
        """Pages that a running request lacks for so many rows. They begin with its last known token's row."""
        return missing_pages(len(request.token_ids), reserve, self._page_size, len(request.seat.pages))

    def take(self, n: int) -> list[int] | None:
        """`n` pages for one request, or None; cached prefixes that nobody uses give way."""
        short = n - self.pool.num_free
        if short > 0:
            self.prefix.evict(short)
        return self.pool.allocate(n)

    def leave(self, request: Request, right: int) -> None:
        """Gives the pages back; those of the first `right` KV rows enter the prefix cache."""
        if right:
            self.prefix.insert(request.token_ids, request.seat.pages, right)
        self.pool.release(request.seat.pages)

    def _wanted(self, request: Request) -> int:
        """For all known tokens, the one to come, and a first step."""
        return pages_for(len(request.token_ids) + 1 + self._worker.reserve_tokens, self._page_size)

    def _outlook(self, request: Request, own: int) -> Outlook:
        known = len(request.token_ids)
        to_come = min(request.stops.max_len - known, self.lengths.to_come(known - request.prompt_len))
        return Outlook(own, pages_for(to_come, self._page_size))
