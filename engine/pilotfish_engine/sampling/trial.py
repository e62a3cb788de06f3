"""Tries a grammar in a process apart before the model's process compiles it.

Compiling recurses over references, rules and alternatives: a chain of 1,000 `$ref`s overflows the stack, and nothing
catches that. A trial has a small stack, and bounds of time and memory; what it survives, a thread with a far larger
stack compiles. It has as many tokens as the model, whose numbers grammars name, but texts only of single bytes: how
deep a grammar goes does not depend on them.

`python -m pilotfish_engine.sampling.trial` is such a process.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from pilotfish_engine.apart import Apart, limit, limit_memory, serve, write
from pilotfish_engine.errors import RequestError, sentence
from pilotfish_engine.messages import Grammar
from pilotfish_engine.sampling.source import FIELD, LIMITS, refusal, source

CPU_SECONDS = 3  # large schemas take some tenths
MEMORY_BYTES = 1 << 30  # of address space, beside what is there at the start
STACK_BYTES = 4 << 20  # half of what the model's own threads have
WALK = 48  # tokens of an answer that are tried
END, TEXTS = 0, 256


class Trials:
    """Those of one model, each working off one grammar after the other."""

    def __init__(self, vocab_size: int) -> None:
        self._process = Apart("pilotfish_engine.sampling.trial", [str(vocab_size)], "trial", lambda word: None)
        weakref.finalize(self, self._process.close)

    def source(self, grammar: Grammar) -> str:
        """The grammar in the library's own form, which compiles. Raises RequestError."""
        too_much = (
            f"this {grammar.kind} cannot be used: it takes more time, memory or depth than it may; one with fewer or "
            "shallower references, rules and alternatives would work"
        )
        done, error = self._process.do(msgspec.json.encode(grammar), too_much)
        if error is not None:
            raise RequestError(error, FIELD)
        assert isinstance(done, str)
        return done


# ---- in the process ------------------------------------------------------------------------------------------------


class _Bytes:
    """What llguidance reads of a tokenizer: token b + 1 is byte b, those behind are special."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, vocab_size: int) -> None:
        special = max(vocab_size, TEXTS + 1) - TEXTS - 1
        self.tokens = [b"", *(bytes([byte]) for byte in range(TEXTS)), *[b""] * special]
        self.special_token_ids = [END, *range(TEXTS + 1, len(self.tokens))]

    def __call__(self, text: bytes) -> list[int]:
        return [byte + 1 for byte in text]


def _tried(tokenizer: LLTokenizer, grammar: Grammar, vocab_size: int) -> tuple[str | None, str | None]:
    """The source, or why there is none. Masks are made as those of steps are, in the library's own threads."""
    try:
        own = source(grammar)
        matcher = LLMatcher(tokenizer, own, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return None, refusal(grammar, matcher)
        _walk(matcher, vocab_size)
        return own, None
    except RequestError as error:
        return None, str(error)
    except BaseException as error:  # a panic of the library is no Exception
        return None, sentence(f"this {grammar.kind} cannot be used: {error}")


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    """Along the lowest and the highest tokens in turn, as far as it goes. What shows only on the way is the answer's
    own error, when it comes to that."""
    executor, mask = LLExecutor(), np.zeros(-(-vocab_size // 32) * 4, np.uint8)
    for step in range(WALK):
        executor.unsafe_compute_mask_ptr([(matcher, 0)], mask.ctypes.data, len(mask), 1)
        allowed = [token for token in range(1, TEXTS + 1) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed or matcher.is_error() or not matcher.consume_token(allowed[-1 if step % 2 else 0]):
            return


def main(vocab_size: int) -> None:
    limit(resource.RLIMIT_CORE, 0)
    vocabulary = _Bytes(vocab_size)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
    limit_memory(MEMORY_BYTES)
    write(sys.stdout.buffer, json.dumps(True).encode())

    def do(work: Any) -> tuple[str | None, str | None]:
        return _tried(tokenizer, msgspec.convert(work, Grammar), len(vocabulary.tokens))

    serve(do, lambda size: CPU_SECONDS)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=main, args=[int(sys.argv[1])])
    worker.start()
    worker.join()
