"""Pure: a model's children as the API server has them, and its engines' reports → Observed.

Reads raw objects once, so that nothing after it needs to know their shape. Does no I/O and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_operator.kinds import DEPLOYMENTS, GROUP, PODS, SECRETS, TEMPLATE_LABEL, Kind
from pilotfish_operator.objects import TOKEN_KEY, Object, Owner
from pilotfish_operator.scrape.findings import Drift, Seen

USAGE_ERROR = 2  # exit code of an engine that was started with what cannot work
TEMPLATE = f"{GROUP}/template"  # annotations of the Deployment: the template last rendered,
SERVING = f"{GROUP}/serving"  # the last one whose pods served,
REFUSED = f"{GROUP}/refused"  # and the one that the engine refused, with its sentence


@dataclass(frozen=True)
class Exit:
    code: int
    message: str


@dataclass(frozen=True)
class Pod:
    """`trouble`: why it does not run, in Kubernetes' or the engine's words. `hash`: of the template it came from."""

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
class Template:
    """A pod template as it was rendered, and the hash of the spec that it was rendered from."""

    hash: str
    body: Object

    def text(self) -> str:
        return json.dumps({"hash": self.hash, "body": self.body}, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Refusal:
    """The engine's sentence about the template of this hash."""

    hash: str
    message: str

    def text(self) -> str:
        return json.dumps({"hash": self.hash, "message": self.message})


@dataclass(frozen=True)
class Observed:
    """`replicas`: what the Deployment asks for, None without one. `seen`: by uid of a pod that serves."""

    replicas: int | None
    total: int
    rendered: Template | None
    serving: Template | None
    refused: Refusal | None
    pods: tuple[Pod, ...]
    has_token: bool
    rollout_trouble: str | None
    seen: Seen = field(default_factory=Seen)
    finished: tuple[Finished, ...] = ()

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
    restart = (meta.get("annotations") or {}).get(f"{GROUP}/restart", "")
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
    refused = _parsed(notes.get(REFUSED))
    secret = family.get((SECRETS, owner.secret))
    found = [obj for (kind, _), obj in family.items() if kind is PODS]
    pods = tuple(sorted((pod(obj) for obj in found if not _is_finished(obj)), key=lambda p: p.name))
    return Observed(
        replicas=deployment["spec"].get("replicas", 1) if deployment else None,
        total=((deployment or {}).get("status") or {}).get("replicas", 0),
        rendered=_template(notes.get(TEMPLATE)),
        serving=_template(notes.get(SERVING)),
        refused=Refusal(refused["hash"], refused["message"]) if refused else None,
        pods=pods,
        has_token=bool(secret and (secret.get("data") or {}).get(TOKEN_KEY)),
        rollout_trouble=_rollout_trouble(deployment),
        seen=seen or Seen(),
        finished=tuple(_finished(obj) for obj in found if _is_finished(obj)),
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
    )


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


def _parsed(text: str | None) -> Object | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and "hash" in found else None


def _template(text: str | None) -> Template | None:
    found = _parsed(text)
    return Template(found["hash"], found["body"]) if found and isinstance(found.get("body"), dict) else None
