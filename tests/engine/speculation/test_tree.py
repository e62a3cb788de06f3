"""Cutting candidates to a tree, and the verdict over it, against plain Python over every small tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_engine.speculation.tree import ABSENT, Candidates, DraftTree, cut, root_only
from pilotfish_engine.speculation.verify import verify


def shapes(nodes: int):
    """Every parent list of `nodes` candidates in which parents come first: −1 is the root."""
    return itertools.product(*[range(-1, number) for number in range(nodes)])


def candidates(parents, tokens, scores=None) -> Candidates:
    scores = [-float(number) for number in range(len(parents))] if scores is None else scores
    return Candidates(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([scores], dtype=torch.float32))


def walk(tree: DraftTree, target: list[int]) -> list[int]:
    """The committed tokens, by following children one by one."""
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    node, committed = 0, []
    while True:
        committed.append(target[node])
        children = [n for n in range(1, len(tokens)) if parents[n] == node and tree.real[0, n]]
        agreeing = [n for n in children if tokens[n] == target[node]]
        if not agreeing:
            return committed
        node = agreeing[0]


def with_distinct_siblings(parents) -> list[int]:
    """Tokens 0, 1, 2, … in the order of a node's siblings."""
    return [sum(parents[other] == parent for other in range(number)) for number, parent in enumerate(parents)]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_verdict_follows_the_target_in_every_tree(nodes):
    """All trees of up to 4 drafted nodes, all target tokens over a vocabulary of 3."""
    for parents in shapes(nodes):
        tokens = with_distinct_siblings(parents)
        tree = cut(torch.tensor([9]), candidates(parents, tokens), nodes + 1, num_steps=4)
        for target in itertools.product(range(3), repeat=nodes + 1):
            verdict = verify(tree, torch.tensor([target]), num_steps=4)
            expected = walk(tree, list(target))
            count = int(verdict.accept_lens[0])
            assert verdict.next_token_ids[0].tolist() == expected + [0] * (nodes + 1 - len(expected))
            assert count == len(expected)
            path = verdict.path[0, :count].tolist()
            assert tree.depth[0, path].tolist() == list(range(count))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_distribution_of_committed_tokens_is_the_target_s(nodes):
    """Exact enumeration: the token after each node is drawn from the target's distribution there; summed over every
    joint outcome, the first tokens committed have the target's probabilities whatever the tree drafts."""
    probs = [0.5, 0.3, 0.2]
    weights = list(itertools.product(range(3), repeat=nodes + 1))
    for parents in shapes(nodes):
        tree = cut(torch.tensor([9]), candidates(parents, with_distinct_siblings(parents)), nodes + 1, num_steps=4)
        verdicts = verify(
            DraftTree(*(part.expand(len(weights), -1) for part in vars(tree).values())), torch.tensor(weights), 4
        )
        seen: dict[tuple[int, ...], float] = {}
        for target, tokens, count in zip(
            weights, verdicts.next_token_ids.tolist(), verdicts.accept_lens.tolist(), strict=True
        ):
            mass = 1.0
            for token in target:
                mass *= probs[token]
            committed = tuple(tokens[:count])
            for length in range(1, count + 1):
                seen[committed[:length]] = seen.get(committed[:length], 0.0) + mass
        for run, mass in seen.items():
            # P(run committed) = P(its beginning committed and its last node drafted) × the target's probability
            before = 1.0 if len(run) == 1 else sum(seen.get((*run[:-1], token), 0.0) for token in range(3))
            assert mass == pytest.approx(before * probs[run[-1]], abs=1e-12)


@given(st.data())
def test_the_cut_is_a_tree_of_the_best_nodes(data):
    """Ancestors first, the highest path scores, ties to the shallower; masks and depths as plain Python finds them."""
    count = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1, number - 1)) for number in range(count)]
    steps = [data.draw(st.sampled_from([0.0, -0.5, -1.0])) for _ in range(count)]
    scores: list[float] = []
    for number, parent in enumerate(parents):
        scores.append(steps[number] + (scores[parent] if parent >= 0 else 0.0))
    budget = data.draw(st.integers(2, count + 2))
    tree = cut(torch.tensor([5]), candidates(parents, list(range(100, 100 + count)), scores), budget, num_steps=count)
    kept = sorted(sorted(range(count), key=lambda n: (-scores[n], n))[: budget - 1])
    assert tree.token_ids[0].tolist() == [5] + [100 + n for n in kept]
    number_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
    assert tree.parents[0].tolist() == [0] + [number_of[parents[n]] for n in kept]
    for node, candidate in enumerate(kept, start=1):
        chain, at = {node, 0}, candidate
        while parents[at] >= 0:
            at = parents[at]
            chain.add(number_of[at])
        assert int(tree.ancestors[0, node]) == sum(1 << n for n in chain)
        assert int(tree.depth[0, node]) == len(chain) - 1


def test_padding_is_never_accepted():
    offered = candidates([-1, 0], [0, 0], [ABSENT, ABSENT])
    tree = cut(torch.tensor([3]), offered, 3, num_steps=2)
    verdict = verify(tree, torch.tensor([[0, 0, 0]]), num_steps=2)
    assert verdict.accept_lens.tolist() == [1]
    assert verdict.next_token_ids.tolist() == [[0, 0, 0]]
    assert tree.real.tolist() == [[True, False, False]]


def test_plain_decoding_is_the_tree_of_the_root():
    tree = root_only(torch.tensor([7, 8]))
    verdict = verify(tree, torch.tensor([[1], [2]]), num_steps=0)
    assert verdict.next_token_ids.tolist() == [[1], [2]]
    assert verdict.accept_lens.tolist() == [1, 1]


def test_sixty_four_nodes_fit_one_mask():
    chain = candidates(list(range(-1, 62)), [1] * 63)
    tree = cut(torch.tensor([1]), chain, 64, num_steps=63)
    assert int(tree.ancestors[0, 63]) == -1  # all 64 bits, the sign bit included
    assert int(tree.depth[0, 63]) == 63
