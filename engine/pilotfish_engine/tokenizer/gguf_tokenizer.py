"""The tokenizer that a GGUF file carries in its metadata: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

Keys, their defaults and which tokens end an answer are llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.gguf_file import read_keys
from pilotfish_engine.tokenizer.gguf_splits import SPLITS
from pilotfish_engine.tokenizer.pieces import read_pieces
from pilotfish_engine.tokenizer.sentencepiece import Kind, found_first, sentencepiece_backend
from pilotfish_engine.tokenizer.templates import chosen_template, gguf_templates
from pilotfish_engine.tokenizer.vocabulary import Tokenizer

# What chats and texts end with; a file mostly names one of them, and its model writes others too.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>", "[e~["),
}
_AMONG_MORE = ("<|end|>", {"<|return|>", "<|call|>"})  # there the first ends a message, and not the answer
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3


@dataclass(frozen=True)
class _Defaults:
    """Where the file says nothing: None is no token."""

    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False


def load_gguf(path: Path) -> Tokenizer:
    """Raises CheckpointError when the file has no tokenizer, or one of another kind."""
    metadata = read_keys(path)
    found = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    try:
        return _build(path, found, str(metadata.get("general.name", "")))
    except KeyError as error:
        raise CheckpointError(
            f"{path}: tokenizer.{error.args[0]} is missing; give a GGUF file with its tokenizer"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # values of other kinds than their keys have; the library raises no narrower class
        raise CheckpointError(f"{path}: its tokenizer is damaged ({error}); give a whole GGUF file") from error


def _build(path: Path, metadata: Mapping[str, Any], name: str) -> Tokenizer:
    model, pre = metadata["ggml.model"], metadata.get("ggml.pre", "default")
    if model not in ("gpt2", "llama") or (model == "gpt2" and pre not in SPLITS):
        raise CheckpointError(
            f"{path}: its tokenizer is {model!r} with pre-tokenizer {pre!r}; "
            f"'llama', or 'gpt2' with one of {', '.join(SPLITS)} would work"
        )
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(metadata["ggml.tokens"])]
    kinds: list[int] = metadata.get("ggml.token_type", [Kind.NORMAL] * len(tokens))
    if len(set(tokens)) < len(tokens) or len(kinds) < len(tokens):
        raise CheckpointError(
            f"{path}: of its {len(tokens)} tokens {len(set(tokens))} differ, and {len(kinds)} have a type; "
            "a GGUF file that llama.cpp can read would work"
        )
    if model == "llama":
        scores = metadata.get("ggml.scores", [0.0] * len(tokens))
        if len(scores) < len(tokens):
            raise CheckpointError(f"{path}: {len(scores)} of its {len(tokens)} tokens have a score; give a whole file")
        backend = sentencepiece_backend(tokens, scores, kinds, prefix=metadata.get("ggml.add_space_prefix", True))
        defaults = _Defaults(1, 2, add_bos=True)
    else:
        backend = _byte_level(metadata, tokens, pre)
        defaults = _Defaults(add_bos=SPLITS[pre].add_bos)
    special = {i for i, kind in enumerate(kinds[: len(tokens)]) if kind in (Kind.CONTROL, Kind.UNKNOWN)}
    phi3 = "phi-3" in name.lower() or "phi3" in name.lower()  # no key says that its tokens swallow spaces behind them
    backend.add_tokens(found_first(tokens, kinds, strip=lambda token: phi3 and token not in _NOT_STRIPPED))
    ids = _named(metadata, len(tokens), defaults)
    _frame(backend, metadata, tokens, ids, defaults)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    shown = {key: tokens[ids[short]] for key, short in names.items() if short in ids}
    return Tokenizer(
        backend=backend,
        decoding=read_pieces(backend.decoder, tokens, special),
        eos_token_ids=_ends(tokens, special, ids),
        end_token_id=ids.get("eot", ids.get("eos")),
        chat_template=chosen_template(gguf_templates(metadata), shown),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> Backend:
    splits = SPLITS[pre]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    halves = ((merge[:at], merge[at + 1 :]) for merge in metadata["ggml.merges"] if (at := merge.find(" ", 1)) > 0)
    merges = [(left, right) for left, right in halves if {left, right, left + right} <= vocabulary.keys()]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splits.whole_words))
    backend.pre_tokenizer = splits.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _named(metadata: Mapping[str, Any], size: int, defaults: _Defaults) -> dict[str, int]:
    """Ids by the name in the middle of `tokenizer.ggml.NAME_token_id`."""
    named = {"bos": defaults.bos, "eos": defaults.eos}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        found = metadata.get(f"ggml.{name}_token_id")
        if type(found) is int and 0 <= found < size:
            named[name] = found
    return {name: i for name, i in named.items() if i is not None and i < size}


def _frame(
    backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int], defaults: _Defaults
) -> None:
    """What stands around a bare prompt."""
    begins = metadata.get("ggml.add_bos_token", defaults.add_bos) and "bos" in ids
    ends = metadata.get("ggml.add_eos_token", False) and "eos" in ids
    first, last = [tokens[ids["bos"]]] if begins else [], [tokens[ids["eos"]]] if ends else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokens.index(token)) for token in {*first, *last}],
        )


def _ends(tokens: Sequence[str], special: Collection[int], ids: Mapping[str, int]) -> frozenset[int]:
    ends = {i for i in special if tokens[i] in _ENDS} | {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    inner, others = _AMONG_MORE
    if others <= {tokens[i] for i in ends}:
        ends -= {i for i in ends if tokens[i] == inner and i != ids.get("eos")}
    return frozenset(ends)
