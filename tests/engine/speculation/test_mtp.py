"""Prediction heads of every form, loaded from checkpoints made of the reference library's layers, against a forward of
whole sequences; and what is refused before a weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish_engine.contract.methods import AUTO
from pilotfish_engine.contract.speculation import Envelope
from pilotfish_engine.engine import check_vocabulary
from pilotfish_engine.errors import CheckpointError, MethodError, UsageError
from pilotfish_engine.kernels.inputs import AttentionInputs
from pilotfish_engine.model import load, read_shape
from pilotfish_engine.model.decoder import Decoder, new_kv_cache
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.mtp import PredictionHead, find_heads, load_heads
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.speculation import mtp, registry
from pilotfish_engine.speculation.mtp import SingleHead
from pilotfish_engine.speculation.proposer import Models, TargetHidden
from tests.engine.speculation.mtp_checkpoints import HIDDEN, KINDS, NUM_LAYERS, VOCAB, Reference

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference library's own

PAGE, LENGTH = 4, 24
INSIDE = ["mimo", "deepseek", "glm", "qwen"]  # those whose heads are in the target's own checkpoint
VARIANTS = [
    ("mimo", 1), ("mimo", 3), ("deepseek", 1), ("deepseek", 3), ("glm", 1), ("glm", 3), ("qwen", 1), ("llama", 2),
    ("llama", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    return cache(lambda kind, count: Reference(KINDS[kind], count, tmp_path_factory.mktemp(f"{kind}{count}")))


def models_of(made: Reference, target: Path | None = None, draft: Path | None = None) -> Models:
    """As the engine makes them. A family that keeps no heads in its own checkpoints gets them as a draft."""
    target = target or made.folder
    if made.kind.architecture == "LlamaForCausalLM" and draft is None:
        alone = made.head_tensors()
        target = made.save(made.folder.parent / f"{made.folder.name}-target", without(made.tensors, *alone))
        draft = made.save(made.folder.parent / f"{made.folder.name}-heads", alone)
    shape = read_shape(target)
    return Models(target, shape, draft, lambda other, size: check_vocabulary(target, shape, other, size))


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@dataclass
class Loaded:
    heads: list[PredictionHead]
    target: Decoder
    kv: KVCache

    @staticmethod
    def of(made: Reference) -> Loaded:
        models = models_of(made)
        mtp.check(models)
        target = load(models.target, torch.float32)
        folder = SafetensorsFolder(models.draft or models.target)
        heads = find_heads(models.target_shape, folder.tensor_shapes)
        assert heads is not None
        assert heads.count == made.count
        kv = new_kv_cache(target.shape, heads.count, LENGTH, PAGE, torch.float32, target.device)
        kv.k.fill_(torch.nan)
        kv.v.fill_(torch.nan)
        return Loaded(load_heads(heads, folder, target.embed, LENGTH), target, kv)

    def inputs(self, token_ids: Tensor, start: int) -> ForwardInputs:
        """Rows from `start` on of the only request, whose pages lie in random order."""
        table = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).int() + 1
        at = torch.arange(start, start + len(token_ids))
        return ForwardInputs(
            token_ids=token_ids,
            positions=at,
            slots=table[at // PAGE].long() * PAGE + at % PAGE,
            attention=AttentionInputs(
                page_table=table.unsqueeze(0),
                prefix_lens=torch.tensor([start], dtype=torch.int32),
                q_indptr=torch.tensor([0, len(token_ids)], dtype=torch.int32),
                tree_mask=None,
            ),
        )


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def some_tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.mark.parametrize("cuts", [(LENGTH,), (5, 12, 13, LENGTH), tuple(range(1, LENGTH + 1))])
@pytest.mark.parametrize(("kind", "count"), VARIANTS)
def test_heads_equal_a_forward_of_the_whole_sequence(
    reference: Callable[[str, int], Reference], kind: str, count: int, cuts: tuple[int, ...]
) -> None:
    """In whole, in chunks, token by token; hidden states and logits of each head over those of the head before."""
    made = reference(kind, count)
    loaded = Loaded.of(made)
    tokens = some_tokens(LENGTH + count)
    hidden = made.target_hidden(tokens[:LENGTH])
    for number, head in enumerate(loaded.heads):
        beside = tokens[number + 1 : number + 1 + LENGTH]
        expected = made.head(number, hidden, beside)
        parts = [
            head.forward(hidden[a:b], loaded.inputs(torch.tensor(beside[a:b]), a), loaded.kv, number)
            for a, b in zip((0, *cuts), cuts, strict=False)
        ]
        close(torch.cat(parts), expected)
        close(loaded.target.logits(torch.cat(parts)), made.logits(expected))
        hidden = expected


@pytest.mark.parametrize("kind", [kind for kind, count in VARIANTS if count == 1])
def test_one_head_recurs_on_what_it_gives(reference: Callable[[str, int], Reference], kind: str) -> None:
    made = reference(kind, 1)
    loaded = Loaded.of(made)
    head = SingleHead(loaded.heads[0], loaded.target)
    assert (head.aux_layers, head.vocab_size, head.feature_size) == ((), VOCAB, HIDDEN)
    tokens = some_tokens(12)
    target = TargetHidden(made.target_hidden(tokens[:9]), ())
    hidden = target.hidden
    out, recurs = head.forward(
        head.combine(head.features(target)), loaded.inputs(torch.tensor(tokens[1:10]), 0), loaded.kv
    )
    for row in range(9, 11):
        hidden = torch.cat([hidden, made.head(0, hidden, tokens[1 : row + 1])[-1:]])
        beside = torch.tensor(tokens[row + 1 : row + 2])
        out, recurs = head.forward(recurs[-1:], loaded.inputs(beside, row), loaded.kv)
        expected = made.head(0, hidden, tokens[1 : row + 2])[-1:]
        close(out, expected)
        close(head.logits(out), made.logits(expected))
    ids = torch.tensor([3, 1])
    assert head.target_ids(ids).tolist() == [3, 1]


# --- what is recognised, and what is refused


@pytest.mark.parametrize("kind", INSIDE)
def test_a_checkpoint_with_heads_is_recognised(reference: Callable[[str, int], Reference], kind: str) -> None:
    made = reference(kind, 1)
    models = models_of(made)
    assert mtp.recognises(models)
    method = registry.resolve(AUTO, models)
    assert method is not None
    assert method.name == "MTP"


def test_a_folder_of_heads_alone_is_recognised(reference: Callable[[str, int], Reference]) -> None:
    models = models_of(reference("llama", 1))
    assert mtp.recognises(models)
    method = registry.resolve(AUTO, models)
    assert method is not None
    assert method.name == "MTP"


def test_checkpoints_without_heads_are_not(reference: Callable[[str, int], Reference], tmp_path: Path) -> None:
    plain = models_of(reference("llama", 1)).target
    assert not mtp.recognises(models_of(reference("mimo", 1), target=plain))
    assert not mtp.recognises(models_of(reference("mimo", 1), draft=plain))
    # a whole model with heads of its own is a standalone draft
    assert not mtp.recognises(models_of(reference("mimo", 1), draft=reference("mimo", 3).folder))
    assert not mtp.recognises(models_of(reference("mimo", 1), draft=tmp_path / "model.gguf"))
    assert not mtp.recognises(models_of(reference("mimo", 1), draft=tmp_path))


def test_copies_of_embedding_and_head_are_known(reference: Callable[[str, int], Reference], tmp_path: Path) -> None:
    made = reference("llama", 2)
    prefix = made.prefix(1)
    copies = {
        f"{prefix}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        f"{prefix}shared_head.head.weight": torch.zeros(VOCAB, HIDDEN),
    }
    target = models_of(made).target
    draft = made.save(tmp_path / "heads", made.head_tensors() | copies)
    mtp.check(models_of(made, target, draft))
    misshaped = made.head_tensors() | copies | {f"{prefix}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN + 1)}
    draft = made.save(tmp_path / "other", misshaped)
    with pytest.raises(
        CheckpointError, match=rf"{prefix}embed_tokens.weight has shape \[64, 33\].* asks for \[64, 32\]"
    ):
        mtp.check(models_of(made, target, draft))


@pytest.mark.parametrize("kind", INSIDE)
def test_the_target_reads_past_its_heads_and_nothing_else(
    reference: Callable[[str, int], Reference], kind: str, tmp_path: Path
) -> None:
    made = reference(kind, 1)
    load(made.folder, torch.float32)
    load(made.save(tmp_path / "bare", without(made.tensors, *made.head_tensors())), torch.float32)
    for name in ("model.layers.0.enorm.weight", "mtp_layers.0.input_proj.weight", "model.mtp.fc.weight"):
        extra = made.save(tmp_path / "extra", made.tensors | {name: torch.zeros(3)})
        with pytest.raises(CheckpointError, match=rf"tensor {name} of shape \[3\] is none"):
            load(extra, torch.float32)


@pytest.mark.parametrize(("kind", "count"), [(kind, count) for kind, count in VARIANTS if kind in INSIDE])
def test_missing_extra_and_misshaped_tensors_are_named(
    reference: Callable[[str, int], Reference], kind: str, count: int, tmp_path: Path
) -> None:
    made = reference(kind, count)

    def refused(tensors: dict[str, Tensor], message: str) -> None:
        changed = made.save(tmp_path / "changed", tensors)
        with pytest.raises(UsageError, match=message):
            mtp.check(models_of(made, changed))

    prefix, block = made.prefix(count - 1), made.prefix(count - 1) + made.kind.block
    projection = f"{prefix}{made.kind.names[2]}.weight"
    inside = next(name for name in made.head_tensors() if name.startswith(block) and "norm" not in name)
    for name in (projection, inside, f"{prefix}{made.kind.names[0]}.weight"):
        refused(without(made.tensors, name), f"tensor {name} is missing")
    wrong = made.tensors | {projection: torch.zeros(HIDDEN, HIDDEN)}
    refused(wrong, rf"tensor {projection} has shape \[32, 32\], but its config asks for \[32, 64\]")
    refused(made.tensors | {f"{block}odd.weight": torch.zeros(2)}, rf"tensor {block}odd.weight of shape \[2\] is none")


def test_a_count_that_contradicts_the_tensors(reference: Callable[[str, int], Reference], tmp_path: Path) -> None:
    made = reference("mimo", 3)
    changed = made.save(tmp_path / "changed", num_nextn_predict_layers=1)
    with pytest.raises(MethodError, match=r"num_nextn_predict_layers is 1, but the files hold 3 .*MiMo"):
        mtp.check(models_of(made, changed))
    silent = made.save(tmp_path / "silent", num_nextn_predict_layers=None)
    mtp.check(models_of(made, silent))
    fewer = without(made.tensors, *(name for name in made.tensors if name.startswith(made.prefix(0))))
    with pytest.raises(CheckpointError, match=r"tensor model.mtp_layers.0\S+ is missing"):
        mtp.check(models_of(made, made.save(tmp_path / "fewer", fewer)))


def test_no_heads(reference: Callable[[str, int], Reference], tmp_path: Path) -> None:
    made = reference("mimo", 1)
    bare = made.save(tmp_path / "bare", without(made.tensors, *made.head_tensors()))
    with pytest.raises(MethodError, match=rf"none of its \d+ tensors is .* model.layers.{NUM_LAYERS}.eh_proj.weight"):
        mtp.check(models_of(made, bare))
    with pytest.raises(MethodError, match=r"model.gguf: MTP heads are read from a folder"):
        mtp.check(models_of(made, draft=tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"num_steps": 4}, r"num_steps is 4, but .* holds 3 MTP heads, .*; at most 3 would work"),
        ({"num_steps": 3, "topk": 2}, r"topk is 2, but .* 3 MTP heads, which draft a chain.*; at most 1 would work"),
    ],
)
def test_bounds_of_several_heads(
    reference: Callable[[str, int], Reference], bounds: dict[str, Any], message: str
) -> None:
    limits = mtp.check(models_of(reference("mimo", 3)))
    misfit = limits.misfit(Envelope(**bounds))
    assert misfit
    assert re.search(message, misfit.sentence)
    assert misfit.field == list(bounds)[-1]
    assert limits.misfit(Envelope(num_steps=3)) is None
    assert mtp.check(models_of(reference("mimo", 1))).misfit(Envelope(num_steps=8, topk=8)) is None


def test_more_children_than_tokens(reference: Callable[[str, int], Reference]) -> None:
    models = models_of(reference("mimo", 1))
    tiny = replace(models, target_shape=replace(models.target_shape, vocab_size=5))
    misfit = mtp.check(tiny).misfit(Envelope(topk=6))
    assert misfit == ("topk", "topk is 6, but the vocabulary has 5 tokens; at most 5 would work")
