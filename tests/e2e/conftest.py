"""The chart installed in a local Kubernetes whose pods are processes, and a small model that serves there."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.demo import chat, story
from examples.demo.world import DemoError, LocalWorld
from tests.cluster.node import runtime
from tests.cluster.processes import Process

ROOT = Path(__file__).parents[2]
EXAMPLE = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())


@dataclass
class Service:
    """What the tests do to the world and ask of it; `model` is the one that serves."""

    world: LocalWorld
    model: str = story.MODEL
    urls: list[str] = field(default_factory=list)

    def status(self, name: str | None = None) -> Any:
        found = self.world.get("speculativemodel", name or self.model)
        return (found or {}).get("status", {})

    def condition(self, kind: str, name: str | None = None) -> tuple[str, str]:
        """Status and message."""
        for each in self.status(name).get("conditions", []):
            if each["type"] == kind:
                return each["status"], each["message"]
        return "", ""

    async def until(self, what: str, done: Callable[[], Any], seconds: float = 300) -> Any:
        """The first true value of `done`, asked again and again. Fails with the model's status."""

        async def poll() -> Any:
            while True:
                if found := await asyncio.to_thread(self._look, done):
                    return found
                await asyncio.sleep(0.5)

        try:
            return await asyncio.wait_for(poll(), seconds)
        except TimeoutError:
            pytest.fail(f"not {what} within {seconds:.0f} s; status: {json.dumps(self.status(), indent=1)}")

    def _look(self, done: Callable[[], Any]) -> Any:
        self.urls[:] = [self.world.url(pod) for pod in self.world.pods(self.model)]
        return done()

    def load(self, users: int) -> chat.Load:
        return chat.Load(self.model, users, lambda: self.urls, seconds=story.PATIENCE)

    def patch(self, patch: dict[str, Any], name: str | None = None) -> None:
        target = ("speculativemodel", name or self.model)
        self.world.run("kubectl", "patch", *target, "--type=merge", "-p", json.dumps(patch), show=False)

    def process(self, pod: Any) -> Process:
        """The program that the pod's only container runs."""
        [container] = (self.world.cluster.state / "pods" / pod["metadata"]["uid"] / "containers").iterdir()
        process = runtime.main_process(runtime.runs(container)[-1])
        assert process is not None, f"{pod['metadata']['name']} runs nothing"
        return process


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    state = tmp_path_factory.mktemp("e2e") / "state"
    world = LocalWorld(state=state)
    try:
        story.install(world)
        yield world
    finally:
        world.close(keep=False)
        logs = shutil.copytree(world.cluster.logs, state.parent / "logs")
        print(f"logs of the control plane: {logs}", file=sys.stderr)


@pytest.fixture(scope="session")
def service(world: LocalWorld) -> Service:
    """One replica of the example serves, n-gram speculation on; it scales to two and back within seconds."""
    example = json.loads(json.dumps(EXAMPLE))
    example["spec"]["autoscaling"] |= {"scaleDownDelay": "5s", "stableWindow": "6s"}
    world.cluster.kubectl("apply", "-f", "-", input=json.dumps(example))
    service = Service(world)
    try:
        asyncio.run(story.wait(world, lambda model: story.holds(model, "Ready"), story.PATIENCE, "READY"))
    except DemoError as error:
        operator = world.run("kubectl", "-n", story.NAMESPACE, "logs", f"deployment/{story.RELEASE}", show=False)
        pytest.fail(f"{error}\noperator:\n{operator[-3000:]}")
    return service
