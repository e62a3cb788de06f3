"""Manifests → server-side apply, one field manager, and only where the live object differs.

An object differs when the fields of the manifest, read from the live object, are no longer what the API server made
of them at the last apply; so defaulting and canonical quantities cause no writes. Fields that another manager added to
what is ours are taken out again. An object that has to be written over and over for the same manifest has another
writer: that is reported, and it is left alone for a while. Each object is independent: one that cannot be written is
a problem with a sentence, and the others are written all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pilotfish_operator import objects, ownership
from pilotfish_operator.cache import Cache, key_of
from pilotfish_operator.kinds import BY_NAME, CLAIMS, CONFIG_MAPS, SECRETS, Kind
from pilotfish_operator.kube import Conflict, Forbidden, Invalid, Kube, KubeError, NotFound
from pilotfish_operator.objects import Object, Owner
from pilotfish_operator.status import Note

CONTESTED_WRITES, CONTESTED_WINDOW, PAUSE = 5, 60.0, 60.0
SURELY_FORBIDDEN = 3  # an API server that has just started forbids what it will allow
CAME_FROM = {  # parts of a Deployment, as the API server names them, and what they were made of
    ".affinity": "spec.scheduling.affinity",
    ".topologySpreadConstraints": "spec.scheduling.topologySpread",
    ".tolerations": "spec.scheduling.tolerations",
    ".nodeSelector": "spec.scheduling.nodeSelector",
    ".priorityClassName": "spec.scheduling.priorityClassName",
    ".runtimeClassName": "spec.scheduling.runtimeClassName",
    ".resources": "spec.resources",
    ".sizeLimit": "spec.cache.emptyDir.sizeLimit",
    ".strategy": "spec.rollout.maxSurge",
    "storageClassName": "spec.cache.storageClassName",
    "requests[storage]": "spec.cache.size",
    "requests.storage": "spec.cache.size",
}
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


@dataclass
class Outcome:
    """What the cluster would not accept, what is to be told, and the failure that another try may mend."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    failed: KubeError | None = None


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
    """`again`: seconds after which an object that was refused is tried again."""

    def __init__(
        self, kube: Kube, cache: Cache, leads: Callable[[], bool], clock: Callable[[], float], again: float
    ) -> None:
        self._kube, self._cache, self._leads, self._clock, self._again = kube, cache, leads, clock, again
        self._written: dict[tuple[Kind, tuple[str, str]], _Written] = {}

    async def apply(self, owner: Owner, manifests: tuple[Object, ...], blind: Collection[Kind] = ()) -> Outcome:
        """Make them so. `blind`: kinds of which nothing can be read. Raises NotLeading."""
        outcome = Outcome()
        for manifest in manifests:
            kind, key = BY_NAME[manifest["kind"]], key_of(manifest)
            try:
                problem = await self._apply_one(owner, manifest, outcome.notes, kind in blind)
            except Conflict as raced:
                outcome.failed = outcome.failed or raced
            except KubeError as refusal:
                outcome.failed = outcome.failed or refusal
                outcome.problems.append(_refused(kind, key[1], refusal))
            else:
                outcome.problems += [problem] if problem else []
        return outcome

    async def prune(self, owner: Owner, names: Collection[str]) -> None:
        """Delete these ConfigMaps of the model; what fails is tried in another turn."""
        for name in names:
            self._check()
            try:
                await self._kube.delete(CONFIG_MAPS, owner.namespace, name)
                self._cache.remove(CONFIG_MAPS, (owner.namespace, name))
                self._written.pop((CONFIG_MAPS, (owner.namespace, name)), None)
            except KubeError as problem:
                log.info("%s/%s is not needed any more and cannot be deleted: %s", owner.namespace, name, problem)

    def forget(self, namespace: str, name: str) -> None:
        """The model is gone, and with it its children."""
        for kind, key in [k for k in self._written if k[1][0] == namespace and k[1][1].startswith(name)]:
            if self._cache.get(kind, key) is None:
                del self._written[kind, key]

    async def keep_token(self, owner: Owner, there: bool) -> Outcome:
        """The admin token's Secret: made where it is not there, adopted where it lost its owner, else left alone."""
        outcome, live = Outcome(), self._cache.get(SECRETS, (owner.namespace, owner.secret))
        try:
            if live is not None and there:
                if not _owned(live, owner):
                    outcome.problems += await self._adopt(SECRETS, live, owner, outcome.notes)
                return outcome
            self._check()
            outcome.problems += await self._create_token(owner, outcome.notes)
        except KubeError as refusal:
            outcome.failed = refusal
            outcome.problems.append(_refused(SECRETS, owner.secret, refusal))
        return outcome

    async def _create_token(self, owner: Owner, notes: list[Note]) -> list[Problem]:
        manifest = objects.secret(owner, secrets.token_urlsafe(32))
        try:
            made = await self._kube.create(SECRETS, manifest)
        except Conflict:
            made = await self._kube.get(SECRETS, owner.namespace, owner.secret)
            if not _owned(made, owner) and (taken := await self._adopt(SECRETS, made, owner, notes)):
                return taken
            if not (made.get("data") or {}).get(objects.TOKEN_KEY):
                made = await self._kube.apply(SECRETS, manifest)
        except (Forbidden, Invalid) as problem:
            return [_refused(SECRETS, owner.secret, problem)]
        self._cache.put(SECRETS, made)
        return []

    async def _adopt(self, kind: Kind, live: Object, owner: Owner, notes: list[Note]) -> list[Problem]:
        """An object that carries our labels and whose owner is gone gets this model as its owner."""
        if not ownership.is_orphan(live, owner.name):
            return [_taken(kind, key_of(live)[1])]
        self._check()
        body = {"metadata": {"ownerReferences": objects.owner_references(owner)}}
        self._cache.put(kind, await self._kube.merge(kind, *key_of(live), body))
        notes.append(Note("Normal", "Adopted", f"{kind.name} {key_of(live)[1]} had lost its owner and is this model's"))
        return []

    async def _apply_one(self, owner: Owner, manifest: Object, notes: list[Note], blind: bool) -> Problem | None:
        kind, key, now = BY_NAME[manifest["kind"]], key_of(manifest), self._clock()
        written = self._written.setdefault((kind, key), _Written())
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        same = digest == written.manifest
        if (now < written.paused_until or (blind and written.made is not None)) and same:
            return written.problem
        live = None if blind else self._cache.get(kind, key)
        if live is None:
            try:
                live = await self._kube.get(kind, *key)
            except NotFound:
                live = None
            except Forbidden:
                if not blind:
                    raise
        if live is not None and not _owned(live, owner):
            if taken := await self._adopt(kind, live, owner, notes):
                return taken[0]
            live = self._cache.get(kind, key)
        known = live is not None and same and written.made is not None
        added = ownership.foreign(live) if live is not None and kind is not CLAIMS else ()
        if known and (added or projection(live, manifest) != written.made):
            live = await self._kube.get(kind, *key)  # the cache may lag, and it does not say who changed it
            written.other, added = ownership.last_writer(live), ownership.foreign(live) if kind is not CLAIMS else ()
        if known and not added and projection(live, manifest) == written.made:
            return written.problem if now < written.paused_until else None
        return await self._write(kind, manifest, digest, written, notes, known)

    async def _write(
        self, kind: Kind, manifest: Object, digest: str, written: _Written, notes: list[Note], drifted: bool
    ) -> Problem | None:
        self._check()
        key, now = key_of(manifest), self._clock()
        try:
            made = await self._kube.apply(kind, manifest)
            added = ownership.foreign(made) if kind is not CLAIMS else ()
            if added:
                made = await self._kube.patch(kind, *key, ownership.removal(made, added))
        except (Forbidden, Invalid) as problem:
            written.forbidden += isinstance(problem, Forbidden)
            if isinstance(problem, Forbidden) and written.forbidden < SURELY_FORBIDDEN:
                raise
            written.manifest, written.made, written.paused_until = digest, None, now + self._again
            written.problem = _refused(kind, key[1], problem)
            return written.problem
        self._cache.put(kind, made)
        written.forbidden = 0
        written.manifest, written.made, written.problem = digest, projection(made, manifest), None
        if not drifted and not added:
            return None
        what = f"{added[0].manager} had set {'; '.join(one.text for one in added[:3])}" if added else ""
        note = f"{kind.name} {key[1]}: {what or f'{written.other} had changed it'}; it was put right"
        log.info("%s: %s", key[0], note)
        notes.append(Note("Warning", "DriftCorrected", note))
        written.corrections = [at for at in written.corrections if at > now - CONTESTED_WINDOW] + [now]
        if len(written.corrections) >= CONTESTED_WRITES:
            written.paused_until = now + PAUSE
            written.problem = (
                "Contested",
                f"{kind.name} {key[1]} was put right {len(written.corrections)} times in {CONTESTED_WINDOW:.0f}s and "
                f"{added[0].manager if added else written.other} changes it each time: stop that writer",
            )
        return written.problem

    def _check(self) -> None:
        if not self._leads():
            raise NotLeading


def _owned(live: Object, owner: Owner) -> bool:
    return any(ref.get("uid") == owner.uid for ref in live["metadata"].get("ownerReferences") or ())


def _taken(kind: Kind, name: str) -> Problem:
    return "NameTaken", f"{kind.name} {name} exists and does not belong to this model: rename one of the two"


def _refused(kind: Kind, name: str, problem: KubeError) -> Problem:
    if isinstance(problem, Forbidden):
        return "Forbidden", f"{kind.name} {name} may not be written: {problem.message}"
    if isinstance(problem, Invalid):
        return "Rejected", f"{kind.name} {name} is refused: {_in_the_spec(problem.message)}"
    return "WriteFailed", f"{kind.name} {name} cannot be written now, tried again: {problem.message}"


def _in_the_spec(message: str) -> str:
    """The API server's sentence, with the part of the SpeculativeModel that a wrong part of a Deployment came from."""
    found = [mine for theirs, mine in CAME_FROM.items() if theirs in message]
    return f"{found[0]}: {message}" if found else message
