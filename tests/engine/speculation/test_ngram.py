"""The C++ matcher against a search in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.speculation.ngram import MAX_NGRAM, MIN_NGRAM, NgramProposer
from pilotfish_engine.speculation.tree import ABSENT
from pilotfish_engine.worker.state import RequestState


def propose(known: list[list[int]], num_steps: int, topk: int):
    state = RequestState(len(known), 64, 16, 66, 32, torch.device("cpu"))
    for row, tokens in enumerate(known):
        state.tokens[row, : len(tokens)] = torch.tensor(tokens)
        state.seq_lens[row] = len(tokens) - 1
    rows = list(range(len(known)))
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=topk * num_steps + 1)
    return NgramProposer(state).propose(state.row_index(rows), rows, settings)


def matches(tokens: list[int]) -> list[int]:
    """Where earlier occurrences of the suffix go on: the longest first, the most recent among equals."""
    found = []
    for end in range(len(tokens) - 1):
        length = 0
        while (
            length < MAX_NGRAM
            and length <= end
            and tokens[end - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        if length >= MIN_NGRAM:
            found.append((-length, -(end + 1)))
    return [-start for _, start in sorted(found)]


def continuation(tokens: list[int], start: int, num_steps: int) -> list[int]:
    tail = tokens[start:]
    return [tail[d % len(tail)] for d in range(num_steps)]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 6))
def test_a_chain_is_what_followed_the_longest_match(known, num_steps):
    offered = propose(known, num_steps, topk=1)
    for row, tokens in enumerate(known):
        found = matches(tokens)
        if found:
            assert offered.token_ids[row].tolist() == continuation(tokens, found[0], num_steps)
            assert offered.parents[row].tolist() == list(range(-1, num_steps - 1))
        else:
            assert offered.scores[row].tolist() == [ABSENT] * num_steps


@given(TOKENS, st.integers(1, 5), st.integers(2, 4))
def test_a_tree_merges_the_best_matches(tokens, num_steps, topk):
    offered = propose([tokens], num_steps, topk)
    ids, parents, scores = (part[0].tolist() for part in (offered.token_ids, offered.parents, offered.scores))
    real = [n for n in range(len(ids)) if scores[n] > ABSENT]
    assert real == list(range(len(real)))
    runs = set()
    for node in real:
        assert parents[node] < node
        assert parents[node] < 0 or scores[parents[node]] >= scores[node]
        run: list[int] = []
        at = node
        while at >= 0:
            run.insert(0, ids[at])
            at = parents[at]
        runs.add(tuple(run))
    assert len(runs) == len(real)  # siblings differ
    wanted = [continuation(tokens, start, num_steps) for start in matches(tokens)[:topk]]
    assert runs == {tuple(run[:length]) for run in wanted for length in range(1, num_steps + 1)}
