"""One pod's life on this node: volumes, init containers, containers, status, and a graceful end.

Owns the pod's folder. Which pods there are is the agent's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.cluster.node import environment
from tests.cluster.node.client import STRATEGIC, ApiError, Client, Unreachable
from tests.cluster.node.container import (
    RETRY,
    Container,
    ImageUnknown,
    Launch,
    Surroundings,
    named_ports,
    termination_file,
)
from tests.cluster.node.environment import ACCOUNT_PATH, MissingReference
from tests.cluster.node.probes import Target
from tests.cluster.node.runtime import Exit
from tests.cluster.node.shim import write
from tests.cluster.node.status import pod_status
from tests.cluster.node.volumes import Sources, Volumes, decoded

Object = dict[str, Any]
T = TypeVar("T")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REFRESH = 30.0  # seconds between two looks at ConfigMaps, Secrets and tokens that are mounted
log = logging.getLogger(__name__)


class Node(NamedTuple):
    """What a pod needs of its node."""

    client: Client
    state: Path
    address: str
    images: Mapping[str, str]
    allocatable: Mapping[str, str]
    backoff_base: float
    event: Callable[[Object, str, str, str], None]


@dataclass
class Life:
    """over: it had ended before we saw it, and never runs again. gone: from the API server. dirty: its status is to be
    told anew."""

    over: bool
    gone: bool = False
    deadline: float = float("inf")
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    dirty: asyncio.Event = field(default_factory=asyncio.Event)


class Pod:
    def __init__(self, pod: Object, node: Node, address: str) -> None:
        self.object, self.address, self._node = pod, address, node
        meta = pod["metadata"]
        self.name = f"{meta['namespace']}/{meta['name']}"
        self.folder = node.state / "pods" / meta["uid"]
        self.logs = logs_folder(node.state, meta)
        self._started = self._claim_folder()
        self._life = Life(over=pod.get("status", {}).get("phase") in ("Succeeded", "Failed"))
        self._reported: Object = {}
        self._data: dict[tuple[str, str], Mapping[str, bytes] | None] = {}
        sources = Sources(self._fetch_data, self._fetch_token, self._field, self._quantity_for({}))
        self._volumes = Volumes(pod, self.folder / "volumes", sources)
        status = pod.get("status", {})
        policy = pod["spec"].get("restartPolicy", "Always")
        failed_only: Callable[[Exit], bool] = lambda ended: policy != "Never" and ended.exit_code != 0  # noqa: E731
        always: Callable[[Exit], bool] = lambda ended: True  # noqa: E731
        make = functools.partial(self._container, status)
        self._init = [make(spec, failed_only) for spec in pod["spec"].get("initContainers", [])]
        restart = always if policy == "Always" else failed_only
        self._containers = [make(spec, restart) for spec in pod["spec"]["containers"]]

    def update(self, pod: Object) -> None:
        """A newer version of the same pod."""
        self.object = pod
        self._life.dirty.set()  # readiness gates are others' to open
        if "deletionTimestamp" in pod["metadata"]:
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
            self._stop(time.monotonic() + grace)

    def vanish(self) -> None:
        """The API server no longer has it: it was deleted without waiting for us."""
        self._life.gone = True
        self._stop(time.monotonic() + 1)

    async def live(self) -> None:
        """Returns when nothing of the pod is left on this node but its logs."""
        beside = [asyncio.ensure_future(self._report()), asyncio.ensure_future(self._refresh())]
        running = asyncio.ensure_future(self._run())
        try:
            self._life.dirty.set()
            await self._life.stopping.wait()
            everyone = [*self._init, *self._containers]
            await asyncio.gather(running, *(self._end(container, running) for container in everyone))
        finally:
            for task in [running, *beside]:
                task.cancel()
            await asyncio.gather(running, *beside, return_exceptions=True)
        while not await self._push():
            await asyncio.sleep(0.5)
        shutil.rmtree(self.folder, ignore_errors=True)
        await self._delete()

    # Life

    def _claim_folder(self) -> float:
        """Makes the pod's folder, or finds it; returns when that was first done."""
        record = self.folder / "pod.json"
        with contextlib.suppress(FileNotFoundError):
            return float(json.loads(record.read_text())["startedAt"])
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = time.time()
        write(record, {"address": self.address, "startedAt": started, "name": self.name})
        return started

    async def _run(self) -> None:
        if self._life.over or not await self._mount():
            return
        for container in self._init:
            await container.live()
            if container.view.exit_code != 0:
                for waiting in self._containers:
                    waiting.view.over = True
                self._life.dirty.set()
                return
        await asyncio.gather(*(container.live() for container in self._containers))

    async def _mount(self) -> bool:
        """Writes the volumes; False when the pod was deleted before all that they need was there."""
        told = ""
        while not self._life.stopping.is_set():
            try:
                await self._volumes.write()
                for container in self._containers if self._init else []:
                    container.view.waiting("PodInitializing")
                return True
            except MissingReference as error:
                if str(error) != told:
                    told = str(error)
                    self._event("Warning", "FailedMount", f"MountVolume.SetUp failed: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY):
                    await self._life.stopping.wait()
        return False

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            with contextlib.suppress(MissingReference):  # what was mounted once stays mounted
                await self._volumes.write()

    def _stop(self, deadline: float) -> None:
        self._life.deadline = min(self._life.deadline, deadline)
        self._life.stopping.set()

    async def _end(self, container: Container, running: asyncio.Future[None]) -> None:
        while not running.done():
            if container.run:
                await container.stop(lambda: self._life.deadline - time.monotonic())
            await asyncio.wait([running], timeout=0.05)

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._node.event(self.object, kind, reason, message)

    # Containers

    def _container(self, status: Object, spec: Object, restart: Callable[[Exit], bool]) -> Container:
        statuses = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        before = next((found for found in statuses if found["name"] == spec["name"]), None)
        meta = self.object["metadata"]
        around = Surroundings(
            folder=self.folder / "containers" / spec["name"],
            logs=self.logs / spec["name"],
            world=self._node.state,
            restart=restart,
            grace=float(self.object["spec"].get("terminationGracePeriodSeconds", 30)),
            backoff_base=self._node.backoff_base,
            prepare=self._launch,
            changed=self._life.dirty.set,
            event=self._event,
            stopping=self._life.stopping,
            describe=f"{meta['name']}_{meta['namespace']}({meta['uid']})",
        )
        return Container(spec, around, before)

    async def _launch(self, spec: Object) -> Launch:
        image = spec["image"]
        prefix = self._node.images.get(image) or self._node.images.get(environment.image_name(image))
        if prefix is None:
            raise ImageUnknown(
                f'image "{image}" is not known to the sandbox; it has {", ".join(sorted(self._node.images))}: '
                "up with --image NAME=PREFIX"
            )
        if spec.get("restartPolicy") == "Always":
            raise MissingReference(
                f"init container {spec['name']} has restartPolicy Always: the sandbox has no sidecars"
            )
        folder = self.folder / "containers" / spec["name"]
        root = folder / "root"
        root.mkdir(parents=True, exist_ok=True)
        paths = {
            mount["mountPath"]: str(self._volumes.location(mount["name"]) / mount.get("subPath", ""))
            for mount in spec.get("volumeMounts", [])
        }
        paths[spec.get("terminationMessagePath") or environment.TERMINATION_PATH] = str(termination_file(folder, spec))
        rewrite = environment.rewriter(paths, self.address)
        env = self._base_environment(prefix, root, paths)
        tables = await self._tables(spec)
        own = environment.variables(spec, tables, self._field, self._quantity_for(spec))
        argv = environment.command_line(spec, env | own, rewrite)
        env |= {name: rewrite(value) for name, value in own.items()}
        cwd = Path(rewrite(spec["workingDir"])) if spec.get("workingDir") else root
        return Launch(list(argv), Target(self.address, named_ports(spec), env, cwd, rewrite))

    def _base_environment(self, prefix: str, root: Path, paths: Mapping[str, str]) -> dict[str, str]:
        host, _, port = self._node.client.server.removeprefix("https://").partition(":")
        env = {
            "PATH": f"{prefix}/bin:{SYSTEM_PATH}",
            "HOME": str(root),
            "LANG": "C.UTF-8",
            "HOSTNAME": self.object["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "KUBERNETES_SERVICE_PORT_HTTPS": port,
        }
        if "/tmp" in paths:
            env["TMPDIR"] = paths["/tmp"]
        if ACCOUNT_PATH in paths:
            env["KUBERNETES_SERVICEACCOUNT_DIR"] = paths[ACCOUNT_PATH]
        return env

    # What containers and volumes are made from

    async def _tables(self, spec: Object) -> dict[tuple[str, str], Mapping[str, str] | None]:
        tables: dict[tuple[str, str], Mapping[str, str] | None] = {}
        for kind, name in environment.referenced(spec):
            data = await self._fetch_data(kind, name)
            tables[kind, name] = None
            if data is not None:
                tables[kind, name] = {key: value.decode(errors="replace") for key, value in data.items()}
        return tables

    async def _fetch_data(self, kind: str, name: str) -> Mapping[str, bytes] | None:
        path = f"/api/v1/namespaces/{self.object['metadata']['namespace']}/{kind}/{name}"
        try:
            found = await self._permitted(lambda: self._node.client.find(path))
        except Unreachable as error:
            if (kind, name) in self._data:
                return self._data[kind, name]
            raise MissingReference(f"the API server cannot be reached: {error}") from error
        self._data[kind, name] = None if found is None else decoded(kind, found)
        return self._data[kind, name]

    async def _fetch_token(self, audience: str | None, seconds: int) -> tuple[str, datetime]:
        meta = self.object["metadata"]
        account = self.object["spec"].get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        spec = {"expirationSeconds": seconds, "boundObjectRef": bound, "audiences": [audience] if audience else []}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            answer = await self._permitted(lambda: self._node.client.call("POST", path, body))
        except Unreachable as error:
            raise MissingReference(f"the API server cannot be reached: {error}") from error
        status = answer["status"]
        return status["token"], datetime.fromisoformat(status["expirationTimestamp"])

    async def _permitted(self, call: Callable[[], Awaitable[T]]) -> T:
        """The authorizer learns a moment after us that this pod is ours, and refuses until then."""
        for attempt in range(20):
            try:
                return await call()
            except ApiError as error:
                if error.status != 403 or attempt == 19:
                    raise MissingReference(str(error)) from error
            await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    def _field(self, path: str) -> str:
        return environment.pod_field(self.object, path, self.address, self._node.address)

    def _quantity_for(self, container: Object) -> Callable[[Object], str]:
        def quantity(reference: Object) -> str:
            name = reference.get("containerName")
            found = next((spec for spec in self.object["spec"]["containers"] if spec["name"] == name), container)
            return environment.resource_field(found, reference, self._node.allocatable)

        return quantity

    # Status

    async def _report(self) -> None:
        while True:
            await self._life.dirty.wait()
            await asyncio.sleep(0.02)  # what happens together is told together
            self._life.dirty.clear()
            while not await self._push():
                await asyncio.sleep(0.5)

    async def _push(self) -> bool:
        """Writes the status if it has changed; False when that must be tried again."""
        status = pod_status(
            self.object, [c.view for c in self._init], [c.view for c in self._containers],
            address=self.address, host=self._node.address, started=self._started, now=time.time(),
        )  # fmt: skip
        if status == self._reported or self._life.gone or self._life.over:
            return True
        body = {"metadata": {"uid": self.object["metadata"]["uid"]}, "status": status}
        try:
            answer = await self._node.client.call("PATCH", f"{self._path}/status", body, STRATEGIC)
        except Unreachable:
            return False
        except ApiError as error:
            if error.status not in (404, 409):
                log.warning("status of %s refused: %s", self.name, error)
            return error.status in (404, 409)
        self.object = {**self.object, "status": answer["status"]}
        self._reported = status
        return True

    async def _delete(self) -> None:
        """Tells the API server that it may forget the pod."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.object["metadata"]["uid"]}}
        while not self._life.gone:
            try:
                await self._node.client.call("DELETE", self._path, body)
                return
            except ApiError as error:
                if error.status in (404, 409):
                    return
                log.warning("deletion of %s refused: %s", self.name, error)
            except Unreachable as error:
                log.info("%s is not deleted yet: %s", self.name, error)
            await asyncio.sleep(0.5)

    @property
    def _path(self) -> str:
        meta = self.object["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def logs_folder(state: Path, meta: Object) -> Path:
    return state / "logs" / "pods" / f"{meta['namespace']}_{meta['name']}_{meta['uid']}"
