"""What a client sends, field by field: served, refused by name, or ignored and told of.

Knows nothing about which fields there are: `unserved` and the bodies do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

MAX_HEADER_CHARACTERS = 1000
_MAX_NAME = 40  # characters of a field's name that are repeated

Values = Mapping[str, tuple[Any, ...]]  # by field: what asks for nothing beyond what is done anyway


@dataclass(frozen=True)
class Unserved:
    """Fields that are known and not served. refused: they would change the answer. ignored: they would not; named like
    those that nobody knows. instead: what to do about one that is refused. silent: they belong to what is sent, and ask
    for nothing whatever they say."""

    refused: Values = field(default_factory=dict)
    ignored: Values = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises PydanticCustomError (type `field`) when one asks for what would change the answer."""
        for name in sorted(body.keys() & self.refused.keys()):
            harmless = self.refused[name]
            if body[name] not in harmless:
                value = next((value for value in harmless if value is not None), None)
                advice = f"leave it out, or give {value!r}" if value is not None else "leave it out"
                advice = self.instead.get(name, advice)
                raise PydanticCustomError("field", "is not served; {advice}", {"field": name, "advice": advice})

    def asks_for_nothing(self, name: str, value: Any) -> bool:
        return name in self.refused or name in self.silent or value in self.ignored.get(name, ())


class Body(BaseModel):
    """An object that a client sends. 5 is not "5"; a field that is not known changes nothing, and is kept by name."""

    model_config = ConfigDict(extra="ignore", strict=True)
    unserved: ClassVar[Unserved] = Unserved()

    _ignored: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _tell_apart(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        cls.unserved.check(value)
        body = handler(value)
        known = {about.alias or name for name, about in cls.model_fields.items()}
        body._ignored = tuple(
            name for name in value if name not in known and not cls.unserved.asks_for_nothing(name, value[name])
        )
        return body

    def ignored(self) -> Iterator[tuple[str | int, ...]]:
        """The path of every field, here and further in, that was sent and changed nothing."""
        for name in self._ignored:
            yield (name,)
        for name, about in type(self).model_fields.items():
            for path in _ignored_in(getattr(self, name)):
                yield (about.alias or name, *path)


def _ignored_in(value: Any) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, Body):
        yield from value.ignored()
    elif isinstance(value, list):
        for index, part in enumerate(value):
            for path in _ignored_in(part):
                yield (index, *path)


def written(path: Iterable[str | int]) -> str:
    """A path as people write it, such as messages[2].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def header(paths: Iterable[tuple[str | int, ...]]) -> str:
    """Paths for a header: names are the client's, so all but letters, digits and _.-~ is percent-encoded, and long ones
    are cut. What would make it longer than 1,000 characters is counted: `a, messages[0].b, +12 more`."""
    shown: list[str] = []
    length = left = 0
    for path in paths:
        text = written(part if isinstance(part, int) else _encoded(part) for part in path)
        length += len(text) + 2
        if left or length > MAX_HEADER_CHARACTERS:
            left += 1
        else:
            shown.append(text)
    return ", ".join([*shown, f"+{left} more"] if left else shown)


def _encoded(name: str) -> str:
    cut = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
    return quote(cut, safe="", errors="replace") or '""'
