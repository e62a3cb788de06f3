"""Processors equal a slow implementation with dictionaries, at every node of random trees, whatever shares the
batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import MAX_LOGIT_BIAS, SamplingParams
from pilotfish_engine.sampling.processors import MAX_END_TOKENS, Paths, Processors
from pilotfish_engine.types import Traits

VOCAB, ROWS = 11, 5
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.9, -1.1]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, 2.5]), max_size=3).map(lambda d: tuple(d.items())),
    min_tokens=st.sampled_from([0, 2, 5]),
)


def slow(logits, params, prompt, answer, ends, allowed=None):
    """One place, one token at a time; the order and the float32 operations are those of the documentation."""
    out = list(logits.numpy())
    for token, added in params.logit_bias:
        out[token] += np.float32(added)
    counts = Counter(answer)
    for token in range(len(out)):
        if token in counts or token in prompt:
            factor = np.float32(params.repetition_penalty)
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= np.float32(params.frequency_penalty) * counts[token]
        out[token] -= np.float32(params.presence_penalty) * (counts[token] > 0)
        if allowed is not None and token not in allowed:
            out[token] = -np.inf
    if len(answer) < params.min_tokens:
        held = [-np.inf if token in ends else value for token, value in enumerate(out)]
        if max(held) > -np.inf:
            out = held
    return torch.tensor(np.array(out, dtype=np.float32))


@st.composite
def batches(draw):
    """Rows with parameters, prompt, answer (its last token is the root) and a tree of (parent, token) under it."""
    made = []
    for row in draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]:
        prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
        answer = draw(st.lists(TOKENS, min_size=1, max_size=5))
        tree = [(0, answer[-1])]
        for number in range(1, draw(st.integers(1, 6))):
            tree.append((draw(st.integers(0, number - 1)), draw(TOKENS)))
        made.append((row, draw(PARAMS), prompt, answer, draw(st.sets(TOKENS, max_size=2)), tree))
    return made


def path(tree, node):
    tokens: list[int] = []
    while node:
        node, token = tree[node][0], tree[node][1]
        tokens.insert(0, token)
    return tokens


def admit(processors, batch):
    traits = Traits.NONE
    for row, params, prompt, answer, ends, _ in batch:
        traits |= processors.admit(row, params, [*prompt, *answer], len(prompt), tuple(ends))
    return traits


def flatten(batch):
    """The trees' nodes one after another, as one pass has them: rows, positions, paths."""
    rows: list[int] = []
    positions: list[int] = []
    token_ids: list[int] = []
    parents: list[int] = []
    for row, _, prompt, answer, _, tree in batch:
        first = len(rows)
        for node, (parent, token) in enumerate(tree):
            rows.append(row)
            positions.append(len(prompt) + len(answer) + len(path(tree, node)))
            token_ids.append(token)
            parents.append(first + parent)
    return (*map(torch.tensor, (rows, positions)), Paths(torch.tensor(token_ids), torch.tensor(parents), 5))


@settings(deadline=None, max_examples=80)
@given(batches(), st.integers(0, 1000), st.booleans())
def test_every_node_equals_the_slow_implementation(batch, seed, with_grammar):
    processors = Processors(ROWS + 1, VOCAB, torch.device("cpu"))
    # other requests had the rows before: nothing of theirs is left
    stale = SamplingParams(
        max_tokens=1, repetition_penalty=3.0, frequency_penalty=2.0, min_tokens=90, logit_bias=((3, 9.0),)
    )
    for row in range(ROWS):
        processors.admit(row, stale, [1, 2, 3], 1, (4,))
    traits = admit(processors, batch)
    token_rows, positions, paths = flatten(batch)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(token_rows), VOCAB, generator=generator) * 3
    words = torch.randint(1, 1 << VOCAB, (len(token_rows), 1), generator=generator, dtype=torch.int32)
    before = logits.clone()
    found = processors.apply(logits, token_rows, positions, traits, paths, words if with_grammar else None)
    assert torch.equal(logits, before)  # log-probabilities are read from it afterwards
    number = 0
    for _, params, prompt, answer, ends, tree in batch:
        for node in range(len(tree)):
            allowed = {t for t in range(VOCAB) if int(words[number, 0]) >> t & 1} if with_grammar else None
            expected = slow(logits[number], params, prompt, [*answer, *path(tree, node)], ends, allowed)
            torch.testing.assert_close(found[number], expected, rtol=1e-6, atol=1e-6)
            number += 1


@settings(deadline=None, max_examples=40)
@given(batches(), st.data())
def test_committed_tokens_count_as_if_they_had_been_there_at_admission(batch, data):
    processors, anew = (Processors(ROWS + 1, VOCAB, torch.device("cpu")) for _ in range(2))
    traits = admit(processors, batch)
    width = 4
    accepted = [data.draw(st.lists(TOKENS, min_size=1, max_size=width)) for _ in batch]
    padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in accepted])
    lens = torch.tensor([len(tokens) for tokens in accepted])
    rows = torch.tensor([member[0] for member in batch])
    processors.commit(rows, traits, padded, lens)
    grown = [(r, p, prompt, [*a, *new], e, t) for (r, p, prompt, a, e, t), new in zip(batch, accepted, strict=True)]
    assert admit(anew, grown) == traits
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(1))
    places = rows, torch.tensor([len(m[2]) + len(m[3]) for m in grown])
    first, second = (p.apply(logits, *places, traits) for p in (processors, anew))
    assert torch.equal(first, second)


def test_a_row_that_asks_for_nothing_is_untouched_to_the_bit():
    processors = Processors(3, VOCAB, torch.device("cpu"))
    full = SamplingParams(
        max_tokens=9, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=4, logit_bias=((2, 1.0),)
    )
    asked = processors.admit(0, full, [1, 2, 3, 4], 2, (5,))
    nothing = processors.admit(1, SamplingParams(max_tokens=9), [1, 2, 3, 4], 2, (5,))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    found = processors.apply(logits, torch.tensor([0, 1]), torch.tensor([4, 4]), asked | nothing)
    assert torch.equal(found[1], logits[1])
    assert not torch.equal(found[0], logits[0])
    assert processors.apply(logits, torch.tensor([1, 1]), torch.tensor([4, 4]), nothing) is logits


@pytest.mark.parametrize(
    ("params", "ends", "field"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, (), "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, (), "logit_bias"),
        ({"logit_bias": ((1, 1.0),) * (MAX_LOGIT_BIAS + 1)}, (), "logit_bias"),
        ({"min_tokens": 1}, (VOCAB,), "stop_token_ids"),
        ({"min_tokens": 1}, (1,) * (MAX_END_TOKENS + 1), "stop_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(params, ends, field):
    processors = Processors(3, VOCAB, torch.device("cpu"))
    with pytest.raises(RequestError, match=f"{field} has") as caught:
        processors.admit(0, SamplingParams(max_tokens=3, **params), [1, 2], 1, ends)
    assert caught.value.field == field


def test_where_a_grammar_leaves_only_the_end_min_tokens_does_not_hold_it_back():
    processors = Processors(2, VOCAB, torch.device("cpu"))
    traits = processors.admit(0, SamplingParams(max_tokens=9, min_tokens=4), [1, 2], 1, (5,))
    allowed = torch.tensor([[1 << 5], [1 << 5 | 1 << 7]], dtype=torch.int32)
    found = processors.apply(torch.zeros(2, VOCAB), torch.tensor([0, 0]), torch.tensor([2, 2]), traits, None, allowed)
    assert [row.isfinite().nonzero().flatten().tolist() for row in found] == [[5], [7]]
