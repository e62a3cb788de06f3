"""A tokenizer whose decoding is bytes: every token has its bytes, and a text is the UTF-8 of their concatenation.

So decoding token by token and decoding at once cannot differ. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from pilotfish_engine.tokenizer.chat import ChatTemplate, Message, TemplateError


@dataclass(frozen=True)
class Tokenizer:
    """pieces[id]: the token's bytes in an answer, empty for special tokens. eos_token_ids: any of them ends it."""

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    bos_token_id: int | None = None
    add_bos: bool = False

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @cached_property
    def longest_piece(self) -> int:
        """Bytes; so no text of more than this times n characters fits into n tokens."""
        return max(map(len, self.pieces))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Special tokens written in the text are recognised. add_special_tokens: what the checkpoint puts around a
        bare prompt (mostly a BOS, or nothing); a rendered chat brings its own."""
        token_ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens and self.add_bos and self.bos_token_id is not None:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def piece(self, token_id: int) -> bytes:
        """Empty for ids past the vocabulary, which a padded embedding can yield."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of an answer, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the next message. Raises TemplateError."""
        if self.chat_template is None:
            raise TemplateError("the checkpoint has no chat template; a bare prompt would work")
        return self.encode(self.chat_template.render(messages))


def byte_pieces(tokens: Sequence[str], special: frozenset[int]) -> tuple[bytes, ...]:
    """Of a byte-level vocabulary (GPT-2): each character stands for a byte; a token with another one for its UTF-8."""
    return tuple(b"" if i in special else _bytes_of(token) for i, token in enumerate(tokens))


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes are themselves; the other 68, in order, are the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
