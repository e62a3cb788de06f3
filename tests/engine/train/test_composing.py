"""Prompts that are composed: whole, by seed, of every kind, and none that drafts are judged by."""

from __future__ import annotations

import pytest

from benchmarks import prompts
from examples.prompts.composing import HERE, SLOT, Composer, library_functions, sections

COUNT = 5000


@pytest.fixture(scope="module")
def asked() -> list[str]:
    composer = Composer(seed=3)
    return [composer.messages()[-1]["content"] for _ in range(COUNT)]


def test_prompts_follow_from_the_seed(asked: list[str]) -> None:
    again, other = Composer(seed=3), Composer(seed=4)
    assert [again.messages()[-1]["content"] for _ in range(50)] == asked[:50]
    assert [other.messages()[-1]["content"] for _ in range(50)] != asked[:50]


def test_every_slot_is_filled_and_most_prompts_differ(asked: list[str]) -> None:
    quoted = [text for pair in library_functions() for text in pair if text]
    for text in asked:
        if any(function in text for function in quoted):
            continue  # which may have braces of their own
        assert SLOT.search(text) is None, text
    assert len(set(asked)) > 0.8 * COUNT


def test_every_task_names_words_that_there_are() -> None:
    composer = Composer(seed=1)
    for _, tasks in sections((HERE / "tasks.txt").read_text(encoding="utf-8")):
        for task in tasks:
            composer.filled(task)


def test_no_judge_is_among_what_can_be_composed(asked: list[str]) -> None:
    judges = {*prompts.chat(80), *prompts.daily(40), *prompts.code(164), *prompts.sums(100)}
    assert len(judges) == 80 + 40 + 164 + 100
    assert not judges & set(asked)
    sources = "".join((HERE / name).read_text(encoding="utf-8") for name in ("tasks.txt", "words.txt", "openings.txt"))
    assert not any(judge in sources for judge in judges)
