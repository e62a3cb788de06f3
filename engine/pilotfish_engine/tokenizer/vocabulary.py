"""A tokenizer whose decoding is bytes: every token has its bytes, and a text is the UTF-8 of their concatenation.

So decoding token by token and decoding at once cannot differ. Knows nothing about files.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from pilotfish_engine.tokenizer.chat import ChatTemplate, Message, TemplateError
from pilotfish_engine.tokenizer.pieces import Pieces

_MARK = "\x02"  # begins no token
_EACH_BYTE = "pilotfish.each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD a byte, as the library's byte fallback has it, where Python's has one for what began well."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True)
class Tokenizer:
    """eos_token_ids: any of them ends an answer. end_token_id: the one that stands behind a written answer. backend:
    encodes, and puts around a bare prompt what belongs there."""

    backend: tokenizers.Tokenizer
    decoding: Pieces
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    end_token_id: int | None = None

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """pieces[id]: the token's bytes in an answer, empty for special tokens."""
        return self.decoding.inside

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def broken_bytes(self) -> str:
        """The codec's way with bytes that are not UTF-8: they become U+FFFD."""
        return _EACH_BYTE if self.decoding.fallback else "replace"

    @cached_property
    def longest_piece(self) -> int:
        """Bytes, in which special tokens have their names; so no text of more than this times n characters fits into n
        tokens."""
        names = (token.content.encode() for token in self.backend.get_added_tokens_decoder().values())
        return max(len(piece) for piece in (*self.pieces, *names))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Special tokens written in the text are recognised. add_special_tokens: what the checkpoint puts around a
        bare prompt (mostly a BOS, or nothing); a rendered chat brings its own."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_within(self, text: str) -> list[int]:
        """The tokens of a text that goes on where another ended. They lack the space that some vocabularies write
        before a text's first word."""
        if not self.decoding.opening:
            return self.encode(text)
        token_ids = self.encode(_MARK + text)
        marked = next((at for at, token in enumerate(token_ids) if self.piece(token).endswith(_MARK.encode())), -1)
        return token_ids[marked + 1 :]

    def piece(self, token_id: int) -> bytes:
        """Empty for ids past the vocabulary, which a padded embedding can yield."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def written(self, token_id: int) -> str:
        """As the vocabulary writes it: of a special token, what stands for it in a template."""
        return self.backend.id_to_token(token_id) or ""

    def specials(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, which an answer's text does not have."""
        found = {text: self.backend.token_to_id(text) for text in texts}
        return {text: token for text, token in found.items() if token is not None and not self.piece(token)}

    def opening_piece(self, token_id: int) -> bytes:
        """The token's bytes where a text begins: some vocabularies write a space before the first word."""
        return self.decoding.opening.get(token_id, self.piece(token_id))

    def decode(self, token_ids: Iterable[int]) -> str:
        """A text from its beginning on, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = list(token_ids)
        found = list(map(self.piece, ids))
        first = next((at for at, piece in enumerate(found) if piece), None) if self.decoding.opening else None
        if first is not None:
            found[first] = self.opening_piece(ids[first])
        return b"".join(found).decode("utf-8", self.broken_bytes)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the next message. Raises TemplateError."""
        if self.chat_template is None:
            raise TemplateError("the checkpoint has no chat template; a bare prompt would work")
        return self.encode(self.chat_template.render(messages))
