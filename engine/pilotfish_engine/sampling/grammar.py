"""Grammars as masks over the vocabulary: which tokens may follow each node of a draft tree.

Torch-free; everything here runs on the host. Compiling happens in a thread of its own, bounded by the limits below;
matching is llguidance's (Earley over a lexer of derivatives, https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import SPACES, Grammar, Stage
from pilotfish_engine.sampling.stages import Place, Stages
from pilotfish_engine.types import CompiledGrammar

FIELD = "grammar"
MAX_CHARACTERS = 1 << 17
MAX_GBNF_CHARACTERS = 1 << 14  # translated in Python, in a time that grows with size times rules
MAX_GBNF_RULES = 500
MAX_LEXER_STATES = 50_000  # up to 2 kB each
MAX_KEPT = 64  # compiled grammars
_BLANKS = r"/[ \t\r\n]{0,16}/"
MAX_REASON = 300  # characters
STUCK = {  # reasons that the library gives by name only
    "NoExtension": "nothing can follow here: references that lead back to themselves, or parts that exclude each other",
    "LexerTooComplex": "its strings have too many cases here; simpler patterns would work",
    "ParserTooComplex": "it has too many cases here; a simpler one would work",
}


@dataclass(frozen=True)
class _Cursor:
    """A place before the grammar, or None within it; `inner` is the grammar's state."""

    place: Place | None
    inner: LLMatcher

    def copy(self) -> _Cursor:
        return self if self.place is not None else _Cursor(None, self.inner.deep_copy())


class Matcher:
    """One answer's place in its grammar, or in what comes before it. error: why it cannot go on, or None."""

    def __init__(
        self,
        inner: LLMatcher,
        ends: Sequence[int],
        ends_late: bool,
        stages: Stages | None = None,
        doubtful: Sequence[int] = (),
    ) -> None:
        """inner: nobody else's. doubtful: tokens of which the library's masks have too many."""
        self._doubtful = doubtful
        self._stages = stages
        self._cursor = _Cursor(None if stages is None else stages.first(), inner)
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
                continue
            following = self._behind(self._cursor, token)
            if following is None:
                self.error = _reason(self._cursor.inner)
            else:
                self._cursor = following

    def masks(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bytes | None]:
        """Returns for each node of a tree the tokens that may follow it. Each is a bit, the lowest first; None: any,
        as the answer has ended there, the grammar has not begun, or the node is none that could be accepted. Node 0
        is the last committed token; parents come before their children."""
        found: list[bytes | None] = [None] * len(token_ids)
        if self._ended or self.error is not None:
            return found
        found[0] = self._mask(self._cursor)
        if found[0] is None and self._cursor.inner.is_error():
            self.error = _reason(self._cursor.inner)
            return found
        if found[0] is not None and not any(found[0]):
            self.error = "no token of the model continues the answer as the grammar wants it"
        children: Mapping[int, list[int]] = defaultdict(list)
        for node in range(1, len(token_ids)):
            children[parents[node]].append(node)
        if children:
            self._visit(self._cursor.copy(), 0, token_ids, children, found)
        return found

    def _visit(
        self,
        cursor: _Cursor,
        node: int,
        token_ids: Sequence[int],
        children: Mapping[int, list[int]],
        found: list[bytes | None],
    ) -> None:
        """The masks behind `node`, whose cursor is used up."""
        mask, below = found[node], children[node]
        for child in below:
            token = token_ids[child]
            if token in self._ends or not (mask is None or mask[token >> 3] >> (token & 7) & 1):
                continue
            branch = self._behind(cursor if child == below[-1] else cursor.copy(), token)
            if branch is None:
                continue
            found[child] = self._mask(branch)
            if not branch.inner.is_error():
                self._visit(branch, child, token_ids, children, found)

    def _behind(self, cursor: _Cursor, token: int) -> _Cursor | None:
        """None: the token cannot follow. A cursor within the grammar is used up; of one before it the grammar is left
        as it is, for another branch to begin."""
        if cursor.place is None:
            return cursor if cursor.inner.consume_token(token) else None
        assert self._stages is not None, "a place is one of the stages"
        place, taken = self._stages.step(cursor.place, token)
        if place is not None:
            return _Cursor(place, cursor.inner)
        begun = _Cursor(None, cursor.inner.deep_copy())
        return begun if taken else self._behind(begun, token)

    def _mask(self, cursor: _Cursor) -> bytes | None:
        if cursor.place is None or self._stages is None:
            return self._grammar_mask(cursor.inner)
        begin = self._stages.optional(cursor.place)
        if begin is None:
            return self._stages.mask(cursor.place)
        found = self._grammar_mask(cursor.inner.deep_copy())
        if found is None:
            return None
        mask = bytearray(found)
        mask[begin >> 3] |= 1 << (begin & 7)
        return bytes(mask)

    def _grammar_mask(self, inner: LLMatcher) -> bytes | None:
        mask = bytearray(inner.compute_bitmask())
        if inner.is_error():
            return None
        for token in self._doubtful:
            if mask[token >> 3] >> (token & 7) & 1 and not inner.validate_tokens([token]):
                mask[token >> 3] &= ~(1 << (token & 7))
        may_end = inner.is_accepting() and (inner.is_stopped() or not self._ends_late)
        for token in self._ends:
            bit = 1 << (token & 7)
            mask[token >> 3] = mask[token >> 3] | bit if may_end else mask[token >> 3] & ~bit
        return bytes(mask)


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
            raise RequestError(f"this {grammar.kind} cannot be used: {_reason(inner)}", FIELD)
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
