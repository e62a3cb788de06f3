"""Tokenizers of folders that have no tokenizer.json: SentencePiece's tokenizer.model and Mistral's tekken.json."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from pilotfish_engine import files
from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.tokenizer.pieces import as_alphabet
from pilotfish_engine.tokenizer.sentencepiece import Kind, found_first, implied_merges, sentencepiece_backend

# What a tekken.json of version 3 does not list: the first twenty.
_MISTRALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
MOST_SPECIAL = 1 << 16
_BPE = 2  # trainer_spec.model_type


def read_tekken(file: Path) -> Tokenizer:
    """Raises CheckpointError."""
    try:
        return _tekken(files.read_json(file, files.LARGE))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{file}: not a tekken.json ({error!r}); give a whole one") from error


def read_sentencepiece(file: Path) -> Tokenizer:
    """Raises CheckpointError, also for what is no BPE."""
    try:
        return _sentencepiece(file, files.read(file, files.LARGE))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file}: not a SentencePiece model ({error!r}); give a whole one") from error


def _tekken(content: Any) -> Tokenizer:
    """Special tokens come first, so many as the settings say, and then the others by rank."""
    config = content["config"]
    count = config["default_num_special_tokens"]
    if type(count) is not int or not 0 <= count <= MOST_SPECIAL:
        raise ValueError(f"default_num_special_tokens is {count!r}, where 0 to {MOST_SPECIAL} are read")
    names = dict(enumerate(_MISTRALS))
    if content.get("special_tokens"):
        names = {token["rank"]: token["token_str"] for token in content["special_tokens"]}
    special = [names.get(i, f"<SPECIAL_{i}>") for i in range(count)]
    ranked = content["vocab"][: config["default_vocab_size"] - count]
    tokens = [as_alphabet(base64.b64decode(token["token_bytes"])) for token in ranked]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = implied_merges(vocabulary, [-float(i) for i in range(len(tokens))])
    ids = {token: count + i for token, i in vocabulary.items()} | {token: i for i, token in enumerate(special)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _begin(backend, "<s>")
    return backend


def _sentencepiece(file: Path, data: bytes) -> Tokenizer:
    """Fields by their numbers in sentencepiece_model.proto: 1 pieces, 2 trainer_spec, 3 normalizer_spec."""
    fields = list(_fields(data))
    pieces = [dict(_fields(value)) for number, value in fields if number == 1]
    trainer, normalizer = (dict(_fields(dict(fields).get(number, b""))) for number in (2, 3))
    if trainer.get(3, 1) != _BPE or normalizer.get(2) or normalizer.get(4, 1):
        raise CheckpointError(
            f"{file}: only a BPE model that normalizes nothing can be read; the tokenizer.json that "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) of `transformers` writes would work"
        )
    tokens = [piece[1].decode() for piece in pieces]
    scores = [struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0 for piece in pieces]
    kinds = [piece.get(3, Kind.NORMAL) for piece in pieces]
    backend = sentencepiece_backend(tokens, scores, kinds, prefix=bool(normalizer.get(3, 1)))
    backend.add_tokens(found_first(tokens, kinds))
    _begin(backend, tokens[trainer.get(41, 1)])
    return backend


def _begin(backend: Tokenizer, token: str) -> None:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    backend.post_processor = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, token_id)])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message (https://protobuf.dev/programming-guides/encoding): varints are
    numbers, everything else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 70:
            raise ValueError("a number has more than ten bytes")
        if byte < 128:
            return value, at
