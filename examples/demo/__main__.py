"""`python -m examples.demo`; KEEP=1 keeps everything at the end, CLUSTER=current uses the current kubectl context."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import openai

from examples.demo import screen, story
from examples.demo.world import DemoError, World, start
from tests.cluster.errors import SandboxError


def main() -> int:
    keep, cluster = os.environ.get("KEEP", "") not in ("", "0"), os.environ.get("CLUSTER", "")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    world: World | None = None
    code = 1
    try:
        screen.step("Start Kubernetes" if cluster != "current" else "Use the current cluster")
        world = start(cluster, keep)
        for step in (story.install, story.serve, story.question, story.load, story.explain):
            step(world)
        code = 0
    except (DemoError, SandboxError, openai.OpenAIError, OSError, subprocess.TimeoutExpired) as error:
        screen.say(f"\nThe demo failed: {error}")
        if world:
            screen.say(f"More in {world.logs()}")
    except KeyboardInterrupt:
        screen.say("\nInterrupted.")
        code = 130
    finally:
        if world:
            _end(world, keep and code == 0)
    if code == 0:
        screen.say(f"\nDone in {screen.elapsed():.0f} s.")
    return code


def _end(world: World, keep: bool) -> None:
    """A second Ctrl-C must not leave half of it behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not keep:
        story.take_down(world)
    world.close(keep)


if __name__ == "__main__":
    sys.exit(main())
