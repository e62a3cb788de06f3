"""Pure: a model's children as the API server has them, and its engines' reports → Observed.

Reads raw objects once, so that nothing after it needs to know their shape. Does no I/O and decides nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, GROUP, PODS, SECRETS, TEMPLATE_LABEL, Kind
from pilotfish_operator.objects import RESTART, TEMPLATE_KEY, TOKEN_KEY, Object, Owner
from pilotfish_operator.scrape.findings import Drift, Seen

USAGE_ERROR = 2  # exit code of an engine that was started with what cannot work,
NOT_YET = 75  # and of one that misses what may come: a download, a file in a claim, a key in a Secret
SERVING = f"{GROUP}/serving"  # annotations of the Deployment: the hash of the last template whose pods served,
VERDICT = f"{GROUP}/verdict"  # and what is held against the one that did not


@dataclass(frozen=True)
class Exit:
    code: int
    message: str


@dataclass(frozen=True)
class Pod:
    """`trouble`: why it does not run, in Kubernetes' or the engine's words. `hash`: of the template it came from.
    `created`: seconds since 1970."""

    uid: str
    name: str
    address: str | None
    port: int
    hash: str
    ready: bool
    leaving: bool
    exit: Exit | None
    restarts: int
    trouble: str | None
    created: float = 0.0

    @property
    def serves(self) -> bool:
        return self.ready and not self.leaving and self.address is not None


@dataclass(frozen=True)
class Finished:
    """A pod that ended for good: evicted, its node shut down, its device not admitted, preempted. `why`: in words."""

    uid: str
    name: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What is held against the template of this hash: reason, sentence, how often it was tried, and until when it is
    not tried again (seconds since 1970; None: until the spec changes)."""

    hash: str
    reason: str
    message: str
    tries: int = 1
    until: float | None = None

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Observed:
    """`replicas`: what the Deployment asks for, None without one. `rendered`, `serving`: hashes of the template that it
    has and of the last that served; `templates`: by hash. `seen`: by uid of a pod that serves."""

    replicas: int | None
    total: int
    rendered: str | None
    serving: str | None
    verdict: Verdict | None
    pods: tuple[Pod, ...]
    has_token: bool
    rollout_trouble: str | None
    seen: Seen = field(default_factory=Seen)
    finished: tuple[Finished, ...] = ()
    templates: Mapping[str, Object] = field(default_factory=dict)
    claim: Object | None = None

    @property
    def reports(self) -> Mapping[str, EngineReport]:
        return self.seen.reports

    @property
    def silent(self) -> dict[str, str]:
        """Why there is no report to use of a pod that serves, by uid."""
        return {**self.seen.unread, **self.seen.doubted}

    @property
    def drift(self) -> Mapping[str, Drift]:
        return self.seen.drift

    def ready(self, template: str) -> int:
        """Pods of that template that serve."""
        return sum(pod.serves and pod.hash == template for pod in self.pods)

    @property
    def ready_any(self) -> int:
        return sum(pod.serves for pod in self.pods)


def owner_of(model: Object) -> Owner:
    meta = model["metadata"]
    restart = (meta.get("annotations") or {}).get(RESTART, "")
    return Owner(meta["namespace"], meta["name"], meta["uid"], restart)


def observe(
    owner: Owner,
    family: Mapping[tuple[Kind, str], Object],
    seen: Seen | None = None,
) -> Observed:
    """`family`: every known child by kind and name."""
    deployment = family.get((DEPLOYMENTS, owner.name))
    meta: Object = deployment["metadata"] if deployment else {}
    notes = meta.get("annotations") or {}
    secret = family.get((SECRETS, owner.secret))
    found = [obj for (kind, _), obj in family.items() if kind is PODS]
    pods = tuple(sorted((pod(obj) for obj in found if not _is_finished(obj)), key=lambda p: p.name))
    return Observed(
        replicas=deployment["spec"].get("replicas", 1) if deployment else None,
        total=((deployment or {}).get("status") or {}).get("replicas", 0),
        rendered=_label(deployment["spec"].get("template") or {}) if deployment else None,
        serving=notes.get(SERVING) or None,
        verdict=_verdict(notes.get(VERDICT)),
        pods=pods,
        has_token=bool(secret and (secret.get("data") or {}).get(TOKEN_KEY)),
        rollout_trouble=_rollout_trouble(deployment),
        seen=seen or Seen(),
        finished=tuple(_finished(obj) for obj in found if _is_finished(obj)),
        templates=dict(_templates(family)),
        claim=(family.get((CLAIMS, f"{owner.name}-cache")) or {}).get("spec"),
    )


def _is_finished(obj: Object) -> bool:
    return (obj.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def _finished(obj: Object) -> Finished:
    meta, state = obj["metadata"], obj["status"]
    words = ": ".join(part for part in (state.get("reason"), state.get("message")) if part)
    how = "failed" if state["phase"] == "Failed" else "ended"
    return Finished(
        meta["uid"], meta["name"], f"{how} for good and counts no more ({words or 'no reason given'})"[:900]
    )


def pod(obj: Object) -> Pod:
    """One pod of a model."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    ports = [port for container in spec.get("containers", ()) for port in container.get("ports") or ()]
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    states = [state for state in status.get("containerStatuses") or () if state["name"] == "engine"]
    state = states[0] if states else {}
    return Pod(
        uid=meta["uid"],
        name=meta["name"],
        address=status.get("podIP"),
        port=next((port["containerPort"] for port in ports if port.get("name") == "http"), 8000),
        hash=(meta.get("labels") or {}).get(TEMPLATE_LABEL, ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        leaving="deletionTimestamp" in meta,
        exit=_exit(state),
        restarts=state.get("restartCount", 0),
        trouble=_trouble(status, conditions, state),
        created=_seconds(meta.get("creationTimestamp")),
    )


def _seconds(text: str | None) -> float:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text or "").timestamp()
    return 0.0


def _exit(state: Object) -> Exit | None:
    for phase in ("state", "lastState"):
        ended = (state.get(phase) or {}).get("terminated")
        if ended:
            reason, words = ended.get("reason") or "", last_words(ended.get("message") or "")
            telling = [reason] if reason not in ("", "Error", "Completed") else []
            return Exit(ended.get("exitCode", 0), ": ".join([*telling, *([words] if words else [])]))
    return None


def last_words(message: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _trouble(status: Object, conditions: Mapping[str, Any], state: Object) -> str | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and not status.get("podIP"):
        return f"cannot be scheduled: {scheduled.get('message') or scheduled.get('reason')}"
    waiting = (state.get("state") or {}).get("waiting") or {}
    ended = _exit(state)
    if ended and ended.code == NOT_YET and conditions.get("Ready", {}).get("status") != "True":
        return f"waits for what is not there yet, tried again with back-off: {ended.message or 'no last words'}"
    if ended and ended.code != 0 and conditions.get("Ready", {}).get("status") != "True":
        return f"exited with code {ended.code}: {ended.message or 'no last words'}"
    if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message') or ''}".rstrip(": ")
    return None


def _rollout_trouble(deployment: Object | None) -> str | None:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    for condition in conditions:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message"))
        if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return str(condition.get("message"))
    return None


def _verdict(text: str | None) -> Verdict | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(text or "null")
        until = found["until"]
        return Verdict(
            str(found["hash"]), str(found["reason"]), str(found["message"]), int(found["tries"]),
            None if until is None else float(until),
        )  # fmt: skip
    return None


def _templates(family: Mapping[tuple[Kind, str], Object]) -> Iterator[tuple[str, Object]]:
    """The templates that ConfigMaps keep, by hash: each was rendered once and never changes."""
    for (kind, _), obj in family.items():
        digest = _label(obj) if kind is CONFIG_MAPS else None
        with contextlib.suppress(ValueError):
            body = json.loads((obj.get("data") or {}).get(TEMPLATE_KEY, "null")) if digest else None
            if digest and isinstance(body, dict):
                yield digest, body


def _label(obj: Object) -> str | None:
    return ((obj.get("metadata") or {}).get("labels") or {}).get(TEMPLATE_LABEL)
