"""The pool of page numbers with reference counts. Knows nothing of tokens, of tensors or of who the holders are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pilotfish_engine.errors import PilotfishError


class PageError(PilotfishError):
    """Page accounting broke: a page was released twice, retained while free, or leaked. Always a bug of the caller."""


class PagePool:
    """Pages 1 … num_pages; page 0 is scratch, is never handed out and cannot be retained or released.

    Deterministic: the page released last is allocated first, and a fresh pool hands out 1, 2, 3, …
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Pages with two or more references."""
        return self._num_shared

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, n: int) -> list[int] | None:
        """`n` free pages with one reference each, held by the caller; None, and nothing taken, when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference for each. Raises PageError on a page that nobody holds."""
        for page in pages:
            self._held(page, "retained")
            self._references[page] += 1
            self._num_shared += self._references[page] == 2

    def release(self, pages: Iterable[int]) -> None:
        """One reference fewer for each; a page without any is free again. Raises PageError on a double release."""
        for page in pages:
            self._held(page, "released")
            self._references[page] -= 1
            if self._references[page] == 1:
                self._num_shared -= 1
            elif self._references[page] == 0:
                self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises PageError unless a page is free exactly when it has no references.

        holders: the pages of every holder (each request's table, the cache's pages); when given, the references must be
        exactly theirs, so that a leak or a page used without a reference is found and named.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise PageError(f"free list holds pages twice: {[p for p, n in Counter(self._free).items() if n > 1][:8]}")
        for page in range(1, self.num_pages + 1):
            if (page in free) != (self._references[page] == 0):
                raise PageError(f"page {page} has {self._references[page]} references and free is {page in free}")
        shared = sum(count > 1 for count in self._references)
        if shared != self._num_shared:
            raise PageError(f"{shared} pages are shared and {self._num_shared} are counted")
        if holders is None:
            return
        expected = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(self._references):
            if expected[page] != count:
                raise PageError(f"page {page} has {count} references and {expected[page]} holders")

    def _held(self, page: int, verb: str) -> None:
        if not 1 <= page <= self.num_pages:
            raise PageError(f"page {page} cannot be {verb}: pages are 1 to {self.num_pages}")
        if self._references[page] == 0:
            raise PageError(f"page {page} cannot be {verb}: it is free")
