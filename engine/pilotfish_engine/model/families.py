"""What each family's config.json says: architecture → shape. One function a family, over what all have in common.

Reads configurations that are already parsed. Knows nothing about files or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.model.config_json import Config, read_rope, yarn_temperature
from pilotfish_engine.model.shape import LatentShape, ModelShape, MoEShape, RoutingShape, check_heads

PARTIAL_ROTATION = {"Glm4MoeForCausalLM": 0.5, "Qwen3NextForCausalLM": 0.25}  # of a head, where the config is silent


def shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; `where` names it in errors. Raises CheckpointError on what cannot run."""
    shape = layer_shape_from_config(config, where)
    kinds = _layer_types(config, shape.num_layers)
    for index, kind in enumerate(kinds):
        if kind != "full_attention":
            raise CheckpointError(
                f"{where}: layer {index} of {shape.architecture} is of type {kind!r}, which is not supported; "
                "a model whose layers are all 'full_attention' would work"
            )
    return shape


def layer_shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The same for drafts that hold a full-attention layer of the family, whatever the target's other layers are."""
    architecture = str((config.get("architectures") or ["none"])[0])
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported are {known}")
    read = Config(config, where)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False)
    read.only("quantization_config", None)
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    max_positions = read.positive("max_position_embeddings")
    _check_window(config, max_positions, where)
    head_dim = read.positive("head_dim", hidden // heads)
    shape = ModelShape(
        architecture=architecture,
        num_layers=read.positive("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        vocab_size=read.positive("vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(read, head_dim, max_positions, PARTIAL_ROTATION.get(architecture)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )
    shape = FAMILIES[architecture](read, shape)
    check_heads(shape, where)
    return shape


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's token id field, which may be one, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _llama(config: Config, shape: ModelShape) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return replace(shape, qkv_bias=bias, out_bias=bias)


def _mistral(config: Config, shape: ModelShape) -> ModelShape:
    config.only("attention_bias", False)
    return shape


def _qwen2(config: Config, shape: ModelShape) -> ModelShape:
    return replace(shape, qkv_bias=True)


def _mimo(config: Config, shape: ModelShape) -> ModelShape:
    return replace(_qwen2(config, shape), draft_prefixes=("model.mtp_layers.",))


def _qwen3(config: Config, shape: ModelShape) -> ModelShape:
    return replace(_llama(config, shape), qk_norm=True)


def _qwen3_moe(config: Config, shape: ModelShape) -> ModelShape:
    return replace(_qwen3(config, shape), moe=_qwen_experts(config))


def _qwen3_next(config: Config, shape: ModelShape) -> ModelShape:
    moe = replace(
        _qwen_experts(config),
        shared=("shared_expert", config.positive("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    return replace(_qwen3(config, shape), moe=moe, output_gate=True, zero_centred_norms=True, draft_prefixes=("mtp.",))


def _qwen_experts(config: Config) -> MoEShape:
    routing = RoutingShape(
        num_experts=config.positive("num_experts", config.values.get("num_local_experts")),
        top_k=config.positive("num_experts_per_tok"),
        scoring="softmax",
        normalised=config.flag("norm_topk_prob", False),
    )
    return MoEShape(
        _checked(routing, config.where),
        expert_size=config.positive("moe_intermediate_size"),
        step=config.positive("decoder_sparse_step", 1),
        dense_layers=frozenset(config.values.get("mlp_only_layers") or ()),
    )


def _glm4_moe(config: Config, shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        moe=_sigmoid_experts(config),
        draft_prefixes=_appended_layers(config, shape),
    )


def _deepseek_v3(config: Config, shape: ModelShape) -> ModelShape:
    config.only("topk_method", "noaux_tc")
    shape = _latent(config, shape, interleaved=config.flag("rope_interleave", True))
    return replace(shape, moe=_sigmoid_experts(config), draft_prefixes=_appended_layers(config, shape))


def _deepseek_v2(config: Config, shape: ModelShape) -> ModelShape:
    config.only("topk_method", "greedy", "group_limited_greedy")
    config.only("norm_topk_prob", False)
    grouped = config.values.get("topk_method") == "group_limited_greedy"
    routing = RoutingShape(
        num_experts=config.positive("n_routed_experts"),
        top_k=config.positive("num_experts_per_tok"),
        scoring="softmax",
        num_groups=config.positive("n_group") if grouped else 1,
        topk_groups=config.positive("topk_group") if grouped else 1,
        normalised=False,
        scaling=float(config.values.get("routed_scaling_factor", 1.0)),
    )
    return replace(_latent(config, shape, interleaved=True), moe=_deepseek_experts(config, routing))


def _latent(config: Config, shape: ModelShape, interleaved: bool) -> ModelShape:
    """One head of latent and rotated key in the place of keys and values."""
    rank = config.values.get("q_lora_rank")
    latent = LatentShape(
        q_rank=None if rank is None else config.positive("q_lora_rank"),
        kv_rank=config.positive("kv_lora_rank"),
        nope_dim=config.positive("qk_nope_head_dim"),
        rope_dim=config.positive("qk_rope_head_dim"),
        v_dim=config.positive("v_head_dim"),
        bias=config.flag("attention_bias", False),
        interleaved=interleaved,
        temperature=yarn_temperature(config, shape.rope),
    )
    return replace(shape, num_kv_heads=1, head_dim=latent.kv_rank + latent.rope_dim, latent=latent)


def _sigmoid_experts(config: Config) -> MoEShape:
    config.only("scoring_func", "sigmoid")
    routing = RoutingShape(
        num_experts=config.positive("n_routed_experts"),
        top_k=config.positive("num_experts_per_tok"),
        scoring="sigmoid",
        correction=True,
        num_groups=config.positive("n_group", 1),
        topk_groups=config.positive("topk_group", 1),
        normalised=config.flag("norm_topk_prob", True),
        scaling=float(config.values.get("routed_scaling_factor", 1.0)),
    )
    return _deepseek_experts(config, routing)


def _deepseek_experts(config: Config, routing: RoutingShape) -> MoEShape:
    config.only("moe_layer_freq", 1)
    size, count = config.positive("moe_intermediate_size"), config.values.get("n_shared_experts")
    return MoEShape(
        _checked(routing, config.where),
        expert_size=size,
        shared=("shared_experts", size * count) if count else None,
        first_layer=config.values.get("first_k_dense_replace") or 0,
    )


def _checked(routing: RoutingShape, where: str) -> RoutingShape:
    """Raises CheckpointError where the experts do not form the groups, or too few are open for every token's choice."""
    experts, groups = routing.num_experts, routing.num_groups
    if experts % groups or (groups > 1 and routing.scoring == "sigmoid" and experts // groups < 2):
        raise CheckpointError(
            f"{where}: {experts} experts do not form {groups} groups; a number of groups that divides the experts "
            "would work, with two or more in each"
        )
    if routing.topk_groups > groups:
        raise CheckpointError(
            f"{where}: topk_group {routing.topk_groups} of {groups} groups; at most {groups} would work"
        )
    if routing.top_k > (reachable := experts // groups * routing.topk_groups):
        raise CheckpointError(
            f"{where}: num_experts_per_tok is {routing.top_k} and {reachable} experts are open to a token; "
            f"at most {reachable} would work"
        )
    return routing


def _appended_layers(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """Prefixes of the prediction layers that such checkpoints number behind the model's own."""
    count = config.values.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{shape.num_layers + extra}." for extra in range(count))


FAMILIES: Mapping[str, Callable[[Config, ModelShape], ModelShape]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeForCausalLM": _glm4_moe,
    "LlamaForCausalLM": _llama,
    "MiMoForCausalLM": _mimo,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
}


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    interval = config.get("full_attention_interval") or 1
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]


def _check_window(config: Mapping[str, Any], max_positions: int, where: str) -> None:
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", config.get("architectures") == ["MistralForCausalLM"])
    if uses_window and window is not None and window < max_positions:
        raise CheckpointError(
            f"{where}: sliding_window {window} is below max_position_embeddings {max_positions}; "
            "only full attention is supported"
        )
