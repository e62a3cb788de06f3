"""What is asked: tokens of MT-bench, everyday, HumanEval and GSM8K prompts, out of installed packages or of a file.

The file is for machines without the packages: {"chat": [[ids…]…], "daily": …, "code": …, "sums": …, "corpus": [text…]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from pilotfish_engine.errors import UsageError
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load

KINDS = {"chat": "MT-bench", "daily": "everyday", "code": "HumanEval", "sums": "GSM8K"}


@dataclass(frozen=True)
class Prompt:
    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """by_kind: token ids of each prompt. corpus: answers to other questions of the same sets, texts."""

    by_kind: dict[str, list[list[int]]]
    corpus: list[str]

    def first(self, count: int) -> Asked:
        """`count` prompts of each kind at most."""
        return Asked({kind: found[:count] for kind, found in self.by_kind.items()}, self.corpus)

    def mixed(self) -> Iterator[Prompt]:
        """The kinds in turn."""
        for turn in zip_longest(*self.by_kind.values()):
            for kind, token_ids in zip(self.by_kind, turn, strict=True):
                if token_ids is not None:
                    yield Prompt(kind, tuple(token_ids))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({**self.by_kind, "corpus": self.corpus}))


def installed(target: str, count: int) -> Asked:
    """The first `count` of each kind, as the target's chat template puts them. Raises UsageError."""
    from benchmarks import prompts  # only here: a prompt file does without the packages

    tokenizer = load(resolve(target))
    texts = {kind: getattr(prompts, kind)(count) for kind in KINDS}
    by_kind = {
        kind: [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in found]
        for kind, found in texts.items()
    }
    answered = prompts.answered()
    corpus = [answer for kind, pairs in answered.items() for ask, answer in pairs if ask not in set(texts[kind])]
    return Asked(by_kind, corpus)


def read(path: Path) -> Asked:
    """Raises UsageError where the file is not as `Asked.write` writes it; the corpus may be missing."""
    try:
        data = json.loads(path.read_text())
        by_kind = {kind: [[int(token) for token in ids] for ids in data[kind]] for kind in KINDS}
        corpus = [str(text) for text in data.get("corpus", [])]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"--prompt-file {path} cannot be used ({error!r}); what --write-prompts writes would work"
        ) from error
    if not all(ids for found in by_kind.values() for ids in found) or not any(by_kind.values()):
        raise UsageError(f"--prompt-file {path} has an empty prompt, or none; what --write-prompts writes would work")
    return Asked(by_kind, corpus)
