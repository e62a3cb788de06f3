"""Makes clients' JSON schemas exact for a grammar, or refuses them in their own words.

Keywords that ask for nothing go, some are said in another way, and what no grammar follows is refused by its path. The
meaning never changes: JSON Schema 2020-12 and its older drafts, and OpenAPI's `nullable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pilotfish_engine.server.body import written

Json = dict[str, Any]

# Notes to a reader, and what speaks of the content of a string, which is not looked into.
_NOTES = frozenset({
    "$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description",
    "discriminator", "example", "examples", "externalDocs", "readOnly", "strict", "title", "writeOnly", "xml",
})  # fmt: skip
# Others are names that nobody checks, as the standard allows.
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
# keyword: what it may say and asks for nothing
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "nullable": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_UNSERVED = (
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_ONE = ("additionalItems", "additionalProperties", "items")  # keywords whose value is a schema
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_JOINS = ("$ref", "allOf", "anyOf", "oneOf")
# pydantic's pattern of a Decimal, and the same without looking ahead
_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"}


class SchemaError(ValueError):
    """path: from the schema's root, as people write it."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(f"{path} {sentence}")
        self.path, self.sentence = path, sentence


def plain(schema: Json) -> Json:
    """The schema as a grammar can follow it; the same values fit. Raises SchemaError."""
    made: Json = _plain(schema, (), schema)
    known: set[str] = set()
    for path, reference in _references(made, ()):
        known |= _followed(made, path, reference, known)
    return made


def _plain(schema: Any, path: tuple[str | int, ...], root: Json) -> Any:
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for keyword, value in schema.items():
        if keyword in _NOTES or keyword.startswith("x-") or _is_nothing(keyword, value, schema):
            continue
        made[keyword] = _within(keyword, value, (*path, keyword), root)
    made = _exclusive(_named_properties(made, root), root)
    for rewrite in (_draft_4_bounds, _closed, _known_pattern, _nullable):
        made = rewrite(made)
    for keyword in _UNSERVED:
        if keyword in made:
            where = written((*path, keyword))
            raise SchemaError(where, "is no keyword that a grammar can follow; a schema without it would work")
    return made


def _within(keyword: str, value: Any, path: tuple[str | int, ...], root: Json) -> Any:
    """A keyword's value with the schemas in it made plain."""
    if keyword in _MAPS and isinstance(value, dict):
        return {name: _plain(part, (*path, name), root) for name, part in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [_plain(part, (*path, index), root) for index, part in enumerate(value)]
    return _plain(value, path, root) if keyword in _ONE else value


def _is_nothing(keyword: str, value: Any, schema: Json) -> bool:
    match keyword:
        case "format":
            return not isinstance(value, str) or value not in FORMATS
        case "uniqueItems" if schema.get("maxItems") in (0, 1):
            return True
        case "minContains" | "maxContains":
            return True  # it speaks of contains, which is refused
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
    return any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING.get(keyword, ()))


def _draft_4_bounds(schema: Json) -> Json:
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):
            strict = schema.pop(exclusive)
            if strict and bound in schema:
                schema[exclusive] = schema.pop(bound)
    return schema


def _named_properties(schema: Json, root: Json) -> Json:
    """Of a map whose keys are told, each key, or each kind of key."""
    names, others = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    if isinstance(names.get("$ref"), str) and isinstance(named := _at(root, names["$ref"]), dict):
        names = {keyword: value for keyword, value in names.items() if keyword != "$ref"} | named
    said = {keyword: value for keyword, value in names.items() if keyword not in _NOTES and keyword != "type"}
    keys = said.get("enum", [said["const"]] if "const" in said else None)
    if len(said) == 1 and isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        told: Json = {"properties": dict.fromkeys(keys, others)}
    elif said.keys() == {"pattern"}:
        told = {"patternProperties": {said["pattern"]: others}}
    else:
        return schema
    return {k: v for k, v in schema.items() if k != "propertyNames"} | told | {"additionalProperties": False}


def _exclusive(schema: Json, root: Json) -> Json:
    """Of one that excludes the others whatever it is: by a property with a value of its own, as in a tagged union."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or "anyOf" in schema:
        return schema
    tags = [_tags(branch, root) for branch in branches]
    for name in tags[0] if tags else ():
        values = [value for tag in tags for value in tag.get(name, [None, None])]
        if len(set(values)) == len(values):
            return {("anyOf" if keyword == "oneOf" else keyword): value for keyword, value in schema.items()}
    return schema


def _tags(branch: Any, root: Json) -> dict[str, list[Any]]:
    """By name the texts of an object's required properties that have only these."""
    if isinstance(branch, dict) and isinstance(branch.get("$ref"), str):
        branch = _at(root, branch["$ref"])
    if not isinstance(branch, dict) or branch.get("type") != "object" or not isinstance(branch.get("properties"), dict):
        return {}
    found: dict[str, list[Any]] = {}
    required = branch.get("required")
    for name, told in branch["properties"].items():
        if isinstance(told, dict) and isinstance(required, list) and name in required:
            values = told.get("enum", [told["const"]] if "const" in told else None)
            if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
                found[name] = values
    return found


def _closed(schema: Json) -> Json:
    """Where nothing else evaluates, what is not evaluated is what is not named."""
    rest = schema.get("unevaluatedProperties")
    if rest is False and "additionalProperties" not in schema and not any(join in schema for join in _JOINS):
        del schema["unevaluatedProperties"]
        schema["additionalProperties"] = False
    return schema


def _known_pattern(schema: Json) -> Json:
    pattern = schema.get("pattern")
    return schema | {"pattern": _PATTERNS[pattern]} if isinstance(pattern, str) and pattern in _PATTERNS else schema


def _nullable(schema: Json) -> Json:
    if schema.pop("nullable", None) is not True:
        return schema
    kind = schema.get("type")
    if isinstance(kind, str) and "const" not in schema and not any(join in schema for join in _JOINS):
        enum = {"enum": [*schema["enum"], None]} if isinstance(schema.get("enum"), list) else {}
        return schema | {"type": [kind, "null"]} | enum
    kept = {keyword: schema.pop(keyword) for keyword in ("$defs", "definitions") if keyword in schema}
    return kept | {"anyOf": [schema, {"type": "null"}]}


def _references(schema: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$ref"), str):
        yield (*path, "$ref"), schema["$ref"]
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _references(part, (*path, keyword, name))
        elif keyword in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _references(part, (*path, keyword, index))
        elif keyword in _ONE:
            yield from _references(value, (*path, keyword))


def _followed(root: Json, path: tuple[str | int, ...], reference: str, known: set[str]) -> set[str]:
    """The places that it leads to, one after the other. Raises SchemaError where that is nowhere, or only itself."""
    seen: set[str] = set()
    place: Any = {"$ref": reference}
    while isinstance(place, dict) and isinstance(place.get("$ref"), str):
        target: str = place["$ref"]
        if target in known:
            break
        if target in seen:
            raise SchemaError(written(path), f"{reference[:100]!r} leads only to itself; a schema there would work")
        seen.add(target)
        if target != "#" and not target.startswith("#/"):
            break
        place = _at(root, target)
        if place is None:
            raise SchemaError(written(path), f"{reference[:100]!r} leads nowhere; a place in the schema would work")
    return seen


def _at(root: Json, reference: str) -> Any:
    """What it leads to within the schema, or None."""
    place: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and len(key) < 6 and int(key) < len(place):
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, dict) else None
    return place
