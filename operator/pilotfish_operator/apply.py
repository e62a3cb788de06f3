"""Manifests → server-side apply, one field manager, and only where the live object differs.

An object differs when the fields of the manifest, read from the live object, are no longer what the API server made
of them at the last apply; so defaulting and canonical quantities cause no writes. An object that has to be written over
and over for the same manifest has another writer: that is reported, and it is left alone for a while.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pilotfish_operator import objects
from pilotfish_operator.cache import Cache, key_of
from pilotfish_operator.kinds import BY_NAME, MANAGER, SECRETS, Kind
from pilotfish_operator.kube import Conflict, Forbidden, Invalid, Kube, NotFound
from pilotfish_operator.objects import Object, Owner

CONTESTED_WRITES, CONTESTED_WINDOW, PAUSE = 5, 60.0, 60.0
SURELY_FORBIDDEN = 3  # an API server that has just started forbids what it will allow
log = logging.getLogger(__name__)
Problem = tuple[str, str]  # reason, sentence


class NotLeading(Exception):
    """Another operator may act from now on."""


@dataclass
class _Written:
    """What is known of the last apply of one object."""

    manifest: str = ""
    made: Any = None
    corrections: list[float] = field(default_factory=list)
    paused_until: float = 0.0
    problem: Problem | None = None
    other: str = "another writer"
    forbidden: int = 0


def projection(live: Any, shape: Any) -> Any:
    """The parts of `live` that `shape` speaks of; named list items are matched by name."""
    if isinstance(shape, dict):
        return (
            {key: projection(live.get(key), value) for key, value in shape.items()} if isinstance(live, dict) else live
        )
    if isinstance(shape, list) and isinstance(live, list):
        if all(isinstance(item, dict) and "name" in item for item in [*shape, *live]):
            by_name = {item["name"]: item for item in live}
            return [projection(by_name.get(item["name"]), item) for item in shape]
        if len(shape) == len(live):
            return [projection(one, item) for one, item in zip(live, shape, strict=True)]
    return live


class Applier:
    def __init__(self, kube: Kube, cache: Cache, leads: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._kube, self._cache, self._leads, self._clock = kube, cache, leads, clock
        self._written: dict[tuple[Kind, tuple[str, str]], _Written] = {}

    async def apply(self, owner: Owner, manifests: tuple[Object, ...]) -> list[Problem]:
        """Make them so; what the cluster will not accept. Raises NotLeading, and KubeError where a retry may help."""
        found = [await self._apply_one(owner, manifest) for manifest in manifests]
        return [problem for problem in found if problem]

    def forget(self, namespace: str, name: str) -> None:
        """The model is gone, and with it its children."""
        for kind, key in [k for k in self._written if k[1][0] == namespace and k[1][1].startswith(name)]:
            if self._cache.get(kind, key) is None:
                del self._written[kind, key]

    async def create_token(self, owner: Owner) -> Problem | None:
        """The admin token's Secret, unless it is there; a token is made once and never written again."""
        self._check()
        manifest = objects.secret(owner, secrets.token_urlsafe(32))
        try:
            made = await self._kube.create(SECRETS, manifest)
        except Conflict:
            made = await self._kube.get(SECRETS, owner.namespace, owner.secret)
            if not _owned(made, owner):
                return _taken(SECRETS, owner.secret)
            if not (made.get("data") or {}).get(objects.TOKEN_KEY):
                made = await self._kube.apply(SECRETS, manifest)
        except (Forbidden, Invalid) as problem:
            return _refused(SECRETS, owner.secret, problem)
        self._cache.put(SECRETS, made)
        return None

    async def _apply_one(self, owner: Owner, manifest: Object) -> Problem | None:
        kind, key, now = BY_NAME[manifest["kind"]], key_of(manifest), self._clock()
        written = self._written.setdefault((kind, key), _Written())
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        live = self._cache.get(kind, key)
        if now < written.paused_until and digest == written.manifest:
            return written.problem
        if live is None:
            try:
                live = await self._kube.get(kind, *key)
            except NotFound:
                live = None
        if live is not None and not _owned(live, owner):
            return _taken(kind, key[1])
        drifted = live is not None and digest == written.manifest and written.made is not None
        if drifted and projection(live, manifest) != written.made:
            live = await self._kube.get(kind, *key)  # the cache may lag, and it does not say who changed it
            written.other = _last_writer(live)
        if drifted and projection(live, manifest) == written.made:
            return written.problem if now < written.paused_until else None
        self._check()
        try:
            made = await self._kube.apply(kind, manifest)
        except (Forbidden, Invalid) as problem:
            written.forbidden += isinstance(problem, Forbidden)
            if isinstance(problem, Forbidden) and written.forbidden < SURELY_FORBIDDEN:
                raise
            written.manifest, written.made, written.paused_until = digest, None, now + PAUSE
            written.problem = _refused(kind, key[1], problem)
            return written.problem
        self._cache.put(kind, made)
        written.forbidden = 0
        written.manifest, written.made, written.problem = digest, projection(made, manifest), None
        if drifted:
            log.info("%s %s/%s had been changed by %s and was put right", kind.name, *key, written.other)
            written.corrections = [at for at in written.corrections if at > now - CONTESTED_WINDOW] + [now]
        if drifted and len(written.corrections) >= CONTESTED_WRITES:
            written.paused_until = now + PAUSE
            written.problem = (
                "Contested",
                f"{kind.name} {key[1]} was put right {len(written.corrections)} times in {CONTESTED_WINDOW:.0f}s and "
                f"{written.other} changes it each time: stop that writer",
            )
        return written.problem

    def _check(self) -> None:
        if not self._leads():
            raise NotLeading


def _last_writer(live: Object) -> str:
    """The field manager, other than ours, that wrote last."""
    entries = [entry for entry in live["metadata"].get("managedFields", ()) if not entry.get("subresource")]
    others = [(entry.get("time", ""), entry.get("manager", "")) for entry in entries if entry.get("manager") != MANAGER]
    return max(others)[1] if others else "another writer"


def _owned(live: Object, owner: Owner) -> bool:
    return any(ref.get("uid") == owner.uid for ref in live["metadata"].get("ownerReferences") or ())


def _taken(kind: Kind, name: str) -> Problem:
    return "NameTaken", f"{kind.name} {name} exists and does not belong to this model: rename one of the two"


def _refused(kind: Kind, name: str, problem: Forbidden | Invalid) -> Problem:
    if isinstance(problem, Forbidden):
        return "Forbidden", f"{kind.name} {name} may not be written: {problem.message}"
    return "Rejected", f"{kind.name} {name} is refused: {problem.message}"
