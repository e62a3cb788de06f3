"""Pure: who owns which fields of an object (metadata.managedFields), and whose the object itself is.

Format: fieldsV1 of server-side apply, a tree of `f:NAME` fields, `k:{…}` list items by key and `v:…` set members.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pilotfish_operator.kinds import MANAGED_BY, MANAGER, MODEL_LABEL, MODELS

Object = dict[str, Any]

CLUSTER = ("kube-controller-manager", "kube-scheduler", "kube-apiserver", "kubelet")  # they fill in what is theirs
PARTS = ("f:spec", "f:data")
LEFT_ALONE = ("f:spec", "f:template", "f:metadata", "f:annotations")  # kubectl rollout restart


@dataclass(frozen=True)
class Foreign:
    """A field that another manager added to an object of ours."""

    manager: str
    path: tuple[str, ...]

    @property
    def text(self) -> str:
        """Such as spec.template.spec.containers[name=engine].env[name=X]."""
        words = []
        for part in self.path:
            if part.startswith("k:"):
                words.append("[" + ",".join(f"{key}={value}" for key, value in json.loads(part[2:]).items()) + "]")
            else:
                words.append(("." if words else "") + part[2:])
        return "".join(words)


def foreign(obj: Object) -> tuple[Foreign, ...]:
    """What others own alone under spec and data; a cached object brings it along."""
    if "foreign" in obj:
        found: tuple[Foreign, ...] = obj["foreign"]
        return found
    entries = [entry for entry in obj["metadata"].get("managedFields") or () if not entry.get("subresource")]
    ours = _merged([entry.get("fieldsV1") or {} for entry in entries if entry.get("manager") == MANAGER])
    if not ours:
        return ()
    return tuple(
        Foreign(entry["manager"], path)
        for entry in entries
        if entry.get("manager") not in (MANAGER, *CLUSTER)
        for part in PARTS
        for path in _extras((entry.get("fieldsV1") or {}).get(part) or {}, ours.get(part) or {}, (part,))
    )


def _merged(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            result[key] = _merged([result.get(key, {}), value]) if value or result.get(key) else {}
    return result


def _extras(theirs: dict[str, Any], ours: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, below in theirs.items():
        here = (*path, key)
        if key == "." or here == LEFT_ALONE:
            continue
        if key not in ours:
            yield here
        else:
            yield from _extras(below, ours[key], here)


def removal(obj: Object, added: Sequence[Foreign]) -> list[Object]:
    """A JSON patch that takes these fields out of exactly this version of the object."""
    places = {place for one in added if (place := _place(obj, one.path)) is not None}
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": obj["metadata"]["resourceVersion"]}
    ordered = sorted(places, key=lambda place: [(isinstance(p, str), p) for p in place], reverse=True)
    return [test, *({"op": "remove", "path": "".join("/" + _escaped(part) for part in place)} for place in ordered)]


def _place(obj: Any, path: tuple[str, ...]) -> tuple[str | int, ...] | None:
    place: list[str | int] = []
    for part in path:
        kind, name = part[:2], part[2:]
        if kind == "f:" and isinstance(obj, dict) and name in obj:
            place.append(name)
            obj = obj[name]
        elif kind in ("k:", "v:", "i:") and isinstance(obj, list):
            wanted = json.loads(name)
            index = next((i for i, item in enumerate(obj) if _matches(kind, i, item, wanted)), None)
            if index is None:
                return None
            place.append(index)
            obj = obj[index]
        else:
            return None
    return tuple(place)


def _matches(kind: str, index: int, item: Any, wanted: Any) -> bool:
    if kind == "k:":
        return isinstance(item, dict) and all(item.get(key) == value for key, value in wanted.items())
    return bool(item == wanted) if kind == "v:" else index == wanted


def _escaped(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def last_writer(live: Object) -> str:
    """The field manager, other than ours, that wrote last."""
    entries = [entry for entry in live["metadata"].get("managedFields", ()) if entry.get("subresource") != "status"]
    others = [(entry.get("time", ""), entry.get("manager", "")) for entry in entries if entry.get("manager") != MANAGER]
    return max(others)[1] if others else "another writer"


def is_orphan(live: Object, model: str) -> bool:
    """Whether it was made for a model of this name that is gone: our labels, and no other controller."""
    labels = live["metadata"].get("labels") or {}
    ours = labels.get(MANAGED_BY) == "pilotfish" and labels.get(MODEL_LABEL) == model
    refs = live["metadata"].get("ownerReferences") or ()
    return ours and all(ref.get("kind") == MODELS.name and ref.get("name") == model for ref in refs)
