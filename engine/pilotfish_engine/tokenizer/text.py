"""From committed tokens to text that may be shown: whole characters, and nothing that a stop string may yet take back.

The HTTP process and the model process both run this over the same tokens, so that character offsets mean the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Literal

from pilotfish_engine.messages import SamplingParams, Thought
from pilotfish_engine.tokenizer.vocabulary import Tokenizer


class Detokenizer:
    """One text. All that `append` returned, with `flush` at the end, is exactly `tokenizer.decode` of its tokens.

    within: the tokens are an answer, which goes on where its prompt ended. Then a first word keeps the space that
    `decode` drops, or the answer would stick to the prompt; so the text has the bytes that a grammar saw.
    """

    def __init__(self, tokenizer: Tokenizer, *, within: bool = False, visible: Sequence[int] = ()) -> None:
        """visible: special tokens whose text is shown."""
        self._tokenizer = tokenizer
        self._visible = {token: tokenizer.written(token).encode() for token in visible}
        self._opens = not within and bool(tokenizer.decoding.opening)
        self._decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.broken_bytes)

    def append(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; possibly none."""
        piece = self._opening_piece if self._opens else self._visible_piece if self._visible else self._tokenizer.piece
        return self._decoder.decode(b"".join(map(piece, token_ids)))

    def flush(self) -> str:
        """U+FFFD when the text ends within a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _visible_piece(self, token_id: int) -> bytes:
        return self._visible.get(token_id) or self._tokenizer.piece(token_id)

    def _opening_piece(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        if not self._opens or not piece:
            return piece
        self._opens = False
        return self._tokenizer.opening_piece(token_id)


class StopStrings:
    """Finds the first stop string in one answer, token by token.

    A stop string ends the answer at the token that completes it; of two completed by one token the earlier start wins.
    Who goes on behind it is told the next one that is completed. In a thought at the answer's beginning, and in the
    blanks around it, none is looked for.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], visible: Sequence[int] = (), thought: Thought | None = None
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, within=True, visible=visible)
        self._stops = tuple(stops)
        self._keep = max(map(len, self._stops), default=1) - 1  # a match may begin this far before new text
        self._tail = ""
        self._tail_start = 0
        self._before = None if thought is None else _Thinking(thought)

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> StopStrings:
        return cls(tokenizer, params.stop, params.visible, params.thought)

    def append(self, token_id: int) -> int | None:
        """`text_end`: the number of characters before the stop string that this token completes, or None."""
        new = self._detokenizer.append((token_id,))
        if not new or not self._stops:
            return None
        if self._before is not None:
            thought = self._before.take(new)
            if thought:
                self._tail_start += len(self._tail) + thought
                self._tail = ""
            self._before = self._before if self._before.goes_on else None
            new = new[thought:]
        text = self._tail + new
        old = len(self._tail)  # one that ended nothing is not found again
        starts = [start for stop in self._stops if (start := text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        text_end = self._tail_start + min(starts) if starts else None
        cut = max(0, len(text) - self._keep)
        self._tail_start += cut
        self._tail = text[cut:]
        return text_end


class _Thinking:
    """Follows an answer from its beginning through a thought and the blanks behind it."""

    def __init__(self, thought: Thought) -> None:
        self._thought = thought
        self._tail = ""
        self._where: Literal["before", "within", "behind"] = "within" if thought.opened else "before"
        self.goes_on = True

    def take(self, text: str) -> int:
        """How many of these characters belong to the thought. A tag that is not whole may yet be something else."""
        if self._where == "before":
            self._tail = (self._tail + text).lstrip()
            begin = next((begin for begin in self._thought.begins if self._tail.startswith(begin)), None)
            if begin is None:
                self.goes_on = any(begin.startswith(self._tail) for begin in self._thought.begins)
                return 0
            opening = len(text) - (len(self._tail) - len(begin))
            self._tail, self._where = "", "within"
            return opening + self.take(text[opening:])
        if self._where == "within":
            seen = self._tail + text
            found = [at + len(end) for end in self._thought.ends if (at := seen.find(end)) >= 0]
            if not found:
                self._tail = seen[-max(map(len, self._thought.ends)) :]
                return len(text)
            self._where, rest = "behind", seen[min(found) :]
        else:
            rest = text
        self.goes_on = not rest.strip()
        return len(text) - len(rest.lstrip())


def held_back(text: str, stops: Sequence[str]) -> int:
    """Counts the last characters of `text` that may begin a stop string. They must not be shown yet."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
