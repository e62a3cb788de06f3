"""Reads how much memory a device has and how much of it is taken: of a GPU, or of the container that a CPU engine runs
in (cgroup v2 and v1), else of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

KIB = 1024


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. used: by anybody, this process included. name: whose memory it is, as a sentence says it."""

    name: str
    total: int
    used: int

    @property
    def free(self) -> int:
        return self.total - self.used


def memory_of(device: torch.device) -> DeviceMemory:
    """What the allocator keeps for later counts as free."""
    if device.type != "cuda":
        return of_this_machine()
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(torch.cuda.get_device_name(device), total, total - free - kept)


def own_bytes(device: torch.device) -> int:
    """What this process holds there."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("RssAnon:")), 0)


def of_this_machine(root: Path = Path("/")) -> DeviceMemory:
    """Of the tightest limit that holds here. root: where proc and sys are found."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    total, free = (int(fields[name].split()[0]) * KIB for name in ("MemTotal", "MemAvailable"))
    found = [DeviceMemory("this machine", total, total - free), *_of_containers(root)]
    return min(found, key=lambda memory: memory.free)


def _of_containers(root: Path) -> Iterator[DeviceMemory]:
    """Every limited group that this process is in. Caches of files, which go when memory is short, are not used."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _groups(root / "sys/fs/cgroup/memory", path, *files)


def _groups(mount: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[DeviceMemory]:
    """From the process's own group up to the mount; in a container its own group may be the mount itself."""
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # "max", and a group without the file
            total = int((folder / limit).read_text())
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines()).get(cache, "0")
            yield DeviceMemory("this container", total, max(0, int((folder / usage).read_text()) - int(cached)))
        if folder == mount:
            return
