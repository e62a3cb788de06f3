"""Which pods run here: registers the node, keeps its lease, watches the pods that are bound to it.

Survives the API server: pods run on while it is away, and what happened meanwhile is told when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.build import kubernetes_version
from tests.cluster.node.client import STRATEGIC, ApiError, Client, Unreachable
from tests.cluster.node.events import Events
from tests.cluster.node.pod import Node, Pod
from tests.cluster.node.runtime import CONTAINER_MARKER
from tests.cluster.node.server import Places, serve
from tests.cluster.node.status import timestamp
from tests.cluster.processes import sweep

Object = dict[str, Any]
PORT = 10250
LEASE_SECONDS, LEASE_PERIOD = 40, 10.0
STATUS_PERIOD = 60.0
CPU_OVERCOMMIT, MEMORY_OVERCOMMIT = 8, 4  # a test machine is small, and requests are made for large ones
log = logging.getLogger(__name__)


def capacity(extended: Mapping[str, str]) -> dict[str, str]:
    """What the node claims to have: the machine, overcommitted, and extended resources as told."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": str((os.cpu_count() or 1) * CPU_OVERCOMMIT),
        "memory": f"{pages * page * MEMORY_OVERCOMMIT // 1024}Ki",
        "ephemeral-storage": f"{shutil.disk_usage('/').total // 1024}Ki",
        "pods": "110",
        **extended,
    }


class Agent:
    """One node. ``run`` returns when the world's state has gone."""

    def __init__(self, state: Path, name: str, kubeconfig: Path) -> None:
        world = json.loads((state / "world.json").read_text())
        settings = world["settings"]
        self._state, self._name, self._identity = state, name, world["id"]
        self._client = Client(kubeconfig)
        self._capacity = capacity(settings["resources"])
        self._events = Events(self._client, name)
        self._node = Node(
            client=self._client,
            state=state,
            address=world["address"],
            images=settings["images"],
            allocatable=self._capacity,
            backoff_base=settings["backoff_base"],
            event=self._events.emit,
        )
        self._pods: dict[str, Pod] = {}  # by uid
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._port = PORT
        self._next = 1

    async def run(self) -> None:
        async with self._client:
            runner, self._port = await serve(self._node.address, PORT, self._state / "pki", self._places)
            loops = [self._heartbeat(), self._report(), self._watch(), self._events.send()]
            tasks = [asyncio.ensure_future(loop) for loop in loops]
            try:
                ended = asyncio.ensure_future(self._world_ended())
                done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a loop that fails ends the agent with its traceback
            finally:
                for task in [*tasks, *self._tasks.values()]:
                    task.cancel()
                await asyncio.gather(*tasks, *self._tasks.values(), return_exceptions=True)
                await runner.cleanup()

    async def _world_ended(self) -> None:
        while True:
            try:
                if json.loads((self._state / "world.json").read_text())["id"] != self._identity:
                    return
            except FileNotFoundError:
                return
            await asyncio.sleep(0.5)

    def _places(self, namespace: str, pod: str) -> Places | None:
        for found in self._pods.values():
            if found.name == f"{namespace}/{pod}":
                return Places(found.logs, found.folder / "containers")
        return None

    # The node

    async def _heartbeat(self) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            delay = LEASE_PERIOD
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": self._name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}
            try:
                lease = await self._client.find(f"{path}/{self._name}")
                if lease is None:
                    await self._client.call("POST", path, {"metadata": {"name": self._name}, "spec": spec})
                else:
                    await self._client.call("PUT", f"{path}/{self._name}", {**lease, "spec": spec})
            except (ApiError, Unreachable) as error:
                log.warning("lease not renewed: %s", error)
                delay = 1.0
            await asyncio.sleep(delay)

    async def _report(self) -> None:
        """Registers the node when it is not there, and says that it is ready."""
        path = f"/api/v1/nodes/{self._name}"
        while True:
            delay = STATUS_PERIOD
            try:
                if await self._client.find(path) is None:
                    labels = {"kubernetes.io/hostname": self._name, "kubernetes.io/os": "linux"}
                    await self._client.call(
                        "POST", "/api/v1/nodes", {"metadata": {"name": self._name, "labels": labels}}
                    )
                await self._client.call("PATCH", f"{path}/status", {"status": self._status()}, STRATEGIC)
            except (ApiError, Unreachable) as error:
                log.warning("node status not written: %s", error)
                delay = 1.0
            await asyncio.sleep(delay)

    def _status(self) -> Object:
        now = timestamp(time.time())
        pressures = ("MemoryPressure", "DiskPressure", "PIDPressure")
        return {
            "addresses": [
                {"type": "InternalIP", "address": self._node.address},
                {"type": "Hostname", "address": self._name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "nodeInfo": {"kubeletVersion": kubernetes_version(), "containerRuntimeVersion": "process://sandbox"},
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now},
                *({"type": kind, "status": "False", "lastHeartbeatTime": now} for kind in pressures),
            ],
        }

    # The pods

    async def _watch(self) -> None:
        selector = {"fieldSelector": f"spec.nodeName={self._name}"}
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._name}"
        while True:
            try:
                listed = await self._client.get(path)
                self._reconcile(listed["items"])
                version = {"resourceVersion": listed["metadata"]["resourceVersion"]}
                async for event in self._client.watch("/api/v1/pods", selector | version):
                    if event["type"] == "DELETED":
                        self._vanish(event["object"]["metadata"]["uid"])
                    else:
                        self._see(event["object"])
            except (ApiError, Unreachable) as error:
                log.warning("pods are not watched: %s", error)
                await asyncio.sleep(0.5)

    def _reconcile(self, pods: list[Object]) -> None:
        listed = {pod["metadata"]["uid"] for pod in pods}
        for uid in set(self._pods) - listed:
            self._vanish(uid)
        for folder in (self._state / "pods").glob("*"):
            if folder.name not in listed and folder.name not in self._pods:  # deleted while no agent was there
                for container in folder.glob("containers/*/*/spec.json"):
                    sweep(f"{CONTAINER_MARKER}={container.parent}")
                shutil.rmtree(folder, ignore_errors=True)
        for pod in pods:
            self._see(pod)

    def _see(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._pods:
            self._pods[uid] = Pod(pod, self._node, self._address(uid))
            self._tasks[uid] = asyncio.create_task(self._live(uid))
        self._pods[uid].update(pod)

    def _vanish(self, uid: str) -> None:
        if uid in self._pods:
            self._pods[uid].vanish()

    async def _live(self, uid: str) -> None:
        pod = self._pods[uid]
        try:
            await pod.live()
            log.info("pod %s has ended", pod.name)
        except Exception:
            log.exception("pod %s is given up", pod.name)
        finally:
            del self._pods[uid], self._tasks[uid]

    def _address(self, uid: str) -> str:
        """The pod's address: the one it had under an earlier agent, else the one that was free the longest."""
        with contextlib.suppress(FileNotFoundError):
            return str(json.loads((self._state / "pods" / uid / "pod.json").read_text())["address"])
        network = self._node.address.rpartition(".")[0]
        taken = {pod.address for pod in self._pods.values()} | {
            json.loads(record.read_text())["address"] for record in (self._state / "pods").glob("*/pod.json")
        }
        while True:
            self._next = self._next % 253 + 1  # 1 is the node's own
            address = f"{network}.{self._next + 1}"
            if address not in taken:
                return address
