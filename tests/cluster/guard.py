"""Ends a world when its state folder or its owner has gone, however they went.

``python -m tests.cluster.guard STATE ID [PID START]``; one beside every world. It never restarts anything.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.cluster.processes import Process, alive, sweep, world_mark

PERIOD = 0.5  # seconds


def world_id(state: Path) -> str | None:
    """The id that ``up`` gave to the world in this folder; None when there is no world."""
    try:
        return str(json.loads((state / "world.json").read_text())["id"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def main(state: Path, identity: str, owner: Process | None) -> None:
    while world_id(state) == identity and (owner is None or alive(owner)):
        time.sleep(PERIOD)
    found = world_id(state)
    if found is not None and found != identity:
        return  # another world has taken the folder: ours was ended before
    sweep(world_mark(state))
    (state / "world.json").unlink(missing_ok=True)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[3:]]
    main(Path(sys.argv[1]), sys.argv[2], Process(*numbers) if numbers else None)
