"""Block drafts (DFlash, arXiv 2602.06036): what such a checkpoint says and holds, and its layers.

The draft predicts a whole block in one pass. Facts of the format, from its authors' code (github.com/z-lab/dflash,
dflash/model.py) and, for vLLM's `speculators` form of it, from github.com/vllm-project/speculators (models/dflash) and
vLLM's reader of that form (update_dflash):

- The layers are Qwen3's, with a norm on each head of Q and K, and `norm` behind the last one.
- The feature of a context row is the concatenation of the target's hidden states there, behind some of its layers;
  hidden_norm(fc(feature)) is the *input of k_proj and v_proj* of every layer. These K and V are all that the draft sees
  of the context: it reads no context tokens. K has the head norm and the rope of the row's own position.
- Over S context rows the block is the last known token at position S, then mask tokens at S + 1, S + 2, …, in the
  target's embedding. Q, K and V of the block come from its own hidden states, and each of its tokens sees the context
  and the whole block. The target's LM head over the place of position S + d gives the d-th drafted token.
- A shorter block has fewer masks; a longer one than `block_size` was never trained.
- `dflash_config.target_layer_ids` count the outputs of layers: id i is the input of layer i + 1. speculators'
  `aux_hidden_state_layer_ids` are inputs already. Behind the last layer it is the residual before the final norm.
- speculators nests the layers' config in `transformer_layer_config`, may cut the vocabulary (`draft_vocab_size`, an
  `lm_head` of its own, and `d2t`: target id = i + d2t[i]; `t2d` is not needed) and may store a copy of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pilotfish_engine import kernels
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.files import as_they_should_be
from pilotfish_engine.model import assembly
from pilotfish_engine.model.attention import GroupedQueryAttention
from pilotfish_engine.model.checkpoint import check_tensor_shapes
from pilotfish_engine.model.config_json import architecture_of
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.families import draft_shape_from_config
from pilotfish_engine.model.inputs import KVCache
from pilotfish_engine.model.layers import Embedding, RMSNorm, reading
from pilotfish_engine.model.linear import Linear, Rows, read_linear
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.model.weights import Weights

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
SPECULATORS = ("dflash", "dflash2", "dspark")
MAX_BLOCK_SIZE = 64  # who sees whom in a block is one 64-bit mask
EMBED, HEAD, TO_TARGET, TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"

# What relatives of the format (DSpark, DFlash 2, Domino) add to this forward, each with the value that adds nothing.
ADDITIONS: Mapping[str, object] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "use_swa": False,
    "causal": False,
    "is_causal": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0,
}


@dataclass(frozen=True)
class DFlashShape:
    """layers: of the draft; its vocab_size is the target's. aux_layers: target layers whose *inputs* make a feature.
    draft_vocab_size: of the draft's logits."""

    layers: ModelShape
    block_size: int
    mask_token_id: int
    aux_layers: tuple[int, ...]
    draft_vocab_size: int

    @property
    def cuts_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.layers.vocab_size

    def weight_shapes(self, present: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight by name, in the order of use. `present`: what the files hold, where copies of the target's
        embedding and LM head may be or not."""
        hidden = self.layers.hidden_size
        if EMBED in present:
            yield EMBED, (self.layers.vocab_size, hidden)
        yield "fc.weight", (hidden, len(self.aux_layers) * hidden)
        yield "hidden_norm.weight", (hidden,)
        for index in range(self.layers.num_layers):
            yield from self.layers.layer_tensors(f"layers.{index}.", index)
        yield "norm.weight", (hidden,)
        if HEAD in present or self.cuts_vocabulary:
            yield HEAD, (self.draft_vocab_size, hidden)


def is_of_family(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is a block draft. Its kind need not be one that can be loaded."""
    return (
        "dflash_config" in config
        or config.get("speculators_model_type") in SPECULATORS
        or architecture_of(config, "config.json") in ARCHITECTURES
    )


def read_shape(folder: SafetensorsFolder) -> DFlashShape:
    """Raises CheckpointError on what cannot run."""
    with as_they_should_be(folder.config_file):
        return _read_shape(folder.config, str(folder.config_file))


def _read_shape(config: Mapping[str, Any], where: str) -> DFlashShape:
    own: Mapping[str, Any] = {**config, **(config.get("dflash_config") or {})}
    for key, nothing in ADDITIONS.items():
        if own.get(key) not in (None, nothing):
            raise CheckpointError(
                f"{where}: {key} is {own[key]!r}, which asks for more than DFlash's forward; a checkpoint with "
                f"{nothing!r} would work"
            )
    speculators = "speculators_model_type" in config
    layer_config = (config.get("transformer_layer_config") or {}) if speculators else config
    layers = draft_shape_from_config({**layer_config, "architectures": ["Qwen3ForCausalLM"]}, where)
    ids_key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = own.get(ids_key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{where}: {ids_key} is {ids!r}; a list of layers' numbers would work")
    if ids != sorted(set(ids)):
        raise CheckpointError(f"{where}: {ids_key} is {ids}, which does not ascend; {sorted(set(ids))} would work")
    vocab_size = layers.vocab_size

    def within(key: str, low: int, high: int, default: int | None = None) -> int:
        value = own.get(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise CheckpointError(f"{where}: {key} is {value!r}; from {low} to {high} would work")
        return value

    return DFlashShape(
        layers=replace(layers, architecture="a DFlash draft"),
        block_size=within("block_size", 2, MAX_BLOCK_SIZE),
        mask_token_id=within("mask_token_id", 0, vocab_size - 1),
        aux_layers=tuple(i if speculators else i + 1 for i in ids),
        draft_vocab_size=within("draft_vocab_size", 1, vocab_size, default=vocab_size),
    )


def check_files(folder: SafetensorsFolder, shape: DFlashShape) -> None:
    """Raises CheckpointError unless the files hold exactly the tensors that the config asks for. They must map the
    tokens of a vocabulary of their own to different ones of the target's."""
    found = folder.tensor_shapes
    expected = dict(shape.weight_shapes(found))
    if shape.cuts_vocabulary:
        expected[TO_TARGET] = (shape.draft_vocab_size,)
        if TO_DRAFT in found:
            expected[TO_DRAFT] = (shape.layers.vocab_size,)
    check_tensor_shapes(folder.path, found, expected, shape.layers.architecture)
    _to_target(folder, shape)


class ContextKV:
    """K and V of context rows: what a layer's attention computes, for rows that have no queries."""

    def __init__(self, attention: GroupedQueryAttention, q_size: int) -> None:
        assert attention.qk_norm is not None
        self._kv = attention.qkv.behind(q_size)
        self._k_norm = attention.qk_norm[1]
        self._cos_sin = attention.cos_sin

    def write(self, x: Tensor, positions: Tensor, slots: Tensor, kv: KVCache, layer: int) -> None:
        """x [N, H] at these positions goes to these slots, int64 [N]."""
        k, v = self._kv(x).chunk(2, dim=1)
        normed = self._k_norm(k.contiguous().view(-1, self._cos_sin.shape[1])).view(k.shape)
        rows = torch.cat([normed, v], dim=1)  # what rope_and_write takes for Q, K and V without heads of Q
        kernels.rope_and_write(rows, positions, self._cos_sin, slots, *kv.layers[layer])


class DFlashDraft:
    """decoder: of blocks, over the context in its KV cache. to_target: int64 [draft vocabulary], None where it is the
    target's."""

    def __init__(
        self, decoder: Decoder, context: list[ContextKV], fc: Linear, hidden_norm: RMSNorm, to_target: Tensor | None
    ) -> None:
        self.decoder = decoder
        self._context = context
        self._fc = fc
        self.feature_size = fc.dense().shape[1]
        self._hidden_norm = hidden_norm
        self._to_target = to_target

    @torch.inference_mode()
    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, kv: KVCache) -> None:
        """features [N, feature_size] of the context rows at these positions go to these slots, int64 [N]."""
        x = self._hidden_norm(self._fc(features))
        for layer, context in enumerate(self._context):
            context.write(x, positions, slots, kv, layer)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._to_target is None else self._to_target[draft_ids]


def load(folder: SafetensorsFolder, shape: DFlashShape, target: Decoder, max_positions: int) -> DFlashDraft:
    """The draft in the target's dtype and on its device; what it has not of its own it shares. `check_files` has
    passed."""
    shapes = dict(shape.weight_shapes(folder.tensor_shapes))
    weights = Weights(folder, shapes, target.dtype, target.device)
    sizes = shape.layers
    cos_sin = assembly.rotary_table(sizes, max_positions, target.device)
    own = EMBED in shapes
    embed = reading(Embedding(weights.read(EMBED)), target.num_tokens) if own else target.embed
    fc, hidden_norm = read_linear(weights, Rows("fc")), assembly.build_norm(weights, sizes, "hidden_norm.weight")
    layers = [
        assembly.build_layer(weights, sizes, f"layers.{index}.", index, cos_sin) for index in range(sizes.num_layers)
    ]
    norm = assembly.build_norm(weights, sizes, "norm.weight")
    head = read_linear(weights, Rows(HEAD.removesuffix(".weight"))) if HEAD in shapes else target.lm_head
    context = []
    for layer in layers:
        assert isinstance(layer.attention, GroupedQueryAttention), "Qwen3's layers have no other"
        context.append(ContextKV(layer.attention, sizes.q_size))
    to_target = _to_target(folder, shape)
    decoder = Decoder(sizes, embed, layers, norm, head)
    return DFlashDraft(decoder, context, fc, hidden_norm, None if to_target is None else to_target.to(target.device))


def _to_target(folder: SafetensorsFolder, shape: DFlashShape) -> Tensor | None:
    """int64 [draft vocabulary]: the target's number of each token of the draft, None where they are the same."""
    if not shape.cuts_vocabulary:
        return None
    offsets = folder.read_raw(TO_TARGET)
    if offsets.dtype is not torch.int64:
        raise CheckpointError(f"{folder.path}: tensor {TO_TARGET} is {offsets.dtype}; int64 would work")
    ids = (torch.arange(shape.draft_vocab_size) + offsets).tolist()
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= shape.layers.vocab_size:
        raise CheckpointError(
            f"{folder.path}: tensor {TO_TARGET} maps {len(ids)} tokens to {len(set(ids))} ones from {min(ids)} to "
            f"{max(ids)}; as many from 0 to {shape.layers.vocab_size - 1} would work"
        )
    return torch.tensor(ids)
