"""A SentencePiece tokenizer with byte fallback behind the server: most characters are several tokens.

What a client is shown, streamed or whole, is what the grammar, the stop strings and the log-probabilities' bytes say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish_engine.tokenizer import Tokenizer, load
from tests.engine.server import letters
from tests.engine.server.serving import NAME, Engine, free_port, launched
from tests.engine.tokenizer.families import save_folder

TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
WITH_TOOLS = "{{ bos_token }}{{ tools | tojson }}" + TEMPLATE.removeprefix("{{ bos_token }}")
TOOLS = [{"type": "function", "function": {"name": "meteo", "description": "Météo", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_folder("mistral-v1", tmp_path_factory.mktemp("spm"))
    letters.model(load(folder).vocab_size).save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text()) | {"bos_token_id": 1, "eos_token_id": 2}
        (folder / name).write_text(json.dumps(content))
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": WITH_TOOLS}]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    port = free_port()
    command = [
        sys.executable, "-m", "pilotfish_engine.cli", "serve", str(folder), "--port", str(port), "--served-name", NAME,
        "--dtype", "float32", "--max-model-len", "512", "--max-running-requests", "4", "--kv-tokens", "2048",
    ]  # fmt: skip
    with launched(command, port, tmp_path_factory.mktemp("engine")) as started:
        yield started


def completed(served: Engine, **body: Any) -> tuple[str, Any]:
    """The text, which is the same streamed, and the log-probabilities."""
    client = served.openai()
    asked = {"model": NAME, "max_tokens": 40, "temperature": 1, "seed": 4, **body}
    whole = client.completions.create(**asked)
    parts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked) if chunk.choices]
    text = whole.choices[0].text
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)
    return text, whole.choices[0].logprobs


def constrained(grammar: dict[str, Any]) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": grammar}}


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_shows_the_bytes_of_its_tokens(served: Engine, seed: int) -> None:
    client = served.openai()
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "你好 ሰላም"}],
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": True,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert whole.message.content is not None
    shown = b"".join(bytes(token.bytes or []) for token in whole.logprobs.content)
    assert whole.message.content == shown.decode("utf-8", "pilotfish.each-byte")
    chunks = [chunk for chunk in client.chat.completions.create(stream=True, **asked) if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


@pytest.mark.parametrize("expression", ["[你好世界]{4}", "(မင်္ဂလာ|ကမ္ဘာ){2}", " ?[а-яё]{5,8}!", "👩‍👩‍👧‍👦|🤷‍♀️", "नमस्ते x"])
def test_grammars_reach_characters_that_are_bytes(served: Engine, expression: str) -> None:
    text, _ = completed(served, prompt="x", **constrained({"regex": expression}))
    assert re.fullmatch(expression, text)


def test_json_in_any_script(served: Engine, tokenizer: Tokenizer) -> None:
    blank = {str(i): -100 for i, piece in enumerate(tokenizer.pieces) if piece and not piece.strip()}
    schema = {
        "type": "object",
        "properties": {"नाम": {"enum": ["ሰላም", "שלום"]}, "数": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["नाम", "数"],
        "additionalProperties": False,
    }
    text, _ = completed(served, prompt="x", max_tokens=120, logit_bias=blank, **constrained({"json": schema}))
    assert json.loads(text)["नाम"] in ("ሰላም", "שלום")


def test_stop_strings_end_answers_within_runs_of_bytes(served: Engine) -> None:
    grammar = constrained({"regex": "你好世界，天气好。"})
    for stop, text in (("世", "你好"), ("界，天", "你好世"), ("气好。", "你好世界，天"), ("x", "你好世界，天气好。")):
        assert completed(served, prompt="x", stop=[stop], **grammar)[0] == text


def test_an_echo_is_the_prompt_and_what_follows(served: Engine, tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("the")[0]
    bias = {"logit_bias": {str(word): 100}, "max_tokens": 1}
    assert tokenizer.piece(word).startswith(b" ")
    text, scores = completed(served, prompt="Hello wörld", echo=True, logprobs=1, **bias)
    assert text == "Hello wörld" + tokenizer.piece(word).decode()
    assert scores.text_offset[-1] == len("Hello wörld")
    assert completed(served, prompt="Hello wörld", **bias)[0] == tokenizer.piece(word).decode()


def test_an_answer_that_ends_within_a_character(served: Engine, tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode()[:2])
    text, scores = completed(served, prompt="x", logit_bias={str(first): 100}, max_tokens=1, logprobs=0)
    assert (text, scores.tokens) == ("\ufffd", ["bytes:\\xe4"])
    assert completed(served, prompt=[1, first, second], max_tokens=1, echo=True)[0].startswith("\ufffd\ufffd")
    texts = {
        completed(served, prompt="x", max_tokens=count, **constrained({"regex": "你"}))[0] for count in (1, 2, 3, 4)
    }
    assert texts == {"\ufffd", "\ufffd\ufffd", "你"}


def test_a_prompt_begins_once(served: Engine, tokenizer: Tokenizer) -> None:
    with served.http as client:
        for body in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}):
            tokens = client.post("/tokenize", json={"model": NAME, **body}).json()["tokens"]
            assert tokens.count(1) == 1
            assert tokens[0] == 1
        asked = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        tokens = client.post("/tokenize", json=asked).json()["tokens"]
        assert tokens == tokenizer.encode("<s>" + json.dumps(TOOLS, ensure_ascii=False) + "[INST] hi [/INST]")
        text = "  你好 ሰላም\n x"
        tokens = client.post("/tokenize", json={"model": NAME, "prompt": text}).json()["tokens"]
        assert client.post("/detokenize", json={"model": NAME, "tokens": tokens}).json()["prompt"] == text
