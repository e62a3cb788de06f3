"""A file of prompts, good and bad lines; batches of sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pilotfish_engine.errors import UsageError
from pilotfish_engine.tokenizer import Tokenizer, load
from pilotfish_engine.train.prompts import Prompt, read_prompts, set_apart
from pilotfish_engine.train.sequences import Answered, collate, cut_to, plan

USER, ASSISTANT, END = 31, 32, 30


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> Tokenizer:
    return load(target_folder)


def read(path: Path, tokenizer: Tokenizer, lines: Sequence[object]) -> tuple[list[Prompt], dict[str, list[int]]]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    prompts, skipped = read_prompts(path, tokenizer, max_tokens=8)
    return prompts, skipped.lines


def chat(*texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def test_lines_of_every_form(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [
        chat("ab"),
        "",
        {"prompt": "abc"},
        {"prompt": [5, 6]},
        chat("a", "b"),
        {"prompt": "a", "answer": "cd"},
        {**chat("b"), "answer": [3, 30]},
        chat("a", "b", "c"),
    ]
    prompts, skipped = read(tmp_path / "a", tokenizer, lines)
    assert prompts == [
        Prompt(1, [USER, 0, 1, ASSISTANT]),
        Prompt(3, [0, 1, 2]),
        Prompt(4, [5, 6]),
        Prompt(5, [USER, 0, ASSISTANT], [1, END]),
        Prompt(6, [0], [2, 3, END]),
        Prompt(7, [USER, 1, ASSISTANT], [3, 30]),
        Prompt(8, [USER, 0, ASSISTANT, 1, USER, 2, ASSISTANT]),
    ]
    assert skipped == {}


def test_lines_that_are_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = "messages are not a list of a role (system, user or assistant) and a text each"
    bad = [
        ("{", "not JSON"),
        ([1], "not an object with either `messages` or `prompt`"),
        ({"text": "a"}, "not an object with either `messages` or `prompt`"),
        ({"prompt": "a", **chat("a")}, "not an object with either `messages` or `prompt`"),
        ({"prompt": ""}, "the prompt is empty, or neither a text nor token ids"),
        ({"prompt": 7}, "the prompt is empty, or neither a text nor token ids"),
        ({"prompt": [5, 48]}, "the prompt has what is no token id"),
        ({"prompt": [True]}, "the prompt has what is no token id"),
        ({"prompt": "a", "answer": ""}, "the answer is empty, or neither a text nor token ids"),
        ({"messages": []}, messages),
        ({"messages": [{"role": "tool", "content": "a"}]}, messages),
        ({"messages": [{"role": "user", "content": ""}]}, messages),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user's message comes before the answer"),
        ({"prompt": "abcdefghi"}, "a prompt of over 8 tokens"),
    ]
    prompts, skipped = read(tmp_path / "a", tokenizer, [chat("a"), *(line for line, _ in bad)])
    assert [prompt.line for prompt in prompts] == [1]
    expected: dict[str, list[int]] = {}
    for number, (_, reason) in enumerate(bad, start=2):
        expected.setdefault(reason, []).append(number)
    assert skipped == expected
    shown = str(read_prompts(tmp_path / "a", tokenizer, 8)[1])
    assert f"skipped 3 lines (3, 4, 5): {bad[1][1]}" in shown
    assert f"skipped 1 line (2): {bad[0][1]}" in shown


def test_bytes_that_are_no_text_are_one_bad_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a").write_bytes(b'{"prompt": "\xff"}\n{"prompt": "a"}\n')
    prompts, skipped = read_prompts(tmp_path / "a", tokenizer, 8)
    assert (len(prompts), skipped.lines) == (1, {"not JSON": [1]})


def test_a_file_without_a_usable_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"no usable line; .* would work; skipped 1 line \(1\): not JSON"):
        read(tmp_path / "a", tokenizer, ["nonsense"])


def test_every_sequence_is_once_in_an_epoch() -> None:
    lengths = [3 + (7 * n) % 23 for n in range(300)]
    first, second = plan(lengths, 100, seed=1, epoch=0), plan(lengths, 100, seed=1, epoch=1)
    for batches in (first, second):
        assert sorted(number for batch in batches for number in batch) == list(range(300))
        assert all(len(batch) * max(lengths[n] for n in batch) <= 100 for batch in batches)
    assert first != second
    assert first == plan(lengths, 100, seed=1, epoch=0)
    padded = sum(len(batch) * max(lengths[n] for n in batch) for batch in first)
    assert padded < 1.2 * sum(lengths)


def test_roots_are_where_serving_drafts() -> None:
    """The target has said the answer's first token: from the prompt's last position on, every later one is drafted."""
    batch = collate([Answered([1, 2, 3, 4, 5, 6], 2), Answered([7, 8, 9, 10], 1)])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]
    assert batch.roots.tolist() == [1, 2, 3, 6, 7]
    assert batch.left.tolist() == [3, 2, 1, 2, 1]
    drafted = batch.tokens.flatten()[batch.roots + 2]
    assert drafted.tolist() == [4, 5, 6, 9, 10]


def test_long_sequences_are_cut_and_empty_ones_left_out() -> None:
    cut = cut_to([Answered(range(9), 3), Answered(range(4), 3), Answered(range(9), 6)], 7)
    assert [(len(one.token_ids), one.prompt_len) for one in cut] == [(7, 3)]
    assert torch.equal(collate(cut).tokens, torch.arange(7)[None])


@pytest.mark.parametrize("seed", range(5))
def test_what_is_asked_twice_is_not_on_both_sides(seed: int) -> None:
    prompts = [Prompt(line, [line % 6]) for line in range(1, 13)]
    apart, others = set_apart(prompts, 3, seed)
    assert len(apart) == 3
    said = {tuple(prompt.token_ids) for prompt in apart}
    assert others, "half of the lines at least are other prompts"
    assert said.isdisjoint(tuple(prompt.token_ids) for prompt in others)
    missing = {prompt.line for prompt in prompts} - {prompt.line for prompt in (*apart, *others)}
    assert all((prompts[line - 1].token_ids[0],) in said for line in missing)
