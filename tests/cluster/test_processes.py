"""World `processes`: pods run as local processes and behave as a kubelet's would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import processes
from tests.cluster.cluster import AGENT, Cluster, Settings
from tests.cluster.errors import CommandError

PROGRAM = str(Path(__file__).with_name("program.py"))
Object = dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = Settings(backoff_base=1.0, resources={"example.com/widget": "3"})
    with Cluster.start("processes", tmp_path_factory.mktemp("processes"), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(world: Cluster) -> Iterator[Cluster]:
    yield world
    world.reset()


def eventually(check: Callable[[], object], timeout: float = 15) -> Any:
    """The first true result of ``check``."""
    deadline = time.monotonic() + timeout
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {check}"
        time.sleep(0.05)
    return result


def make_pod(cluster: Cluster, name: str, container: Object | None = None, **spec: Any) -> None:
    """A pod that serves the test program, with what is given put over it."""
    base: Object = {"name": "main", "image": "python", "command": ["python", PROGRAM, "$(IP)"]}
    base["env"] = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    base["readinessProbe"] = {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1}
    own = container or {}
    merged = {**base, **own, "env": [*base["env"], *own.get("env", [])]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}}
    cluster.kubectl("apply", "-f", "-", input=json.dumps({**pod, "spec": {"containers": [merged], **spec}}))


def run_once(cluster: Cluster, name: str, code: str, **spec: Any) -> None:
    """A pod that runs some Python once."""
    container = {"name": "main", "image": "python", "command": ["python", "-c", code]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    body = {"restartPolicy": "Never", "containers": [{**container, **spec.pop("container", {})}], **spec}
    cluster.kubectl("apply", "-f", "-", input=json.dumps({**pod, "spec": body}))


def pod(cluster: Cluster, name: str) -> Object:
    found = cluster.api.get(f"/api/v1/namespaces/default/pods/{name}")
    assert found, f"pod {name} is there"
    return found


def main(cluster: Cluster, name: str) -> Object:
    """The status of the pod's container; empty before there is one."""
    statuses: list[Object] = pod(cluster, name)["status"].get("containerStatuses", [{}])
    return statuses[0]


def ready(cluster: Cluster, name: str) -> str:
    """Waits until the pod is ready; returns its address."""
    cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=20s")
    return str(pod(cluster, name)["status"]["podIP"])


def ask(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}:8080{path}", timeout=5) as answer:
        return str(answer.read().decode())


def crash(address: str, code: int, words: str = "") -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        ask(address, f"/exit?code={code}&words={words}")


def test_a_deployment_becomes_ready_and_its_pods_have_addresses_of_their_own(cluster: Cluster) -> None:
    command = ["python", PROGRAM, "0.0.0.0"]
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1}
    ports = [{"name": "http", "containerPort": 8080}]
    resources = {"requests": {"cpu": "500m", "example.com/widget": "1"}, "limits": {"example.com/widget": "1"}}
    container: Object = {"name": "main", "image": "registry.example/x/python:3@sha256:" + "0" * 64, "command": command}
    container |= {"readinessProbe": probe, "ports": ports, "resources": resources}
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}
    spec = {"replicas": 3, "selector": {"matchLabels": {"app": "web"}}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(deployment))
    cluster.kubectl("rollout", "status", "deployment/web", "--timeout=20s")
    pods = json.loads(cluster.kubectl("get", "pods", "-l", "app=web", "-o", "json"))["items"]
    addresses = {item["status"]["podIP"] for item in pods}
    assert len(addresses) == 3
    assert all(ask(address, "/ready") == "yes" for address in addresses)


def test_variables_and_files_are_as_the_pod_says(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "conf", "--from-literal=mode=fast", "--from-literal=app.yaml=a: 1")
    cluster.kubectl("create", "secret", "generic", "key", "--from-literal=password=s3cret")
    env: list[Object] = [
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "key", "key": "password"}}},
        {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "mode"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "CONFIG", "value": "/etc/app/app.yaml"},
        {"name": "BOTH", "value": "$(MODE)-$(LABEL)"},
    ]
    items = [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
    projected = [{"secret": {"name": "key"}}, {"downwardAPI": {"items": items}}]
    container = {
        "command": ["python", PROGRAM, "$(IP)", "--secret=/run/all/password", "$(MODE)"],
        "env": env,
        "envFrom": [{"prefix": "FROM_", "secretRef": {"name": "key"}}],
        "resources": {"limits": {"cpu": "2"}},
        "volumeMounts": [
            {"name": "conf", "mountPath": "/etc/app"},
            {"name": "all", "mountPath": "/run/all"},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    }
    volumes = [
        {"name": "conf", "configMap": {"name": "conf"}},
        {"name": "all", "projected": {"sources": projected}},
        {"name": "scratch", "emptyDir": {}},
    ]
    make_pod(cluster, "files", container, volumes=volumes)
    address = ready(cluster, "files")
    found = json.loads(ask(address, "/env"))
    expected = {"PASSWORD": "s3cret", "MODE": "fast", "CPUS": "2", "LABEL": "files", "BOTH": "fast-files"}
    expected |= {"FROM_password": "s3cret", "IP": address, "HOSTNAME": "files"}
    assert {name: found.get(name) for name in expected} == expected
    assert ask(address, f"/file?path={found['CONFIG']}") == "a: 1"
    _, secret, mode = json.loads(ask(address, "/argv"))
    path = secret.removeprefix("--secret=")
    assert (ask(address, f"/file?path={path}"), mode) == ("s3cret", "fast")
    assert ask(address, f"/file?path={Path(path).with_name('labels')}") == 'app="files"'
    assert Path(found["TMPDIR"]).is_dir()
    assert str(cluster.state) in found["TMPDIR"]


def test_a_pod_reaches_the_api_as_its_service_account(cluster: Cluster) -> None:
    cluster.kubectl("create", "serviceaccount", "robot")
    make_pod(cluster, "caller", serviceAccountName="robot")
    assert ask(ready(cluster, "caller"), "/whoami") == "system:serviceaccount:default:robot"


def test_a_crash_loop_shows_exit_code_and_last_words(cluster: Cluster) -> None:
    code = "print('loading', flush=True); raise SystemExit('no such model: llama')"
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    run_once(cluster, "crashing", code, container=policy, restartPolicy="Always")

    def loops() -> Object | None:
        status = main(cluster, "crashing")
        return status if status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" else None

    status = eventually(loops)
    terminated = status["lastState"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (1, "Error")
    assert terminated["message"] == "loading\nno such model: llama"
    assert status["restartCount"] >= 1
    assert pod(cluster, "crashing")["status"]["phase"] == "Running"
    assert "no such model" in cluster.kubectl("logs", "crashing", "--previous")
    eventually(lambda: main(cluster, "crashing")["restartCount"] > status["restartCount"])


def test_a_termination_message_is_read_from_its_file(cluster: Cluster) -> None:
    code = "import sys; open(sys.argv[1], 'w').write('out of pages'); sys.exit(7)"
    container = {"command": ["python", "-c", code, "/dev/termination-log"]}
    run_once(cluster, "message", code, container=container)
    eventually(lambda: pod(cluster, "message")["status"]["phase"] == "Failed")
    terminated = main(cluster, "message")["state"]["terminated"]
    assert (terminated["exitCode"], terminated["message"]) == (7, "out of pages")


def test_deletion_runs_the_hook_then_lets_the_program_drain(cluster: Cluster, tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", f"sleep 0.2; date +%s.%N > {tmp_path}/hook"]}}}
    make_pod(cluster, "polite", {"lifecycle": hook})
    ready(cluster, "polite")
    log = next(cluster.logs.glob("pods/default_polite_*/main/0.log"))
    cluster.kubectl("delete", "pod", "polite", "--timeout=20s")
    assert log.read_text().split() == ["serving", "SIGTERM", "drained"]
    assert (tmp_path / "hook").exists()


def test_a_program_that_ignores_sigterm_is_killed_with_its_children_after_its_grace(cluster: Cluster) -> None:
    make_pod(cluster, "stubborn", {"env": [{"name": "ON_TERM", "value": "ignore"}]}, terminationGracePeriodSeconds=2)
    address = ready(cluster, "stubborn")
    child = processes.identify(int(ask(address, "/spawn")))
    assert child
    started = time.monotonic()
    cluster.kubectl("delete", "pod", "stubborn", "--timeout=20s")
    assert 2 <= time.monotonic() - started < 6
    assert not processes.alive(child)


@pytest.mark.parametrize("victim", ["program", "shim"])
def test_a_killed_process_is_noticed_at_once_and_started_again(cluster: Cluster, victim: str) -> None:
    make_pod(cluster, "killed")
    pid = int(ask(ready(cluster, "killed"), "/pid"))
    found = processes.stat(pid)
    assert found
    started = time.monotonic()
    os.kill(pid if victim == "program" else found.parent, signal.SIGKILL)
    eventually(lambda: "running" not in (s := main(cluster, "killed"))["state"] or s["restartCount"])
    assert time.monotonic() - started < 3
    eventually(lambda: main(cluster, "killed")["restartCount"] == 1)
    terminated = main(cluster, "killed")["lastState"]["terminated"]
    assert (terminated["exitCode"], terminated["signal"]) == (137, 9)
    assert int(ask(ready(cluster, "killed"), "/pid")) != pid
    assert processes.stat(pid) is None


def test_readiness_follows_its_probe_both_ways(cluster: Cluster) -> None:
    make_pod(cluster, "moody", {"readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}, "periodSeconds": 1,
                                                   "failureThreshold": 1}})  # fmt: skip
    address = ready(cluster, "moody")
    ask(address, "/unready")
    cluster.kubectl("wait", "pod/moody", "--for=condition=Ready=False", "--timeout=10s")
    assert main(cluster, "moody")["restartCount"] == 0


def test_startup_gates_and_liveness_restarts(cluster: Cluster) -> None:
    alive = {"exec": {"command": ["sh", "-c", "test ! -e $HOME/dead"]}, "periodSeconds": 1, "failureThreshold": 1}
    startup = {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 10}
    make_pod(cluster, "mortal", {"livenessProbe": alive, "startupProbe": startup})
    address = ready(cluster, "mortal")
    assert main(cluster, "mortal")["started"]
    home = json.loads(ask(address, "/env"))["HOME"]
    Path(home, "dead").touch()
    status = eventually(lambda: (s := main(cluster, "mortal"))["restartCount"] and s)
    assert status["lastState"]["terminated"]["exitCode"] == 0  # it drained on SIGTERM
    Path(home, "dead").unlink(missing_ok=True)
    ready(cluster, "mortal")


def test_init_containers_run_first_and_in_order(cluster: Cluster) -> None:
    def write(text: str) -> Object:
        code = f"open('/shared/words'.strip(), 'a').write('{text} ')"
        mount = [{"name": "shared", "mountPath": "/shared"}]
        return {"name": text, "image": "python", "command": ["python", "-c", code], "volumeMounts": mount}

    code = "print(open('/shared/words').read())"
    mounts = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    volumes = [{"name": "shared", "emptyDir": {}}]
    init = [write("one"), write("two")]
    run_once(cluster, "ordered", code, container=mounts, initContainers=init, volumes=volumes)
    eventually(lambda: pod(cluster, "ordered")["status"]["phase"] == "Succeeded")
    assert cluster.kubectl("logs", "ordered").split() == ["one", "two"]


def test_a_failed_init_container_fails_the_pod(cluster: Cluster) -> None:
    init = [{"name": "first", "image": "python", "command": ["python", "-c", "raise SystemExit(4)"]}]
    run_once(cluster, "unready", "print('never')", initContainers=init)
    eventually(lambda: pod(cluster, "unready")["status"]["phase"] == "Failed")
    assert pod(cluster, "unready")["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    with pytest.raises(CommandError):
        cluster.kubectl("logs", "unready", "-c", "main")


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        ({"image": "unheard-of:1"}, "ErrImagePull", "--image NAME=PREFIX"),
        ({"command": ["no-such-program"]}, "StartError", "no-such-program: No such file or directory"),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "k"}}}]},
            "CreateContainerConfigError",
            'secret "absent" not found',
        ),
    ],
)
def test_what_cannot_start_says_why(cluster: Cluster, container: Object, reason: str, words: str) -> None:
    run_once(cluster, "wrong", "", container=container)

    def shown() -> Object | None:
        state = main(cluster, "wrong").get("state", {})
        found = state.get("waiting") or state.get("terminated") or {}
        return found if found.get("reason") == reason else None

    assert words in eventually(shown)["message"]


def test_a_pod_waits_for_its_secret(cluster: Cluster) -> None:
    volumes = [{"name": "late", "secret": {"secretName": "late"}}]
    mounts = {"volumeMounts": [{"name": "late", "mountPath": "/late"}]}
    run_once(cluster, "patient", "print(open('/late/k').read())", container=mounts, volumes=volumes)
    eventually(lambda: "FailedMount" in cluster.kubectl("events", "--for=pod/patient"))
    cluster.kubectl("create", "secret", "generic", "late", "--from-literal=k=here")
    eventually(lambda: pod(cluster, "patient")["status"]["phase"] == "Succeeded")
    assert cluster.kubectl("logs", "patient") == "here\n"


def test_logs_follow_and_tail(cluster: Cluster) -> None:
    run_once(cluster, "chatty", "import time\nfor i in range(8): print(i, flush=True); time.sleep(0.1)")
    eventually(lambda: main(cluster, "chatty").get("state", {}).get("running"))
    assert cluster.kubectl("logs", "-f", "chatty", timeout=20).split() == [str(i) for i in range(8)]
    eventually(lambda: pod(cluster, "chatty")["status"]["phase"] == "Succeeded")
    assert cluster.kubectl("logs", "chatty", "--tail=2").split() == ["6", "7"]


def test_a_killed_agent_finds_again_what_it_left(cluster: Cluster) -> None:
    for name in ("steady", "ended", "deleted"):
        make_pod(cluster, name)
    steady, ended, deleted = (ready(cluster, name) for name in ("steady", "ended", "deleted"))
    pid, orphan = ask(steady, "/pid"), processes.identify(int(ask(deleted, "/pid")))
    assert orphan
    cluster.kill_component(AGENT)
    crash(ended, 5, "last+words")
    cluster.kubectl("delete", "pod", "deleted", "--force", "--grace-period=0")
    cluster.restart_component(AGENT)
    eventually(lambda: main(cluster, "ended")["restartCount"] == 1)
    assert main(cluster, "ended")["lastState"]["terminated"]["exitCode"] == 5
    eventually(lambda: not processes.alive(orphan))
    ready(cluster, "ended")
    assert ask(steady, "/pid") == pid
    assert main(cluster, "steady")["restartCount"] == 0
    assert "last words" in cluster.kubectl("logs", "ended", "--previous")
    cluster.kubectl("delete", "pod", "steady", "--timeout=20s")
    with pytest.raises(OSError, match="refused"):
        ask(steady, "/pid")


def test_pods_run_on_without_the_api_server_and_it_is_told_afterwards(cluster: Cluster) -> None:
    make_pod(cluster, "lonely")
    address = ready(cluster, "lonely")
    cluster.kill_component("kube-apiserver")
    crash(address, 6)
    eventually(lambda: _answers(address), timeout=20)
    cluster.restart_component("kube-apiserver")
    eventually(lambda: main(cluster, "lonely")["restartCount"] == 1)
    assert main(cluster, "lonely")["lastState"]["terminated"]["exitCode"] == 6
    ready(cluster, "lonely")


def _answers(address: str) -> bool:
    try:
        return ask(address, "/ready") == "yes"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["agent killed, then down", "state folder removed"])
def test_nothing_is_left_of_pods_either(end: str, tmp_path: Path) -> None:
    state = tmp_path / "world"
    with Cluster.start("processes", state) as cluster:
        make_pod(cluster, "parent")
        address = ready(cluster, "parent")
        found = [processes.identify(int(ask(address, path))) for path in ("/pid", "/spawn")]
        if end == "agent killed, then down":
            cluster.kill_component(AGENT)
            cluster.stop()
            assert not processes.marked(processes.world_mark(state))
        else:
            shutil.rmtree(state)
        eventually(lambda: not any(process and processes.alive(process) for process in found))
        eventually(lambda: not processes.marked(processes.world_mark(state)))
