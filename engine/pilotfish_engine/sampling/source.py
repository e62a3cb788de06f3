"""Writes a client's grammar in llguidance's own form, and its refusals in words."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from pilotfish_engine.errors import RequestError
from pilotfish_engine.messages import SPACES, Grammar

FIELD = "grammar"
MAX_CHARACTERS = 1 << 17
MAX_GBNF_CHARACTERS = 1 << 14  # translated in Python, in a time that grows with size times rules
MAX_GBNF_RULES = 500
MAX_REASON = 300  # characters
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # a state has up to 2 kB
_BLANKS = r"/[ \t\r\n]{0,16}/"
_FRAME = re.compile(r"^at \d+\(\d+\): | \d+ \| start: .*$", re.DOTALL)
STUCK = {  # reasons that the library gives by name only
    "NoExtension": "nothing can follow here: references that lead back to themselves, or parts that exclude each other",
    "LexerTooComplex": "its strings have too many cases here; simpler patterns would work",
    "Too many items": "it has too many cases here; a simpler one would work",
    "ParserTooComplex": "it has too many cases here; a simpler one would work",
}


def source(grammar: Grammar) -> str:
    """Raises RequestError."""
    own = _own(grammar)
    return _behind_blanks(own) if grammar.after else own


def _own(grammar: Grammar) -> str:
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


def reason(inner: LLMatcher) -> str:
    error = inner.get_error()
    return short(next((words for name, words in STUCK.items() if name in error), error))


def refusal(grammar: Grammar, inner: LLMatcher) -> str:
    """Why a grammar does not compile. The rule that was made around a regular expression is left out."""
    words = reason(inner)
    if grammar.kind == "regex":
        words = _FRAME.sub("", words).rpartition("error: ")[2]
    return f"this {grammar.kind} cannot be used: {words}"


def short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MAX_REASON else words[:MAX_REASON] + "…"
