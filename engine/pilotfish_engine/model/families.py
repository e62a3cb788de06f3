"""What each family's config.json says: architecture → shape. One function a family, over what all have in common.

Reads configurations that are already parsed. Knows nothing about files or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.files import as_they_should_be
from pilotfish_engine.model.config_json import (
    MOST_OF,
    Config,
    architecture_of,
    read_rope,
    read_window,
    yarn_temperature,
)
from pilotfish_engine.model.fp8 import read_block
from pilotfish_engine.model.shape import LatentShape, ModelShape, MoEShape, RoutingShape, WindowShape, check_heads

GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
PARTIAL_ROTATION = {"Glm4MoeForCausalLM": 0.5, "Qwen3NextForCausalLM": 0.25}  # of a head, where the config is silent


def draft_shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """As shape_from_config, for layers of a draft, which see the whole context."""
    shape = shape_from_config(config, where)
    if shape.window is not None and shape.window.layers and shape.window.size < shape.max_position_embeddings:
        raise CheckpointError(
            f"{where}: sliding_window {shape.window.size} is below max_position_embeddings "
            f"{shape.max_position_embeddings}; a draft without a window would work"
        )
    return shape


def shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; `where` names it in errors. Raises CheckpointError on what cannot run."""
    architecture = architecture_of(config, where)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"{where}: architecture {architecture} is not supported; supported are {known}")
    if architecture.startswith("Gemma3"):
        config = _gemma3_values(Config(config, where))
    read = Config(config, where)
    with as_they_should_be(where):
        read_block(config, where)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False)
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    max_positions = read.positive("max_position_embeddings")
    head_dim = read.positive("head_dim", max(1, hidden // heads))
    rope = read_rope(read, head_dim, max_positions, PARTIAL_ROTATION.get(architecture))
    if rope.scaling == "yarn":  # some configs name the stretched length here, some the one before
        max_positions = max(max_positions, int(rope.original_max_positions * rope.factor))
    shape = ModelShape(
        architecture=architecture,
        num_layers=read.positive("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=read.positive("intermediate_size"),
        vocab_size=read.positive("vocab_size"),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, most=1.0),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        bos_token_id=next(iter(read.token_ids("bos_token_id")), None),
        eos_token_ids=read.token_ids("eos_token_id"),
    )
    shape = FAMILIES[architecture](read, shape)
    check_heads(shape, where)
    _check_layers(read, shape)
    return shape


def _llama(config: Config, shape: ModelShape) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return replace(shape, qkv_bias=bias, out_bias=bias)


def _mistral(config: Config, shape: ModelShape) -> ModelShape:
    config.only("attention_bias", False)
    return _windowed(shape, read_window(config, used=True), range(shape.num_layers))


def _gemma3(config: Config, shape: ModelShape) -> ModelShape:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("attn_logit_softcapping", None)
    config.only("final_logit_softcapping", None)
    config.only("use_bidirectional_attention", False)
    local = Config({"rope_parameters": config.values["local_rope"]}, config.where)
    layers = [index for index, kind in enumerate(config.texts("layer_types")) if kind == "sliding_attention"]
    shape = replace(
        _llama(config, shape),
        qk_norm=True,
        query_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        zero_centred_norms=True,
        output_norms=True,
        activation="gelu_tanh",
        embed_scale=shape.hidden_size**0.5,
    )
    rope = read_rope(local, shape.head_dim, shape.max_position_embeddings, partial=None)
    return replace(shape, window=WindowShape(config.positive("sliding_window"), frozenset(layers), rope))


def _gemma3_with_images(config: Config, shape: ModelShape) -> ModelShape:
    """The text's part of a model that reads images too. Its checkpoints have two spellings."""
    return replace(
        _gemma3(config, shape),
        spellings=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        unread_prefixes=tuple(
            f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
        ),
    )


def _gemma3_values(config: Config) -> dict[str, Any]:
    """A Gemma-3 config on one level, with every value that the family has where a config is silent: `rope_parameters`
    of the layers that see everything, `local_rope` of the others."""
    text = {key: value for key, value in config.inner("text_config").items() if value is not None}
    values = {**GEMMA3_DEFAULTS, **config.values, **text, "architectures": config.values["architectures"]}
    read = Config(values, config.where)
    ropes = Config(read.inner("rope_parameters"), config.where)
    whole = {"rope_theta": read.number("rope_theta", 1e6), **read.inner("rope_scaling")}
    local = {"rope_theta": read.number("rope_local_base_freq", 1e4)}
    pattern = read.positive("sliding_window_pattern")
    kinds = [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(read.positive("num_hidden_layers"))
    ]
    return {
        **values,
        "rope_parameters": whole | ropes.inner("full_attention"),
        "local_rope": local | ropes.inner("sliding_attention"),
        "layer_types": read.texts("layer_types") or kinds,
    }


def _qwen2(config: Config, shape: ModelShape) -> ModelShape:
    return replace(_qwen_windows(config, shape), qkv_bias=True)


def _qwen_windows(config: Config, shape: ModelShape) -> ModelShape:
    """The last layers have the window, if any, but where the config names those that have."""
    kinds = config.texts("layer_types")
    if not kinds:
        layers = range(config.whole("max_window_layers", 28), shape.num_layers)
        return _windowed(shape, read_window(config, used=False), layers)
    named = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    return _windowed(shape, read_window(config, used=False), named)


def _windowed(shape: ModelShape, size: int | None, layers: Iterable[int]) -> ModelShape:
    return shape if size is None else replace(shape, window=WindowShape(size, frozenset(layers), shape.rope))


def _mimo(config: Config, shape: ModelShape) -> ModelShape:
    config.only("use_sliding_window", False)
    return replace(_qwen2(config, shape), unread_prefixes=("model.mtp_layers.",))


def _qwen3(config: Config, shape: ModelShape) -> ModelShape:
    return replace(_llama(config, _qwen_windows(config, shape)), qk_norm=True)


def _qwen3_moe(config: Config, shape: ModelShape) -> ModelShape:
    shape = _windowed(shape, read_window(config, used=False), range(shape.num_layers))
    return replace(_llama(config, shape), qk_norm=True, moe=_qwen_experts(config))


def _qwen3_next(config: Config, shape: ModelShape) -> ModelShape:
    moe = replace(
        _qwen_experts(config),
        shared=("shared_expert", config.positive("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    shape = replace(_llama(config, shape), qk_norm=True)
    return replace(shape, moe=moe, output_gate=True, zero_centred_norms=True, unread_prefixes=("mtp.",))


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
        dense_layers=frozenset(config.numbers("mlp_only_layers")),
    )


def _glm4_moe(config: Config, shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        moe=_sigmoid_experts(config),
        unread_prefixes=_appended_layers(config, shape),
    )


def _deepseek_v3(config: Config, shape: ModelShape) -> ModelShape:
    config.only("topk_method", "noaux_tc")
    shape = _latent(config, shape, interleaved=config.flag("rope_interleave", True))
    return replace(shape, moe=_sigmoid_experts(config), unread_prefixes=_appended_layers(config, shape))


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
        scaling=config.number("routed_scaling_factor", 1.0, most=1e6),
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
        scaling=config.number("routed_scaling_factor", 1.0, most=1e6),
    )
    return _deepseek_experts(config, routing)


def _deepseek_experts(config: Config, routing: RoutingShape) -> MoEShape:
    config.only("moe_layer_freq", 1)
    size, count = config.positive("moe_intermediate_size"), config.whole("n_shared_experts", 0)
    return MoEShape(
        _checked(routing, config.where),
        expert_size=size,
        shared=("shared_experts", size * count) if count else None,
        first_layer=config.whole("first_k_dense_replace", 0),
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
    count = min(config.whole("num_nextn_predict_layers", 0), MOST_OF["num_hidden_layers"])
    return tuple(f"model.layers.{shape.num_layers + extra}." for extra in range(count))


FAMILIES: Mapping[str, Callable[[Config, ModelShape], ModelShape]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_images,
    "Glm4MoeForCausalLM": _glm4_moe,
    "LlamaForCausalLM": _llama,
    "MiMoForCausalLM": _mimo,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
}


def _layer_types(config: Config, num_layers: int) -> list[str]:
    kinds = config.texts("layer_types")
    if kinds:
        return kinds
    interval = config.positive("full_attention_interval", 1)
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]


def _check_layers(config: Config, shape: ModelShape) -> None:
    """Raises CheckpointError where the config asks for windows, or for layers of another kind, that the family has not
    here."""
    if shape.window is None and config.flag("use_sliding_window", False) and read_window(config, used=False):
        raise CheckpointError(
            f"{config.where}: sliding_window {config.values['sliding_window']} in {shape.architecture} is not "
            "supported; use_sliding_window false would work"
        )
    for index, kind in enumerate(_layer_types(config, shape.num_layers)):
        if kind == "full_attention" or (kind == "sliding_attention" and shape.window_of(index) is not None):
            continue
        raise CheckpointError(
            f"{config.where}: layer {index} of {shape.architecture} is of type {kind!r}, which is not supported; "
            "a model whose layers are all 'full_attention' would work"
        )
