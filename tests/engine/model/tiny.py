"""Tiny random models of every family, made by the reference library's own classes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes))


def deepseek_v3(**changes: Any) -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | LATENT | GROUPS | changes))


def deepseek_v2(**changes: Any) -> PreTrainedModel:
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SMALL | LATENT | {"n_shared_experts": 2} | changes))


def gemma3(**changes: Any) -> PreTrainedModel:
    """Windows that end within a tree of a few nodes too."""
    values = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 9, "sliding_window_pattern": 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | values | changes))


def glm4_moe(**changes: Any) -> PreTrainedModel:
    return Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL | ROUTED | {"head_dim": 16, "n_shared_experts": 2} | changes))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL | EXPERTS | {"head_dim": 16} | changes))


def qwen3_next(**changes: Any) -> PreTrainedModel:
    values = {"head_dim": 32, "layer_types": ["full_attention"] * 3, "shared_expert_intermediate_size": 48}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL | EXPERTS | values | changes))


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """With random norms, biases and corrections too, which start as ones and zeros."""
    for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("correction_bias"))]:
        if tensor.ndim == 1:
            torch.nn.init.normal_(tensor, mean=0.5, std=0.5)
    return model.eval()


torch.manual_seed(0)
MODELS: dict[str, PreTrainedModel] = {
    name: randomised(model)
    for name, model in {
        "untied": llama(tie_word_embeddings=False),
        "tied": llama(tie_word_embeddings=True),
        "one kv head": llama(num_key_value_heads=1, head_dim=24),
        "linear rope": llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}),
        "llama3 rope": llama(rope_parameters=LLAMA3),
        "yarn rope": llama(rope_parameters=YARN),
        "yarn rope, not truncated": llama(rope_parameters={**YARN, "truncate": False, "attention_factor": 1.3}),
        "yarn rope, by weights": llama(
            rope_parameters={**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 2.0}
        ),
        "yarn rope, beyond": llama(rope_parameters=YARN, max_position_embeddings=32),
        "dynamic rope": llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}),
        "biased llama": llama(attention_bias=True),
        "mistral": MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
        "mistral, window": MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL)),
        "qwen2, windows": Qwen2ForCausalLM(Qwen2Config(**SMALL, **WINDOWS, max_window_layers=1)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=32)),
        "qwen3, windows": Qwen3ForCausalLM(Qwen3Config(**SMALL, **WINDOWS, head_dim=32, layer_types=KINDS)),
        "biased qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, attention_bias=True)),
        "gemma3": gemma3(),
        "gemma3, scaled": gemma3(
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            layer_types=KINDS,
        ),
        "gemma3, untied and biased": gemma3(tie_word_embeddings=False, attention_bias=True, sliding_window=70),
        "deepseek v3": deepseek_v3(),
        "deepseek v3, one group": deepseek_v3(n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=0),
        "deepseek v3, biased, in halves": deepseek_v3(q_lora_rank=None, attention_bias=True, rope_interleave=False),
        "deepseek v3, biased queries": deepseek_v3(attention_bias=True),
        "deepseek v3, yarn": deepseek_v3(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
        "deepseek v2": deepseek_v2(q_lora_rank=None),
        "deepseek v2, groups": deepseek_v2(topk_method="group_limited_greedy", routed_scaling_factor=3.0, **GROUPS),
        "glm4 moe": glm4_moe(use_qk_norm=True, attention_bias=True, **GROUPS),
        "glm4 moe, plain": glm4_moe(first_k_dense_replace=2, rope_parameters={**YARN, "partial_rotary_factor": 0.75}),
        "qwen3 moe": qwen3_moe(norm_topk_prob=True),
        "qwen3 moe, every second layer": qwen3_moe(decoder_sparse_step=2, attention_bias=True),
        "qwen3 moe, windows": qwen3_moe(**WINDOWS),
        "qwen3 moe, one plain layer": qwen3_moe(mlp_only_layers=[1]),
        "qwen3 next": qwen3_next(),
        "qwen3 next, biased": qwen3_next(attention_bias=True, norm_topk_prob=False),
    }.items()
}
# of these, one for each kind of attention and of routing
VARIANTS = [
    "untied",
    "mistral, window",
    "qwen3",
    "gemma3",
    "deepseek v3",
    "deepseek v2, groups",
    "glm4 moe",
    "qwen3 moe",
    "qwen3 next",
]
