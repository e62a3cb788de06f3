"""Says what an EAGLE, EAGLE-2 or EAGLE-3 head is like, and which tensors it has.

Formats: those of SafeAILab (EAGLE, arXiv 2401.15077; EAGLE-2, 2406.16858: the same head; EAGLE-3, 2503.01840) with the
names that SpecForge, ModelOpt, SGLang and vLLM write, the norms of EAGLE-3.1 (2605.09992), and vLLM's `speculators`.
Reads a parsed config and tensor names. Knows nothing about files, weights or the target beyond what the config says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.files import as_they_should_be
from pilotfish_engine.model.config_json import Config, architecture_of
from pilotfish_engine.model.families import draft_shape_from_config
from pilotfish_engine.model.shape import ModelShape

Method = Literal["EAGLE", "EAGLE3"]
Shapes = Mapping[str, tuple[int, ...]]

METHODS: dict[Method, str] = {"EAGLE": "an EAGLE head", "EAGLE3": "an EAGLE-3 head"}
SPECULATORS: dict[str, Method] = {"eagle": "EAGLE", "eagle3": "EAGLE3"}  # values of speculators_model_type
FAMILIES = {  # of the head's own layers, by model_type
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_AUX = 3

# fields that are beside transformer_layer_config in a speculators config, or in eagle_config
OWN_FIELDS = (
    "draft_vocab_size",
    "target_hidden_size",
    AUX_IDS,
    "num_aux_hidden_states",
    "use_aux_hidden_state",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "fusion_bias",
    "layernorms",
    "parallel_drafting",
    "parallel_draft_step",
    "use_mtp_layernorm",
    "quantization_config",
)
# fields with one value that runs, which is also what their absence means
FIXED: dict[str, Any] = {
    "parallel_drafting": False,
    "parallel_draft_step": 1,
    "use_mtp_layernorm": False,
    "layernorms": False,  # norms around the head's layer: its readers disagree on what recurs
    "add_para_norm": False,
    "logit_scale": 1,
}


@dataclass(frozen=True, kw_only=True)
class FusionShape:
    """How a head reads the target. target_hidden_size: width of the hidden states that are read, of num_aux of the
    target's layers side by side, or with 0 of the target's final ones. aux_ids: as the config names those layers (None:
    the usual three). fc, fc_bias: whether there is such a tensor."""

    target_hidden_size: int
    num_aux: int = 0
    aux_ids: tuple[int, ...] | None = None
    fc: bool = True
    fc_bias: bool
    norm_before_fc: bool = False
    fc_norm: bool = False

    @property
    def feature_size(self) -> int:
        return self.target_hidden_size * max(1, self.num_aux)


@dataclass(frozen=True, kw_only=True)
class HeadShape(FusionShape):
    """block: the head's own layers, its vocab_size that of the embedding. draft_vocab_size: rows of the head.

    own_embed, lm_head: whose tensors are used. has_d2t: draft ids differ from the target's. verifier: the target's
    architectures where the checkpoint names them.
    """

    method: Method
    block: ModelShape
    draft_vocab_size: int
    own_embed: bool
    lm_head: Literal["own", "own embedding", "target"]
    has_d2t: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    verifier: tuple[str, ...] = ()

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight by its canonical name (see `canonical`), each exactly once, in the order of use."""
        hidden = self.block.hidden_size
        if self.own_embed:
            yield "embed_tokens.weight", (self.block.vocab_size, hidden)
        if self.norm_before_fc:
            yield "input_norm.weight", (self.feature_size,)
        if self.fc_norm:
            for index in range(self.num_aux):
                yield f"fc_norm.{index}.weight", (self.target_hidden_size,)
        if self.fc:
            yield "fc.weight", (hidden, 2 * hidden if self.method == "EAGLE" else self.feature_size)
        if self.fc_bias:
            yield "fc.bias", (hidden,)
        yield from self._first_layer()
        for index in range(1, self.block.num_layers):
            yield from self.block.layer_tensors(f"layers.{index}.", index)
        if self.method == "EAGLE3":
            yield "norm.weight", (hidden,)
        if self.lm_head == "own":
            yield "lm_head.weight", (self.draft_vocab_size, hidden)

    def _first_layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """EAGLE's has no norm before attention; EAGLE-3's attention reads embedding and hidden state, each normed."""
        hidden = self.block.hidden_size
        if self.method == "EAGLE3":
            yield "layers.0.hidden_norm.weight", (hidden,)
        for name, shape in self.block.layer_tensors("layers.0.", 0):
            if name == "layers.0.input_layernorm.weight" and self.method == "EAGLE":
                continue
            reads_both = self.method == "EAGLE3" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            yield name, (shape[0], 2 * hidden) if reads_both else shape

    def aux_layers(self, num_layers: int, where: str) -> tuple[int, ...]:
        """The layers of a target of `num_layers` whose inputs are read; `num_layers` stands for what leaves the last.

        Checkpoints name layers in two conventions: by their input, or by their output, when the first id is 1 (told
        apart as SGLang does, pull request 25454). Raises CheckpointError unless they ascend within the target.
        """
        if self.num_aux == 0:
            return ()
        ids = self.aux_ids
        layers: tuple[int, ...]
        if ids is None:
            layers = (2, num_layers // 2, num_layers - 3)
            named = f"{where}: no {AUX_IDS}, and the usual three would be {list(layers)}"
        else:
            layers = tuple(i + 1 for i in ids) if ids[0] == 1 else ids
            named = f"{where}: {AUX_IDS} {list(ids)}" + (" (of outputs, as the first is 1)" if ids[0] == 1 else "")
        if len(layers) > num_layers + 1:
            raise CheckpointError(
                f"{named} are {len(layers)}, and a target of {num_layers} layers has {num_layers + 1}"
            )
        if not all(0 <= layer <= num_layers for layer in layers):
            raise CheckpointError(
                f"{named}, which reach outside of the target's {num_layers} layers; a draft trained beside this "
                "target would work"
            )
        if any(a >= b for a, b in pairwise(layers)):
            raise CheckpointError(
                f"{named}, which do not ascend in a target of {num_layers} layers; "
                "distinct layers in ascending order would work"
            )
        return layers


def canonical(name: str) -> str:
    """One spelling for each tensor: without `model.`, layers as `layers.N.`, speculators' EAGLE as SafeAILab's."""
    name = name.removeprefix("model.")
    for other, own in (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc.")):
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


def method_of(config: Mapping[str, Any], tensors: Shapes) -> Method | None:
    """Which method the checkpoint belongs to, by `speculators_model_type`, else by tensors, else by architecture."""
    if "speculators_model_type" in config:
        return SPECULATORS.get(str(config["speculators_model_type"]))
    if "layers.0.hidden_norm.weight" in tensors or "d2t" in tensors:
        return "EAGLE3"
    has_head = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors.keys()
    if has_head and "layers.0.input_layernorm.weight" not in tensors:
        return "EAGLE"
    architecture = _architecture(config).lower()
    if "eagle3" in architecture:
        return "EAGLE3"
    return "EAGLE" if "eagle" in architecture else None


def head_shape(method: Method, config: Mapping[str, Any], tensors: Shapes, one_layer: bool, where: str) -> HeadShape:
    """The head that a config.json describes beside tensors of canonical names. one_layer: the checkpoint's format has
    one layer, whatever its config says. Raises CheckpointError on what cannot run."""
    with as_they_should_be(where):
        return _head_shape(method, config, tensors, one_layer, where)


def _head_shape(method: Method, config: Mapping[str, Any], tensors: Shapes, one_layer: bool, where: str) -> HeadShape:
    fields = _flat(config, where)
    for key, plain in FIXED.items():
        if (fields.get(key) or plain) != plain:
            raise CheckpointError(f"{where}: {key} {fields[key]!r} is not supported; {plain!r} would work")
    block = _block(fields, tensors, one_layer, where)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    shape = HeadShape(
        method=method,
        block=block,
        draft_vocab_size=block.vocab_size,
        target_hidden_size=block.hidden_size,
        own_embed="embed_tokens.weight" in tensors,
        lm_head="own" if "lm_head.weight" in tensors else "target",
        fc_bias="fc.bias" in tensors,
        verifier=tuple(Config(verifier, where).texts("architectures")),
    )
    if method == "EAGLE":
        named = fields.get("fusion_bias", fields.get("bias"))
        truncated = Config(fields, where).positive("truncated_vocab_size", block.vocab_size)
        if truncated != block.vocab_size:
            raise CheckpointError(
                f"{where}: truncated_vocab_size is {truncated} and vocab_size {block.vocab_size}; equal ones would work"
            )
        return shape if named is None else replace(shape, fc_bias=bool(named))
    return _with_fusion(_with_vocabulary(shape, fields, tensors, where), fields, tensors, where)


def _with_vocabulary(shape: HeadShape, fields: Mapping[str, Any], tensors: Shapes, where: str) -> HeadShape:
    vocab_size = shape.block.vocab_size
    named = fields.get("draft_vocab_size")
    size = vocab_size if named is None else named
    if type(size) is not int or not 0 < size <= vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size is {size!r} and vocab_size {vocab_size}; from 1 to {vocab_size} would work"
        )
    lm_head = shape.lm_head
    if size != vocab_size:
        lm_head = "own"
    elif lm_head == "target" and shape.own_embed and shape.block.tie_word_embeddings:
        lm_head = "own embedding"
    return replace(shape, draft_vocab_size=size, lm_head=lm_head, has_d2t=size != vocab_size or "d2t" in tensors)


def _with_fusion(shape: HeadShape, fields: Mapping[str, Any], tensors: Shapes, where: str) -> HeadShape:
    """The layers that are read, and what happens to them before the head's own layers."""
    if "speculators_model_type" in fields and fields.get("norm_before_residual") is None:
        raise CheckpointError(
            f"{where}: no norm_before_residual, whose default differs between readers; true or false would work"
        )
    hidden = shape.block.hidden_size
    width = Config(fields, where).positive("target_hidden_size", hidden)
    num_aux, ids, named = _aux(fields, where)
    fc = tensors.get("fc.weight", ())
    if len(fc) == 2 and fc[1] % width == 0 and fc[1] // width != num_aux:
        raise CheckpointError(
            f"{where}: {named}, but fc.weight of shape {list(fc)} reads {fc[1] // width} of {width} each; "
            "files and config of the same head would work"
        )
    norm_before_fc, fc_norm = bool(fields.get("norm_before_fc")), bool(fields.get("fc_norm"))
    if (norm_before_fc or fc_norm) and num_aux == 0:
        key = "norm_before_fc" if norm_before_fc else "fc_norm"
        raise CheckpointError(f"{where}: {key} is true, but {named}; {key} false would work")
    if norm_before_fc and fc_norm:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm are both true; one of them would work")
    return replace(
        shape,
        target_hidden_size=width,
        num_aux=num_aux,
        aux_ids=ids,
        fc=num_aux > 0 and ("fc.weight" in tensors or num_aux * width != hidden),
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=bool(fields.get("norm_output")),
    )


def _aux(fields: Mapping[str, Any], where: str) -> tuple[int, tuple[int, ...] | None, str]:
    """How many of the target's layers are read, which, and where that stands."""
    if fields.get("use_aux_hidden_state") is False:
        return 0, None, "use_aux_hidden_state is false"
    ids, count = fields.get(AUX_IDS) or None, fields.get("num_aux_hidden_states")
    if ids is None:
        if count not in (None, DEFAULT_AUX):
            raise CheckpointError(
                f"{where}: num_aux_hidden_states is {count!r}, and no {AUX_IDS} says which; it would work with them"
            )
        return DEFAULT_AUX, None, f"{DEFAULT_AUX} of the target's layers are read where no {AUX_IDS} names others"
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CheckpointError(f"{where}: {AUX_IDS} is {ids!r}; a list of layer numbers would work")
    if count not in (None, len(ids)):
        raise CheckpointError(
            f"{where}: {AUX_IDS} {ids} are {len(ids)}, but num_aux_hidden_states is {count!r}; equal ones would work"
        )
    return len(ids), tuple(ids), f"{AUX_IDS} {ids} are {len(ids)}"


def _block(fields: Mapping[str, Any], tensors: Shapes, one_layer: bool, where: str) -> ModelShape:
    """The head's own layers, as a causal LM of their family would have them."""
    kind = fields.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{where}: layers of model_type {kind!r} are not supported in a head; {', '.join(FAMILIES)} would work"
        )
    given = {**fields, "architectures": [FAMILIES[kind]]}
    if one_layer:
        given["num_hidden_layers"] = 1
    if given.get("layer_types"):  # some are the target's
        given["layer_types"] = given["layer_types"][: given.get("num_hidden_layers")]
    block = draft_shape_from_config(given, where)
    qkv_bias = given.get("qkv_bias")
    if qkv_bias is None:  # SafeAILab's heads of Qwen2 have none, SGLang's have
        qkv_bias = block.qkv_bias and (kind != "qwen2" or "layers.0.self_attn.q_proj.bias" in tensors)
    return replace(block, qkv_bias=bool(qkv_bias))


def _flat(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All fields on one level: those of a speculators config, of vLLM's nested `model`, and of `eagle_config`."""
    fields = dict(config)
    if "speculators_model_type" in config:
        layers = config.get("transformer_layer_config")
        if not isinstance(layers, dict):
            raise CheckpointError(f"{where}: transformer_layer_config is {layers!r}; an object would work")
        own = {key: config[key] for key in OWN_FIELDS if config.get(key) is not None}
        fields = {**layers, **own, "speculators_model_type": config["speculators_model_type"]}
    elif config.get("model_type") == "eagle":
        fields = {**fields, "model_type": "llama", **(config.get("model") or {})}
    for key, value in (config.get("eagle_config") or {}).items():
        if key in OWN_FIELDS and value is not None:
            if fields.get(key) not in (None, value):
                raise CheckpointError(
                    f"{where}: {key} is {fields[key]!r}, but {value!r} in eagle_config; equal ones would work"
                )
            fields[key] = value
    return fields


def _architecture(config: Mapping[str, Any]) -> str:
    return architecture_of(config, "config.json")
