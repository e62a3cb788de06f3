"""SentencePiece's BPE (https://github.com/google/sentencepiece) by the `tokenizers` library: tokens, scores and types.

A GGUF file carries these three as a tokenizer.model does; the numbers of the types are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPACE = "▁"


class Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_JOINED = (0, Kind.NORMAL, Kind.UNUSED)  # may be made of others; single bytes are not, nor what is found before


def sentencepiece_backend(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, prefix: bool
) -> Tokenizer:
    """Without its added tokens. prefix: a text, and what follows a special token, begins with a space that is not
    there."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=implied_merges({token: i for token, i in vocabulary.items() if kinds[i] in _JOINED}, scores),
            unk_token=next((token for token, kind in zip(tokens, kinds, strict=False) if kind == Kind.UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def implied_merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """scores: by id. Where the two neighbours are joined whose whole has the best score, every way to cut a token in
    two is a merge; of equal scores the token that stands first."""
    merges = []
    for token in sorted(vocabulary, key=lambda token: (-scores[vocabulary[token]], vocabulary[token])):
        pairs = [
            (left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in vocabulary and (right := token[at:]) in vocabulary
        ]
        merges += (
            pairs if len(pairs) < 2 else sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        )
    return merges


def found_first(
    tokens: Sequence[str], kinds: Sequence[int], strip: Callable[[str], bool] = lambda _: False
) -> list[AddedToken]:
    """Tokens that are found in a text before it is split. strip: which of them swallow the spaces behind them."""
    return [
        AddedToken(token, special=kind != Kind.USER_DEFINED, normalized=False, rstrip=strip(token))
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
    ]
