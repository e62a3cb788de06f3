"""Grammars as masks over the vocabulary: which tokens may follow each node of a draft tree.

Torch-free; everything here runs on the host. Compiling happens in a thread of its own, bounded by the limits below;
matching is llguidance's (Earley over a lexer of derivatives, https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import SPACES, Grammar
from pilotfish_engine.types import CompiledGrammar

FIELD = "grammar"
MAX_CHARACTERS = 1 << 17
MAX_GBNF_CHARACTERS = 1 << 14  # translated in Python, in a time that grows with size times rules
MAX_GBNF_RULES = 500
MAX_LEXER_STATES = 50_000  # up to 2 kB each
MAX_KEPT = 64  # compiled grammars
MAX_REASON = 300  # characters
STUCK = {  # reasons that the library gives by name only
    "NoExtension": "nothing can follow here: references that lead back to themselves, or parts that exclude each other",
    "LexerTooComplex": "its strings have too many cases here; simpler patterns would work",
    "ParserTooComplex": "it has too many cases here; a simpler one would work",
}


class Matcher:
    """One answer's place in its grammar. error: why it cannot go on, or None."""

    def __init__(self, inner: LLMatcher, ends: Sequence[int], ends_late: bool) -> None:
        self._inner = inner
        self._ends = frozenset(ends)
        self._ends_late = ends_late
        self._ended = False
        self.error: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed. What follows an end is ignored."""
        for token in token_ids:
            if self._ended or self.error is not None:
                return
            if token in self._ends:
                self._ended = True
            elif not self._inner.consume_token(token):
                self.error = _reason(self._inner)

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bytes | None]:
        """For each node of a tree the tokens that may follow it, a bit each, lowest first; None: any, as the answer has
        ended there, or the node is none that could be accepted. Node 0 is the last committed token; parents come before
        their children."""
        found: list[bytes | None] = [None] * len(token_ids)
        if self._ended or self.error is not None:
            return found
        found[0] = self._mask(self._inner)
        if found[0] is None:
            self.error = _reason(self._inner)
        elif not any(found[0]):
            self.error = "no token of the model continues the answer as the grammar wants it"
        children: Mapping[int, list[int]] = defaultdict(list)
        for node in range(1, len(token_ids)):
            children[parents[node]].append(node)
        if children:
            self._visit(self._inner.deep_copy(), 0, token_ids, children, found)
        return found

    def _visit(
        self,
        inner: LLMatcher,
        node: int,
        token_ids: Sequence[int],
        children: Mapping[int, list[int]],
        found: list[bytes | None],
    ) -> None:
        """The masks behind `node`, whose matcher `inner` is used up."""
        mask, below = found[node], children[node]
        if mask is None:
            return
        for child in below:
            token = token_ids[child]
            if token in self._ends or not mask[token >> 3] >> (token & 7) & 1:
                continue
            branch = inner if child == below[-1] else inner.deep_copy()
            if branch.consume_token(token):
                found[child] = self._mask(branch)
                self._visit(branch, child, token_ids, children, found)

    def _mask(self, inner: LLMatcher) -> bytes | None:
        mask = bytearray(inner.compute_bitmask())
        if inner.is_error():
            return None
        may_end = inner.is_accepting() and (inner.is_stopped() or not self._ends_late)
        for token in self._ends:
            bit = 1 << (token & 7)
            mask[token >> 3] = mask[token >> 3] | bit if may_end else mask[token >> 3] & ~bit
        return bytes(mask)


class _Compiled:
    def __init__(self, inner: LLMatcher, pieces: Sequence[bytes], eos_token_ids: frozenset[int]) -> None:
        self._inner = inner
        self._pieces = pieces
        self._eos_token_ids = eos_token_ids

    def start(self, answer: Sequence[int], stop_token_ids: Sequence[int], ignore_eos: bool) -> Matcher:
        """A matcher behind these tokens. Where the grammar is complete the model's end tokens may follow, and those of
        the stop tokens that have no text; with ignore_eos only where nothing else may."""
        ends = self._eos_token_ids.union(t for t in stop_token_ids if t < len(self._pieces) and not self._pieces[t])
        matcher = Matcher(self._inner.deep_copy(), sorted(ends), ignore_eos)
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
        inner = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=limits)
        if inner.is_error():
            raise RequestError(f"this {grammar.kind} cannot be used: {_reason(inner)}", FIELD)
        trial = inner.deep_copy()
        trial.compute_bitmask()
        if trial.is_error() or (trial.is_stopped() and not trial.is_accepting()):
            raise RequestError(f"no answer can begin as this {grammar.kind} says", FIELD)
        return _Compiled(inner, self._pieces, self._eos_token_ids)

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


def _as_json(text: str) -> str:
    """The library writes a schema into a larger JSON text as it is."""
    try:
        schema = json.loads(text)
        return json.dumps(SPACES | schema if isinstance(schema, dict) else schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this json_schema is not JSON: {_short(str(error))}", FIELD) from error


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
        raise RequestError(f"this ebnf cannot be used: {_short(str(error))}", FIELD) from error


def _reason(inner: LLMatcher) -> str:
    error = inner.get_error()
    return _short(next((words for name, words in STUCK.items() if name in error), error))


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_REASON else words[:MAX_REASON] + "…"
