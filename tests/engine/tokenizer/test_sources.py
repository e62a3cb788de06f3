"""Folders without tokenizer.json: SentencePiece's models and Mistral's tekken.json, written here as they are published.

Tried once against the library `sentencepiece` on Mistral's own models (versions 1, 3 and 7): 700 texts, no difference.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.mistral.tokenizer import MistralConverter

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.tokenizer import load
from tests.engine.tokenizer.families import FAMILIES, save_folder, texts, vocabulary_of


def message(*fields: tuple[int, Any]) -> bytes:
    """Protobuf: numbers as varints, floats in four bytes, texts and messages with their length."""
    data = bytearray()
    for number, value in fields:
        if isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(content)) + content
    return bytes(data)


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def sentencepiece_model(name: str, *, model_type: int = 2, prefix: bool = True) -> bytes:
    tokens, scores, kinds = vocabulary_of(FAMILIES[name].make())
    pieces = [
        (1, message((1, token), (2, score), (3, int(kind))))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    ]
    begin = next(i for i, token in enumerate(tokens) if token in ("<s>", "<bos>"))
    trainer = message((3, model_type), (10, 0.9995), (41, begin))
    normalizer = message((1, "identity"), (3, int(prefix)), (4, 0), (5, 1))
    return message(*pieces, (2, trainer), (3, normalizer))


@pytest.mark.parametrize("name", ["llama-2", "mistral-v1", "gemma-3"])
def test_a_sentencepiece_model_is_the_tokenizer_of_its_family(tmp_path: Path, name: str) -> None:
    made = load(save_folder(name, tmp_path / "whole"))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(name, prefix=name != "gemma-3"))
    read = load(tmp_path)
    assert read.pieces == made.pieces
    assert read.backend.id_to_token(min(read.eos_token_ids)) in ("</s>", "<eos>")
    for text in texts():
        token_ids = made.encode(text, add_special_tokens=True)
        assert read.encode(text, add_special_tokens=True) == token_ids
        assert read.decode(token_ids) == made.decode(token_ids)


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    whole = sentencepiece_model("llama-2")
    for content, sentence in (
        (sentencepiece_model("llama-2", model_type=1), r"only a BPE model .*save_pretrained.* would work"),
        (b"\xff\xff", "not a SentencePiece model"),
        (whole[:-3], "not a SentencePiece model"),
        (whole[:5000], "only a BPE model|not a SentencePiece model"),
        (b"", "only a BPE model|not a SentencePiece model"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=sentence):
            load(tmp_path)


def tekken(folder: Path, special: list[dict[str, Any]] | None) -> str:
    """folder: an empty one, for the family's tokenizer."""
    made, count = load(save_folder("tekken", folder)), 100
    words = [made.pieces[i] for i in range(made.vocab_size) if made.pieces[i]]
    content = {
        "config": {
            "pattern": json.loads(made.backend.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
            "num_vocab_tokens": len(words),
            "default_vocab_size": count + len(words) - 7,  # files have more words than models
            "default_num_special_tokens": count,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
    }
    return json.dumps(content if special is None else content | {"special_tokens": special})


LISTED = [
    {"rank": i, "token_str": text, "is_control": True}
    for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[X]"])
]


def test_a_tekken_json_is_read_as_the_reference_does(tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    file.write_text(tekken(tmp_path / "family", LISTED))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ eos_token }}")
    read, other = load(tmp_path), MistralConverter(str(file)).converted()
    assert read.vocab_size == other.get_vocab_size()
    for text in [*texts(), "a[INST]b[X]</s>"]:
        token_ids = other.encode(text, add_special_tokens=False).ids
        assert read.encode(text) == token_ids
        assert read.encode(text, add_special_tokens=True) == [1, *token_ids]
        assert read.decode(token_ids) == other.decode(token_ids, skip_special_tokens=True)
    assert read.eos_token_ids == {2}
    assert read.encode_chat([]) == [1, 3, 2]


def test_older_tekken_files_list_no_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(tekken(tmp_path / "family", None))
    assert load(tmp_path).encode("[TOOL_CALLS]</s>[SYSTEM_PROMPT]") == [9, 2, 17]
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not a tekken\.json"):
        load(tmp_path)


def test_other_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"vocab\.json cannot be read; the tokenizer\.json that .* would work"):
        load(tmp_path)
