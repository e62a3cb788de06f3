"""Holds one container's process: ``python -S -m tests.cluster.node.shim FOLDER``.

Outlives the agent, so that a restarted agent finds the exit code of what ended meanwhile. Reads spec.json; writes
run.json when the program has started and exit.json when it and all its descendants have ended. Ends the program when
the world's state is gone; the kernel ends it when the shim is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.processes import identify, stat

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PERIOD_MS = 1000  # between two looks at whether the world is still there


def main(folder: Path) -> None:
    os.setsid()
    spec = json.loads((folder / "spec.json").read_text())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        _become(spec, libc, writer)
    os.close(writer)
    failure = os.read(reader, 4096).decode()
    write(folder / "run.json", {"process": identify(pid) or (pid, -1), "startedAt": time.time()})
    exit_code, killed_by = _supervise(pid, Path(spec["world"]))
    _end_descendants()
    report = {"exitCode": exit_code, "signal": killed_by, "finishedAt": time.time(), "failure": failure}
    write(folder / "exit.json", report)


def write(path: Path, value: Any) -> None:
    """A reader sees all of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def _become(spec: dict[str, Any], libc: ctypes.CDLL, writer: int) -> None:
    try:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(spec["cwd"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        os.write(writer, f"{spec['argv'][0]}: {error.strerror}".encode())
    finally:
        os._exit(128)


def _supervise(pid: int, world: Path) -> tuple[int, int]:
    """Exit code and signal of the program, the code being 128 + signal as in a shell."""
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    while not poll.poll(PERIOD_MS):
        if not world.exists():
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return (128 - code, -code) if code < 0 else (code, 0)


def _end_descendants() -> None:
    """What a container's end takes with it: whoever lost its parent has become our child."""
    while True:
        for name in os.listdir("/proc"):
            found = stat(int(name)) if name.isdigit() else None
            if found and found.parent == os.getpid():
                os.kill(int(name), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
            continue
        return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
