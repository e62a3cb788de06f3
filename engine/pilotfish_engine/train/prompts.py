"""What a target is asked: a file of JSON lines, each with `messages` (as the chat API takes them) or a bare `prompt`.

A prompt and an answer are texts or lists of token ids. A conversation that ends with the assistant's message, or a line
with an `answer` beside its `prompt` or `messages`, is trained on as it stands; of any other the target writes the
answer. A line that is not what it should be is counted under its reason and skipped. Knows nothing about models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotfish_engine.errors import UsageError
from pilotfish_engine.tokenizer import TemplateError, Tokenizer

NAMED = 5  # lines of each reason that are named
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """line: its number in the file, from 1. answer: the tokens to train on, where the file has them."""

    line: int
    token_ids: list[int]
    answer: list[int] | None = None


@dataclass
class Skipped:
    """Numbers of the lines that were skipped, by reason."""

    lines: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, line: int) -> None:
        self.lines.setdefault(reason, []).append(line)

    def __str__(self) -> str:
        return "\n".join(f"skipped {_counted(lines)}: {reason}" for reason, lines in self.lines.items())


def _counted(lines: list[int]) -> str:
    named = ", ".join(map(str, lines[:NAMED])) + (", …" if len(lines) > NAMED else "")
    return f"{len(lines)} line{'s' if len(lines) > 1 else ''} ({named})"


def set_apart(prompts: Sequence[Prompt], held_out: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """So many that are held out, and those to train on. Both have an order by the seed. What is asked on several
    lines is never on both sides."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    apart, others = order[:held_out], order[held_out:]
    asked = {tuple(prompt.token_ids) for prompt in apart}
    return apart, [prompt for prompt in others if tuple(prompt.token_ids) not in asked]


class _BadLine(Exception):
    pass


def read_prompts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> tuple[list[Prompt], Skipped]:
    """max_tokens: of a prompt. Raises UsageError where the file cannot be read or no line of it is usable."""
    prompts, skipped = list[Prompt](), Skipped()
    for number, line in _lines(path):
        try:
            prompts.append(_prompt(number, line, tokenizer, max_tokens))
        except _BadLine as error:
            skipped.add(str(error), number)
    if not prompts:
        raise UsageError(
            f"--data {path} has no usable line; lines like "
            '{"messages": [{"role": "user", "content": "…"}]} would work' + (f"; {skipped}" if skipped.lines else "")
        )
    return prompts, skipped


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read ({error.strerror}); a file of JSON lines would work") from error


def _prompt(number: int, line: bytes, tokenizer: Tokenizer, max_tokens: int) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:  # also of bytes that are no UTF-8
        raise _BadLine("not JSON") from error
    if not isinstance(content, dict) or ("messages" in content) == ("prompt" in content):
        raise _BadLine("not an object with either `messages` or `prompt`")
    answer = content.get("answer")
    if "prompt" in content:
        token_ids = _tokens(content["prompt"], "prompt", tokenizer)
    else:
        token_ids, answer = _conversation(content["messages"], answer, tokenizer)
    if len(token_ids) > max_tokens:
        raise _BadLine(f"a prompt of over {max_tokens} tokens")
    if answer is None:
        return Prompt(number, token_ids)
    end = [tokenizer.end_token_id] if isinstance(answer, str) and tokenizer.end_token_id is not None else []
    return Prompt(number, token_ids, _tokens(answer, "answer", tokenizer) + end)


def _tokens(given: Any, name: str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(given, str) and given:
        prompt = name == "prompt"
        return tokenizer.encode(given, add_special_tokens=True) if prompt else tokenizer.encode_within(given)
    if not isinstance(given, list) or not given:
        raise _BadLine(f"the {name} is empty, or neither a text nor token ids")
    for token in given:
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise _BadLine(f"the {name} has what is no token id")
    return given


def _conversation(messages: Any, answer: Any, tokenizer: Tokenizer) -> tuple[list[int], Any]:
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise _BadLine("messages are not a list of a role (system, user or assistant) and a text each")
    if answer is None and messages[-1]["role"] == "assistant":
        *messages, last = messages
        answer = last["content"]
    if not messages or messages[-1]["role"] != "user":
        raise _BadLine("no user's message comes before the answer")
    try:
        return tokenizer.encode_chat(messages), answer
    except TemplateError as error:
        raise _BadLine(str(error)) from error


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and bool(message["content"])
    )
