"""Tiny checkpoints with prediction heads in every form, whose blocks are the reference library's decoder layers, and an
independent forward of target and heads over a whole sequence, in the order of DeepSeek-V3's paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

NUM_LAYERS, HIDDEN, VOCAB, EPS = 2, 32, 64, 1e-5  # sizes that the fast kernels take, too
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "rms_norm_eps": EPS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Kind:
    """A family beside a form. prefix, block: of head j's tensors and of its layer's behind that, {j} and {layer} filled
    in; names: of the norm of the embedding, of the hidden state, the projection and the final norm."""

    model: type[PreTrainedModel]
    config: type[Any]
    values: dict[str, Any]
    architecture: str
    prefix: str
    names: tuple[str, str, str, str]
    block: str = ""
    hidden_first: bool = False
    zero_centred: bool = False
    count_key: str | None = "num_nextn_predict_layers"


NEXTN = ("model.layers.{layer}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
KINDS = {
    "mimo": Kind(
        Qwen2ForCausalLM, Qwen2Config, {}, "MiMoForCausalLM", "model.mtp_layers.{j}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), hidden_first=True,
    ),
    "deepseek": Kind(
        DeepseekV3ForCausalLM, DeepseekV3Config,
        EXPERTS | {
            "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12, "v_head_dim": 12,
        },
        "DeepseekV3ForCausalLM", *NEXTN,
    ),
    "glm": Kind(
        Glm4MoeForCausalLM, Glm4MoeConfig, EXPERTS | {"use_qk_norm": True},
        "Glm4MoeForCausalLM", *NEXTN,
    ),
    "qwen": Kind(
        Qwen3NextForCausalLM, Qwen3NextConfig,
        {
            "layer_types": ["full_attention"] * (NUM_LAYERS + 1), "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
        "Qwen3NextForCausalLM", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        block="layers.0.", zero_centred=True, count_key=None,
    ),
    "llama": Kind(LlamaForCausalLM, LlamaConfig, {}, "LlamaForCausalLM", *NEXTN),
}  # fmt: skip


@dataclass
class Reference:
    """The reference library's target and decoder layers, and the heads' own tensors; the files they are saved in."""

    kind: Kind
    count: int
    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        kind = self.kind
        whole = kind.model(kind.config(**COMMON | kind.values, num_hidden_layers=NUM_LAYERS + self.count)).eval()
        with torch.no_grad():
            for name, tensor in whole.state_dict().items():
                if "norm" in name or name.endswith("bias"):  # which start as ones or zeros
                    tensor.add_(torch.randn_like(tensor), alpha=0.3)
        whole.save_pretrained(self.folder)
        config = json.loads((self.folder / "config.json").read_text())
        config |= {"architectures": [kind.architecture], "num_hidden_layers": NUM_LAYERS}
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            config.pop(key, None)
        if kind.count_key is not None:
            config[kind.count_key] = self.count
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:NUM_LAYERS]
        self.config = config
        self.own = [self._own(head) for head in range(self.count)]
        for name, tensor in load_file(self.folder / "model.safetensors").items():
            self.tensors[self._name_of(name)] = tensor
        for head, own in enumerate(self.own):
            self.tensors |= {f"{self.prefix(head)}{name}.weight": tensor for name, tensor in own.items()}
        self.blocks = list(whole.model.layers[NUM_LAYERS:])
        whole.model.layers = whole.model.layers[:NUM_LAYERS]
        whole.config.num_hidden_layers = NUM_LAYERS
        self.model = whole
        self.save()

    def prefix(self, head: int) -> str:
        return self.kind.prefix.format(j=head, layer=NUM_LAYERS + head)

    def _own(self, head: int) -> dict[str, Tensor]:
        embed_norm, hidden_norm, projection, final_norm = self.kind.names
        base = 0.0 if self.kind.zero_centred else 1.0
        own = {name: base + 0.3 * torch.randn(HIDDEN) for name in (embed_norm, hidden_norm, final_norm)}
        return own | {projection: 0.2 * torch.randn(HIDDEN, 2 * HIDDEN)}

    def _name_of(self, name: str) -> str:
        for head in range(self.count):
            layer = f"model.layers.{NUM_LAYERS + head}."
            if name.startswith(layer):
                return self.prefix(head) + self.kind.block + name.removeprefix(layer)
        return name

    def save(self, folder: Path | None = None, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
        """Writes the checkpoint, or a changed copy of it."""
        folder = folder or self.folder
        folder.mkdir(exist_ok=True)
        values = {key: value for key, value in (self.config | config).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(values))
        save_file(self.tensors if tensors is None else tensors, folder / "model.safetensors")
        return folder

    def head_tensors(self) -> dict[str, Tensor]:
        """Those of the heads alone."""
        prefixes = tuple(self.prefix(head) for head in range(self.count))
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefixes)}

    @torch.inference_mode()
    def target_hidden(self, tokens: Sequence[int]) -> Tensor:
        """[n, H], after the target's final norm."""
        hidden: Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def head(self, number: int, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
        """hidden [n, H] of rows 0 … n − 1 and the token beside each → [n, H], after the head's final norm."""
        own, kind = self.own[number], self.kind
        embed_norm, hidden_norm, projection, final_norm = kind.names

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            weight = 1 + weight if kind.zero_centred else weight
            return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight

        embedded = norm(self.model.model.embed_tokens(torch.tensor(token_ids)), own[embed_norm])
        hidden = norm(hidden, own[hidden_norm])
        parts = [hidden, embedded] if kind.hidden_first else [embedded, hidden]
        x = (torch.cat(parts, dim=1) @ own[projection].T).unsqueeze(0)
        count = x.shape[1]
        positions = torch.arange(count).unsqueeze(0)
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        out = self.blocks[number](
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        out = out[0] if isinstance(out, tuple) else out
        return norm(out[0], own[final_norm])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def drafts(self, tokens: Sequence[int], num_steps: int) -> list[int]:
        """The chain after `tokens`: of one head over its own output, or a token of each of several heads."""
        tokens, last = list(tokens), len(tokens) - 1
        hidden = self.target_hidden(tokens[:-1])
        drafted: list[int] = []
        for step in range(num_steps):
            if self.count == 1:
                out = self.head(0, hidden, tokens[1:])
                hidden = torch.cat([hidden, out[-1:]])
            else:
                out = hidden = self.head(step, hidden, tokens[step + 1 : step + 1 + last])
            drafted.append(int(self.logits(out[-1]).argmax()))
            tokens.append(drafted[-1])
        return drafted

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(self.target_hidden(tokens)[-1]).argmax()))
        return tokens[len(prompt) :]
