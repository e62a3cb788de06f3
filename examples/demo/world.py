"""Where the demo runs: the local Kubernetes of `tests/cluster/`, or the cluster of the current kubectl context.

Both give the same three things: kubectl and helm, the URLs of a model's ready pods, and an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.demo import screen
from tests.cluster.build import build
from tests.cluster.cluster import DEFAULT_STATE, Cluster
from tests.cluster.errors import StateError

ENGINE_PORT = 8000


class DemoError(Exception):
    """Something did not come about; the sentence says what, and what was seen instead."""


class World(ABC):
    """A cluster that the demo may use. `touched`: something of the demo may be in it."""

    touched = False
    environment: Mapping[str, str]

    def run(self, *argv: str, show: bool = True, timeout: float = 300) -> str:
        """Standard output of kubectl or helm. Raises DemoError with what the command said."""
        if show:
            screen.command(argv)
        path = shutil.which(argv[0], path=self.environment["PATH"]) or argv[0]
        done = subprocess.run([path, *argv[1:]], env=self.environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise DemoError(f"{shlex.join(argv)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def show(self, *argv: str) -> None:
        screen.say(self.run(*argv).rstrip())

    def get(self, *what: str) -> Any:
        """`kubectl get … -o json`; None when it is not there."""
        text = self.run("kubectl", "get", *what, "-o", "json", "--ignore-not-found", show=False, timeout=120)
        return json.loads(text) if text else None

    def pods(self, model: str) -> list[Any]:
        """The model's pods that serve and are not leaving, oldest first."""
        listed = self.get("pods", "-l", f"pilotfish.dev/model={model}") or {"items": []}
        return sorted((pod for pod in listed["items"] if _serves(pod)), key=lambda pod: str(pod["status"]["startTime"]))

    @abstractmethod
    def url(self, pod: Any) -> str:
        """Base URL for an OpenAI client of one pod."""

    @abstractmethod
    def close(self, keep: bool) -> None:
        """Ends what this object started; `keep` leaves the cluster and says how to go on."""

    @abstractmethod
    def logs(self) -> str:
        """Where a person finds out what went wrong."""


def _serves(pod: Any) -> bool:
    conditions = pod["status"].get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


class LocalWorld(World):
    """Control plane and pods as processes of this machine; pods are reached by their loopback addresses."""

    def __init__(self, keep: bool = False, state: Path = DEFAULT_STATE) -> None:
        with contextlib.suppress(StateError):
            Cluster.attach(state).stop()
            screen.note("ended the local Kubernetes that was still up")
        self.cluster = Cluster.start("processes", state, owned=not keep)
        self.environment = self.cluster.env

    def url(self, pod: Any) -> str:
        return f"http://{pod['status']['podIP']}:{ENGINE_PORT}/v1"

    def close(self, keep: bool) -> None:
        if not keep:
            self.cluster.stop()
            return
        screen.say('Everything still runs. Go on with:\n  eval "$(.venv/bin/python -m tests.cluster env)"')
        screen.say("  kubectl get speculativemodels\nand end it with:\n  make down")

    def logs(self) -> str:
        return str(self.cluster.logs)


class CurrentWorld(World):
    """The cluster of the current context; pods are reached through port-forwards."""

    def __init__(self) -> None:
        missing = [name for name in ("kubectl", "helm") if shutil.which(name) is None]
        folders = [str(build(missing))] if missing else []
        self.environment = os.environ | {"PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
        self._forwards: dict[str, tuple[subprocess.Popen[str], int]] = {}
        screen.note(f"context {self.run('kubectl', 'config', 'current-context', show=False).strip()}")

    def url(self, pod: Any) -> str:
        name, address = str(pod["metadata"]["name"]), str(pod["status"]["podIP"])
        if address.startswith("127."):  # a world of tests/cluster/ that somebody has up: a process of this machine
            return f"http://{address}:{ENGINE_PORT}/v1"
        if name not in self._forwards or self._forwards[name][0].poll() is not None:
            self._forwards[name] = self._forward(name)
        return f"http://127.0.0.1:{self._forwards[name][1]}/v1"

    def _forward(self, name: str) -> tuple[subprocess.Popen[str], int]:
        argv = ["kubectl", "port-forward", "--address=127.0.0.1", f"pod/{name}", f":{ENGINE_PORT}"]
        process = subprocess.Popen(
            argv, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout
        line = process.stdout.readline()
        port = re.search(r"127\.0\.0\.1:(\d+)", line)
        if port is None:
            process.terminate()
            raise DemoError(f"{shlex.join(argv)}: {line.strip()}")
        return process, int(port[1])

    def close(self, keep: bool) -> None:
        for process, _ in self._forwards.values():
            process.terminate()
            process.wait(10)
        if keep:
            screen.say("Everything still runs. End it with:\n  kubectl delete speculativemodel smollm2")
            screen.say("  helm uninstall pilotfish -n pilotfish-system")

    def logs(self) -> str:
        return "kubectl -n pilotfish-system logs deployment/pilotfish"


def start(name: str, keep: bool) -> World:
    """The world that CLUSTER names: empty for the local one."""
    match name:
        case "" | "local":
            return LocalWorld(keep)
        case "current":
            return CurrentWorld()
    raise DemoError(f"CLUSTER={name} is not known: leave it out for the local Kubernetes, or say CLUSTER=current")
