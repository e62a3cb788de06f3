"""The C++ matcher against a search in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.speculation import ngram_corpus
from pilotfish_engine.speculation.ngram import NgramProposer
from pilotfish_engine.speculation.ngram_matcher import MAX_MATCHES, MAX_NGRAM, MIN_NGRAM, Corpus
from pilotfish_engine.speculation.tree import ABSENT, Candidates

Match = tuple[int, Fraction, list[int]]  # the common context, the weight, what follows
CPU = torch.device("cpu")


def propose(known: list[list[int]], num_steps: int, topk: int, corpus: Corpus | None = None) -> Candidates:
    state = RequestState(len(known), 64, 16, 66, 32, CPU)
    for row, tokens in enumerate(known):
        state.tokens[row, : len(tokens)] = torch.tensor(tokens)
        state.seq_lens[row] = len(tokens) - 1
    rows = list(range(len(known)))
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=min(64, topk * num_steps + 1))
    return NgramProposer(state, corpus).propose(state.rows(rows), settings)


def common(context: Sequence[int], suffix: Sequence[int]) -> int:
    """How many of the last tokens are the same."""
    length = 0
    while length < min(MAX_NGRAM, len(context), len(suffix)) and context[-1 - length] == suffix[-1 - length]:
        length += 1
    return length


def own_matches(tokens: list[int], num_steps: int, topk: int) -> list[Match]:
    """Where earlier occurrences of the suffix go on: the longest first, the most recent among equals."""
    lengths = {end: common(tokens[:end], tokens) for end in range(1, len(tokens))}
    found = sorted((-length, -start) for start, length in lengths.items() if length >= MIN_NGRAM)
    return [
        (-length, Fraction(2**-length, rank), [tokens[-start:][d % (len(tokens) + start)] for d in range(num_steps)])
        for rank, (length, start) in enumerate(found[: min(MAX_MATCHES, topk * topk)], start=1)
    ]


def corpus_matches(documents: list[list[int]], tokens: list[int], num_steps: int, topk: int) -> list[Match]:
    """The best of the 16 entries around the suffix's place, when all are sorted by what stands before them."""
    entries = [
        (document[:at][::-1][:MAX_NGRAM], number, at)
        for number, document in enumerate(documents)
        for at in range(1, len(document))
    ]
    entries.sort()
    # a context that begins its document sorts before every longer one, and before a suffix that is longer still
    place = sum(context < tokens[::-1][:MAX_NGRAM] for context, _, _ in entries)
    found = [
        (common(context[::-1], tokens), documents[number][at : at + num_steps])
        for context, number, at in entries[max(0, place - 8) : place + 8]
    ]
    found = sorted((match for match in found if match[0] >= MIN_NGRAM), key=lambda match: -match[0])
    return [(length, Fraction(2**length), run) for length, run in found[: min(MAX_MATCHES, topk * topk)]]


def merged(matches: list[Match], num_steps: int, topk: int) -> dict[tuple[int, ...], float]:
    """The paths of the tree with their scores: at each node the `topk` children with the most votes."""
    votes: dict[tuple[int, ...], Fraction] = {}
    context: dict[tuple[int, ...], int] = {}  # of the best match on the path
    for length, weight, run in matches:
        for depth in range(1, len(run) + 1):
            path = tuple(run[:depth])
            votes[path] = votes.get(path, Fraction(0)) + weight
            context.setdefault(path, length)
    kept: dict[tuple[int, ...], float] = {}
    total = sum(weight for _, weight, _ in matches)
    frontier: list[tuple[int, ...]] = [()]
    for depth in range(1, num_steps + 1):
        children = []
        for node in frontier:
            offered = [path for path in votes if len(path) == depth and path[:-1] == node]
            children += sorted(offered, key=lambda path: -votes[path])[:topk]  # stable: the better match among equals
        for path in children:
            kept[path] = math.log(votes[path] / total) - 2 * depth / (1 + context[path])
        frontier = children
    return kept


def paths(offered: Candidates, row: int) -> dict[tuple[int, ...], float]:
    """As `merged`, of a row of candidates, whose form is checked on the way."""
    ids, parents, scores = (part[row].tolist() for part in (offered.token_ids, offered.parents, offered.scores))
    found: dict[tuple[int, ...], float] = {}
    run_of: dict[int, tuple[int, ...]] = {-1: ()}
    for node in range(len(ids)):
        if scores[node] == ABSENT:
            assert (ids[node], parents[node]) == (0, -1)
            continue
        assert parents[node] in run_of, "a parent stands before its child and is there"
        assert parents[node] < 0 or scores[parents[node]] > scores[node]
        run_of[node] = (*run_of[parents[node]], ids[node])
        assert run_of[node] not in found, "siblings differ"
        found[run_of[node]] = scores[node]
    return found


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=40), min_size=1, max_size=4)


def indexed(documents: list[list[int]]) -> Corpus:
    return ngram_corpus.index([str(number) for number in range(len(documents))], lambda text: documents[int(text)], CPU)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 8))
def test_a_chain_is_what_followed_the_longest_match(known, num_steps):
    offered = propose(known, num_steps, topk=1)
    for row, tokens in enumerate(known):
        found = own_matches(tokens, num_steps, topk=1)
        if found:
            assert offered.token_ids[row].tolist() == found[0][2]
            assert offered.parents[row].tolist() == list(range(-1, num_steps - 1))
        else:
            assert offered.scores[row].tolist() == [ABSENT] * num_steps


@given(TOKENS, st.integers(1, 8), st.integers(1, 8))
def test_a_tree_merges_the_best_matches_by_their_votes(tokens, num_steps, topk):
    expected = merged(own_matches(tokens, num_steps, topk), num_steps, topk)
    assert paths(propose([tokens], num_steps, topk), 0) == pytest.approx(expected, rel=1e-6)


@given(TOKENS, DOCUMENTS, st.integers(1, 8), st.integers(1, 8))
def test_a_corpus_is_followed_where_it_knows_a_longer_context(tokens, documents, num_steps, topk):
    own = own_matches(tokens, num_steps, topk)
    other = corpus_matches(documents, tokens, num_steps, topk)
    longest = max(common(document[:at], tokens) for document in documents for at in range(1, len(document)))
    assert (other[0][0] if other else 0) == longest, "no entry elsewhere shares more"
    best = other if longest > (own[0][0] if own else 0) else own
    offered = propose([tokens], num_steps, topk, indexed(documents))
    assert paths(offered, 0) == pytest.approx(merged(best, num_steps, topk), rel=1e-6)


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_steps", [1, 8])
@pytest.mark.parametrize("count", [1, 2, 130])
def test_rows_of_any_length_fit_the_reserve(topk, num_steps, count):
    """One known token, and as many as the row has places (130)."""
    offered = propose([[number % 3 for number in range(count)]], num_steps, topk, indexed([[0, 0]]))
    assert offered.token_ids.shape[1] <= topk + (num_steps - 1) * topk**2
    assert len(paths(offered, 0)) == {1: 1, 2: 0, 130: num_steps}[count]  # of the corpus, nothing, the loop
