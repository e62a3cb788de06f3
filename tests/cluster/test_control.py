"""World `control`: it comes up, does its work, can be broken and mended, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.cluster import REPOSITORY, Cluster
from tests.cluster.errors import CommandError, StateError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start("control", tmp_path_factory.mktemp("control")) as cluster:
        yield cluster


def test_the_default_service_account_and_the_root_certificate_are_there(cluster: Cluster) -> None:
    names = cluster.kubectl("get", "serviceaccounts,configmaps", "-n", "default", "-o", "name").split()
    assert names == ["serviceaccount/default", "configmap/kube-root-ca.crt"]


def test_the_versions_can_be_parsed(cluster: Cluster) -> None:
    versions = json.loads(cluster.kubectl("version", "-o", "json"))
    assert versions["clientVersion"]["gitVersion"] == versions["serverVersion"]["gitVersion"]


def test_controllers_make_pods(cluster: Cluster) -> None:
    cluster.kubectl("create", "deployment", "made", "--image=none", "--replicas=2")
    cluster.kubectl("wait", "deployment/made", "--for=jsonpath={.status.unavailableReplicas}=2", "--timeout=20s")
    assert len(cluster.kubectl("get", "pods", "-l", "app=made", "-o", "name").split()) == 2


def test_reset_deletes_what_a_test_left_even_behind_finalizers(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "left")
    for namespace in ("default", "left"):
        cluster.kubectl("create", "configmap", "kept", "-n", namespace)
        patch = '{"metadata":{"finalizers":["sandbox.test/never"]}}'
        cluster.kubectl("patch", "configmap", "kept", "-n", namespace, "--type=merge", "-p", patch)
    cluster.reset()
    assert "left" not in cluster.kubectl("get", "namespaces", "-o", "name")
    assert cluster.kubectl("get", "all,configmaps", "-n", "default", "-o", "name").split() == [
        "service/kubernetes",
        "configmap/kube-root-ca.crt",
    ]


def test_a_failed_command_says_why(cluster: Cluster) -> None:
    with pytest.raises(CommandError, match='pods "absent" not found'):
        cluster.kubectl("get", "pod", "absent")


def test_helm_speaks_to_the_world(cluster: Cluster) -> None:
    assert json.loads(cluster.helm("list", "-A", "-o", "json")) == []


def test_the_api_server_comes_back_with_its_data(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "survivor")
    cluster.kill_component("kube-apiserver", signal.SIGKILL)
    with pytest.raises(CommandError):
        cluster.kubectl("get", "configmap", "survivor", "--request-timeout=1s")
    cluster.restart_component("kube-apiserver")
    assert cluster.kubectl("get", "configmap", "survivor", "-o", "name") == "configmap/survivor\n"


def test_a_second_world_in_the_same_folder_is_refused(cluster: Cluster) -> None:
    with pytest.raises(StateError, match="already up"):
        Cluster.start("control", cluster.state)
    assert cluster.kubectl("get", "namespace", "default", "-o", "name") == "namespace/default\n"


def test_a_folder_with_other_things_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StateError, match=r"holds thesis\.txt"):
        Cluster.start("control", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


OWNER = """
import sys, time
from tests.cluster.cluster import Cluster
cluster = Cluster.start("control", sys.argv[1])
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["owner killed", "state folder removed", "guard killed, then down"])
def test_nothing_is_left_whatever_was_killed(end: str, tmp_path: Path) -> None:
    state = tmp_path / "world"
    mark = processes.world_mark(state)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(state)], env=environment, stdout=subprocess.PIPE)
    try:
        assert owner.stdout
        assert owner.stdout.readline() == b"up\n"
        assert len(processes.marked(mark)) == 5
        if end == "owner killed":
            owner.kill()
        elif end == "state folder removed":
            shutil.rmtree(state)
        else:
            Cluster.attach(state).kill_component("guard")
            owner.kill()
            down = [sys.executable, "-m", "tests.cluster", "down", "--state", str(state)]
            subprocess.run(down, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while left := processes.marked(mark):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)
    finally:
        owner.kill()
        owner.communicate()
        processes.sweep(mark)
