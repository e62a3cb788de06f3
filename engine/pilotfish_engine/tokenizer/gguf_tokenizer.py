"""The tokenizer that a GGUF file carries in its metadata: byte-level BPE of the kinds named in `_PRE_TOKENIZERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.tokenizer.chat import ChatTemplate
from pilotfish_engine.tokenizer.gguf_metadata import read_metadata
from pilotfish_engine.tokenizer.vocabulary import Tokenizer, byte_pieces

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Llama 3 and Qwen 2 split alike but for the length of a number.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": lambda: _split("{1,3}"),
    "qwen2": lambda: _split(""),
}


def load_gguf(path: Path) -> Tokenizer:
    """Raises CheckpointError when the file has no tokenizer, or one of another kind."""
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in read_metadata(path).items()
        if key.startswith("tokenizer.")
    }
    try:
        return _build(path, metadata)
    except KeyError as error:
        raise CheckpointError(
            f"{path}: tokenizer.{error.args[0]} is missing; give a GGUF file with its tokenizer"
        ) from error


def _build(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    model, pre = metadata["ggml.model"], metadata.get("ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: its tokenizer is {model!r} with pre-tokenizer {pre!r}; "
            f"'gpt2' with one of {', '.join(_PRE_TOKENIZERS)} would work"
        )
    tokens: list[str] = metadata["ggml.tokens"]
    kinds: list[int] = metadata.get("ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["ggml.merges"]]
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    special = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
    ends = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")
    return Tokenizer(
        backend=backend,
        pieces=byte_pieces(tokens, special),
        eos_token_ids=frozenset(metadata[key] for key in ends if key in metadata),
        chat_template=_chat_template(metadata, tokens),
        bos_token_id=metadata.get("ggml.bos_token_id"),
        add_bos=metadata.get("ggml.add_bos_token", False),
    )


def _chat_template(metadata: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = metadata.get("chat_template")
    if source is None:
        return None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"ggml.{key}_token_id") for name, key in names.items()}
    return ChatTemplate(source, {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)})
