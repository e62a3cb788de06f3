"""Prompts composed of tasks and words, by chance from a seed. A slot `{name}` takes a word, `{2-9}` a number.

Words may hold slots too. `{code}` and `{stub}` take a short function of Python's standard library, or its head.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SLOT = re.compile(r"\{(?:(\d+)-(\d+)|(\w+))\}")
CODE_LINES = (4, 14)  # of a function that is quoted
CODE_WIDTH = 88
TURNS = 0.06  # of the prompts come after an earlier turn
EARLIER = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Can you help me with something?", "Of course! What do you need help with?"),
    ("Hi, I have a question.", "Hi! I'm happy to help. What would you like to know?"),
    ("Are you good at this sort of thing?", "I'll do my best. What would you like me to do?"),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly and precisely.",
    "You are a friendly teacher who explains things with examples.",
    "You are an experienced writer and editor.",
    "You are a careful programmer.",
)
SYSTEM = 0.06  # of the prompts have a system's message of their own


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Of a file whose sections begin with `# title`: the title, and its lines."""
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        yield title, [line for line in lines if line]


class Composer:
    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        words = sections((HERE / "words.txt").read_text(encoding="utf-8"))
        self._words = {title: [word for line in lines for word in line.split("; ")] for title, lines in words}
        self._tasks: dict[str, list[str]] = {}
        self._weights: dict[str, int] = {}
        for title, lines in sections((HERE / "tasks.txt").read_text(encoding="utf-8")):
            group, weight = title.split()
            self._tasks[group], self._weights[group] = [line.replace("\\n", "\n") for line in lines], int(weight)
            if weight == "0":
                self._words[group] = self._tasks.pop(group)
        functions = list(library_functions())
        self._words["code"] = [whole for whole, _ in functions]
        self._words["stub"] = [head for _, head in functions if head]

    def messages(self) -> list[dict[str, str]]:
        """A conversation that ends with the user's turn."""
        dice = self._dice
        messages = [{"role": "user", "content": self._text()}]
        if dice.random() < TURNS:
            asked, answered = dice.choice(EARLIER)
            earlier = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            messages = earlier + messages
        if dice.random() < SYSTEM:
            messages.insert(0, {"role": "system", "content": dice.choice(SYSTEMS)})
        return messages

    def _text(self) -> str:
        groups = list(self._tasks)
        group = self._dice.choices(groups, [self._weights[group] for group in groups])[0]
        text = self.filled(self._dice.choice(self._tasks[group]))
        return text[0].upper() + text[1:] if self._dice.random() < 0.95 else text.lower()

    def filled(self, template: str) -> str:
        return SLOT.sub(lambda slot: self._word(slot), template)

    def _word(self, slot: re.Match[str]) -> str:
        low, high, name = slot.groups()
        if name is None:
            return str(self._dice.randint(int(low), int(high)))
        word = self._dice.choice(self._words[name])
        return word if name in ("code", "stub") else self.filled(word)


def library_functions() -> Iterator[tuple[str, str]]:
    """Short functions of Python's standard library (PSF licence): whole, and up to the end of the docstring ("" where
    there is none)."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            whole = lines[node.lineno - 1 : node.end_lineno]
            if not CODE_LINES[0] <= len(whole) <= CODE_LINES[1] or max(map(len, whole)) > CODE_WIDTH:
                continue
            documented = ast.get_docstring(node) is not None
            head = lines[node.lineno - 1 : node.body[0].end_lineno] if documented else []
            yield "\n".join(whole), "\n".join(head)
