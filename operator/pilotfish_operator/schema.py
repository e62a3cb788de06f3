"""Types of fields, and what pydantic cannot know of a CRD's schema: CEL rules, durations, quantities, free-form parts.

Knows nothing about which fields there are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core.core_schema import CoreSchema, literal_schema

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


def seconds(value: str | float) -> float:
    """Seconds of a duration as Go writes it ('1m30s'); ValueError for anything else."""
    if isinstance(value, int | float):
        return float(value)
    if not re.fullmatch(_DURATION, value):
        raise ValueError(f"{value!r} is not a duration; write it as Go does, such as 60s or 5m")
    return sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)", value))


STORED = "x-stored"  # a default that the API server itself fills in


def rule(expression: str, message: str, **more: str) -> dict[str, str]:
    """One x-kubernetes-validations entry."""
    return {"rule": expression, "message": message, **more}


def rules(*rules: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"x-kubernetes-validations": list(rules), **more}


def duration_schema(least: str, most: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "type": "string",
            "maxLength": 32,
            **rules(
                rule(f"self.matches(r'{_DURATION}')", "write a duration as Go does, such as 60s or 5m"),
                rule(
                    f"!self.matches(r'{_DURATION}') || "
                    f"(duration(self) >= duration('{least}') && duration(self) <= duration('{most}'))",
                    f"choose a duration from {least} to {most}",
                ),
            ),
        }
    )


def auto_or_int(least: int, what: str, most: int | None = None) -> WithJsonSchema:
    within = f"self >= {least}" if most is None else f"self >= {least} && self <= {most}"
    bounds = f"from {least}" if most is None else f"from {least} to {most}"
    return WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            **rules(rule(f"type(self) == int ? {within} : self == 'Auto'", f"write Auto or {what} {bounds}")),
        }
    )


@dataclass(frozen=True)
class OneOf:
    """Marks a string that is one of these; as a Literal does whose names stand elsewhere."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return literal_schema(list(self.names))


AutoOrSize = Annotated[Literal["Auto"] | int, auto_or_int(1, "a whole number")]
Quantity = Annotated[
    str,
    BeforeValidator(str),
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], "pattern": _QUANTITY}
    ),
]
Source = Annotated[
    str,
    Field(max_length=1024),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 1024,
            **rules(
                rule(
                    "self.matches('^(hf|pvc|file|package)://.+$')",
                    "write the source as hf://ORG/REPO, pvc://CLAIM/PATH, file:///PATH or package://PACKAGE/FILE",
                )
            ),
        }
    ),
]
Free = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]


class Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")
