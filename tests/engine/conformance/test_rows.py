"""Rows without a token and tokens without a row: what the twins of the whole suite cannot show."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish_engine.messages import Grammar
from pilotfish_engine.model.layers import Embedding, reading
from pilotfish_engine.speculation.recurrent import RecurrentProposer
from pilotfish_engine.speculation.vocabulary import Vocabulary
from tests.engine.conformance import models, twins
from tests.engine.conformance.conftest import VOCAB, prompts
from tests.engine.conformance.harness import Harness, fixed, load


@pytest.fixture(scope="module", params=[twins.PADDED, twins.SHORT])
def drafting(request, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pair = models.small_model(target, folder / "near", "near")
    twinned = twins.twin(pair, request.param, folder / "twin")
    return load(twinned.target, "STANDALONE", twinned.draft, 16)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 3}, {"frequency_penalty": 1.5}])
def test_grammars_are_followed(drafting, params):
    harness = Harness(drafting, grammars=drafting.grammars)
    harness.scheduler.set_envelope(fixed(4, 2))
    digits = [twins.letters().index(digit) for digit in "135"]
    asked = [harness.submit([0, 0, 0, 5], grammar=Grammar("regex", "(135)+"), max_tokens=9, **params)]
    asked += [harness.submit([0, 0, 0, 7], max_tokens=9, **params)]
    harness.drain()
    found = harness.answers[asked[0]].token_ids
    text = found[:-1] if found[-1] == models.EOS else found
    assert len(text) >= 3
    assert text == (digits * 3)[: len(text)]
    assert max(harness.answers[asked[1]].token_ids) < VOCAB


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [0, 0, 0, VOCAB]},
        {"prompt": [0, -1]},
        {"logit_bias": ((VOCAB, 9.0),)},
        {"stop_token_ids": (VOCAB + 270,)},
    ],
)
def test_a_token_without_a_row_ends_its_own_request(drafting, greedy, bad):
    harness = Harness(drafting)
    asked = prompts(3, seed=4)
    ids = [harness.submit(prompt, ignore_eos=True) for prompt in asked[:2]]
    params = dict(bad)
    wrong = harness.submit(params.pop("prompt", [0, 0, 0, 4]), **params)
    ids.append(harness.submit(asked[2], ignore_eos=True))
    outputs = [output for _ in range(60) for output in harness.scheduler.step()]
    assert not harness.scheduler.has_work
    (ended,) = [output for output in outputs if output.request_id == wrong]
    assert ended.field == next(iter(bad))
    assert f"0 to {VOCAB - 1} would work" in str(ended.error)
    for request_id, prompt in zip(ids, asked, strict=True):
        tokens = [token for output in outputs if output.request_id == request_id for token in output.token_ids]
        assert tokens == greedy(prompt, 16)


def test_likeliest_tokens_are_tokens(drafting):
    harness = Harness(drafting)
    request_id = harness.submit([0, 0, 0, 9], temperature=2.0, seed=1, logprobs=20, ignore_eos=True)
    harness.drain()
    for scored in harness.answers[request_id].logprobs:
        assert scored is not None
        assert max(token for token, _ in scored.top) < VOCAB
        assert sum(torch.tensor([logprob for _, logprob in scored.top]).exp()) <= 1.001


@pytest.mark.parametrize("rows", [VOCAB - 9, VOCAB + 40])
def test_a_draft_of_the_same_tokens_and_other_rows(target, greedy, tmp_path, rows):
    """Fewer tokens than the target's: those of its answers that the draft does not know are read as another."""
    pair = models.small_model(target, tmp_path / "own", "equal")
    draft, big = tmp_path / "draft", tmp_path / "target"
    assert pair.draft is not None
    shutil.copytree(pair.draft, draft)
    shutil.copytree(target, big)
    twins.tokenizer(VOCAB).save(str(big / "tokenizer.json"))
    twins.tokenizer(min(rows, VOCAB)).save(str(draft / "tokenizer.json"))
    tensors = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = twins.with_rows(tensors[name], max(0, rows - VOCAB))
        tensors[name] = more[:rows].contiguous()
    save_file(tensors, draft / "model.safetensors")
    twins.resize(draft, rows)
    harness = Harness(load(big, "STANDALONE", draft, 16))
    harness.scheduler.set_envelope(fixed(4, 2))
    asked = [*prompts(4, seed=9), [0, 0, 0, VOCAB - 1, VOCAB - 2]]
    assert harness.run(asked, max_tokens=20, ignore_eos=True) == [greedy(prompt, 20) for prompt in asked]
    assert any(max(result.accept_lens) > 2 for _, result in harness.worker.steps)


def test_columns_that_are_no_token_are_not_drafted():
    logits = torch.tensor([[1.0, 9.0, torch.nan, 3.0]])
    cut = Vocabulary(torch.tensor([4, 2, 7, 0]), 5)  # token 7 is none
    assert (cut.size, cut.ids.tolist()) == (3, [4, 2, 0, 0])
    assert cut.known(logits).tolist() == [[1.0, 9.0, -torch.inf, 3.0]]
    padded = Vocabulary(torch.arange(4), 2)
    assert (padded.size, padded.ids.tolist(), padded.known(logits).tolist()) == (2, [0, 1], [[1.0, 9.0]])


def test_an_embedding_reads_what_it_does_not_know_as_token_0():
    embed = Embedding(torch.tensor([[1.0], [2.0], [3.0]]))
    assert reading(embed, 3) is embed
    assert reading(embed, 5)(torch.tensor([2, 4, 3, 0])).tolist() == [[3.0], [1.0], [1.0], [1.0]]


def test_a_head_s_own_vocabulary_is_of_the_target_s_tokens(tmp_path, target):
    """The twin of an EAGLE-3 head maps rows of its own to rows that are no token."""
    pair = twins.twin(models.head_on_three_states(target, tmp_path / "head", "equal"), twins.PADDED, tmp_path / "twin")
    assert pair.draft is not None
    head = load(pair.target, "EAGLE3", pair.draft, 16).step.proposer
    assert json.loads((pair.draft / "config.json").read_text())["draft_vocab_size"] == VOCAB + twins.CUT_PADDING
    assert isinstance(head, RecurrentProposer)
    assert head._vocabulary.size == VOCAB
