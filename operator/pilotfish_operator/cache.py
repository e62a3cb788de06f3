"""The objects as the watches and periodic lists have shown them; what reconciling reads in place of the API server.

Newer versions win, wherever they come from. A list that shows something which the watch of that kind has not delivered
`PATIENCE` seconds later proves the watch dead. Does no I/O; knows nothing about what the objects mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pilotfish_operator.kinds import MODEL_LABEL, MODELS, TENDED, Kind
from pilotfish_operator.ownership import foreign

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name
PATIENCE = 45.0


def key_of(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def owner_key(kind: Kind, obj: Object) -> Key | None:
    """The model that an object belongs to: itself, or the one that its label names."""
    if kind is MODELS:
        return key_of(obj)
    name = (obj["metadata"].get("labels") or {}).get(MODEL_LABEL)
    return (obj["metadata"].get("namespace", ""), name) if name else None


def version(obj: Object) -> int:
    """resourceVersion, which later versions of an object exceed."""
    return int(obj["metadata"]["resourceVersion"])


class Cache:
    def __init__(self) -> None:
        self._objects: dict[Kind, dict[Key, Object]] = {}
        self._families: dict[Key, dict[tuple[Kind, str], Object]] = {}
        self._missed: dict[tuple[Kind, Key], tuple[int, float]] = {}
        self._listed = set[tuple[Kind, str | None]]()
        self._blind: dict[tuple[Kind, str | None], str] = {}

    def was_listed(self, kind: Kind, namespace: str | None) -> bool:
        return (kind, namespace) in self._listed

    def lose(self, kind: Kind, namespace: str | None, why: str) -> None:
        """What is known of these grows old: they cannot be read."""
        self._blind[kind, namespace] = why

    def blind(self, namespace: str) -> dict[Kind, str]:
        """The kinds of which nothing can be read there, and why."""
        return {kind: why for (kind, where), why in self._blind.items() if where in (None, namespace)}

    def get(self, kind: Kind, key: Key) -> Object | None:
        return self._objects.get(kind, {}).get(key)

    def models(self) -> list[Key]:
        return list(self._objects.get(MODELS, {}))

    def family(self, model: Key) -> Mapping[tuple[Kind, str], Object]:
        """Every known child of a model by kind and name; the model itself is not among them."""
        return dict(self._families.get(model, {}))

    def put(self, kind: Kind, obj: Object) -> bool:
        """Keep `obj` unless a newer version is known; whether anything changed."""
        known = self._objects.setdefault(kind, {})
        key, owner = key_of(obj), owner_key(kind, obj)
        if owner is None or (key in known and version(known[key]) >= version(obj)):
            return False
        added = {"foreign": foreign(obj)} if kind in TENDED and "foreign" not in obj else {}
        meta = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
        obj = obj | {"metadata": meta} | added
        known[key] = obj
        if kind is not MODELS:
            self._families.setdefault(owner, {})[kind, key[1]] = obj
        return True

    def remove(self, kind: Kind, key: Key) -> None:
        obj = self._objects.get(kind, {}).pop(key, None)
        self._missed.pop((kind, key), None)
        owner = owner_key(kind, obj) if obj else None
        if owner and kind is not MODELS and (family := self._families.get(owner)):
            family.pop((kind, key[1]), None)
            if not family:
                del self._families[owner]

    def watched(self, kind: Kind, obj: Object, deleted: bool) -> Key | None:
        """Take in an event of a watch; the model that it concerns."""
        if deleted:
            self.remove(kind, key_of(obj))
        else:
            self.put(kind, obj)
            missed = self._missed.get((kind, key_of(obj)))
            if missed and version(obj) >= missed[0]:
                del self._missed[kind, key_of(obj)]
        return owner_key(kind, obj)

    def listed(self, kind: Kind, namespace: str | None, objects: Iterable[Object], at: str, now: float) -> set[Key]:
        """Take in a whole list made at version `at`; the models whose objects it changed."""
        changed, present = set[Key](), set[Key]()
        self._listed.add((kind, namespace))
        self._blind.pop((kind, namespace), None)
        for obj in objects:
            key, owner = key_of(obj), owner_key(kind, obj)
            present.add(key)
            if owner and self.put(kind, obj):
                changed.add(owner)
                self._missed.setdefault((kind, key), (version(obj), now))
        for key, obj in list(self._objects.get(kind, {}).items()):
            owner = owner_key(kind, obj)
            if key not in present and namespace in (None, key[0]) and version(obj) <= int(at):
                self.remove(kind, key)
                changed |= {owner} if owner else set()
        return changed

    def stale_watches(self, now: float) -> set[str]:
        """Kinds whose watch has not delivered, for PATIENCE seconds, what a list showed."""
        return {kind.plural for (kind, _), (_, since) in self._missed.items() if now - since > PATIENCE}
