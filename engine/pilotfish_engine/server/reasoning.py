"""Reasoning told apart from the answer behind it: by tags that a family puts around it.

An answer begins within the tags where the chat template has opened them, or opens them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pilotfish_engine.messages import Thought
from pilotfish_engine.server.parts import Part, Reader, Reasoning, joined
from pilotfish_engine.tokenizer import held_back


@dataclass(frozen=True)
class Style:
    """begins and ends: the first of each is what a template writes. families: whose models reason so."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    families: str
    aliases: tuple[str, ...] = ()


STYLES = (
    Style(
        "think",
        ("<think>",),
        ("</think>",),
        "DeepSeek-R1 and V3.1, Qwen3, QwQ, GLM-4.5, SmolLM3, Granite 3.3, Kimi K2 Thinking",
        ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2"),
    ),
    Style("mistral", ("[THINK]",), ("[/THINK]",), "Magistral"),
    Style("seed_oss", ("<seed:think>",), ("</seed:think>",), "Seed-OSS"),
    Style(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        "Granite 3.2",
    ),
)
HARMONY = Style("harmony", ("<|channel|>analysis<|message|>",), (), "gpt-oss", ("gpt_oss", "openai_gptoss"))


BY_NAME: Mapping[str, Style] = {name: each for each in (*STYLES, HARMONY) for name in (each.name, *each.aliases)}


def detected(template: str, is_token: Callable[[str], bool]) -> Style | None:
    """By the tags in the chat template, or else in the vocabulary."""
    if "<|channel|>" in template and "<|start|>" in template:
        return HARMONY
    for style in STYLES:
        if any(end in template for end in style.ends):
            return style
    return next((style for style in STYLES if is_token(style.begins[0]) and is_token(style.ends[0])), None)


def thought(style: Style, opened: bool) -> Thought:
    """Of gpt-oss, whose answers are messages. All before the first one that is for the user."""
    if style is HARMONY:
        return Thought(("<|channel|>",), ("final<|message|>", "commentary<|message|>"))
    return Thought(style.begins, style.ends, opened)


def opened(style: Style, prompt: str) -> bool:
    """Whether a rendered prompt ends within reasoning."""
    return prompt.rstrip().endswith(style.begins)


class ReasoningReader:
    """Blank text around the reasoning belongs to nothing. Without an end all is reasoning. opened: the prompt opened
    it. behind: reads what follows."""

    def __init__(self, style: Style, opened: bool, behind: Reader) -> None:
        self._style = style
        self._behind = behind
        self.reasoned = 0
        self._fed = 0
        self._text = ""
        self._said = False
        self._fresh = opened
        self._where: Literal["begin", "reasoning", "gap", "behind"] = "reasoning" if opened else "begin"

    def feed(self, text: str, last: bool) -> Sequence[Part]:
        parts: list[Part] = []
        self._text += text
        self._fed += len(text)
        if self._where == "begin":
            self._begin(last)
        if self._where == "reasoning":
            ended = self._reason(parts, last)
            self.reasoned = self._fed - (len(self._text) if ended else 0)
        if self._where == "gap":
            self._text = self._text.lstrip()
            if self._text or last:
                self._where = "behind"
        if self._where == "behind":
            parts += self._behind.feed(self._text, last)
            self._text = ""
        return joined(parts)

    def _begin(self, last: bool) -> None:
        text = self._text.lstrip()
        begin = next((begin for begin in self._style.begins if text.startswith(begin)), None)
        if begin is not None:
            self._text, self._where = text[len(begin) :], "reasoning"
        elif last or not any(begin.startswith(text) for begin in self._style.begins):
            self._where = "behind"

    def _reason(self, parts: list[Part], last: bool) -> bool:
        """Whether it has ended."""
        text = self._text if self._said else self._text.lstrip()
        if self._fresh:
            again = next((begin for begin in self._style.begins if text.startswith(begin)), None)
            if again is None and not last and any(begin.startswith(text) for begin in self._style.begins):
                return False
            self._fresh = False
            text = text if again is None else text[len(again) :].lstrip()  # the prompt had opened it
        found = [(at, end) for end in self._style.ends if (at := text.find(end)) >= 0]
        at, end = min(found, default=(len(text), ""))
        if not end and not last:
            at -= held_back(text, self._style.ends)
        said = text[:at].rstrip()
        if said:
            parts.append(Reasoning(said))
            self._said = True
        if end:
            self._text, self._where = text[at + len(end) :], "gap"
        else:
            self._text = "" if last else text[len(said) :]
        return bool(end)
