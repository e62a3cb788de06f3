"""What a machine, a container of either kind and containers within containers say of their memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish_engine.worker.machine_memory import DeviceMemory, of_this_machine, own_bytes

GIB = 1 << 30
V2, V1 = "0::{path}\n", "5:cpu,memory:{path}\n4:pids:/other\n"


def machine(root: Path, total: int = 64, available: int = 48, group: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    lines = f"MemTotal: {total << 20} kB\nMemFree: 5 kB\nMemAvailable: {available << 20} kB\n"
    (root / "proc/meminfo").write_text(lines)
    if group:
        (root / "proc/self/cgroup").write_text(group)
    return root


def limited(folder: Path, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached * GIB}\n")


NAMES = {
    V2: ("memory.max", "memory.current", "inactive_file"),
    V1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def mount(root: Path, version: str) -> Path:
    return root / "sys/fs/cgroup" / ("" if version == V2 else "memory")


def test_a_machine_without_limits(tmp_path):
    assert of_this_machine(machine(tmp_path)) == DeviceMemory("this machine", 64 * GIB, 16 * GIB)


@pytest.mark.parametrize("version", [V2, V1])
@pytest.mark.parametrize("path", ["/", "/pods/one"])
def test_a_container_has_its_limit_and_caches_are_not_used(tmp_path, version, path):
    machine(tmp_path, group=version.format(path=path))
    limited(mount(tmp_path, version) / path[1:], NAMES[version], str(2 * GIB), used=1, cached=1)
    assert of_this_machine(tmp_path) == DeviceMemory("this container", 2 * GIB, 0)


@pytest.mark.parametrize("version", [V2, V1])
def test_the_tightest_of_several_limits_counts(tmp_path, version):
    machine(tmp_path, group=version.format(path="/pods/one"))
    limited(mount(tmp_path, version) / "pods", NAMES[version], str(8 * GIB), used=7, cached=0)
    limited(mount(tmp_path, version) / "pods/one", NAMES[version], str(4 * GIB), used=2, cached=0)
    assert of_this_machine(tmp_path) == DeviceMemory("this container", 8 * GIB, 7 * GIB)


@pytest.mark.parametrize(("version", "unlimited"), [(V2, "max"), (V1, str((1 << 63) - 4096))])
def test_a_group_without_a_limit_is_the_machine(tmp_path, version, unlimited):
    machine(tmp_path, group=version.format(path="/pods/one"))
    limited(mount(tmp_path, version) / "pods/one", NAMES[version], unlimited, used=2, cached=0)
    assert of_this_machine(tmp_path) == DeviceMemory("this machine", 64 * GIB, 16 * GIB)


def test_a_container_that_sees_only_its_own_group_at_the_mount(tmp_path):
    """As with a path of the host's that is not there."""
    machine(tmp_path, group=V2.format(path="/kubepods/pod1/abc"))
    limited(mount(tmp_path, V2), NAMES[V2], str(2 * GIB), used=1, cached=0)
    assert of_this_machine(tmp_path).total == 2 * GIB


def test_here(tmp_path):
    import torch

    found = of_this_machine()
    assert 0 < found.free <= found.total
    assert 0 < own_bytes(torch.device("cpu")) < found.total
