"""Tiny checkpoints of block drafts, and their forward written a second time: plain torch, in float64, over the whole
context at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3Model

HIDDEN, THETA, EPS = 32, 10000.0, 1e-6
MASK = 3


def tiny_target(vocab_size: int, num_layers: int = 3, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class BlockDraft:
    """config: of the files. outputs_of: target layers whose outputs make a feature. tensors: as in the files."""

    config: dict[str, Any]
    outputs_of: tuple[int, ...]
    tensors: dict[str, Tensor]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    own: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def block_draft(
    vocab_size: int,
    outputs_of: Sequence[int] = (0, 2),
    block_size: int = 6,
    num_layers: int = 2,
    bias: bool = False,
    seed: int = 1,
) -> BlockDraft:
    """A random one, its layers made by the reference library's class."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}  # not the target's
    reference = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        max_position_embeddings=64,
        initializer_range=0.3,
        attention_bias=bias,
        **sizes,
    )
    tensors = {name: tensor for name, tensor in Qwen3Model(reference).state_dict().items() if "embed" not in name}
    tensors["fc.weight"] = torch.randn(HIDDEN, len(outputs_of) * HIDDEN) * 0.1
    tensors["hidden_norm.weight"] = torch.ones(HIDDEN)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("bias"):  # which start as ones and zeros
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(outputs_of)},
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": bias,
        "layer_types": ["full_attention"] * num_layers,
        "num_target_layers": 3,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        **sizes,
    }
    return BlockDraft(config, tuple(outputs_of), tensors, 6, 2, 16)


def reference_logits(target: LlamaForCausalLM, draft: BlockDraft, tokens: Sequence[int], num_steps: int) -> Tensor:
    """float64 [num_steps, V]: of the tokens after `tokens`, whose last one has no row in the target's KV yet."""
    weights = {name: tensor.double() for name, tensor in draft.tensors.items()}
    with outputs(target, draft.outputs_of) as seen, torch.inference_mode():
        target(torch.tensor([list(tokens[:-1])]))
    feature = torch.cat([seen[layer][0].double() for layer in draft.outputs_of], dim=1)
    context = rms(feature @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    embedding = weights.get("embed_tokens.weight", target.model.embed_tokens.weight.detach().double())
    hidden = embedding[[tokens[-1]] + [MASK] * num_steps]
    for layer in range(draft.config.get("num_hidden_layers") or draft.own["num_hidden_layers"]):
        own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"layers.{layer}.")}
        hidden = hidden + attention(draft, own, rms(hidden, own["input_layernorm.weight"]), context)
        normed = rms(hidden, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ own["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (normed @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", target.lm_head.weight.detach().double())
    return rms(hidden[1:], weights["norm.weight"]) @ head.T


def attention(draft: BlockDraft, own: dict[str, Tensor], block: Tensor, context: Tensor) -> Tensor:
    """Queries of the block over the context and the whole block."""
    size, rows = len(context), torch.cat([context, block])

    def heads(name: str, x: Tensor) -> Tensor:
        projected = x @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0)
        return projected.view(len(x), -1, draft.head_dim)

    positions = torch.arange(len(rows))
    q = rotated(rms(heads("q", block), own["self_attn.q_norm.weight"]), positions[size:])
    k = rotated(rms(heads("k", rows), own["self_attn.k_norm.weight"]), positions)
    group = draft.num_heads // draft.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), heads("v", rows).repeat_interleave(group, dim=1)
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / draft.head_dim**0.5, dim=2)
    out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return out @ own["self_attn.o_proj.weight"].T + own.get("self_attn.o_proj.bias", 0)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [N, heads, D]: dimension i turns with i + D/2."""
    half = x.shape[2] // 2
    angles = positions.double()[:, None] / THETA ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)


@contextmanager
def outputs(target: LlamaForCausalLM, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What leaves these layers of the target while it runs, by layer."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: object, _args: object, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [target.model.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def copying_pair(period: int) -> tuple[LlamaForCausalLM, BlockDraft]:
    """A target that says again what stood `period` places before, and a draft that does the same for each place of its
    block, as long as that place is before the block: it is always right, and only if every context row is.

    Half of a hidden state is the token itself (one dimension each, and one that is always there), the other half the
    token copied by attention, which one head sees at exactly one distance: there all its pairs turn to the same angle.
    """
    half, vocab_size, always, theta = 32, 24, 31, 50.0
    angles = 1 / theta ** (torch.arange(16) / 16)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=2 * half,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=half,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    target = LlamaForCausalLM(config).eval()
    eye, nothing = torch.eye(half), torch.zeros(half, half)

    def at_distance(distance: int, strength: float) -> dict[str, Tensor]:
        """Weights of the head that sees the token there, and puts it into the other half."""
        q, k = torch.zeros(half, 2 * half), torch.zeros(half, 2 * half)
        q[:16, always] = strength
        k[:16, always], k[16:, always] = (distance * angles).cos() * strength, (distance * angles).sin() * strength
        into_other_half = torch.cat([nothing, eye])
        return {"q_proj": q, "k_proj": k, "v_proj": torch.cat([eye, nothing], dim=1), "o_proj": into_other_half}

    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() == 2:
                weight.zero_()
        embed, head = target.model.embed_tokens.weight, target.lm_head.weight
        embed[:, always] = 1.0
        for token in range(vocab_size):
            embed[token, token], head[token, half + token] = 1.0, 1.0
        for name, weight in at_distance(period - 1, 3.0).items():
            getattr(target.model.layers[0].self_attn, name).weight.copy_(weight)
    draft = block_draft(vocab_size, outputs_of=[0], num_layers=1)
    sizes = {"hidden_size": 2 * half, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": half}
    draft.config |= {**sizes, "intermediate_size": 16, "rope_theta": theta}
    ones = torch.ones(2 * half)
    layer = {f"self_attn.{name}.weight": weight for name, weight in at_distance(period, 1.0).items()}
    layer |= {"self_attn.q_norm.weight": 9 * torch.ones(half), "self_attn.k_norm.weight": 9 * torch.ones(half)}
    layer |= {f"mlp.{name}_proj.weight": torch.zeros(16, 2 * half) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": torch.zeros(2 * half, 16)}
    layer |= {f"{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
    draft.tensors = {f"layers.0.{name}": weight for name, weight in layer.items()}
    draft.tensors |= {"fc.weight": torch.eye(2 * half), "hidden_norm.weight": ones.clone(), "norm.weight": ones.clone()}
    return target, draft
