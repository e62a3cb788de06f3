"""Tiny checkpoints of the suite: one target, and for every registered method drafts that are equal to it, near it and
random.

The target is made so that a draft of one layer can equal it: only its first layer does anything, every embedding has a
root mean square of 1 (so that its norm changes nothing), and token 0 is seen by nobody (drafts that pair a hidden state
with the next token never read a prompt's first token, and prompts here begin with it). Two dimensions of an embedding
are fixed: FLAG, −1 for token 0 and 1 for the others, and ONE, always 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish_engine.speculation import registry
from tests.engine.speculation.block_drafts import block_draft

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 16  # a head that the C++ attention takes
EOS = 1
UNSEEN = 3  # a prompt begins with so many tokens 0: as many as the deepest draft does not read
FLAG, ONE = 0, 1
HIDE = 11.0  # query and key of the pair that turns slowest: scores of ±30
SELF = 23.8  # of the pairs by which a head sees itself alone: 30 and more below it for any other row within the context
NOISE = {"equal": 0.0, "near": 0.05}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path | None


Builder = Callable[[Path, Path, str], Pair]


def target_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embed = model.model.embed_tokens.weight
        embed.mul_(((HIDDEN - 2) / embed[:, 2:].square().sum(dim=1, keepdim=True)).sqrt())
        embed[:, [FLAG, ONE]] = 1.0
        embed[0, FLAG] = -1.0
        model.lm_head.weight.mul_(2)
        model.lm_head.weight[EOS].mul_(1.5)  # so that answers come to an end
        attention, slowest = model.model.layers[0].self_attn, HEAD_DIM // 2 - 1
        for weight, column in ((attention.q_proj.weight, ONE), (attention.k_proj.weight, FLAG)):
            heads = weight.view(-1, HEAD_DIM, HIDDEN)
            heads[:, [slowest, slowest + HEAD_DIM // 2]] = 0
            heads[:, slowest, column] = HIDE
        idle = model.model.layers[1]
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    return model


def other_model() -> LlamaForCausalLM:
    """A random one of the target's vocabulary, with nothing of the target."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**(target_model().config.to_dict() | {"initializer_range": 0.6}))).eval()


def layer(model: LlamaForCausalLM) -> Tensors:
    """The layer that does something, by names within it."""
    prefix = "model.layers.0."
    return {n.removeprefix(prefix): w.clone() for n, w in model.state_dict().items() if n.startswith(prefix)}


def save(folder: Path, config: dict[str, object], tensors: Tensors, level: str = "equal") -> Path:
    """level: the tensors as they are, with a little noise, or random."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(2)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn_like(tensor)
            tensors[name] = (0.4 * noise if level == "random" else tensor + NOISE[level] * noise).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain(model: LlamaForCausalLM) -> dict[str, object]:
    found: dict[str, object] = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return found


def no_draft(target: Path, folder: Path, level: str) -> Pair:
    return Pair(target, None)


def small_model(target: Path, folder: Path, level: str) -> Pair:
    model = other_model() if level == "random" else target_model()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    return Pair(target, save(folder, plain(model), weights, "equal" if level == "random" else level))


def head_on_final_states(target: Path, folder: Path, level: str) -> Pair:
    """EAGLE: its layer is the target's, over the embedding half of what `fc` reads."""
    model = target_model()
    tensors = {f"layers.0.{name}": weight for name, weight in layer(model).items() if name != "input_layernorm.weight"}
    tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    return Pair(target, save(folder, plain(model) | {"num_hidden_layers": 1}, tensors, level))


def head_on_three_states(target: Path, folder: Path, level: str) -> Pair:
    """EAGLE-3: four heads are the target's over the embedding; others see only themselves, and put the embedding in the
    place of the hidden state."""
    model = target_model()
    own = layer(model)
    group = HEADS // KV_HEADS
    eye, ones = torch.eye(HIDDEN), torch.ones(HIDDEN)
    carriers = HIDDEN // HEAD_DIM
    alone = torch.zeros(carriers, HEAD_DIM, 2 * HIDDEN)
    alone[:, : HEAD_DIM // 2 - 1, ONE] = SELF

    def both(weight: Tensor, repeat: int, added: Tensor) -> Tensor:
        heads = weight.view(-1, HEAD_DIM, HIDDEN).repeat_interleave(repeat, dim=0).flatten(0, 1)
        return torch.cat([torch.cat([heads, torch.zeros_like(heads)], dim=1), added.view(-1, 2 * HIDDEN)])

    attention = {
        "q_proj": both(own["self_attn.q_proj.weight"], 1, alone),
        "k_proj": both(own["self_attn.k_proj.weight"], group, alone),
        "v_proj": both(own["self_attn.v_proj.weight"], group, torch.cat([eye, -eye], dim=1)),
        "o_proj": torch.cat([own["self_attn.o_proj.weight"], eye], dim=1),
    }
    tensors = {f"midlayer.{name}": weight for name, weight in own.items() if name.startswith("mlp.")}
    tensors |= {f"midlayer.self_attn.{name}.weight": weight for name, weight in attention.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = ones.clone()
    tensors |= {
        "fc.weight": 0.3 * torch.randn(HIDDEN, 3 * HIDDEN),
        "norm.weight": ones.clone(),
        "lm_head.weight": model.lm_head.weight.detach().flip(0),
        "d2t": VOCAB - 1 - 2 * torch.arange(VOCAB),  # draft id i is the target's VOCAB − 1 − i
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    config = plain(model) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS + carriers,
        "num_key_value_heads": HEADS + carriers,
        "draft_vocab_size": VOCAB,
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    return Pair(target, save(folder, config, tensors, level))


def own_heads(count: int) -> Builder:
    """MTP: heads in the target's checkpoint, here MiMo's form, each the target's layer over the embedding."""

    def build_pair(target: Path, folder: Path, level: str) -> Pair:
        model = target_model()
        shared = {name: weight.clone() for name, weight in model.state_dict().items()}
        sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        for index in range(2):
            shared |= {f"model.layers.{index}.self_attn.{n}.bias": torch.zeros(size) for n, size in sizes.items()}
        heads: Tensors = {}
        for head in range(count):
            prefix = f"model.mtp_layers.{head}."
            heads |= {prefix + name: weight for name, weight in layer(model).items()}
            heads |= {f"{prefix}self_attn.{n}.bias": torch.zeros(size) for n, size in sizes.items()}
            heads[prefix + "input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                heads[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
        config = plain(model) | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": count}
        save(folder, config, heads, level)
        save_file(shared | heads, folder / "model.safetensors")
        return Pair(folder, None)

    return build_pair


def block(target: Path, folder: Path, level: str) -> Pair:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Pair(target, block_draft(VOCAB, outputs_of=(0, 1)).save(folder))


LEVELS = ("equal", "near", "random")
# of each method: what builds its checkpoints, and how like the target its drafts can be made
BUILDERS: dict[str, list[tuple[str, Builder, tuple[str, ...]]]] = {
    "NGRAM": [("", no_draft, ("",))],
    "STANDALONE": [("", small_model, LEVELS)],
    "EAGLE": [("", head_on_final_states, LEVELS)],
    "EAGLE3": [("", head_on_three_states, LEVELS)],
    "MTP": [("", own_heads(1), LEVELS), ("3 ", own_heads(3), LEVELS)],
    "DFLASH": [("", block, ("random",))],
}


def drafts(method: str, *without: str) -> list[str]:
    """The names of a method's drafts, less those levels where it has others. A KeyError is a method that was registered
    without checkpoints here."""
    found = []
    for label, _, levels in BUILDERS[method]:
        found += [label + level for level in [level for level in levels if level not in without] or levels]
    return found


def build(method: str, draft: str, target: Path, folder: Path) -> Pair:
    for label, builder, levels in BUILDERS[method]:
        if draft.removeprefix(label) in levels:
            return builder(target, folder / f"{method} {draft}", draft.removeprefix(label))
    raise KeyError(f"{method} has no draft {draft!r}")


def within(method: str, draft: str, num_steps: int, topk: int) -> tuple[int, int]:
    """The settings next to these that the method can do with this draft."""
    if not next(known for known in registry.methods() if known.name == method).trees:
        topk = 1
    return (min(num_steps, 3), 1) if draft.startswith("3 ") else (num_steps, topk)
