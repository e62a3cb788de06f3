"""What the API server is told of a pod. Pure: from what containers are like to the pod's status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.cluster.node.runtime import Exit

Object = dict[str, Any]


@dataclass
class View:
    """One container as its status shows it. ``state`` and ``last`` have the API's form."""

    name: str
    image: str
    container_id: str = ""
    state: Object = field(default_factory=dict)
    last: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    over: bool = False  # ended, and will not be started again

    def waiting(self, reason: str, message: str = "") -> None:
        self.ready = self.started = False
        self.state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}

    def running(self, started_at: float) -> None:
        self.state = {"running": {"startedAt": timestamp(started_at)}}

    def terminated(self, ended: Exit, message: str) -> None:
        self.ready = self.started = False
        reason = "StartError" if ended.failure else "Completed" if ended.exit_code == 0 else "Error"
        self.state = {
            "terminated": {
                "exitCode": ended.exit_code,
                "reason": reason,
                "startedAt": timestamp(ended.started_at),
                "finishedAt": timestamp(ended.finished_at),
                "containerID": self.container_id,
            }
            | ({"signal": ended.signal} if ended.signal else {})
            | ({"message": message} if message else {})
        }

    @property
    def exit_code(self) -> int | None:
        terminated = self.state.get("terminated")
        return terminated["exitCode"] if terminated else None

    def status(self) -> Object:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": self.image if self.container_id else "",
            "containerID": self.container_id,
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def phase(init: Sequence[View], containers: Sequence[View], restarts_always: bool) -> str:
    """Pending, Running, Succeeded or Failed, by a kubelet's rules."""
    if any(view.over and view.exit_code for view in init):
        return "Failed"
    if any(view.exit_code != 0 for view in init):
        return "Pending"
    if all(view.over for view in containers) and not restarts_always:
        return "Failed" if any(view.exit_code for view in containers) else "Succeeded"
    if any("waiting" in view.state and not view.last for view in containers):
        return "Pending"
    return "Running"


def pod_status(
    pod: Object,
    init: Sequence[View],
    containers: Sequence[View],
    *,
    address: str,
    host: str,
    started: float,
    now: float,
) -> Object:
    """The whole status but for the conditions that are others' to set."""
    current = phase(init, containers, pod["spec"].get("restartPolicy", "Always") == "Always")
    initialized = all(view.exit_code == 0 for view in init)
    unready = [view.name for view in containers if not view.ready]
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])]
    before = {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", [])}
    open_gates = [gate for gate in gates if before.get(gate, {}).get("status") != "True"]
    ended = current in ("Succeeded", "Failed")
    reason = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(current, "ContainersNotReady")
    message = f"containers with unready status: [{' '.join(unready)}]" if unready and not ended else ""
    gate_message = f"readiness gates not passed: [{' '.join(open_gates)}]" if open_gates and not unready else ""
    gate_reason = "ReadinessGatesNotReady" if gate_message else reason
    conditions = [
        ("PodReadyToStartContainers", not ended, "", ""),
        ("Initialized", initialized, "ContainersNotInitialized", ""),
        ("ContainersReady", not unready, reason, message),
        ("Ready", not unready and not open_gates, gate_reason, message or gate_message),
    ]
    return {
        "phase": current,
        "hostIP": host,
        "hostIPs": [{"ip": host}],
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": timestamp(started),
        "observedGeneration": pod["metadata"].get("generation", 0),
        "initContainerStatuses": [view.status() for view in init],
        "containerStatuses": [view.status() for view in containers],
        "conditions": [_condition(*condition, before.get(condition[0], {}), now) for condition in conditions],
    }


def _condition(kind: str, holds: bool, reason: str, message: str, before: Object, now: float) -> Object:
    status = "True" if holds else "False"
    changed = before.get("status") != status
    return {
        "type": kind,
        "status": status,
        "reason": None if holds else reason or None,
        "message": None if holds else message or None,
        "lastTransitionTime": timestamp(now) if changed else before["lastTransitionTime"],
    }
