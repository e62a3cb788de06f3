"""All that is known of a checkpoint without reading its weights, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pilotfish_engine.config import EngineConfig
from pilotfish_engine.errors import CheckpointError, UsageError
from pilotfish_engine.inspection import verdicts
from pilotfish_engine.inspection.verdicts import Fit, Offers
from pilotfish_engine.model.checkpoint import open_whole
from pilotfish_engine.model.config_json import MOST, MOST_OF, architecture_of
from pilotfish_engine.model.families import draft_shape_from_config
from pilotfish_engine.model.safetensors_checkpoint import SafetensorsFolder
from pilotfish_engine.model.shape import ModelShape, RopeShape
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import apart, load

WIDTHS = {"bfloat16": 2, "float32": 4}  # bytes
ATTENTION = ".self_attn."


@dataclass(frozen=True)
class Sizes:
    """layers: that hold attention; window: how many positions `windowed` of them see. kv_elements: numbers that one
    token takes in the KV cache, in all layers."""

    layers: int
    hidden_size: int
    intermediate_size: int | None
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int | None
    tied: bool
    kv_elements: int
    window: int | None = None
    windowed: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes, as loaded in one dtype. kv: of max_running_requests requests of max_model_len tokens each."""

    weights: int
    kv_token: int
    kv_context: int | None
    kv: int | None


@dataclass(frozen=True)
class Stored:
    """What the files take, and how many numbers of each dtype they hold."""

    bytes: int
    dtypes: Mapping[str, int]


class _Judged(NamedTuple):
    draft_of: tuple[str, ...]
    offers: Offers | None
    fit: Fit | None


@dataclass(frozen=True)
class Description:
    """family: as the config names it. draft_of: the methods whose draft this is, or can be. parameters: those that are
    loaded; beside: numbers in the files that are not the model's own, such as heads. offers: of a model. fit: beside
    the target that was named."""

    path: str
    family: str
    is_model: bool
    sizes: Sizes
    parameters: int
    beside: int
    stored: Stored
    tokenizer: str
    draft_of: tuple[str, ...]
    offers: Offers | None
    fit: Fit | None
    max_model_len: int | None
    max_running_requests: int
    memory: Mapping[str, Memory]


def describe(config: EngineConfig, target: str | None = None) -> Description:
    """Of config.model.source, and how it goes with `target`. Raises CheckpointError on what is damaged, or of no kind
    that the engine knows."""
    path = resolve(config.model.source)
    beside = None if target is None else _open_target(target)
    try:
        checkpoint = open_whole(path)
        apart.check(path)
    except apart.UnsafeTokenizer:
        raise
    except CheckpointError as error:
        return _draft(config, path, beside, error)
    shape = checkpoint.shape
    parameters = sum(map(prod, checkpoint.tensor_shapes.values()))
    return _description(
        config,
        path,
        shape.architecture,
        _sizes_of(shape),
        parameters,
        checkpoint.stored_as,
        _Judged(
            draft_of=verdicts.as_draft(path, shape),
            offers=verdicts.as_target(path, shape),
            fit=None if beside is None else verdicts.beside(*beside, path),
        ),
    )


def _open_target(source: str) -> tuple[Path, ModelShape]:
    path = resolve(source)
    checkpoint = open_whole(path)
    apart.check(path)
    return path, checkpoint.shape


def _draft(
    config: EngineConfig, path: Path, beside: tuple[Path, ModelShape] | None, no_model: CheckpointError
) -> Description:
    """Of what is no whole model. Raises `no_model` where no method says that it is its draft."""
    if not path.is_dir():
        raise no_model
    folder = SafetensorsFolder(path)
    fields, shapes = _fields(folder.config), [] if beside is None else [beside[1]]
    own = None
    with suppress(CheckpointError):
        own = draft_shape_from_config(folder.config, str(folder.config_file))
        shapes.append(own)
    shapes.append(_unknown_target(fields))
    apart.check(path)
    method = verdicts.draft_method(path, shapes)
    if method is None:
        raise no_model
    layers = len({name.partition(ATTENTION)[0] for name in folder.tensor_shapes if ATTENTION in name})
    return _description(
        config,
        path,
        str(folder.config.get("speculators_model_type") or architecture_of(folder.config, str(path))),
        _sizes_of_draft(fields, layers, own),
        sum(map(prod, folder.tensor_shapes.values())),
        folder.stored_as,
        _Judged((method.name,), None, None if beside is None else verdicts.beside(*beside, path, method)),
    )


def _description(
    config: EngineConfig,
    path: Path,
    family: str,
    sizes: Sizes,
    parameters: int,
    stored_as: Mapping[str, int],
    judged: _Judged,
) -> Description:
    longest = config.model.max_model_len
    if longest is not None and judged.offers is not None and sizes.context is not None and longest > sizes.context:
        raise UsageError(
            f"--max-model-len is {longest}, and {path} reaches {sizes.context}; at most {sizes.context} would work"
        )
    requests = config.capacity.max_running_requests
    longest = longest or sizes.context

    def memory(width: int) -> Memory:
        token = sizes.kv_elements * width
        return Memory(
            weights=parameters * width,
            kv_token=token,
            kv_context=None if sizes.context is None else token * sizes.context,
            kv=None if longest is None else token * longest * requests,
        )

    return Description(
        path=str(path),
        family=family,
        is_model=judged.offers is not None,
        sizes=sizes,
        parameters=parameters,
        beside=max(0, sum(stored_as.values()) - parameters),
        stored=Stored(_stored_bytes(path), dict(sorted(stored_as.items(), key=lambda item: -item[1]))),
        tokenizer=_tokenizer(path),
        **judged._asdict(),
        max_model_len=longest,
        max_running_requests=requests,
        memory={name: memory(width) for name, width in WIDTHS.items()},
    )


def _sizes_of(shape: ModelShape) -> Sizes:
    return Sizes(
        layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        context=shape.max_position_embeddings,
        tied=shape.tie_word_embeddings,
        kv_elements=shape.kv_elements_per_token,
        window=None if shape.window is None else shape.window.size,
        windowed=0 if shape.window is None else len(shape.window.layers),
    )


def _sizes_of_draft(fields: Mapping[str, Any], layers: int, own: ModelShape | None) -> Sizes:
    """own: of one of its layers, where the config names a family."""
    if own is not None:
        return replace(_sizes_of(own), layers=layers, kv_elements=own.kv_elements_per_token // own.num_layers * layers)
    heads, hidden = _number(fields, "num_attention_heads", 1), _number(fields, "hidden_size", 0)
    kv_heads = _number(fields, "num_key_value_heads", heads)
    head_dim = _number(fields, "head_dim", hidden // heads)
    return Sizes(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=_number(fields, "intermediate_size", 0) or None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_number(fields, "vocab_size", 0),
        context=_number(fields, "max_position_embeddings", 0) or None,
        tied=bool(fields.get("tie_word_embeddings", False)),
        kv_elements=2 * layers * kv_heads * head_dim,
    )


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes layers: all of it, or one of its objects."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return next((part for part in parts if "hidden_size" in part), config)


def _number(fields: Mapping[str, Any], key: str, default: int) -> int:
    value = fields.get(key)
    return value if type(value) is int and 0 < value <= MOST_OF.get(key, MOST) else default


def _unknown_target(fields: Mapping[str, Any]) -> ModelShape:
    """One that goes with whatever the draft says of it, so that only the draft itself is judged."""
    return ModelShape(
        architecture="an unknown target",
        num_layers=verdicts.MANY_LAYERS,
        hidden_size=_number(fields, "hidden_size", 1),
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=1,
        vocab_size=_number(fields, "vocab_size", 1),
        rms_norm_eps=1e-6,
        rope=RopeShape(10000.0),
        max_position_embeddings=1,
        tie_word_embeddings=False,
    )


def _stored_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file())


def _tokenizer(path: Path) -> str:
    try:
        tokenizer = load(path)
    except CheckpointError as error:
        return f"none that can be used: {error}"
    chat = "with" if tokenizer.chat_template is not None else "without"
    return f"{tokenizer.vocab_size} tokens, {chat} a chat template"
