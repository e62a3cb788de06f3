"""One checkpoint for each way in which published EAGLE and EAGLE-3 heads are written."""

from __future__ import annotations

from collections.abc import Callable

from transformers import LlamaForCausalLM

from tests.engine.speculation.eagle_heads import HIDDEN, LAYERS, Head, Layers, as_speculators, eagle, eagle3

OWN = ("head", "map", "fc")


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
    head = as_speculators(eagle(target, ("embed", "fc_bias")), "eagle", fusion_bias=True, layernorms=False)
    head.spell = of_speculators
    return head


def speculators_eagle3(target: LlamaForCausalLM, family: str = "llama") -> Head:
    head = eagle3(target, (*OWN, "embed", "norm_before_residual"), Layers(family), spell=plain)
    fields = {"draft_vocab_size": 24, "norm_before_residual": True, "target_hidden_size": None}
    return as_speculators(head, "eagle3", **fields)


FORMATS: dict[str, Callable[[LlamaForCausalLM], Head]] = {
    # SafeAILab's own, the second without what is the target's
    "EAGLE": eagle,
    "EAGLE without embedding": lambda t: eagle(t, ("fc_bias",)),
    "EAGLE silent on its bias": lambda t: eagle(t, ("embed", "fc_bias"), bias=None),
    "EAGLE of SGLang": lambda t: eagle(t, ("embed", "head"), architectures=["LlamaForCausalLMEagle"]),
    "EAGLE of vLLM": vllm_eagle,
    "EAGLE of speculators": speculators_eagle,
    "EAGLE of two layers": lambda t: eagle(t, layers=Layers(number=2)),
    "EAGLE of Qwen2": lambda t: eagle(t, layers=Layers("qwen2"), architectures=["Qwen2ForCausalLMEagle"]),
    "EAGLE of Qwen2 without biases": lambda t: unbiased(eagle(t, layers=Layers("qwen2"))),
    # SafeAILab's own, with the number of layers of its target in the config (EAGLE3-Vicuna1.3-13B)
    "EAGLE-3": lambda t: eagle3(t, architectures=["LlamaForCausalLM"], num_hidden_layers=40),
    "EAGLE-3 of SpecForge": lambda t: eagle3(
        t,
        (*OWN, "embed"),
        draft_vocab=64,
        aux=(2, 4, 5),
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    ),
    "EAGLE-3 of ModelOpt": lambda t: eagle3(
        t,
        (*OWN, "norm_before_fc"),
        aux=(4, 6, LAYERS),
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
        t, ("head", "map"), aux=(), eagle_config={"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    ),
    "EAGLE-3 of another width": lambda t: eagle3(t, (*OWN, "embed"), Layers(hidden=48), target_hidden_size=HIDDEN),
    "EAGLE-3 without fc": lambda t: eagle3(t, ("head", "map"), aux=(7,), eagle_aux_hidden_state_layer_ids=[7]),
    "EAGLE-3 with the target's head": lambda t: eagle3(t, ("fc",), draft_vocab=None, spell=plain),
    "EAGLE-3 tied": lambda t: eagle3(t, ("fc", "embed", "tied"), draft_vocab=None, tie_word_embeddings=True),
    "EAGLE-3 of speculators": speculators_eagle3,
    "EAGLE-3 of speculators with Qwen3 layers": lambda t: speculators_eagle3(t, "qwen3"),
    "EAGLE-3.1": lambda t: eagle3(
        t,
        (*OWN, "fc_norm", "norm_output"),
        aux=(2, 3, 5, 7),
        spell=inside_model,
        eagle_aux_hidden_state_layer_ids=[2, 3, 5, 7],
        num_aux_hidden_states=4,
        fc_norm=True,
        norm_output=True,
    ),
    "EAGLE-3 of two layers": lambda t: eagle3(t, layers=Layers(number=2), spell=plain),
    "EAGLE-3 with biases": lambda t: eagle3(t, layers=Layers(fields={"attention_bias": True})),
    "EAGLE-3 with scaled rope": lambda t: eagle3(
        t,
        layers=Layers(
            fields={
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            }
        ),
    ),
}
