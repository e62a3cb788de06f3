"""Block drafts that do not fit, each refused by name, with both values where there are two, from metadata alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import check_vocabulary
from pilotfish_engine.errors import CheckpointError, UsageError
from pilotfish_engine.model.loading import read_shape
from pilotfish_engine.speculation import dflash
from pilotfish_engine.speculation.proposer import Models
from tests.engine.speculation.block_drafts import BlockDraft, block_draft, tiny_target

VOCAB = 8
Change = Callable[[BlockDraft], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    tiny_target(VOCAB).save_pretrained(folder)
    return folder


def models(target: Path, draft: Path | None) -> Models:
    shape = read_shape(target)
    return Models(target, shape, draft, lambda other, size: check_vocabulary(target, shape, other, size))


def envelope(num_steps: int = 5, topk: int = 1) -> Envelope:
    return Envelope(num_steps=num_steps, topk=topk, num_draft_tokens=num_steps + 1)


def top(**values: Any) -> Change:
    return lambda draft: draft.config.update(values)


def inner(**values: Any) -> Change:
    return lambda draft: draft.config["dflash_config"].update(values)


def tensor(name: str, *shape: int) -> Change:
    return lambda draft: draft.tensors.update({name: torch.zeros(shape)})


def without(name: str) -> Change:
    return lambda draft: draft.tensors.pop(name)


def cut_vocabulary(draft: BlockDraft) -> None:
    draft.config["draft_vocab_size"] = 5
    draft.tensors |= {"lm_head.weight": torch.zeros(5, 32), "d2t": torch.zeros(5, dtype=torch.int64)}


def then(*changes: Change) -> Change:
    return lambda draft: [change(draft) for change in changes]


REFUSED: dict[str, tuple[Change, str]] = {
    "missing tensor": (
        without("layers.1.self_attn.k_norm.weight"),
        r"layers.1.self_attn.k_norm.weight is missing; .*\[16\]",
    ),
    "missing projection": (without("fc.weight"), r"tensor fc.weight is missing; its config asks for shape \[32, 64\]"),
    "extra tensor": (
        tensor("mask_embedding", 32),
        r"tensor mask_embedding of shape \[32\] is none that a DFlash draft has",
    ),
    "another layer": (tensor("layers.2.mlp.up_proj.weight", 40, 32), r"layers.2.mlp.up_proj.weight .* is none that"),
    "misshaped tensor": (tensor("norm.weight", 31), r"norm.weight has shape \[31\], but its config asks for \[32\]"),
    "features of other layers": (
        inner(target_layer_ids=[0, 1, 2]),
        r"fc.weight has shape \[32, 64\], but its config asks for \[32, 96\]",
    ),
    "embedding of another vocabulary": (
        tensor("embed_tokens.weight", 9, 32),
        r"embed_tokens.weight has shape \[9, 32\].*\[8, 32\]",
    ),
    "head of another vocabulary": (tensor("lm_head.weight", 7, 32), r"lm_head.weight has shape \[7, 32\].*\[8, 32\]"),
    "cut vocabulary without a map": (then(cut_vocabulary, without("d2t")), r"tensor d2t is missing; .*\[5\]"),
    "map of another vocabulary": (then(cut_vocabulary, tensor("t2d", 9)), r"t2d has shape \[9\], .*\[8\]"),
    "map without a cut vocabulary": (tensor("d2t", 8), r"tensor d2t of shape \[8\] is none"),
    "hidden size": (
        top(hidden_size=48),
        r"the draft draft has hidden_size 48 and the target target 32; a draft that was",
    ),
    "vocabulary": (top(vocab_size=9), r"the draft draft has a vocabulary of 9 tokens and the target target one of 8"),
    "layer of a larger target": (
        inner(target_layer_ids=[0, 3]),
        r"reads the target behind layer 3, and target has 3 layers, 0 to 2",
    ),
    "unordered layers": (
        inner(target_layer_ids=[2, 0]),
        r"target_layer_ids is \[2, 0\], .* ascend; \[0, 2\] would work",
    ),
    "repeated layers": (inner(target_layer_ids=[1, 1]), r"target_layer_ids is \[1, 1\], .* ascend; \[1\] would work"),
    "negative layer": (inner(target_layer_ids=[-1, 2]), r"target_layer_ids is \[-1, 2\]; a list of layers' numbers"),
    "no layers": (inner(target_layer_ids=[]), r"target_layer_ids is \[\]; a list of layers' numbers would work"),
    "layers not named": (inner(target_layer_ids=None), r"target_layer_ids is None; a list of layers' numbers"),
    "no mask": (inner(mask_token_id=None), r"mask_token_id is None; from 0 to 7 would work"),
    "mask out of range": (inner(mask_token_id=8), r"mask_token_id is 8; from 0 to 7 would work"),
    "no block": (top(block_size=None), r"block_size is None; from 2 to 64 would work"),
    "block of one": (top(block_size=1), r"block_size is 1; from 2 to 64 would work"),
    "block too large": (inner(block_size=65), r"block_size is 65; from 2 to 64 would work"),
    "draft vocabulary too large": (top(draft_vocab_size=9), r"draft_vocab_size is 9; from 1 to 8 would work"),
    "Markov head": (
        inner(markov_rank=4, markov_head_type="vanilla"),
        r"markov_rank is 4, .* a checkpoint with 0 would work",
    ),
    "confidence head": (
        inner(enable_confidence_head=True),
        r"enable_confidence_head is True, .* with False would work",
    ),
    "convolutions": (inner(conv_kernel_size=2), r"conv_kernel_size is 2, .* with 0 would work"),
    "causal blocks": (top(is_causal=True), r"is_causal is True, .* with False would work"),
    "capped logits": (inner(final_logit_softcapping=20.0), r"final_logit_softcapping is 20.0"),
    "windows": (top(layer_types=["sliding_attention"] * 2, sliding_window=8), r"sliding_attention"),
    "heads": (top(num_attention_heads=5), r"5 attention heads do not divide among 2 KV heads"),
    "not of this kind": (
        then(top(architectures=["LlamaForCausalLM"]), lambda draft: draft.config.pop("dflash_config")),
        r"the draft draft does not say that it is DFlash's; a checkpoint with dflash_config would work",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(target, tmp_path, monkeypatch, name):
    change, sentence = REFUSED[name]
    draft = block_draft(VOCAB)
    change(draft)
    monkeypatch.setattr("pilotfish_engine.model.safetensors_checkpoint.SafetensorsFolder.read", refuse)
    with pytest.raises(UsageError, match=sentence):
        dflash.check(models(target, draft.save(tmp_path / "draft")))


def refuse(*_: object) -> None:
    raise AssertionError("a weight was read")


def test_a_file_is_not_a_draft(target, tmp_path):
    (tmp_path / "draft.gguf").write_bytes(b"")
    assert not dflash.recognises(models(target, tmp_path / "draft.gguf"))
    with pytest.raises(CheckpointError, match=r"draft.gguf: not a DFlash draft; a folder with config.json"):
        dflash.check(models(target, tmp_path / "draft.gguf"))


def test_more_children_than_the_draft_knows(target, tmp_path):
    draft = block_draft(VOCAB)
    cut_vocabulary(draft)
    path = draft.save(tmp_path / "draft")
    limits = dflash.check(models(target, path))
    assert limits.misfit(envelope(topk=5)) is None
    misfit = limits.misfit(envelope(topk=6))
    assert misfit == ("topk", "topk is 6, but the draft draft knows 5 tokens; at most 5 would work")


def test_more_steps_than_a_block_has(target, tmp_path):
    draft = block_draft(VOCAB)
    top(block_size=5)(draft)
    limits = dflash.check(models(target, draft.save(tmp_path / "draft")))
    assert limits.misfit(envelope(num_steps=4)) is None
    misfit = limits.misfit(envelope(num_steps=5))
    assert misfit
    assert "num_steps is 5, but the draft draft predicts blocks of 5 tokens" in misfit.sentence
    assert "at most 4 would work" in misfit.sentence


@pytest.mark.parametrize(
    ("offsets", "sentence"),
    [
        ([0, 0, 0, 0, 4], r"maps 5 tokens to 5 ones from 0 to 8; as many from 0 to 7 would work"),
        ([-1, 0, 0, 0, 0], r"maps 5 tokens to 5 ones from -1 to 4"),
        ([1, 0, 0, 0, 0], r"maps 5 tokens to 4 ones from 1 to 4"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], r"tensor d2t is torch.float32; int64 would work"),
    ],
)
def test_a_map_to_tokens_that_there_are_not(target, tmp_path, offsets, sentence):
    draft = block_draft(VOCAB)
    cut_vocabulary(draft)
    draft.tensors["d2t"] = torch.tensor(offsets)
    with pytest.raises(CheckpointError, match=sentence):
        dflash.check(models(target, draft.save(tmp_path / "draft")))


def test_what_is_recognised(target, tmp_path):
    """Its relatives too, so that they are refused by what they are and not as a causal LM that they are not."""
    draft = block_draft(VOCAB)
    folder = draft.save(tmp_path / "draft")
    assert dflash.recognises(models(target, folder))
    dflash.check(models(target, folder))
    configs: dict[str, dict[str, Any]] = {
        "dspark": {"architectures": ["Qwen3DSparkModel"]},
        "speculators": {"speculators_model_type": "dspark"},
        "eagle": {"architectures": ["LlamaForCausalLMEagle3"]},
        "another": {"architectures": ["LlamaForCausalLM"]},
    }
    for name, config in configs.items():
        folder = BlockDraft(config, (0,), draft.tensors, 6, 2, 16).save(tmp_path / name)
        assert dflash.recognises(models(target, folder)) == (name in ("dspark", "speculators"))
    assert not dflash.recognises(models(target, None))
