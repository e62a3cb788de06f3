"""The radix prefix cache: which full pages already hold the KV of which token prefix.

A tree with one node a page; the edge to a child is the tuple of the page's tokens, so a hit is exact, never a hash
collision. A draft whose KV row depends on the tokens after it (`lookahead`) lengthens the tuple by these: the page is
found only where they follow again. Only full pages enter. Knows nothing of tensors or requests, and has no clock:
recency is a counter of calls.

Ownership, by the rule of the package: the cache holds one reference of each page in the tree. `match` takes references
for its caller, who releases them with `PagePool.release` like any page of its own; that reference is the lock, since a
page that anyone else holds is not evicted. `insert` gives nothing away: the caller keeps and later releases every
reference it had.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from pilotfish_engine.kv.pages import PageError, PagePool

Key = tuple[int, ...]


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used_at")

    def __init__(self, key: Key, page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent  # None: the root, or no longer in the tree
        self.children: dict[Key, _Node] = {}
        self.used_at = 0


class PrefixCache:
    """page_size: tokens a page, a power of two. lookahead: how many tokens after it a KV row depends on."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int = 0) -> None:
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}; it must be a power of two")
        self._pool = pool
        self._page_size = page_size
        self._lookahead = lookahead
        self._root = _Node((), 0, None)
        self._calls = 0
        self._num_cached = 0
        # (used_at, page, leaf), with entries that have since been used again, grown children or left the tree.
        # Invariant: every leaf has one entry with its present used_at.
        self._leaves: list[tuple[int, int, _Node]] = []

    @property
    def num_cached(self) -> int:
        """Pages in the tree."""
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        """About how many pages `evict` could free now, in O(1): cached pages less shared ones.

        Exact while everyone who holds a cached page also holds its predecessors in the tree. A request that inserted
        behind another's copy of the same prefix makes it too high, pages shared outside the cache too low.
        """
        return max(0, self._num_cached - self._pool.num_shared)

    def match(self, token_ids: Sequence[int], most: int | None = None) -> list[int]:
        """Returns the pages of the longest cached prefix of `token_ids`. They are in order, each with a reference for
        the caller.

        The prefix has len(result) * page_size tokens, at most `most` (None: all). Who must compute at least one token
        says len(token_ids) − 1.
        """
        node, pages = self._root, []
        self._calls += 1
        for key in self._keys(token_ids, self._num_full(token_ids, most)):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            node.used_at = self._calls
            pages.append(node.page)
        self._note_leaf(node)
        self._pool.retain(pages)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], most: int | None = None) -> int:
        """Keep the full pages of the first `most` tokens (None: all); pages[i] holds tokens [i * page_size, (i + 1) *
        page_size). With lookahead a page enters only where the tokens after it are among `token_ids`.

        pages may be longer than the full pages (a partial last page, reserved ones): the rest is ignored. The caller
        must hold a reference of each, and what it writes later must lie behind the tokens inserted.
        Returns n: the first n pages were cached already (by these page numbers or by others of the same content) and
        the cache took no reference for them; it took one of each later page.
        """
        num_full = self._num_full(token_ids, most)
        if len(pages) < num_full:
            raise ValueError(f"{len(token_ids)} tokens fill {num_full} pages of {self._page_size}; got {len(pages)}")
        node, num_known = self._root, 0
        self._calls += 1
        for key, page in zip(self._keys(token_ids, num_full), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                self._pool.retain((page,))
                child = node.children[key] = _Node(key, page, node)
                self._num_cached += 1
            else:
                num_known += 1
            node = child
            node.used_at = self._calls
        self._note_leaf(node)
        return num_known

    def evict(self, n: int) -> int:
        """Frees up to `n` pages that only the cache holds. The least recently used go first, from the leaves up.

        Returns how many were freed; fewer than n only when no more could be.
        """
        freed = 0
        held: list[tuple[int, int, _Node]] = []
        while freed < n and self._leaves:
            entry = heapq.heappop(self._leaves)
            used_at, page, node = entry
            if node.parent is None or node.children or node.used_at != used_at:
                continue
            if self._pool.references(page) > 1:
                held.append(entry)
                continue
            parent = node.parent
            self._remove(node)
            self._note_leaf(parent)
            freed += 1
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def flush(self) -> int:
        """Forget everything; pages that others hold stay theirs. Returns how many pages left the tree."""
        pages = list(self.pages())
        self._pool.release(pages)
        self._root.children.clear()
        self._leaves.clear()
        self._num_cached = 0
        return len(pages)

    def pages(self) -> Iterator[int]:
        """Every cached page, parents before children."""
        return (node.page for node in self._nodes())

    def check(self) -> None:
        """Raises PageError unless the tree is whole: each page once, held by the pool, every leaf known to `evict`."""
        nodes = list(self._nodes())
        if len({node.page for node in nodes}) != len(nodes) or len(nodes) != self._num_cached:
            raise PageError(f"the prefix cache counts {self._num_cached} pages and holds {len(nodes)}, or one twice")
        current = {id(node) for used_at, _, node in self._leaves if node.used_at == used_at}
        for node in nodes:
            if self._pool.references(node.page) < 1:
                raise PageError(f"page {node.page} is cached and free")
            if not node.children and id(node) not in current:
                raise PageError(f"page {node.page} is a leaf that cannot be evicted")

    def _num_full(self, token_ids: Sequence[int], most: int | None) -> int:
        usable = len(token_ids) - self._lookahead
        return max(0, usable if most is None else min(usable, most)) // self._page_size

    def _keys(self, token_ids: Sequence[int], num_full: int) -> Iterator[Key]:
        size = self._page_size
        return (tuple(token_ids[page * size : (page + 1) * size + self._lookahead]) for page in range(num_full))

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _remove(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.key]
        leaf.parent = None
        self._pool.release((leaf.page,))
        self._num_cached -= 1

    def _note_leaf(self, node: _Node) -> None:
        """Restore the invariant of `_leaves` for a node that was just used or has lost a child."""
        if node.parent is None or node.children:
            return
        heapq.heappush(self._leaves, (node.used_at, node.page, node))
        if len(self._leaves) > 2 * self._num_cached + 64:  # stale entries outweigh the tree
            self._leaves = [(n.used_at, n.page, n) for n in self._nodes() if not n.children]
            heapq.heapify(self._leaves)
