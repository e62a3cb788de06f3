"""The EAGLE-3 head as it is trained (arXiv 2503.01840): float32 parameters under the names of the public checkpoint.

`unroll` is training-time test: the head reads its own output, step after step, as it does when it drafts a chain. Row r
is a root: the last position that the target has read. At step s the head stands at position r + s, reads token
r + 1 + s, and sees the real rows up to r and its own rows of steps 1 … s from the same root. Its logits are for token
r + 2 + s. Knows nothing about losses or where tokens come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pilotfish_engine.model import rope
from pilotfish_engine.model.decoder import Decoder
from pilotfish_engine.model.shape import ModelShape, RopeShape

INIT_STD = 0.02


@dataclass(frozen=True)
class HeadSizes:
    """num_aux: how many of the target's layers are read. The rotary base is the target's, unscaled."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    num_aux: int = 3

    @staticmethod
    def beside(target: ModelShape, draft_vocab_size: int) -> HeadSizes:
        """Those of one of the target's own layers."""
        return HeadSizes(
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope.theta,
            max_positions=target.max_position_embeddings,
        )

    def config(self, target: ModelShape) -> dict[str, Any]:
        """config.json in the form of SafeAILab, which SGLang and vLLM read."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_ids[0] if target.eos_token_ids else None,
        }


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class _Seen:
    """The rows that each root sees: real ones up to its own, and of every later step the one that came from it."""

    def __init__(self, length: int, steps: int, device: torch.device) -> None:
        real = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = torch.eye(length, dtype=torch.bool, device=device)
        self._mask = torch.cat([real, *[own] * (steps - 1)], dim=1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def with_step(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """keys, values [B, T, Hkv, D] of one more step → those of all steps so far, [B, S·T, Hkv, D], and which of
        them each root sees, bool [T, S·T]."""
        self._keys.append(keys)
        self._values.append(values)
        rows = len(self._keys) * keys.shape[1]
        return torch.cat(self._keys, dim=1), torch.cat(self._values, dim=1), self._mask[:, :rows]


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        inputs, dim = 2 * sizes.hidden_size, sizes.head_dim
        self.q_proj = nn.Linear(inputs, sizes.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, sizes.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, sizes.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * dim, sizes.hidden_size, bias=False)
        self.head_dim = dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: _Seen) -> Tensor:
        """x [B, T, 2H] of one step, whose keys and values `seen` is given."""
        q = _rotated(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k = _rotated(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        keys, values, mask = seen.with_step(k, self.v_proj(x).unflatten(-1, (-1, self.head_dim)))
        group = q.shape[2] // k.shape[2]
        keys, values = (rows.repeat_interleave(group, dim=2).transpose(1, 2) for rows in (keys, values))
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.hidden_norm = _Norm(hidden, eps)
        self.input_layernorm = _Norm(hidden, eps)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.mlp = _GatedMLP(hidden, sizes.intermediate_size)


class TrainedHead(nn.Module):
    """The embedding is the target's, and no parameter of this."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(sizes.num_aux * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.midlayer = _Layer(sizes)
        self.norm = _Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)

    def unroll(self, features: Tensor, tokens: Tensor, embedding: Tensor, steps: int) -> Iterator[Tensor]:
        """features [B, T, A·H] of the target beside tokens int64 [B, T]; embedding [vocabulary, H]. Yields of each step
        what `lm_head` reads, [B, T, H] by root. A row past the end of its tokens reads token 0."""
        length = tokens.shape[1]
        cos, sin = self._rotary(length + steps, tokens.device)
        layer = self.midlayer
        hidden = self.fc(features)
        seen = _Seen(length, steps, tokens.device)
        padded = functional.pad(tokens, (0, steps))
        for step in range(steps):
            read = functional.embedding(padded[:, 1 + step : 1 + step + length], embedding)
            both = torch.cat((layer.input_layernorm(read), layer.hidden_norm(hidden)), dim=-1)
            places = slice(step, step + length)
            x = hidden + layer.self_attn(both, cos[places], sin[places], seen)
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            yield self.norm(hidden)

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        table = rope.cos_sin_table(RopeShape(self.sizes.rope_theta), self.sizes.head_dim, length).to(device)
        cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


@torch.no_grad()
def initialise(head: TrainedHead, target: Decoder, token_ids: Tensor, features: Tensor, seed: int) -> None:
    """Random by `seed`, but for what is known to be near: the output says what the target's would of the state that the
    deepest of the layers read holds, brought to a size of 1. token_ids: int64, the target's of the draft's tokens;
    features: some [N, A·H] of what the head will read."""
    dice = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * INIT_STD)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    hidden = head.sizes.hidden_size
    size = features[:, -hidden:].float().square().mean(dim=1).sqrt().median().cpu()
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:].copy_(torch.eye(hidden) / size)
    head.norm.weight.copy_(target.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.dense()[token_ids.to(target.device)])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D]; cos, sin [T, 1, D/2]; in float32, as serving does it."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
