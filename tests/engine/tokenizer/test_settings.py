"""What the files beside tokenizer.json say, and what a GGUF file's keys do: against the reference library, and
llama.cpp's defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pilotfish_engine.errors import CheckpointError
from pilotfish_engine.gguf_file import read_keys
from pilotfish_engine.tokenizer import gguf_tokenizer, load
from tests.engine.tokenizer.families import save_folder, save_gguf, texts

Files = Mapping[str, Any]
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def folder_of(tmp_path: Path, files: Files, family: str = "llama-2") -> Path:
    """files: their texts, or what is written as JSON; tokenizer_config.json's are added to the family's own."""
    save_folder(family, tmp_path)
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            content = json.loads(file.read_text()) | content
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def token(text: str, **flags: bool) -> dict[str, Any]:
    known = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": text, **known, **flags}


NAMED_AS = {"__type": "AddedToken"}
ADDED: list[Files] = [
    {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"9000": token("<new>"), "8000": token("<shown>", special=False)}
        }
    },
    {"tokenizer_config.json": {"added_tokens_decoder": {"2": token("</s>", lstrip=True, rstrip=True)}}},
    {"tokenizer_config.json": {"added_tokens_decoder": {"7": token("<w>", single_word=True, special=False)}}},
    {"tokenizer_config.json": {"added_tokens_decoder": {"7": token("Hello", normalized=True, special=False)}}},
    {"tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": NAMED_AS | token("<pad>"), "bos_token": None}},
    {"tokenizer_config.json": {"additional_special_tokens": ["<a>", "<b>"], "image_token": "<img>"}},
    {"tokenizer_config.json": {"extra_special_tokens": {"audio_token": "<aud>"}}},
    {"added_tokens.json": {"<late>": 901, "<early>": 900}, "special_tokens_map.json": {"eos_token": "<late>"}},
    {"special_tokens_map.json": {"additional_special_tokens": ["<x>", "<y>"], "pad_token": "<y>"}},
    {"tokenizer_config.json": {"split_special_tokens": True}},
]
MARKED = [
    *("a <new> b <shown> c", "x </s> y</s>", "<w>a <w> b<w>", "Hello Hello world", "<|im_end|><pad>z"),
    *("<a> <b><img><aud>", "<late>q<early> r", "<x><y>", "<s>[INST]", "▁Hello </s>"),
]


@pytest.mark.parametrize("family", ["llama-2", "gemma-3", "qwen-3"])
@pytest.mark.parametrize("files", ADDED)
def test_added_tokens_are_the_references(tmp_path: Path, files: Files, family: str) -> None:
    path = folder_of(tmp_path, files, family)
    own, other = load(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert own.vocab_size == len(other)
    for text in MARKED:
        token_ids = other.encode(text)
        assert own.encode(text, add_special_tokens=True) == token_ids
        assert own.decode(token_ids) == other.decode(token_ids, skip_special_tokens=True)


def test_lengths_that_were_set_for_training_cut_and_fill_nothing(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {})
    made = Tokenizer.from_file(str(path / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=64, pad_token="<unk>")
    made.save(str(path / "tokenizer.json"))
    text = texts()[6]
    assert load(path).encode(text) == PreTrainedTokenizerFast.from_pretrained(path).encode(
        text, add_special_tokens=False
    )
    assert 4 < len(load(path).encode(text)) != 64


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": [5, 6]}, "generation_config.json": {"eos_token_id": 7}}, {5, 6, 7}),
        ({"config.json": {"text_config": {"eos_token_id": [8]}}}, {8}),
        ({"tokenizer_config.json": {"eos_token": "</s>"}, "generation_config.json": {"eos_token_id": [9]}}, {2, 9}),
        ({"tokenizer_config.json": {"eos_token": token("</s>")}, "config.json": {"eos_token_id": None}}, {2}),
        ({"special_tokens_map.json": {"eos_token": token("</s>")}}, {2}),
        ({"config.json": {"eos_token_id": [-1, "2", True, 4]}}, {4}),
        ({}, set()),
    ],
)
def test_the_ends_of_all_files_are_joined(tmp_path: Path, files: Files, ends: set[int]) -> None:
    assert load(folder_of(tmp_path, files)).eos_token_ids == ends


def test_a_written_answer_ends_as_the_tokenizer_says(tmp_path: Path) -> None:
    files = {"config.json": {"eos_token_id": [5, 6]}, "generation_config.json": {"eos_token_id": [7, 1]}}
    assert load(folder_of(tmp_path, files)).end_token_id == 7
    assert load(folder_of(tmp_path, {"tokenizer_config.json": {"eos_token": "</s>"}})).end_token_id == 2
    assert load(save_gguf("llama-3", tmp_path / "m.gguf", eos_token_id=9, eot_token_id=8)).end_token_id == 8


NAMED = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
TEMPLATES: list[Files] = [
    {"tokenizer_config.json": {"chat_template": "C{{ bos_token }}", "bos_token": "<s>"}},
    {"tokenizer_config.json": {"chat_template": NAMED, "bos_token": NAMED_AS | token("<s>")}},
    {"tokenizer_config.json": {"chat_template": {"default": "D", "tool_use": "T", "rag": "R"}}},
    {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": "J{{ eos_token }}"},
    {
        "chat_template.jinja": "J",
        "additional_chat_templates/tool_use.jinja": "A",
        "additional_chat_templates/x.jinja": "X",
    },
    {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "only"}]}},
    {"special_tokens_map.json": {"sep_token": "<sep>"}, "tokenizer_config.json": {"chat_template": "{{ sep_token }}"}},
]


@pytest.mark.parametrize("files", TEMPLATES)
def test_chat_templates_are_chosen_as_the_reference_does(tmp_path: Path, files: Files) -> None:
    path = folder_of(tmp_path, files)
    own, other = load(path).chat_template, PreTrainedTokenizerFast.from_pretrained(path)
    assert own is not None
    for tools in ([], TOOLS):
        text = other.apply_chat_template(HELLO, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert own.render(HELLO, tools) == text
        assert own.source_for(tools=bool(tools)) == other.get_chat_template(tools=tools or None)


def test_a_processors_template_is_used_where_there_is_no_other(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"chat_template.json": {"chat_template": "P"}})
    assert (template := load(path).chat_template) is not None
    assert template.source == "P"
    folder_of(tmp_path, {"tokenizer_config.json": {"chat_template": "C"}})
    assert (template := load(path).chat_template) is not None
    assert template.source == "C"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"chat_template.json": "{"}, "chat_template.json: not readable as JSON"),
        ({"chat_template.json": "[]"}, "chat_template.json: holds list, not an object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"a": {}}}}, "special tokens are malformed"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "special tokens are malformed"),
        ({"tokenizer_config.json": {"additional_special_tokens": 3}}, "special tokens are malformed"),
        ({"added_tokens.json": {"<a>": "x"}}, "special tokens are malformed"),
        ({"added_tokens.json": "["}, "added_tokens.json: not readable as JSON"),
    ],
)
def test_damaged_settings_are_refused(tmp_path: Path, files: Files, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(folder_of(tmp_path, files))


# Keys of GGUF files


def test_missing_keys_mean_what_llama_cpp_takes_them_for(tmp_path: Path) -> None:
    made = load(save_gguf("mistral-v1", tmp_path / "spm.gguf"))
    assert made.encode("", add_special_tokens=True) == [1]
    assert made.eos_token_ids == {2}
    assert made.encode("a")[0] == made.backend.token_to_id("▁a") or made.backend.id_to_token(made.encode("a")[0]) == "▁"
    assert load(save_gguf("smollm2", tmp_path / "bpe.gguf")).encode("", add_special_tokens=True) == []
    begins = load(save_gguf("tekken", tmp_path / "tekken.gguf"))
    assert begins.encode("", add_special_tokens=True) == [begins.backend.token_to_id("<s>")]


def test_a_text_of_special_tokens_is_no_longer_than_it_says(tmp_path: Path) -> None:
    made = load(save_gguf("tekken", tmp_path / "m.gguf"))
    assert len("[TOOL_CALLS]" * 50) <= made.longest_piece * len(made.encode("[TOOL_CALLS]" * 50))


def test_a_file_can_begin_and_end_prompts(tmp_path: Path) -> None:
    for flags, framed in (
        ({"add_bos_token": False}, []),
        ({"add_bos_token": False, "add_eos_token": True}, [2]),
        ({"add_eos_token": True}, [1, 2]),
    ):
        assert load(save_gguf("llama-2", tmp_path / "m.gguf", **flags)).encode("", add_special_tokens=True) == framed


def test_the_ends_of_a_file_are_those_that_are_named_or_known(tmp_path: Path) -> None:
    harmony = load(save_gguf("gpt-4o", tmp_path / "o.gguf"))
    names = {harmony.backend.id_to_token(i) for i in harmony.eos_token_ids}
    assert names == {"<|endoftext|>", "<|return|>", "<|call|>"}  # <|end|> ends a message of an answer
    named = load(save_gguf("llama-3", tmp_path / "l.gguf", eos_token_id=7, eot_token_id=8, eom_token_id=9))
    assert named.eos_token_ids == {7, 8, 9, named.backend.token_to_id("<|eot_id|>")}
    beyond = load(save_gguf("llama-2", tmp_path / "b.gguf", eos_token_id=99999))
    assert beyond.eos_token_ids == {2}


def test_a_file_can_have_a_template_for_tools(tmp_path: Path) -> None:
    file = save_gguf("llama-2", tmp_path / "m.gguf", **{"chat_template": "D", "chat_template.tool_use": "T"})
    assert (template := load(file).chat_template) is not None
    assert (template.render(HELLO), template.render(HELLO, TOOLS)) == ("D", "T")


@pytest.mark.parametrize("family", ["llama-2", "llama-3", "qwen-3", "gpt-4o", "tekken", "gemma-3"])
def test_gguf_files_encode_as_the_reference_reads_them(tmp_path: Path, family: str) -> None:
    """Where it reads them rightly: of SentencePiece's it drops a space that a text begins with, and the space before a
    text behind a special token, which llama.cpp writes; of others it knows a part of the names."""
    file = save_gguf(family, tmp_path / "m.gguf")
    own, other = load(file), PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name)
    for text in texts():
        if not text.startswith((" ", "▁")) or family not in ("llama-2", "gemma-3"):
            assert own.encode(text) == other.encode(text, add_special_tokens=False)


def test_a_prompt_has_one_beginning(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {"tokenizer_config.json": {"chat_template": "{{ bos_token }}hi", "bos_token": "<s>"}})
    for tokenizer in (load(path), load(save_gguf("llama-2", tmp_path / "m.gguf", chat_template="{{ bos_token }}hi"))):
        assert tokenizer.encode_chat(HELLO).count(1) == 1
        assert tokenizer.encode("hi", add_special_tokens=True).count(1) == 1


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("tokens", ["a", "a"], "of its 2 tokens 1 differ"),
        ("tokens", 5, "its tokenizer is damaged"),
        ("tokens", [5], "its tokenizer is damaged"),
        ("scores", [0.0], r"1 of its \d+ tokens have a score"),
        ("scores", ["x"] * 700, "its tokenizer is damaged"),
        ("token_type", [1], "and 1 have a type"),
    ],
)
def test_damaged_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, sentence: str
) -> None:
    file = save_gguf("llama-2", tmp_path / "m.gguf")
    damaged = read_keys(file) | {f"tokenizer.ggml.{key}": value}
    monkeypatch.setattr(gguf_tokenizer, "read_keys", lambda _: damaged)
    with pytest.raises(CheckpointError, match=sentence):
        load(file)
