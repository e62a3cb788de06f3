"""Compiles grammars for a vocabulary. A thread of its own does it, bounded by the limits below.

Torch-free; everything here runs on the host. The library is llguidance (Earley over a lexer of derivatives,
https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import SPACES, Grammar, Stage
from pilotfish_engine.sampling.matcher import Matcher, reason, short
from pilotfish_engine.sampling.stages import Stages
from pilotfish_engine.types import CompiledGrammar

FIELD = "grammar"
MAX_CHARACTERS = 1 << 17
MAX_GBNF_CHARACTERS = 1 << 14  # translated in Python, in a time that grows with size times rules
MAX_GBNF_RULES = 500
MAX_LEXER_STATES = 50_000  # up to 2 kB each
MAX_KEPT = 64  # compiled grammars
_BLANKS = r"/[ \t\r\n]{0,16}/"


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
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._stages: dict[tuple[Stage, ...], Stages] = {}  # as many as a model's formats of reasoning and calls make

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Returns at once. The future raises RequestError, with the reason, for what is no grammar or too large."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> _Compiled:
        if not self._eos_token_ids:
            raise RequestError("the model has no end token, so an answer to a grammar could not end", FIELD)
        if self._tokenizer is None:
            self._tokenizer = self._load()
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        source = _source(grammar) if not grammar.after else _behind_blanks(_source(grammar))
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if inner.is_error():
            raise RequestError(f"this {grammar.kind} cannot be used: {reason(inner)}", FIELD)
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


def _source(grammar: Grammar) -> str:
    """llguidance's own form. Raises RequestError."""
    text = grammar.text
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            f"this {grammar.kind} has {len(text)} characters; {MAX_CHARACTERS} at most would work", FIELD
        )
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_as_json('{"type": "object"}'))
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_as_json(text))
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "ebnf":
            return LLMatcher.grammar_from_lark(_as_lark(text) if "::=" in text else text)


def _behind_blanks(source: str) -> str:
    """The grammar with blanks before it, as models write them behind their reasoning."""
    only = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    first = {"lark_grammar": f"start: {_BLANKS} @answer"}
    return json.dumps({"grammars": [first, {**only, "name": "answer"}]})


def _as_json(text: str) -> str:
    """The library writes a schema into a larger JSON text as it is."""
    try:
        schema = json.loads(text)
        return json.dumps(SPACES | schema if isinstance(schema, dict) else schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this json_schema is not JSON: {short(str(error))}", FIELD) from error


def _as_lark(text: str) -> str:
    rules = text.count("::=")
    if len(text) > MAX_GBNF_CHARACTERS or rules > MAX_GBNF_RULES:
        raise RequestError(
            f"this ebnf has {len(text)} characters and {rules} rules; {MAX_GBNF_CHARACTERS} and {MAX_GBNF_RULES} at "
            "most would work, or a Lark grammar",
            FIELD,
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises no narrower class
        raise RequestError(f"this ebnf cannot be used: {short(str(error))}", FIELD) from error
