"""Says what an answer may call, how that is read, and which grammar enforces it.

Knows nothing about HTTP, and nothing about how families write calls (tool_formats does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish_engine.messages import Grammar, Stage
from pilotfish_engine.server.conversation import Function
from pilotfish_engine.server.parts import Reader
from pilotfish_engine.server.tool_formats import Format, Specials
from pilotfish_engine.server.tool_formats.format import literal, spaced
from pilotfish_engine.server.tool_formats.items import loaded

_ANY_OBJECT = '{"type": "object"}'
_NO_CALL = r"TEXT: /(\s*[^\s{\[](.|\n)*)?/"  # where calls have no tag: begins as none does


@dataclass(frozen=True)
class Calls:
    """template: the chat template's text. several: an answer may call more than one function; where it does though it
    may not, only the first is told. specials: the format's tags that are special tokens."""

    format: Format
    functions: Sequence[Function]
    required: bool
    several: bool
    template: str = ""
    specials: Specials = field(default_factory=dict)

    def reader(self) -> Reader:
        return self.format.reader(self.functions, self.several)

    @property
    def tagged(self) -> bool:
        """Whether a tag tells calls from JSON that is the answer itself."""
        return bool(self.format.spelling(self.template).start)

    @property
    def strict(self) -> bool:
        return any(function.strict for function in self.functions)

    def grammar(self, form: Grammar | None, reasoning: Sequence[Stage] = ()) -> Grammar | None:
        """Calls and nothing else where they are required. Else calls, or what `form` (JSON) says; and without it any
        text, in which a call is held to its grammar if a function is strict. None: nothing is enforced. reasoning:
        what comes before all of it."""
        spelling = self.format.spelling(self.template)
        start, opening = (literal(text, self.specials) for text in (spelling.start, spelling.opening))
        if not self.required and form is None and not self.strict:
            return None
        rules = spelling.rules(self.functions, self.several, self.specials)
        after = tuple(reasoning)
        if self.required:
            rules.insert(0, f"start: {start} {opening} calls")
        elif form is not None:
            schema = spaced(loaded(form.text or _ANY_OBJECT))
            rules[:0] = [f"start: {start} {opening} calls | answer", f"answer: %json {schema}"]
        elif spelling.start:
            after += (stage_of([spelling.start], self.specials),)
            rules.insert(0, f"start: {literal(spelling.opening.lstrip(), self.specials)} calls")
        else:
            rules[:0] = [f"start: {opening} calls | TEXT", _NO_CALL]
        # "::=" would make it GBNF; within the strings of a schema it can be written otherwise
        return Grammar("ebnf", "\n".join(rules).replace("::=", "\\u003a:="), after)


def stage_of(ends: Sequence[str], specials: Specials, begin: int | None = None) -> Stage:
    return Stage(
        ends=tuple(end for end in ends if end not in specials),
        end_tokens=tuple(specials[end] for end in ends if end in specials),
        begin=begin,
    )
