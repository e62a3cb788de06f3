"""MTP: the model's own prediction heads, from its checkpoint or from a folder that holds them alone (forms and forward:
model/mtp.py).

One head drafts step after step over its own output, as EAGLE's does, trees included. Several draft one token each.
"""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from pilotfish_engine.contract.methods import Limit, Limits
from pilotfish_engine.errors import CheckpointError, MethodError
from pilotfish_engine.model.checkpoint import check_tensor_shapes
from pilotfish_engine.model.decoder import Decoder, new_kv_cache
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.mtp import FORMS, HeadSet, PredictionHead, declared_count, find_heads, load_heads
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.speculation.multilayer_mtp import MultiLayerProposer
from pilotfish_engine.speculation.proposer import Models, Proposer, ProposerContext, TargetHidden
from pilotfish_engine.speculation.recurrent import RecurrentProposer


class SingleHead:
    """The one head as a RecurrentHead. What recurs is what it gives, after its final norm like the target's own."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, head: PredictionHead, target: Decoder) -> None:
        self.vocab_size = target.shape.vocab_size
        self.feature_size = target.shape.hidden_size
        self._head = head
        self._target = target

    def new_kv_cache(self, num_pages: int, page_size: int) -> KVCache:
        target = self._target
        return new_kv_cache(target.shape, 1, num_pages, page_size, target.dtype, target.device)

    def features(self, target: TargetHidden) -> Tensor:
        return target.hidden

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache) -> tuple[Tensor, Tensor]:
        out = self._head.forward(hidden, inputs, kv, 0)
        return out, out

    def logits(self, out: Tensor) -> Tensor:
        return self._target.logits(out)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def recognises(models: Models) -> bool:
    with suppress(CheckpointError, MethodError):  # nothing of this kind; another method may know it
        folder, _ = _open(models)
        return models.draft is None or "model.embed_tokens.weight" not in folder.tensor_shapes
    return False


def check(models: Models) -> Limits:
    folder, heads = _open(models)
    declared = declared_count(folder.config)
    if declared is not None and declared[1] != heads.count:
        raise MethodError(
            f"{folder.config_file}: {declared[0]} is {declared[1]}, but the files hold {heads.count} of its "
            f"{heads.form.name} MTP heads; files and config of the same model would work"
        )
    own = {name for name, _ in models.target_shape.tensor_shapes() if name in folder.tensor_shapes}
    copies = heads.copies()
    found = {name: size for name, size in folder.tensor_shapes.items() if name not in own}
    expected = heads.tensors() | {name: size for name, size in copies.items() if name in found}
    check_tensor_shapes(folder.path, found, expected, f"{heads.form.name} MTP of {models.target_shape.architecture}")
    if heads.count > 1:
        several = f"{folder.path} holds {heads.count} MTP heads, which draft a chain, a token each"
        return Limits(num_steps=Limit(heads.count, several), topk=Limit(1, several))
    vocabulary = models.target_shape.vocab_size
    return Limits(topk=Limit(vocabulary, f"the vocabulary has {vocabulary} tokens"))


def build(context: ProposerContext) -> Proposer:
    state, target = context.state, context.target
    folder, heads = _open(context.models)
    loaded = load_heads(heads, folder, target.embed, state.length)
    if heads.count == 1:
        return RecurrentProposer(SingleHead(loaded[0], target), state, context.num_pages, context.page_size)
    shape = context.models.target_shape
    kv = new_kv_cache(shape, heads.count, context.num_pages, context.page_size, target.dtype, target.device)
    return MultiLayerProposer(loaded, kv, target, state)


def _open(models: Models) -> tuple[SafetensorsFolder, HeadSet]:
    """Where the heads are. Raises MethodError where there are none."""
    path = models.target if models.draft is None else models.draft
    if not path.is_dir():
        raise MethodError(f"{path}: MTP heads are read from a folder of safetensors; such a checkpoint would work")
    folder = SafetensorsFolder(path)
    heads = find_heads(models.target_shape, folder.tensor_shapes)
    if heads is None:
        names = [f"{form.prefix_of(0, models.target_shape)}{form.projection}.weight" for form in FORMS]
        raise MethodError(
            f"{path}: none of its {len(folder.tensor_shapes)} tensors is an MTP head's; a checkpoint with "
            f"{', '.join(names[:-1])} or {names[-1]} would work"
        )
    return folder, heads
