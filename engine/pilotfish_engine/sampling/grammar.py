"""Compiles grammars for a vocabulary. A thread of its own does it, with what a trial apart has let through.

Torch-free; everything here runs on the host. The library is llguidance (Earley over a lexer of derivatives,
https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import Grammar, Stage
from pilotfish_engine.sampling.matcher import Matcher
from pilotfish_engine.sampling.source import FIELD, LIMITS, refusal
from pilotfish_engine.sampling.stages import Stages
from pilotfish_engine.sampling.trial import Trials
from pilotfish_engine.types import CompiledGrammar

MAX_KEPT = 64  # compiled grammars
LONG_CHARACTERS = 1 << 12  # what is longer does not stand before what is not
STACK_BYTES = 256 << 20  # of the thread that compiles, 64 times what a trial has; only what is used is there


class _Compiled:
    def __init__(
        self,
        inner: LLMatcher,
        pieces: Sequence[bytes],
        eos_token_ids: frozenset[int],
        stages: Stages | None,
        doubtful: Sequence[int],
    ) -> None:
        self._doubtful = doubtful
        self._inner = inner
        self._stages = stages
        self._pieces = pieces
        self._eos_token_ids = eos_token_ids

    def start(self, answer: Sequence[int], stop_token_ids: Sequence[int], ignore_eos: bool) -> Matcher:
        """A matcher behind these tokens. Where the grammar is complete the model's end tokens may follow, and those of
        the stop tokens that have no text; with ignore_eos only where nothing else may."""
        ends = self._eos_token_ids.union(t for t in stop_token_ids if t < len(self._pieces) and not self._pieces[t])
        matcher = Matcher(self._inner.deep_copy(), sorted(ends), ignore_eos, self._stages, self._doubtful)
        matcher.advance(answer)
        return matcher


@dataclass(frozen=True)
class _Lane:
    thread: ThreadPoolExecutor
    trials: Trials


class Grammars:
    """Compiles grammars for one vocabulary; keeps the last ones."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        eos_token_ids: frozenset[int],
        vocab_size: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        """pieces[id]: the bytes of a token, empty for special ones. vocab_size: the model's, which may have more tokens
        than pieces. encode: of a text that goes on where another ended."""
        self._pieces = pieces[:vocab_size]
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._encode = encode
        self._lanes = [_Lane(_thread(), Trials(vocab_size)) for _ in ("short", "long")]
        self._loading = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._stages: dict[tuple[Stage, ...], Stages] = {}  # as many as a model's formats of reasoning and calls make

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Returns at once. The future raises RequestError, with the reason, for what is no grammar or too large."""
        future = self._compiled.get(grammar)
        if future is None:
            lane = self._lanes[len(grammar.text) > LONG_CHARACTERS]
            future = self._compiled[grammar] = lane.thread.submit(self._compile, grammar, lane.trials)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar, trials: Trials) -> _Compiled:
        if not self._eos_token_ids:
            raise RequestError("the model has no end token, so an answer to a grammar could not end", FIELD)
        source = trials.source(grammar)
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if inner.is_error():
            raise RequestError(refusal(grammar, inner), FIELD)
        trial = inner.deep_copy()
        trial.compute_bitmask()
        if trial.is_error() or (trial.is_stopped() and not trial.is_accepting()):
            raise RequestError(f"no answer can begin as this {grammar.kind} says", FIELD)
        return _Compiled(
            inner, self._pieces, self._eos_token_ids, self._stages_of(grammar.after), self._doubtful(grammar)
        )

    def _doubtful(self, grammar: Grammar) -> Sequence[int]:
        """Where a word of any length may end with a special token, the library lets all special tokens through: it
        writes them as bytes that begin with FF."""
        if "<[" not in grammar.text:
            return ()
        found = [token for token, piece in enumerate(self._pieces) if not piece or piece[0] == 0xFF]
        return [token for token in found if token not in self._eos_token_ids]

    def _stages_of(self, after: tuple[Stage, ...]) -> Stages | None:
        if not after:
            return None
        if after not in self._stages:
            self._stages[after] = Stages(after, self._pieces, -(-self._vocab_size // 32) * 4)
        return self._stages[after]

    def _load(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._pieces, min(self._eos_token_ids), self._encode)
        tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
        )
        vocabulary.greedy = tokenizer.greedy_tokenize
        return tokenizer


def _thread() -> ThreadPoolExecutor:
    before = threading.stack_size(STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, "grammar")
        executor.submit(int).result()  # it is there from here on
        return executor
    finally:
        threading.stack_size(before)


class _Vocabulary:
    """What llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], eos_token_id: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = list(pieces)
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.eos_token_id = eos_token_id
        self.greedy: Callable[[str], list[int]] = lambda _: []
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar leaves no choice of. Their bytes have to be the text's, and are not where
        the vocabulary normalizes it or takes it for a special token's name: then any that are."""
        written = text.decode("utf-8", "replace")
        token_ids = self._encode(written)
        known = all(0 <= token < len(self.tokens) for token in token_ids)
        exact = known and b"".join(self.tokens[token] for token in token_ids) == text
        return token_ids if exact else self.greedy(written)
