"""Cutting candidates to a tree, and the verdict over it, against plain Python over every small tree."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import fields, replace

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
        tree = cut(torch.tensor([9]), candidates(parents, tokens), nodes + 1, num_steps=nodes)
        for target in itertools.product(range(3), repeat=nodes + 1):
            verdict = verify(tree, torch.tensor([target]), num_steps=nodes)
            expected = walk(tree, list(target))
            count = int(verdict.accept_lens[0])
            assert verdict.next_token_ids[0].tolist() == expected + [0] * (nodes + 1 - len(expected))
            assert count == len(expected)
            path = verdict.path[0, :count].tolist()
            assert tree.depth[0, path].tolist() == list(range(count))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_distribution_of_committed_tokens_is_the_target_s(nodes):
    """Exact enumeration: after each node the target has another distribution; summed over every joint outcome, each run
    of committed tokens has the product of the target's probabilities along it, whatever the tree drafts."""
    probs = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.7, 0.05], [0.6, 0.0, 0.4], [1 / 3, 1 / 3, 1 / 3]]
    outcomes = list(itertools.product(range(3), repeat=nodes + 1))
    mass = [math.prod(probs[node][token] for node, token in enumerate(outcome)) for outcome in outcomes]
    for parents in shapes(nodes):
        tokens = with_distinct_siblings(parents)
        one = cut(torch.tensor([9]), candidates(parents, tokens), nodes + 1, num_steps=nodes)
        by_request = {
            field.name: getattr(one, field.name).expand(len(outcomes), -1)
            for field in fields(one)
            if field.name not in ("request", "node", "used", "indptr")
        }
        verdict = verify(replace(one, **by_request), torch.tensor(outcomes), num_steps=nodes)
        seen: dict[tuple[int, ...], float] = {}
        for weight, ids, count in zip(mass, verdict.next_token_ids.tolist(), verdict.accept_lens.tolist(), strict=True):
            for length in range(1, count + 1):
                run = tuple(ids[:length])
                seen[run] = seen.get(run, 0.0) + weight
        expected: dict[tuple[int, ...], float] = {}
        reached: list[tuple[int, tuple[int, ...], float]] = [(-1, (), 1.0)]  # a node, the tokens to it, their chance
        while reached:
            candidate, run, chance = reached.pop()
            for token, p in enumerate(probs[candidate + 1]):
                if chance * p == 0:
                    continue
                expected[(*run, token)] = chance * p
                reached += [
                    (child, (*run, token), chance * p)
                    for child in range(nodes)
                    if parents[child] == candidate and tokens[child] == token
                ]
        assert {run: chance for run, chance in seen.items() if chance > 0} == pytest.approx(expected, abs=1e-12)


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


@given(st.data())
def test_the_budget_goes_to_the_best_nodes_of_the_whole_batch(data):
    batch, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    budget = data.draw(st.integers(2, 64))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    parents = [[rng.randrange(-1, number) for number in range(count)] for _ in range(batch)]
    scores: list[list[float]] = []
    for row in parents:
        own: list[float] = []
        for parent in row:
            own.append((own[parent] if parent >= 0 else 0.0) - rng.choice([0.0, 0.125, 0.5]))
        scores.append(own)
    absent = rng.random() < 0.3  # one request without any draft
    if absent:
        scores[0] = [ABSENT] * count
    roots = torch.arange(batch) + 1000
    ids = torch.arange(batch * count).view(batch, count)
    tree = cut(roots, Candidates(ids, torch.tensor(parents), torch.tensor(scores)), budget, num_steps=count)
    tokens = batch * min(budget, count + 1)
    assert tree.request.shape == (tokens,)
    best = [sorted((-score, n) for n, score in enumerate(row))[:63] for row in scores]
    ranked = sorted((*pair, b) for b in range(batch) for pair in best[b])[: tokens - batch]
    kept = [sorted(n for score, n, owner in ranked if owner == b and score < -ABSENT) for b in range(batch)]
    place = 0
    for b in range(batch):
        assert int(tree.indptr[b]) == place
        assert tree.token_ids[b][tree.real[b]].tolist() == [1000 + b] + [b * count + n for n in kept[b]]
        for node in range(1 + len(kept[b])):
            assert (int(tree.request[place]), int(tree.node[place])) == (b, node)
            assert int(tree.flat[b, node]) == place
            assert bool(tree.used[place])
            place += 1
    assert int(tree.indptr[batch]) == place
    assert not tree.used[place:].any()
    assert (tree.packed(tree.token_ids, -1)[place:] == -1).all()


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
    empty = Candidates(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))
    for field in fields(tree):
        assert torch.equal(getattr(tree, field.name), getattr(cut(torch.tensor([7, 8]), empty, 1, 0), field.name))


def test_sixty_four_nodes_fit_one_mask():
    chain = candidates(list(range(-1, 62)), [1] * 63)
    tree = cut(torch.tensor([1]), chain, 64, num_steps=63)
    assert int(tree.ancestors[0, 63]) == -1  # all 64 bits, the sign bit included
    assert int(tree.depth[0, 63]) == 63
