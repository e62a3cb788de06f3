"""Two checkouts side by side: the numbers of the benchmarks' tables, and nothing else of what they print."""

from __future__ import annotations

from benchmarks.beside import figures, table

PRINTED = """ms a step, SmolLM2-135M-Instruct, torch.bfloat16, 2 threads
                              draft     tree   verify    rest/step
EAGLE3, tree of 8, ×16         7.05     0.38    89.51        1.8%
decode tokens/s, plain: with a disabled EAGLE-3 head and started without a draft
×1        45.2     45.4
met    disabled / started without a draft, batch 1: 1.00 (bar 0.98)
"""
FOUND = {
    ("EAGLE3, tree of 8, ×16", 0): 7.05,
    ("EAGLE3, tree of 8, ×16", 1): 0.38,
    ("EAGLE3, tree of 8, ×16", 2): 89.51,
    ("×1", 0): 45.2,
    ("×1", 1): 45.4,
}


def test_figures_are_the_numbers_of_rows() -> None:
    assert figures(PRINTED) == FOUND


def test_a_ratio_is_of_a_pair_and_the_median_is_told() -> None:
    pairs = [({("a", 0): 10.0, ("b", 0): 0.0}, {("a", 0): 10.0 * r, ("b", 0): 0.0}) for r in (0.5, 1.0, 3.0)]
    header, first, second = table(pairs).splitlines()
    assert "ratio" in header
    assert first.split() == ["a", "0", "10.00", "10.00", "1.000", "0.500", "3.000"]
    assert second.split() == ["b", "0", "0.00", "0.00"], "no ratio of nothing"


def test_what_one_of_them_lacks_is_not_compared() -> None:
    assert len(table([({("a", 0): 1.0}, {("a", 0): 1.0, ("new", 0): 1.0})]).splitlines()) == 2
