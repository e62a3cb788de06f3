"""Log-probabilities as OpenAI writes them, for chats and for plain completions.

There is one entry for each token of the answer that usage counts, the ending one included, in the chunk of a stream
that shows its text or in a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish_engine.messages import TokenLogprob
from pilotfish_engine.tokenizer import Detokenizer, Tokenizer

Json = dict[str, Any]

_LEAST = -9999.0  # OpenAI's for what is all but impossible; JSON has no infinity


@dataclass(frozen=True)
class ScoredToken:
    """offset: where its text begins, in characters of the whole text. scores: None for a prompt's first token."""

    token_id: int
    offset: int
    scores: TokenLogprob | None


def prompt_tokens(
    token_ids: Sequence[int], scores: Sequence[TokenLogprob], text: str, tokenizer: Tokenizer
) -> list[ScoredToken]:
    """scores: from the second token on. text: the prompt's, in which special tokens may be written out."""
    detokenizer, offset = Detokenizer(tokenizer), 0
    tokens: list[ScoredToken] = []
    for token_id, score in zip(token_ids, [None, *scores], strict=True):
        tokens.append(ScoredToken(token_id, offset, score))
        offset += len(detokenizer.append((token_id,)))
        name = "" if tokenizer.piece(token_id) else token_text(tokenizer, token_id)
        offset += len(name) if text.startswith(name, offset) else 0
    return tokens


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        piece = tokenizer.piece(token_id)
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(piece) if piece else None,  # special tokens have none
        }

    content = [
        entry(token.token_id, token.scores.logprob) | {"top_logprobs": [entry(*other) for other in token.scores.top]}
        for token in tokens
        if token.scores is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> Json:
    """top_logprobs holds the token itself too, be it among the likeliest or not."""

    def text(token_id: int) -> str:
        return token_text(tokenizer, token_id)

    def top(token: ScoredToken) -> dict[str, float] | None:
        if token.scores is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in token.scores.top:  # the likeliest of those with one text, as "A" and <0x41>
            found.setdefault(text(other), max(logprob, _LEAST))
        return found | {text(token.token_id): max(token.scores.logprob, _LEAST)}

    return {
        "tokens": [text(token.token_id) for token in tokens],
        "token_logprobs": [None if t.scores is None else max(t.scores.logprob, _LEAST) for t in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token adds to a text. Special tokens have their names, parts of characters their bytes, as OpenAI
    writes them, and ids without a token their number."""
    piece = tokenizer.piece(token_id)
    if not piece:
        return tokenizer.backend.id_to_token(token_id) or f"token_id:{token_id}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
