import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pilotfish_engine.kv.pages import PageError, PagePool
from pilotfish_engine.kv.prefix import PrefixCache


def inserted(pool: PagePool, cache: PrefixCache, token_ids: list[int], page_size: int) -> list[int]:
    """A request that computed all of token_ids, kept them in the cache and ended."""
    pages = pool.allocate(-(-len(token_ids) // page_size))
    assert pages is not None
    cache.insert(token_ids, pages)
    pool.release(pages)
    return pages[: len(token_ids) // page_size]


def test_only_full_pages_hit() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 4)
    pages = inserted(pool, cache, list(range(10)), 4)
    assert cache.num_cached == 2
    assert pool.num_free == 8
    assert cache.match(list(range(10))) == pages
    assert cache.match(list(range(7))) == pages[:1]
    assert cache.match([0, 1, 2]) == []
    assert cache.match([0, 1, 2, 9]) == []


def test_a_page_that_depends_on_the_next_token_is_found_only_before_it() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 2, lookahead=1)
    first, second = inserted(pool, cache, [1, 2, 3, 4, 5], 2)
    assert cache.match([1, 2, 3, 4, 5]) == [first, second]
    assert cache.match([1, 2, 3, 4]) == [first]  # what follows the second page is not known
    assert cache.match([1, 2, 3, 4, 9]) == [first]
    assert cache.match([1, 2, 9]) == []
    other, third = inserted(pool, cache, [1, 2, 9, 4, 5], 2)
    assert cache.match([1, 2, 9, 4, 5]) == [other, third]
    assert cache.match([1, 2, 3, 4, 5]) == [first, second]
    assert cache.match([1, 2, 3, 4, 5], most=3) == [first]
    pages = pool.allocate(2)
    assert pages is not None
    cache.insert([7, 7, 7, 7, 7], pages, most=3)  # only three rows of it are right
    assert cache.match([7, 7, 7, 7, 7]) == pages[:1]
    assert inserted(pool, cache, [8, 8], 2) != []
    assert cache.match([8, 8, 8]) == []  # it was not known what follows


def test_insert_says_how_many_were_known_and_leaves_the_callers_references() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 2)
    first = inserted(pool, cache, [1, 2, 3, 4], 2)
    mine = pool.allocate(3)
    assert mine is not None
    assert cache.insert([1, 2, 3, 4, 5, 6], mine) == 2
    assert cache.match([1, 2, 3, 4, 5, 6]) == [*first, mine[2]]
    pool.check([mine, cache_pages(cache), [*first, mine[2]]])


def cache_pages(cache: PrefixCache) -> list[int]:
    return list(cache.pages())


def test_inserting_the_same_pages_again_takes_no_second_reference() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 1)
    pages = pool.allocate(3)
    assert pages is not None
    assert cache.insert([1, 2], pages) == 0
    assert cache.insert([1, 2, 3], pages) == 2
    pool.release(pages)
    assert cache.evict(3) == 3
    assert pool.num_free == 4


def test_eviction_is_least_recently_used_from_the_leaves() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 1)
    inserted(pool, cache, [1, 2, 3], 1)
    inserted(pool, cache, [1, 7], 1)
    pool.release(cache.match([1, 2, 3]))
    assert cache.evict(1) == 1  # [1, 7] was used longest ago
    assert cache.match([1, 7]) == [1]
    pool.release([1])
    assert cache.evict(2) == 2
    assert cache.match([1, 2, 3]) == [1]


def test_what_somebody_holds_is_not_evicted() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 1)
    inserted(pool, cache, [1, 2, 3], 1)
    held = cache.match([1, 2])
    assert cache.num_evictable == 1
    assert cache.evict(10) == 1
    assert cache.evict(10) == 0
    pool.release(held)
    assert cache.evict(10) == 2


def test_flush_leaves_the_pages_of_running_requests() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, 1)
    inserted(pool, cache, [1, 2, 3], 1)
    held = cache.match([1, 2])
    assert cache.flush() == 3
    assert cache.match([1]) == []
    pool.check([held])


def test_errors_name_the_value() -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError, match="page_size is 3"):
        PrefixCache(pool, 3)
    with pytest.raises(ValueError, match="5 tokens fill 2 pages of 2; got 1"):
        PrefixCache(pool, 2).insert([1, 2, 3, 4, 5], [1])
    with pytest.raises(PageError, match="page 2 cannot be retained"):
        PrefixCache(pool, 2).insert([1, 2, 3, 4, 5], [2, 1])  # pages that the caller does not hold


@pytest.mark.timeout(20)
def test_long_prompts_are_cheap_whatever_the_page_size() -> None:
    pool = PagePool(20_000)
    cache = PrefixCache(pool, 1)
    for round_ in range(20):  # 8k tokens a prompt, two of which fit: evicts all the time
        tokens = list(range(round_, round_ + 8192))
        need = 8192 - pool.num_free
        cache.evict(max(0, need))
        inserted(pool, cache, tokens, 1)
        held = cache.match(tokens)
        assert len(held) == 8192
        pool.release(held)
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Requests start, grow, insert and end beside a model that keeps {token prefix: page} and when it was last used."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(3, 24))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size)
        self.running: list[tuple[list[int], list[int]]] = []  # tokens, pages
        self.model: dict[tuple[int, ...], int] = {}
        self.used_at: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def full_prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used_at[prefix] = self.clock

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens: list[int]) -> None:
        expected = []
        for prefix in self.full_prefixes(tokens):
            if prefix not in self.model:
                break
            expected.append(prefix)
        pages = self.cache.match(tokens)
        self.touch(expected)
        assert pages == [self.model[prefix] for prefix in expected]
        need = -(-len(tokens) // self.page_size) - len(pages)
        self.evict_for(need)
        own = self.pool.allocate(need)
        if own is None:
            self.pool.release(pages)
        else:
            self.running.append((tokens, pages + own))

    def evict_for(self, need: int) -> None:
        missing = max(0, need - self.pool.num_free)
        victims = self.victims(missing)
        free = self.pool.num_free
        assert self.cache.evict(missing) == len(victims) == self.pool.num_free - free
        for prefix in victims:
            del self.model[prefix]

    def victims(self, n: int) -> list[tuple[int, ...]]:
        model, victims = dict(self.model), list[tuple[int, ...]]()
        held = {page for _, pages in self.running for page in pages}
        held |= {page for page in self.model.values() if self.pool.references(page) > 1}  # the one being admitted
        while len(victims) < n:
            interior = {prefix[: -self.page_size] for prefix in model}
            leaves = [prefix for prefix, page in model.items() if prefix not in interior and page not in held]
            if not leaves:
                break
            victims.append(min(leaves, key=self.used_at.__getitem__))
            del model[victims[-1]]
        return victims

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans())
    def insert(self, data: st.DataObject, ends: bool) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        tokens, pages = self.running[index]
        prefixes = self.full_prefixes(tokens)
        known = sum(prefix in self.model for prefix in prefixes)
        assert self.cache.insert(tokens, pages) == known
        for prefix, page in zip(prefixes, pages, strict=False):
            self.model.setdefault(prefix, page)
        self.touch(prefixes)
        if ends:
            self.pool.release(pages)
            del self.running[index]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        tokens, pages = self.running[index]
        if len(tokens) == len(pages) * self.page_size:
            self.evict_for(1)
            more = self.pool.allocate(1)
            if more is None:
                return
            pages = pages + more
        self.running[index] = ([*tokens, token], pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        _, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(pages)

    @rule(n=st.integers(0, 30))
    def evict(self, n: int) -> None:
        victims = self.victims(n)
        assert self.cache.evict(n) == len(victims)
        for prefix in victims:
            del self.model[prefix]

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() == len(self.model)
        self.model.clear()

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.cache.check()
        self.pool.check([*(pages for _, pages in self.running), list(self.cache.pages())])
        cached = set(self.cache.pages())
        assert cached == set(self.model.values())
        used = {page for _, pages in self.running for page in pages} - cached
        assert self.pool.num_free + len(used) + self.cache.num_cached == self.pool.num_pages


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
