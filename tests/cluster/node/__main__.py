"""``python -m tests.cluster.node STATE``: the node agent of the world in this folder. Pods outlive it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from tests.cluster.cluster import NODE
from tests.cluster.control import kubeconfig
from tests.cluster.node.agent import Agent


async def main(state: Path) -> None:
    running = asyncio.current_task()
    assert running
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await Agent(state, NODE, kubeconfig(state, NODE)).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(main(Path(sys.argv[1])))
    except asyncio.CancelledError:
        sys.exit(0)
