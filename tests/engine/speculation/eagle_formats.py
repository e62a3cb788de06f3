"""One checkpoint for each way in which published EAGLE and EAGLE-3 heads are written."""

from __future__ import annotations

from collections.abc import Callable

from transformers import LlamaForCausalLM

from tests.engine.speculation.eagle_heads import HIDDEN, LAYERS, Head, as_speculators, eagle, eagle3


def plain(name: str) -> str:
    return name


def inside_model(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


def of_speculators(name: str) -> str:
    return name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")


def unbiased(head: Head) -> Head:
    head.weights = {name: tensor for name, tensor in head.weights.items() if not name.endswith("_proj.bias")}
    return head


def vllm_eagle(target: LlamaForCausalLM) -> Head:
    head = eagle(target)
    layers = head.config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    head.config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": layers}
    head.spell = inside_model
    return head


def speculators_eagle(target: LlamaForCausalLM) -> Head:
    head = as_speculators(eagle(target, fc_bias=True), "eagle", fusion_bias=True, layernorms=False)
    head.spell = of_speculators
    return head


def speculators_eagle3(target: LlamaForCausalLM, **options: object) -> Head:
    flags = ("norm_before_residual",)
    head = eagle3(target, own_embed=True, flags=flags, spell=plain, **options)  # type: ignore[arg-type]
    fields = {"draft_vocab_size": 24, "norm_before_residual": True, "target_hidden_size": None}
    return as_speculators(head, "eagle3", **fields)


FORMATS: dict[str, Callable[[LlamaForCausalLM], Head]] = {
    # SafeAILab's own, the second without what is the target's
    "EAGLE": eagle,
    "EAGLE without embedding": lambda t: eagle(t, own_embed=False, fc_bias=True),
    "EAGLE silent on its bias": lambda t: eagle(t, fc_bias=True, bias=None),
    "EAGLE of SGLang": lambda t: eagle(t, own_head=True, architectures=["LlamaForCausalLMEagle"]),
    "EAGLE of vLLM": vllm_eagle,
    "EAGLE of speculators": speculators_eagle,
    "EAGLE of two layers": lambda t: eagle(t, layers=2),
    "EAGLE of Qwen2": lambda t: eagle(t, family="qwen2", architectures=["Qwen2ForCausalLMEagle"]),
    "EAGLE of Qwen2 without biases": lambda t: unbiased(eagle(t, family="qwen2")),
    # SafeAILab's own, with the number of layers of its target in the config (EAGLE3-Vicuna1.3-13B)
    "EAGLE-3": lambda t: eagle3(t, architectures=["LlamaForCausalLM"], num_hidden_layers=40),
    "EAGLE-3 of SpecForge": lambda t: eagle3(
        t,
        draft_vocab=64,
        own_embed=True,
        aux=(2, 4, 5),
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    ),
    "EAGLE-3 of ModelOpt": lambda t: eagle3(
        t,
        aux=(4, 6, LAYERS),
        flags=("norm_before_fc",),
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [4, 6, LAYERS],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "norm_before_fc": True,
        },
    ),
    "EAGLE-3 of the final state": lambda t: eagle3(
        t, aux=(), fc=False, eagle_config={"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    ),
    "EAGLE-3 of another width": lambda t: eagle3(t, hidden=48, own_embed=True, target_hidden_size=HIDDEN),
    "EAGLE-3 without fc": lambda t: eagle3(t, aux=(7,), fc=False, eagle_aux_hidden_state_layer_ids=[7]),
    "EAGLE-3 with the target's head": lambda t: eagle3(t, draft_vocab=None, own_head=False, has_map=False, spell=plain),
    "EAGLE-3 tied": lambda t: eagle3(
        t, draft_vocab=None, own_head=False, own_embed=True, has_map=False, flags=("tied",), tie_word_embeddings=True
    ),
    "EAGLE-3 of speculators": speculators_eagle3,
    "EAGLE-3 of speculators with Qwen3 layers": lambda t: speculators_eagle3(t, family="qwen3"),
    "EAGLE-3.1": lambda t: eagle3(
        t,
        aux=(2, 3, 5, 7),
        flags=("fc_norm", "norm_output"),
        spell=inside_model,
        eagle_aux_hidden_state_layer_ids=[2, 3, 5, 7],
        num_aux_hidden_states=4,
        fc_norm=True,
        norm_output=True,
    ),
    "EAGLE-3 of two layers": lambda t: eagle3(t, layers=2, spell=plain),
    "EAGLE-3 with biases": lambda t: eagle3(t, layer_fields={"attention_bias": True}),
    "EAGLE-3 with scaled rope": lambda t: eagle3(
        t,
        layer_fields={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
