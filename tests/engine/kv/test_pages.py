import pytest

from pilotfish_engine.kv.pages import PageError, PagePool


def test_pages_are_one_to_num_pages_and_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [4]


def test_page_released_last_is_allocated_first() -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.release([2, 3])
    assert pool.allocate(2) == [3, 2]


def test_shared_page_is_free_after_its_last_release() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    pool.retain([1])
    assert pool.num_shared == 1
    pool.release([1])
    assert (pool.num_free, pool.num_shared, pool.references(1)) == (1, 0, 1)
    pool.release([1])
    assert pool.num_free == 2


@pytest.mark.parametrize("page", [0, -1, 3, 1])
def test_misuse_names_the_page(page: int) -> None:
    pool = PagePool(2)  # page 1 is free
    with pytest.raises(PageError, match=f"page {page} cannot be released"):
        pool.release([page])
    with pytest.raises(PageError, match=f"page {page} cannot be retained"):
        pool.retain([page])


def test_double_release_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages
    pool.release(pages)
    with pytest.raises(PageError, match="it is free"):
        pool.release(pages)


def test_check_finds_a_leak_and_a_use_without_reference() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    pool.check([[1], [2]])
    with pytest.raises(PageError, match="page 2 has 1 references and 0 holders"):
        pool.check([[1]])
    with pytest.raises(PageError, match="page 1 has 1 references and 2 holders"):
        pool.check([[1], [1, 2]])


@pytest.mark.parametrize("num_pages", [0, -3])
def test_pool_needs_a_page(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages is {num_pages}"):
        PagePool(num_pages)
