"""Makes the environment of a client: its own, from pins with hashes, below .work/clients.

An environment is named after a checksum of its pins: nothing changed, nothing to do.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "clients"
WORK = ROOT / ".work" / "clients"


def names() -> list[str]:
    """The clients that have pins."""
    return sorted(path.stem for path in PINS.glob("*.txt"))


def version(client: str) -> str:
    """The pinned version of the client's own package."""
    package = wanted(client).partition("[")[0]
    pins = (PINS / f"{client}.txt").read_text().splitlines()
    return next(line.split("==")[1].split()[0] for line in pins if line.startswith(package + "=="))


def wanted(client: str) -> str:
    """What was pinned: the first line of the .in file."""
    return (PINS / f"{client}.in").read_text().split()[0]


def python_of(client: str) -> Path:
    """The client's Python, its environment made first where it is not there. Raises CalledProcessError."""
    pins = PINS / f"{client}.txt"
    folder = WORK / "environments" / f"{client}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        for old in folder.parent.glob(f"{client}-*"):
            if len(old.name) == len(folder.name):
                shutil.rmtree(old)
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
        install = ["pip", "install", "--quiet", "--python", str(python), "--require-hashes", "--requirement", str(pins)]
        subprocess.run([uv, *install], check=True)
        (folder / "made").touch()
    return python
