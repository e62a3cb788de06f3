"""Runs `pilotfish-engine inspect` on one folder or file after the other in a process that the kernel bounds:
`python -m tests.attack.inspected`. On its input a JSON list of arguments a line, on its output what came of it.

What ends that process is a fault of the file that it was inspecting; the next one gets a new process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 400 << 20  # beside what is there when torch is imported
CPU_SECONDS = 20
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Verdict:
    code: int
    out: str
    err: str

    def fault(self) -> str | None:
        """Why this is not what becomes of a file, whatever is in it."""
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}: {self.err[-2000:]}"
        if self.code == 2:
            sentences = self.err.rstrip("\n").split("\n")
            if len(sentences) != 1 or not sentences[0] or len(self.err) > 4000 or self.out:
                return f"no sentence: {self.err[-2000:]!r}"
        elif self.err or not self.out:
            return f"{self.code} without an answer: {self.err[-2000:]!r}"
        return None


class Inspector:
    def __init__(self) -> None:
        self._process = self._started()

    def inspect(self, *arguments: str) -> Verdict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        told = self._process.stdout.readline()
        if told:
            return Verdict(**json.loads(told))
        code = self._process.wait()
        self.close()
        self._process = self._started()
        return Verdict(code, "", "")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def _started(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/engine:{ROOT}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.attack.inspected"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True,
        )  # fmt: skip


# ---- in the process ------------------------------------------------------------------------------------------------


def _inspected(arguments: list[str]) -> Verdict:
    from pilotfish_engine.cli import main

    seconds = math.ceil(time.process_time()) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    own = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code: object = -1
        try:
            main(["inspect", *arguments])
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), own, strict=True):
            os.dup2(file, number)
            os.close(file)
        out.seek(0)
        err.seek(0)
        return Verdict(code if isinstance(code, int) else -1, *(f.read().decode(errors="replace") for f in (out, err)))


def _serve() -> None:
    import pilotfish_engine.inspection  # noqa: F401
    from pilotfish_engine.speculation import registry

    for method in registry.methods():  # what each of them would import
        registry.load(method)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(vars(_inspected(json.loads(line)))), flush=True)


if __name__ == "__main__":
    _serve()
