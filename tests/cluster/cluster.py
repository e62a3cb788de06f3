"""A running world as one object: start it, use it, break a part of it, reset it, stop it.

``Cluster.start`` is what the tests and the demo call; ``Cluster.attach`` is how a later command finds the same world
again. All that is known of a world lies in its state folder: no state in memory but the path.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster import control, processes
from tests.cluster.api import Api
from tests.cluster.build import TARGETS, binaries_folder, build
from tests.cluster.errors import CommandError, ComponentError, SandboxError, StateError
from tests.cluster.node.runtime import terminate_all
from tests.cluster.processes import MARKER, Process

REPOSITORY = Path(__file__).parents[2]
DEFAULT_STATE = REPOSITORY / ".work" / "sandbox"
WORLDS = ("control", "processes")
NODE = "sandbox-node"
AGENT = "node-agent"
GUARD = "guard"
START_TIMEOUT = 300.0  # seconds for one component; a machine full of other work is slow, an idle one needs three


NONE: dict[str, list[Any]] = {"items": []}
# All that a state folder holds, and all that is ever deleted from one.
OURS = {"world.json", "components", "kubeconfigs", "pki", "etcd", "etcd:1", "etcd:2", "pods", "logs", "helm", ".kube"}


@dataclass(frozen=True)
class Settings:
    """What a world is made from.

    ``images``: image name (without registry and tag) → prefix of the environment whose ``bin`` comes first on PATH.
    ``resources``: extended resources of the node. ``backoff_base``: seconds before the second restart of a container.
    """

    world: str = "control"
    images: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("pilotfish-operator", "pilotfish-engine", "python"), sys.prefix)
    )
    resources: Mapping[str, str] = field(default_factory=dict)
    backoff_base: float = 10.0


@dataclass(frozen=True)
class World:
    """world.json: its presence says that the world is up; taking it away ends the world."""

    id: str
    address: str  # the API server and the node; pods have the other addresses of its /24
    port: int
    settings: Settings


class Cluster:
    """One world. Make it with ``start`` or ``attach``."""

    def __init__(self, state: Path, world: World) -> None:
        self.state, self.world = state, world
        self.kubeconfig = control.kubeconfig(state, control.ADMIN)
        self._api: Api | None = None

    @classmethod
    def start(
        cls, world: str, state_dir: str | Path, *, owned: bool = True, settings: Settings | None = None
    ) -> Cluster:
        """Builds what is missing and returns when the world is ready.

        ``owned``: the world ends when the calling process has ended, whatever ended it.
        Raises StateError when ``state_dir`` holds a running world, BuildError, ComponentError.
        """
        if world not in WORLDS:
            raise StateError(f"unknown world {world!r}; there are {', '.join(WORLDS)}")
        build(tuple(TARGETS))
        state = Path(state_dir).resolve()
        values = asdict(settings or Settings()) | {"world": world}
        cluster = cls(state, _claim(state, Settings(**values)))
        try:
            cluster._start_components(owned)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def attach(cls, state_dir: str | Path = DEFAULT_STATE) -> Cluster:
        """The world that is up in ``state_dir``. Raises StateError when there is none."""
        state = Path(state_dir).resolve()
        try:
            found = json.loads((state / "world.json").read_text())
        except FileNotFoundError:
            raise StateError(f"no world is up in {state}: python -m tests.cluster up control --state {state}") from None
        return cls(state, World(**(found | {"settings": Settings(**found["settings"])})))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def server(self) -> str:
        return f"https://{self.world.address}:{self.world.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What a shell needs to use this world; helm's own folders too, so that it leaves a user's alone."""
        helm = self.state / "helm"
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{binaries_folder()}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HELM_CACHE_HOME": str(helm / "cache"),
            "HELM_CONFIG_HOME": str(helm / "config"),
            "HELM_DATA_HOME": str(helm / "data"),
        }

    @property
    def env(self) -> dict[str, str]:
        """The environment of this process with ``variables`` in it."""
        return os.environ | self.variables

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 60) -> str:
        """Standard output of kubectl. Raises CommandError, or subprocess.TimeoutExpired."""
        return self._command("kubectl", args, input, timeout)

    def helm(self, *args: str, input: str | None = None, timeout: float = 120) -> str:
        """Standard output of helm. Raises CommandError, or subprocess.TimeoutExpired."""
        return self._command("helm", args, input, timeout)

    def await_crd(self, name: str, seconds: float = 30) -> None:
        """Until it is served. `kubectl wait` ends with an error where it has no condition at all yet."""
        path = 'jsonpath={.status.conditions[?(@.type=="Established")].status}'
        end = time.monotonic() + seconds
        while self.kubectl("get", "crd", name, "-o", path) != "True":
            if time.monotonic() > end:
                raise TimeoutError(f"the CRD {name} was not established within {seconds:g} s")
            time.sleep(0.1)

    def _command(self, name: str, args: tuple[str, ...], text: str | None, timeout: float) -> str:
        argv = [str(binaries_folder() / name), *args]
        result = subprocess.run(argv, env=self.env, input=text, capture_output=True, text=True, timeout=timeout)
        if result.returncode:
            raise CommandError([name, *args], result.returncode, result.stdout, result.stderr)
        return result.stdout

    # Components

    @property
    def components(self) -> list[str]:
        return sorted(path.stem for path in (self.state / "components").glob("*.json"))

    def process(self, name: str) -> Process:
        """The last process that was started for a component. Raises StateError for an unknown one."""
        pid, start = self._record(name)["process"]
        return Process(pid, start)

    def _record(self, name: str) -> dict[str, list[Any]]:
        try:
            record: dict[str, list[Any]] = json.loads((self.state / "components" / f"{name}.json").read_text())
        except FileNotFoundError:
            raise StateError(f"no component {name!r} in {self.state}; there are {', '.join(self.components)}") from None
        return record

    def kill_component(self, name: str, number: signal.Signals = signal.SIGKILL, timeout: float = 10) -> None:
        """Signals a component and waits until it has ended. It stays down until ``restart_component``."""
        process = self.process(name)
        processes.send(process, number)
        if not processes.wait(process, timeout):
            raise ComponentError(f"{name} (process {process.pid}) did not end within {timeout:g} s of {number.name}")

    def restart_component(self, name: str) -> None:
        """Ends a component if it runs, starts it again with the same arguments, and waits until it is ready."""
        with contextlib.suppress(ComponentError):
            self.kill_component(name, signal.SIGTERM, timeout=5)
        self.kill_component(name)
        self._spawn(name, self._record(name)["argv"])
        self._wait(name, self._readiness(name))

    def _spawn(self, name: str, argv: list[str]) -> None:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.state),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(REPOSITORY),
            MARKER: str(self.state),
        }
        log = self.logs / f"{name}.log"
        process = processes.spawn(argv, cwd=self.state, log=log, environment=environment)
        record = json.dumps({"argv": argv, "process": process})
        control.write_private(self.state / "components" / f"{name}.json", record)

    def _start_components(self, owned: bool) -> None:
        binaries, world = binaries_folder(), self.world
        for folder in ("components", "logs", "pods"):
            (self.state / folder).mkdir()
        control.write_credentials(self.state, self.server, [NODE])
        owner = processes.identify(os.getpid()) if owned else None
        guard = [sys.executable, "-m", "tests.cluster.guard", str(self.state), world.id, *map(str, owner or ())]
        self._spawn(GUARD, guard)
        self._spawn("etcd", control.etcd(binaries))
        self._spawn("kube-apiserver", control.api_server(binaries, world.address, world.port))
        self._wait("kube-apiserver", self._readiness("kube-apiserver"))
        self._spawn("kube-controller-manager", control.controller_manager(binaries, self.state))
        self._spawn("kube-scheduler", control.scheduler(binaries, self.state))
        if world.settings.world == "processes":
            self._spawn(AGENT, [sys.executable, "-m", "tests.cluster.node", str(self.state)])
            self._wait(AGENT, self._readiness(AGENT))
        self._wait("kube-controller-manager", self._readiness("kube-controller-manager"))

    def _readiness(self, name: str) -> Callable[[], bool]:
        """What says that a component works; that its process is alive is checked beside it."""

        def api_ready() -> bool:
            return (self.state / "pki/apiserver.crt").exists() and self.api.ready()

        def controllers_work() -> bool:
            paths = ("serviceaccounts/default", "configmaps/kube-root-ca.crt")
            return all(self.api.get(f"/api/v1/namespaces/default/{path}") for path in paths)

        def node_ready() -> bool:
            node = self.api.get(f"/api/v1/nodes/{NODE}") or {}
            conditions = node.get("status", {}).get("conditions", [])
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            return ready and not node.get("spec", {}).get("taints")

        checks = {"kube-apiserver": api_ready, "kube-controller-manager": controllers_work, AGENT: node_ready}
        return checks.get(name, lambda: True)

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not ready():
            if not processes.alive(self.process(name)):
                raise ComponentError(f"{name} ended while starting:\n{_tail(self.logs / f'{name}.log')}")
            if time.monotonic() > deadline:
                log = self.logs / f"{name}.log"
                raise ComponentError(f"{name} is not ready after {START_TIMEOUT:.0f} s:\n{_tail(log)}")
            time.sleep(0.05)

    # The API

    @property
    def api(self) -> Api:
        """Blocking calls with the admin's rights."""
        if self._api is None:
            self._api = Api(self.kubeconfig)
        return self._api

    def reset(self, timeout: float = 30) -> None:
        """Deletes all namespaced objects that were not there at the start, and all namespaces but the first four.

        Finalizers are taken off, grace is not waited for. Cluster-scoped objects stay, CRDs among them.
        Raises ComponentError when something is still there after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        collections = self.api.collections()
        while left := list(self._leftovers(collections)):
            for path, deleted, finalizers in left:
                if not deleted:
                    self.api.delete(path)
                if finalizers:
                    self.api.release(path)
            if time.monotonic() > deadline:
                raise ComponentError(f"still there {timeout:g} s after reset: {', '.join(path for path, *_ in left)}")

    def _leftovers(self, collections: list[str]) -> Iterator[tuple[str, bool, bool]]:
        """Path, whether it is being deleted, whether its finalizers can be taken off."""
        namespaces = {item["metadata"]["name"]: item for item in (self.api.get("/api/v1/namespaces") or NONE)["items"]}
        extra = [name for name in namespaces if name != "default" and not name.startswith("kube-")]
        crowded = set()
        for collection in collections:
            for name in ("default", *extra):
                folder = collection.format(namespace=name)
                for item in (self.api.get(folder) or NONE)["items"]:
                    meta = item["metadata"]
                    if name != "default" or not _original(folder.rpartition("/")[2], meta["name"]):
                        crowded.add(name)
                        path = f"{folder}/{meta['name']}"
                        yield path, "deletionTimestamp" in meta, bool(meta.get("finalizers"))
        for name in extra:  # its controller would come to an empty one after 5 s
            deleted = "deletionTimestamp" in namespaces[name]["metadata"]
            yield f"/api/v1/namespaces/{name}", deleted, deleted and name not in crowded

    # The end

    def stop(self) -> None:
        """Ends every process of this world and removes its state; the logs stay until the next start."""
        if self._api:
            self._api.close()
            self._api = None
        with contextlib.suppress(SandboxError):
            self.kill_component(AGENT)  # so that nothing is started again
        terminate_all(self.state / "pods", grace=5.0)
        stop_state(self.state)


def stop_state(state: Path) -> int:
    """Ends everything that carries this state folder's mark, known to a world or not; returns how much that was."""
    killed = processes.sweep(processes.world_mark(state))
    for name in OURS - {"logs"}:
        path = state / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return killed


def _claim(state: Path, settings: Settings) -> World:
    """Takes the state folder for a new world. Raises StateError when it holds one, or something else."""
    if (state / "world.json").exists() and processes.marked(processes.world_mark(state)):
        raise StateError(f"a world is already up in {state}: python -m tests.cluster down --state {state}")
    foreign = [path.name for path in state.glob("*") if path.name not in OURS] if state.exists() else []
    if foreign:
        raise StateError(f"{state} is not a state folder, it holds {foreign[0]}: choose an empty or new folder")
    stop_state(state)
    shutil.rmtree(state / "logs", ignore_errors=True)
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    address, port = _address()
    world = World(uuid.uuid4().hex, address, port, settings)
    with contextlib.suppress(FileExistsError), (state / "world.json").open("x") as file:
        json.dump(asdict(world), file, indent=1)
        return world
    raise StateError(f"another world is being started in {state}: choose another --state")


def _address() -> tuple[str, int]:
    """A loopback /24 that no other world uses, by its first address, and a free port there for the API server."""
    while True:
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.1"
        for port in (6443, 0):  # 6443 is taken on every address when something listens on the wildcard
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind((address, port))
                return address, int(probe.getsockname()[1])


def _original(kind: str, name: str) -> bool:
    """What a new namespace has by itself, and the API server's own Service."""
    return (kind, name) in {
        ("serviceaccounts", "default"),
        ("configmaps", "kube-root-ca.crt"),
        ("services", "kubernetes"),
        ("endpoints", "kubernetes"),
        ("endpointslices", "kubernetes"),
    }


def _tail(path: Path, lines: int = 15) -> str:
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) + f"\n(all of it: {path})"
    return f"({path} was not written)"
