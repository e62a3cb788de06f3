"""A real API server for the whole run, a namespace for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.operator.live import ROOT, Kubelet, OperatorProcess, Space, eventually

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without the CRD."""
    with Cluster.start("control", tmp_path_factory.mktemp("operator-world")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """With the CRD."""
    install_crd(bare_cluster)
    return bare_cluster


def install_crd(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    cluster.await_crd("speculativemodels.pilotfish.dev")


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Space]:
    space = Space(cluster, f"test-{next(_numbers)}")
    yield space
    space.api.close()


@pytest.fixture
def kubelet(space: Space) -> Iterator[Kubelet]:
    thread = Kubelet(space)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def operator(space: Space, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts operators for the test's namespace, with a pod's credentials and least rights, and ends them with it."""
    started: list[OperatorProcess] = []
    account = space.account(tmp_path / "account")

    def start(*flags: str, **env: str) -> OperatorProcess:
        process = OperatorProcess(space, tmp_path / f"operator{len(started)}.log", *flags, **account, **env)
        started.append(process)
        eventually(lambda: process.healthz()[0] == 200 or process.process.poll() is not None, "the operator listens")
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.end()
        print(process.text())
