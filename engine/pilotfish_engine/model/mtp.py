"""Multi-token prediction heads, which a model's own checkpoint brings along: their tensors by form, and their forward.

Head j reads, at row i, the head before it (the model itself before head 0) and token i + j + 1, and its logits are of
token i + j + 2 (DeepSeek-V3, arXiv 2412.19437, section 2.2); rope position i. Embedding and LM head are the model's.

A head gives what its final norm gives, like the model itself, and that is what the next one reads. (vLLM lets the state
before that norm recur for the NextN form; the reference library and SGLang the one after it.) The embedding beside row
0 is used as it is: the zero that some put there stands for the token that the shift drops, of which there is no row
here.

Knows nothing about drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish_engine.model.assembly import build_layer, build_norm, rotary_table
from pilotfish_engine.model.inputs import ForwardInputs, KVCache
from pilotfish_engine.model.layers import DecoderLayer, Embedding, RMSNorm
from pilotfish_engine.model.linear import Linear, Rows, read_linear
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.model.weights import Files, Weights

MAX_HEADS = 8
COUNT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # of a config.json


@dataclass(frozen=True)
class Form:
    """How one kind of checkpoint names a head's tensors. prefix: of all of a head, {layer} being num_layers + head.
    block: of its decoder layer, behind the prefix. copies: of the model's embedding or LM head, not read."""

    name: str
    prefix: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    block: str = ""
    hidden_first: bool = False
    copies: tuple[str, ...] = ()

    @property
    def max_heads(self) -> int:
        return MAX_HEADS if "{" in self.prefix else 1

    def prefix_of(self, head: int, shape: ModelShape) -> str:
        return self.prefix.format(head=head, layer=shape.num_layers + head)

    def own(self, prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What a head has beside its decoder layer."""
        for name in (self.embed_norm, self.hidden_norm, self.final_norm):
            yield f"{prefix}{name}.weight", (hidden,)
        yield f"{prefix}{self.projection}.weight", (hidden, 2 * hidden)


FORMS = (
    Form(
        "NextN", "model.layers.{layer}.", "enorm", "hnorm", "eh_proj", "shared_head.norm",
        copies=("embed_tokens", "shared_head.head"),
    ),
    Form(
        "MiMo", "model.mtp_layers.{head}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        hidden_first=True,
    ),
    Form(
        "Qwen3-Next", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class HeadSet:
    """The heads that a checkpoint holds: `count` of one form."""

    form: Form
    count: int
    shape: ModelShape

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the heads need, by name."""
        return {name: size for head in range(self.count) for name, size in self._tensors_of(head)}

    def _tensors_of(self, head: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        prefix = self.form.prefix_of(head, self.shape)
        yield from self.form.own(prefix, self.shape.hidden_size)
        yield from self.shape.layer_tensors(prefix + self.form.block, self.layer_index(head))

    def layer_index(self, head: int) -> int:
        """Of the head's block. The family decides by it between a plain MLP and experts."""
        return head if self.form.block else self.shape.num_layers + head

    def copies(self) -> dict[str, tuple[int, ...]]:
        """Tensors that may be there beside: the model's own once more."""
        prefixes = [self.form.prefix_of(head, self.shape) for head in range(self.count)]
        size = (self.shape.vocab_size, self.shape.hidden_size)
        return {f"{prefix}{name}.weight": size for prefix in prefixes for name in self.form.copies}


def find_heads(shape: ModelShape, names: Iterable[str]) -> HeadSet | None:
    """The heads whose tensors are among `names`, None where there are none. A head counts as soon as one of the tensors
    that only heads have is there, so that what it lacks can be named."""
    found = set(names)
    for form in FORMS:
        present = [
            head
            for head in range(form.max_heads)
            if any(name in found for name, _ in form.own(form.prefix_of(head, shape), shape.hidden_size))
        ]
        if present:
            return HeadSet(form, present[-1] + 1, shape)
    return None


class PredictionHead:
    """projection: [H, 2H] over the normed embedding and the normed hidden state, in the order that `hidden_first`
    says; embed: the model's."""

    def __init__(
        self,
        embed: Embedding,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        projection: Linear,
        hidden_first: bool,
        layer: DecoderLayer,
        final_norm: RMSNorm,
    ) -> None:
        self.embed = embed
        self.embed_norm = embed_norm
        self.hidden_norm = hidden_norm
        self.projection = projection
        self.hidden_first = hidden_first
        self.layer = layer
        self.final_norm = final_norm

    @torch.inference_mode()
    def forward(self, hidden: Tensor, inputs: ForwardInputs, kv: KVCache, index: int) -> Tensor:
        """Runs the head over what the one before it gave. hidden [N, H] of the head before, at rows
        inputs.positions, beside inputs.token_ids → [N, H] after the final norm, of the tokens that inputs.kept says.
        index: of the head's layer in `kv`."""
        embedded = self.embed_norm(self.embed(inputs.token_ids))
        normed = self.hidden_norm(hidden.contiguous())
        parts = (normed, embedded) if self.hidden_first else (embedded, normed)
        residual = self.projection(torch.cat(parts, dim=1))
        out, _ = self.final_norm.add(*self.layer(None, residual, inputs, kv, index))
        return out


def load_heads(heads: HeadSet, files: Files, embed: Embedding, max_positions: int) -> list[PredictionHead]:
    """Reads every head from `files`, in the dtype of the model's `embed` and beside it; rotary tables reach
    `max_positions`."""
    shape, form = heads.shape, heads.form
    weights = Weights(files, heads.tensors(), embed.dtype, embed.device)
    cos_sin = rotary_table(shape, max_positions, embed.device)

    def load(head: int) -> PredictionHead:
        prefix = form.prefix_of(head, shape)
        embed_norm, hidden_norm, final_norm = (
            build_norm(weights, shape, f"{prefix}{name}.weight")
            for name in (form.embed_norm, form.hidden_norm, form.final_norm)
        )
        return PredictionHead(
            embed=embed,
            embed_norm=embed_norm,
            hidden_norm=hidden_norm,
            projection=read_linear(weights, Rows(f"{prefix}{form.projection}")),
            hidden_first=form.hidden_first,
            layer=build_layer(weights, shape, prefix + form.block, heads.layer_index(head), cos_sin),
            final_norm=final_norm,
        )

    return [load(head) for head in range(heads.count)]


def declared_count(config: Mapping[str, object]) -> tuple[str, int] | None:
    """The key by which a config.json says how many heads there are, and its value; None where it does not say."""
    for key in COUNT_KEYS:
        value = config.get(key)
        if isinstance(value, int):
            return key, value
    return None
