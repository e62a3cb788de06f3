"""Pure: (spec, Observed, Plan) → conditions and the numbers behind the columns.

Says what was measured, and leaves out what is not known. Does no I/O and holds no clock: time is passed in as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pilotfish_engine.contract.goodput import Choice
from pilotfish_engine.contract.methods import NO_METHOD
from pilotfish_engine.contract.reason import count, overtaken
from pilotfish_engine.contract.speculation import EngineReport
from pilotfish_operator.api import Spec
from pilotfish_operator.objects import Object, Owner, several
from pilotfish_operator.observe import Observed, Verdict
from pilotfish_operator.plan import Plan
from pilotfish_operator.reported import Condition, EffectiveStatus, Load, SettingsStatus, SpeculationStatus, Status
from pilotfish_operator.tune import in_step

T = TypeVar("T")
Truth = Literal["True", "False", "Unknown"]
Fact = tuple[Truth, str, str]  # status, reason, message
GOOD_WHEN_FALSE = ("Degraded", "ScalingLimited", "Paused")
QUIET = ("Progressing", "SpeculationActive", "ModelCached")  # no event for these: they follow others or the load


@dataclass(frozen=True)
class Note:
    """An event to record on the model. `once`: what it is about, where it must be told a single time."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    once: str = ""


@dataclass(frozen=True)
class Last:
    """The status as it stands, and what the next is of: the spec's generation, and the time as text."""

    status: Mapping[str, Any]
    generation: int
    now: str


@dataclass(frozen=True)
class Trouble:
    """problems: (reason, sentence) of what could not be read or written; drifting: pods that hold other settings than
    they should, for long; unsure: pods are not known."""

    problems: Sequence[tuple[str, str]] = ()
    drifting: Sequence[str] = ()
    unsure: bool = False


def compose(
    owner: Owner,
    spec: Spec,
    observed: Observed,
    plan: Plan,
    trouble: Trouble,
    last: Last,
) -> Object:
    """Returns the whole status."""
    problems, drifting, unsure = trouble.problems, trouble.drifting, trouble.unsure
    unknown: Fact = ("Unknown", *problems[0]) if problems else ("Unknown", "CannotRead", "")
    facts: dict[str, Fact] = {
        "Ready": unknown if unsure else _ready(observed, plan),
        "Progressing": unknown if unsure else _progressing(observed, plan),
        "Degraded": _degraded(observed, plan, problems, drifting),
        "SettingsApplied": _settings(spec, observed, plan, drifting),
        "MetricsAvailable": _metrics(observed),
        "DraftCompatible": _draft(spec, observed, plan),
        "SpeculationActive": _active(observed),
        "ScalingLimited": _limited(plan),
        "Paused": _paused(spec, plan),
        "ModelCached": _cached(spec, observed),
    }
    result = Status(
        observed_generation=last.generation,
        replicas=observed.total,
        ready_replicas=observed.ready(plan.wanted),
        selector=",".join(f"{key}={value}" for key, value in sorted(owner.selector.items())),
        endpoint=owner.endpoint,
        conditions=conditions(facts, last),
        load=_load(observed, plan),
        speculation=_speculation(spec, observed, plan),
    )
    return result.model_dump(by_alias=True, exclude_none=True, mode="json")


def invalid(message: str, last: Last) -> Object:
    """The status of a model whose spec this operator cannot read; what else is known stays."""
    facts: dict[str, Fact] = {
        "Ready": ("Unknown", "InvalidSpec", message),
        "Degraded": ("True", "InvalidSpec", message),
    }
    found = conditions(facts, last)
    return {
        **last.status,
        "observedGeneration": last.generation,
        "conditions": [c.model_dump(by_alias=True, mode="json") for c in found],
    }


def failed(message: str, last: Last) -> Object:
    """The status of a model on which the operator itself fails; what else is known stays."""
    others = [condition for condition in last.status.get("conditions") or () if condition["type"] != "Degraded"]
    found = conditions({"Degraded": ("True", "OperatorFailed", message)}, last)
    return {**last.status, "conditions": [*others, *(c.model_dump(by_alias=True, mode="json") for c in found)]}


def conditions(facts: Mapping[str, Fact], last: Last) -> list[Condition]:
    """Conditions whose transition time is that of the last change of their status."""
    before = {condition["type"]: condition for condition in last.status.get("conditions") or ()}
    result = []
    for kind, (truth, reason, message) in facts.items():
        same = before.get(kind, {}).get("status") == truth
        result.append(
            Condition(
                type=kind,
                status=truth,
                reason=reason,
                message=message[:4000],
                observed_generation=last.generation,
                last_transition_time=before[kind]["lastTransitionTime"] if same else last.now,
            )
        )
    return result


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Note]:
    """What to record of the difference: conditions that turned, in the words they turned with."""
    before = {condition["type"]: condition for condition in old.get("conditions") or ()}
    notes = []
    for condition in new["conditions"]:
        kind, truth = condition["type"], condition["status"]
        was = before.get(kind, {}).get("status")
        if truth == was or kind in QUIET or (was in (None, "Unknown") and truth != "True") or truth == "Unknown":
            continue
        good = (truth == "False") == (kind in GOOD_WHEN_FALSE)
        if was is None and good:
            continue
        notes.append(Note("Normal" if good else "Warning", condition["reason"], f"{kind}: {condition['message']}"))
    return notes


def material(status: Mapping[str, Any]) -> Object:
    """The part of a status whose change is worth a write at once; loads and words of reasons may wait."""
    speculation = status.get("speculation") or {}
    return {
        **{key: status.get(key) for key in ("observedGeneration", "replicas", "readyReplicas")},
        "conditions": [(c["type"], c["status"], c["reason"]) for c in status.get("conditions") or ()],
        "desired": speculation.get("desired"),
        "inStep": (speculation.get("effective") or {}).get("podsInStep"),
        "method": speculation.get("method"),
    }


def _ready(observed: Observed, plan: Plan) -> Fact:
    ready = observed.ready(plan.wanted)
    if ready:
        return "True", "Serving", f"{ready} of {count(plan.replicas)} serve"
    if plan.blocked:
        former = observed.ready_any
        tail = f"; {count(former)} with the former settings still there" if former else ""
        return "False", plan.blocked[0], plan.blocked[1] + tail
    if plan.replicas == 0:
        return "False", "ScaledToZero", "spec.replicas is 0"
    if observed.ready_any:
        return "False", "RollingOut", f"{count(observed.ready_any)} with the former settings meanwhile"
    return "False", "Starting", f"0 of {count(plan.replicas)} serve yet"


def _progressing(observed: Observed, plan: Plan) -> Fact:
    ready, others = observed.ready(plan.wanted), sum(pod.hash != plan.wanted for pod in observed.pods)
    if plan.blocked:
        return "False", plan.blocked[0], plan.blocked[1]
    if ready >= plan.replicas and not others and len(observed.pods) == plan.replicas:
        return "False", "Complete", f"{ready} of {count(plan.replicas)} serve"
    return (
        "True",
        "RollingOut",
        f"{ready} of {count(plan.replicas)} serve" + (f", {others} older pods" if others else ""),
    )


def _degraded(observed: Observed, plan: Plan, problems: Sequence[tuple[str, str]], drifting: Sequence[str]) -> Fact:
    if plan.blocked:
        reason, message = plan.blocked
        if plan.verdict:
            message += f" ({_meanwhile(plan, plan.verdict)})"
        return "True", reason, message
    if plan.verdict:
        return "True", plan.verdict.reason, f"{plan.verdict.message} (try {plan.verdict.tries + 1} is under way)"
    if problems:
        return "True", problems[0][0], "; ".join(sentence for _, sentence in problems)
    if observed.rollout_trouble:
        return "True", "RolloutStuck", observed.rollout_trouble
    for pod in observed.pods:
        if pod.trouble and not pod.leaving:
            reason = "PodFailing" if pod.exit else "PodNotStarting"
            again = f", restarted {pod.restarts} times" if pod.restarts else ""
            return "True", reason, f"pod {pod.name} {pod.trouble}{again}"
    if observed.seen.doubted:
        return "True", "ReportsNotBelieved", _doubts(observed)
    if drifting:
        return "True", "SettingsDrift", "; ".join(drifting[:3])
    return "False", "AsExpected", "nothing is wrong"


def _meanwhile(plan: Plan, verdict: Verdict) -> str:
    what = "no pods run" if plan.replicas == 0 else "the former settings go on serving"
    if verdict.until is None:
        return f"{what} until the spec changes"
    at = datetime.fromtimestamp(verdict.until, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"{what} until the spec changes; tried again at {at}, ever more seldom"


def _metrics(observed: Observed) -> Fact:
    serving = [pod for pod in observed.pods if pod.serves]
    if not serving:
        return "Unknown", "NoPods", "no pod serves yet"
    unread = [f"{pod.name}: {observed.seen.unread[pod.uid]}" for pod in serving if pod.uid in observed.seen.unread]
    if not unread and not observed.seen.doubted and not observed.reports:
        return "Unknown", "NotRead", "no pod has been read yet"
    if unread:
        text = f"{len(unread)} of {len(serving)} pods cannot be read, so nothing scales in: "
        return "False", "ScrapeFailed", text + "; ".join(unread[:3])
    if observed.seen.doubted:
        return "False", "ReportsNotBelieved", f"{_doubts(observed)}; nothing scales in"
    return "True", "AllRead", f"{len(observed.reports)} of {len(serving)} pods read"


def _doubts(observed: Observed) -> str:
    found = [
        f"{pod.name}: {observed.seen.doubted[pod.uid]}" for pod in observed.pods if pod.uid in observed.seen.doubted
    ]
    return f"{len(found)} pods send reports that are not used: " + "; ".join(found[:3])


def _settings(spec: Spec, observed: Observed, plan: Plan, drifting: Sequence[str]) -> Fact:
    if spec.speculation.method == "None":
        return "True", "NoSpeculation", "spec.speculation.method is None"
    if drifting:
        return "False", "SettingsDrift", "; ".join(drifting[:3])
    if not observed.reports:
        return "Unknown", "NoReport", "no engine has reported yet"
    behind = len(observed.reports) - len(in_step(observed.reports, plan.decision.tuning.envelope))
    if behind:
        return "True", "Applying", f"{behind} of {len(observed.reports)} engines are about to get them"
    return "True", "InStep", f"{len(observed.reports)} engines hold the desired settings"


def _draft(spec: Spec, observed: Observed, plan: Plan) -> Fact:
    if plan.draft_misfits and plan.blocked:
        return "False", "DraftMisfits", plan.blocked[1]
    if spec.speculation.draft is None:
        return "True", "NoDraft", "no draft model is asked for"
    if observed.ready(plan.wanted):
        return "True", "Loaded", "the engines run with the draft"
    return "Unknown", "NotLoaded", "no engine has loaded the draft yet"


def _active(observed: Observed) -> Fact:
    reports = list(observed.reports.values())
    if not reports:
        return "Unknown", "NoReport", "no engine has reported yet"
    active = sum(report.effective.active for report in reports)
    reason = next((report.reason for report in reports if report.effective.active == bool(active)), "")
    text = f"{active} of {len(reports)} engines speculate: {reason}"
    if active:
        return "True", "Speculating", text
    off = all(report.method == NO_METHOD for report in reports)
    return "False", "Off" if off else "Plain", text


def _paused(spec: Spec, plan: Plan) -> Fact:
    if spec.paused:
        text = f"spec.paused is true: {count(plan.replicas)} and the present settings stay; drift is still put right"
        return "True", "Paused", text
    return "False", "Running", "spec.paused is false"


def _limited(plan: Plan) -> Fact:
    limited = plan.decision.scale.limited
    if limited:
        return "True", "TooFewReplicas" if "maxReplicas" in limited else "LoadUnknown", limited
    return "False", "WithinBounds", plan.decision.scale.reason


def _cached(spec: Spec, observed: Observed) -> Fact:
    claim, asked = observed.claim, spec.cache
    if claim and asked and asked.size:
        if several(spec) and "ReadWriteOnce" in (claim.get("accessModes") or ()):
            text = "the cache's claim was made for one replica (ReadWriteOnce): replicas on other nodes wait for it"
            return "False", "ClaimNotShared", f"{text}; give cache.persistentVolumeClaim one that is ReadWriteMany"
        if asked.storage_class_name not in (None, claim.get("storageClassName")):
            text = f"the cache's claim has the class {claim.get('storageClassName')}, not {asked.storage_class_name}"
            return "False", "ClaimDiffers", f"{text}: a claim cannot change it; delete the claim to have it made again"
    scheme = spec.model.source.partition("://")[0]
    if scheme == "pvc":
        return "True", "InClaim", "the weights are read from a claim"
    if scheme in ("file", "package"):
        return "True", "InImage", "the weights are a part of the engine's image"
    return "Unknown", "Downloaded", "each pod downloads what its cache lacks"


def _load(observed: Observed, plan: Plan) -> Load | None:
    serving, scale = observed.ready_any, plan.decision.scale
    if not observed.reports or not serving or not scale.stable.covered:
        return None
    return Load(
        concurrency=round(scale.stable.value, 1),
        per_replica=round(scale.stable.value / serving, 1),
        tokens_per_second=round(plan.decision.tokens_per_second, 1),
        waiting=sum(report.waiting for report in observed.reports.values()),
    )


def _speculation(spec: Spec, observed: Observed, plan: Plan) -> SpeculationStatus:
    reports, tuning, seen = observed.reports, plan.decision.tuning, plan.decision.traffic
    method = _most(report.method for report in reports.values()) or spec.speculation.method
    if method == NO_METHOD:
        return SpeculationStatus(active=False, method=method, reason="spec.speculation.method is None")
    envelope = tuning.envelope
    desired = SettingsStatus(
        num_steps=envelope.num_steps,
        topk=envelope.topk,
        num_draft_tokens=envelope.num_draft_tokens,
        disable_threshold=envelope.disable_threshold,
    )
    if not reports:
        return SpeculationStatus(method=method, desired=desired, reason=tuning.reason)
    runs = _most(report.effective for report in reports.values())
    assert runs is not None
    effective = EffectiveStatus(
        num_steps=runs.num_steps,
        topk=runs.topk,
        num_draft_tokens=runs.num_draft_tokens,
        disable_threshold=runs.disable_threshold,
        pods_in_step=f"{len(in_step(reports, envelope))}/{observed.ready_any}",
    )
    length = seen.accept_length if seen else None
    active = any(report.effective.active for report in reports.values())
    gain = tuning.choice.speedup if tuning.choice and active else None if active else 1.0
    return SpeculationStatus(
        active=active,
        method=method,
        desired=desired,
        effective=effective,
        accept_length=None if length is None else round(length, 2),
        speedup=None if gain is None else round(gain, 2),
        crossover=tuning.crossover,
        reason=_newest(tuning.reason, tuning.choice, reports.values()),
    )


def _newest(reason: str, choice: Choice | None, reports: Collection[EngineReport]) -> str:
    """The operator's verdict on the load of a while; where engines, who judge each step, do otherwise, that too."""
    pays = choice is not None and choice.settings.num_steps > 0
    others = [report for report in reports if report.effective.active != pays]
    if choice is None or not others:
        return reason
    return overtaken(reason, len(others), len(reports), plain=pays)


def _most(values: Iterable[T]) -> T | None:
    found = Counter(values).most_common(1)
    return found[0][0] if found else None
