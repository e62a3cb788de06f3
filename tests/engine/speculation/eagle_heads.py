"""EAGLE and EAGLE-3 checkpoints of every format, their layers made by the reference library, and their forward in plain
torch: whole sequences, no cache and no pages, written from the papers and the formats' own descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

VOCAB, HIDDEN, LAYERS = 64, 32, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LAYER_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
}


def target_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, initializer_range=0.4)
    return LlamaForCausalLM(config).eval()


@dataclass
class Head:
    """A checkpoint before it is written. weights: by the plainest names, those of SafeAILab with layers.0 for midlayer.
    spell: from such a name to the format's. The rest is what the forward below goes by."""

    kind: str
    config: dict[str, Any]
    weights: dict[str, Tensor]
    layers: Any  # configuration object of the layers
    aux: tuple[int, ...] = ()  # inputs of the target's layers
    flags: frozenset[str] = frozenset()
    map: Tensor | None = None
    spell: Callable[[str], str] = field(default=lambda name: name)
    shared: dict[str, Tensor] = field(default_factory=dict)  # the target's

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {self.spell(name): tensor.contiguous() for name, tensor in self.weights.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    def tensor(self, name: str) -> Tensor:
        return self.weights[name] if name in self.weights else self.shared[name]


def randomised(shape: tuple[int, ...], norm: bool = False) -> Tensor:
    return 1 + 0.3 * torch.randn(shape) if norm else torch.randn(shape) / shape[-1] ** 0.5


def layer_weights(family: str, config: Any, index: int, inputs: int) -> dict[str, Tensor]:
    """Of the reference library's decoder layer, its attention reading `inputs` numbers a token."""
    layer = LAYER_CLASSES[family][1](config, index)
    if inputs != config.hidden_size:
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(inputs, old.out_features, bias=old.bias is not None))
    return {
        f"layers.{index}.{name}": randomised(tuple(tensor.shape), norm="norm" in name)
        for name, tensor in layer.state_dict().items()
    }


class Layers(NamedTuple):
    """fields: further ones of their config."""

    family: str = "llama"
    number: int = 1
    hidden: int = HIDDEN
    fields: Mapping[str, Any] = MappingProxyType({})


ONE = Layers()


def eagle(target: LlamaForCausalLM, has: tuple[str, ...] = ("embed",), layers: Layers = ONE, **fields: Any) -> Head:
    """has: what is the head's own: embed, head, fc_bias."""
    torch.manual_seed(1)
    config = LAYER_CLASSES[layers.family][0](**SIZES, num_hidden_layers=layers.number)
    weights = {"fc.weight": randomised((HIDDEN, 2 * HIDDEN))}
    if "embed" in has:
        weights["embed_tokens.weight"] = randomised((VOCAB, HIDDEN))
    if "head" in has:
        weights["lm_head.weight"] = randomised((VOCAB, HIDDEN))
    if "fc_bias" in has:
        weights["fc.bias"] = randomised((HIDDEN,))
    for index in range(layers.number):
        weights |= layer_weights(layers.family, config, index, HIDDEN)
    del weights["layers.0.input_layernorm.weight"]
    written = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "bias": "fc_bias" in has} | fields
    return Head("eagle", written, weights, config, shared=shared_with(target))


def eagle3(
    target: LlamaForCausalLM,
    has: tuple[str, ...] = ("head", "map", "fc"),
    layers: Layers = ONE,
    draft_vocab: int | None = 24,
    aux: tuple[int, ...] = (2, LAYERS // 2, LAYERS - 3),
    spell: Callable[[str], str] = lambda name: name.replace("layers.0.", "midlayer."),
    **fields: Any,
) -> Head:
    """has: what is the head's own (head, map, fc, embed), and what it does that others do not (a Head's flags).
    draft_vocab None: the target's vocabulary. A map of draft tokens is spread over the target's, in order."""
    torch.manual_seed(2)
    hidden = layers.hidden
    sizes = SIZES | {"hidden_size": hidden} | dict(layers.fields)
    config = LAYER_CLASSES[layers.family][0](**sizes, num_hidden_layers=layers.number)
    for_layer = {**layer_weights(layers.family, config, 0, 2 * hidden)}
    for index in range(1, layers.number):
        for_layer |= layer_weights(layers.family, config, index, hidden)
    rows = draft_vocab or VOCAB
    width = HIDDEN * max(1, len(aux))
    weights = {
        **for_layer,
        "layers.0.hidden_norm.weight": randomised((hidden,), norm=True),
        "norm.weight": randomised((hidden,), norm=True),
    }
    if "fc" in has:
        weights["fc.weight"] = randomised((hidden, width))
    if "head" in has:
        weights["lm_head.weight"] = randomised((rows, hidden))
    if "embed" in has:
        weights["embed_tokens.weight"] = randomised((VOCAB, hidden))
    if "norm_before_fc" in has:
        weights["input_norm.weight"] = randomised((width,), norm=True)
    if "fc_norm" in has:
        weights |= {f"fc_norm.{i}.weight": randomised((HIDDEN,), norm=True) for i in range(len(aux))}
    ids = torch.randperm(VOCAB)[:rows].sort().values if "map" in has and rows < VOCAB else torch.arange(rows)
    if "map" in has:
        weights["d2t"] = ids - torch.arange(rows)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    written = config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab} | fields
    return Head("eagle3", written, weights, config, aux, frozenset(has), ids, spell=spell, shared=shared_with(target))


def shared_with(target: LlamaForCausalLM) -> dict[str, Tensor]:
    return {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}


def as_speculators(head: Head, kind: str, **fields: Any) -> Head:
    """The same head as vLLM's `speculators` library writes it."""
    layers = head.layers.to_dict()
    head.config = {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layers,
        **fields,
    }
    return head


# -- the forward ---------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, heads, D]; cos, sin [M, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def attend(head: Head, index: int, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    config, prefix = head.layers, f"layers.{index}.self_attn."
    weights = head.weights

    def project(name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    q, k, v = (project(f"{name}_proj", x).unflatten(-1, (-1, config.head_dim)) for name in "qkv")
    if f"{prefix}q_norm.weight" in weights:
        q = rms(q, weights[f"{prefix}q_norm.weight"], config.rms_norm_eps)
        k = rms(k, weights[f"{prefix}k_norm.weight"], config.rms_norm_eps)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    q, k = rotated(q, cos[0], sin[0]), rotated(k, cos[0], sin[0])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return project("o_proj", torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1))


@torch.no_grad()
def combined(head: Head, features: Tensor) -> Tensor:
    """Features of the target's pass → what the head reads in place of its own output."""
    eps = head.layers.rms_norm_eps
    if "norm_before_fc" in head.flags:
        features = rms(features, head.weights["input_norm.weight"], eps)
    if "fc_norm" in head.flags:
        parts = features.split(HIDDEN, dim=-1)
        features = torch.cat([rms(p, head.weights[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)], dim=-1)
    if head.kind == "eagle" or "fc.weight" not in head.weights:
        return features
    return functional.linear(features, head.weights["fc.weight"], head.weights.get("fc.bias"))


@torch.no_grad()
def forward(
    head: Head, hidden: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one sequence or tree, each with the hidden state it reads [M, H] and its token; visible: bool [M, M].
    Returns logits, what they are of, and what recurs."""
    eps, weights = head.layers.rms_norm_eps, head.weights
    embeds = functional.embedding(tokens, head.tensor("embed_tokens.weight"))
    if head.kind == "eagle":
        both = torch.cat((embeds, hidden), dim=-1)
        x = functional.linear(both, weights["fc.weight"], weights.get("fc.bias"))
        read = x
    else:
        normed = rms(hidden, weights["layers.0.hidden_norm.weight"], eps)
        read = torch.cat((rms(embeds, weights["layers.0.input_layernorm.weight"], eps), normed), dim=-1)
        x = normed if "norm_before_residual" in head.flags else hidden
    for index in range(head.layers.num_hidden_layers):
        if index > 0:
            read = rms(x, weights[f"layers.{index}.input_layernorm.weight"], eps)
        x = x + attend(head, index, read, positions, visible)
        read = rms(x, weights[f"layers.{index}.post_attention_layernorm.weight"], eps)
        gate, up = (functional.linear(read, weights[f"layers.{index}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + functional.linear(functional.silu(gate) * up, weights[f"layers.{index}.mlp.down_proj.weight"])
    out = x if head.kind == "eagle" else rms(x, weights["norm.weight"], eps)
    lm_head = head.tensor("embed_tokens.weight" if "tied" in head.flags else "lm_head.weight")
    recurs = out if head.kind == "eagle" or "norm_output" in head.flags else x
    return functional.linear(out, lm_head), out, recurs
