"""The matcher as tensor code gives the candidates of the one in C++, number for number, and a graph can hold it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_engine.speculation import ngram_corpus, ngram_matcher, ngram_tensors
from tests.engine.conformance.test_capturable import HOST_COPIES, Capturable, refuse

CPU = torch.device("cpu")
SPAN = 48


@st.composite
def states(draw):
    """tokens [R, L] full of stale ones, seq_lens, rows: few letters, so that matches abound, or enough that
    a corpus knows more."""
    letters = draw(st.sampled_from([1, 2, 3, 10, 40]))
    known = draw(st.lists(st.integers(1, SPAN), min_size=1, max_size=4))
    flat = draw(st.lists(st.integers(0, letters - 1), min_size=SPAN * len(known), max_size=SPAN * len(known)))
    rows = draw(st.permutations(range(len(known))))[: draw(st.integers(1, len(known)))]
    return torch.tensor(flat).view(-1, SPAN), torch.tensor(known) - 1, torch.tensor(rows)


DOCUMENTS = st.one_of(
    st.just([]), *(st.lists(st.text(letters, min_size=2, max_size=40), max_size=6) for letters in ("ab", "abcdefghij"))
)


def indexed(documents: list[str]) -> ngram_matcher.Corpus | None:
    return ngram_corpus.index(documents, lambda text: [ord(c) - ord("a") for c in text], CPU) if documents else None


@settings(max_examples=250)
@given(states(), st.integers(1, 8), st.integers(1, 8), DOCUMENTS, st.sampled_from([1 << 22, 64, 17]))
def test_both_matchers_are_one(state, topk, num_steps, documents, at_once):
    corpus = indexed(documents)
    tokens, seq_lens, rows = state
    expected = ngram_matcher.drafts(tokens, seq_lens, rows, topk, num_steps, corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_tensors, "AT_ONCE", at_once)  # the rows are looked at in pieces, whose seams must not show
        found = ngram_tensors.drafts(tokens, seq_lens, rows, topk, num_steps, corpus)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.parents, expected.parents)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("documents", [[], ["abcabd", "bcda"]])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 4), (4, 4), (8, 8)])
def test_nothing_in_it_needs_the_host(monkeypatch, topk, num_steps, documents):
    corpus = indexed(documents)
    tokens = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 0, 0]] * 3)
    seq_lens, rows = torch.tensor([8, 6, 0]), torch.tensor([2, 0, 1])
    for name in HOST_COPIES:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with torch.inference_mode(), Capturable():
        found = ngram_tensors.drafts(tokens, seq_lens, rows, topk, num_steps, corpus)
    monkeypatch.undo()
    assert (found.scores[0].max() > float("-inf")) == bool(documents)  # one known token repeats nothing of its own
    assert found.scores[1:].max(dim=1).values.min() > float("-inf")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("documents", [[], ["abcabd" * 9, "bcda", "dddddabcd"]])
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 4), (4, 4), (8, 8)])
def test_a_graph_of_it_on_a_gpu_gives_what_the_cpu_gives(topk, num_steps, documents):
    generator = torch.Generator().manual_seed(topk)
    corpus, rows = indexed(documents), torch.tensor([3, 0, 5, 1])
    there = corpus and ngram_matcher.Corpus(corpus.tokens.cuda(), corpus.order.cuda())
    text = torch.zeros(6, SPAN, dtype=torch.int64, device="cuda")
    lens, which = text[:, 0].clone(), rows.cuda()
    with torch.inference_mode():
        ngram_tensors.drafts(text, lens, which, topk, num_steps, there)  # libraries make their workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ngram_tensors.drafts(text, lens, which, topk, num_steps, there)
        for letters in (1, 2, 4, 9) * 5:
            tokens = torch.randint(0, letters, (6, SPAN), generator=generator)
            seq_lens = torch.randint(0, SPAN, (6,), generator=generator)
            text.copy_(tokens)
            lens.copy_(seq_lens)
            graph.replay()
            expected = ngram_matcher.drafts(tokens, seq_lens, rows, topk, num_steps, corpus)
            assert torch.equal(found.token_ids.cpu(), expected.token_ids)
            assert torch.equal(found.parents.cpu(), expected.parents)
            assert torch.equal(found.scores.cpu(), expected.scores)
