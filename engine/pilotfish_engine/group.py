"""An engine whose model several processes share: rank 0 is the model process, and starts the others as
`python -m pilotfish_engine.group RANK SIZE STORE PARENT_PID`, which then do what comes through standard input.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from pilotfish_engine.config import CONFIG, EngineConfig, share_cores
from pilotfish_engine.distributed.children import Say, die_with, settle
from pilotfish_engine.errors import UsageError

if TYPE_CHECKING:
    from pilotfish_engine.distributed.collectives import Ranks
    from pilotfish_engine.scheduler.scheduler import Scheduler

COMMAND = (sys.executable, "-m", "pilotfish_engine.group")
_HEARD_SECONDS = 10.0


def build(config: EngineConfig, say: Say) -> Scheduler:
    """As engine.build, with the other ranks started. Raises as `assemble`. say: told why, when a rank ends or fails;
    this process then ends."""
    from pilotfish_engine.distributed.followers import Followers
    from pilotfish_engine.engine import assemble, schedule
    from pilotfish_engine.worker.leader import Leader, Load

    def end(sentence: str) -> None:
        say(sentence)
        print(sentence, file=sys.stderr, flush=True)
        os._exit(1)  # the main thread may be inside a collective that nothing ends

    followers = Followers(config.capacity.tensor_parallel_size, COMMAND, end)

    def join() -> Ranks:
        ranks = followers.start()
        followers.send(Load(CONFIG.dump_json(config)))
        return ranks

    try:
        parts = assemble(config, join=join)
    except BaseException:
        followers.close()
        raise
    return schedule(config, parts, Leader(parts.worker, followers))


def main(arguments: list[str]) -> int:
    """A follower's life."""
    rank, size, store, parent = (int(argument) for argument in arguments)
    die_with(parent)
    share_cores()
    from pilotfish_engine.contract.speculation import CostProfile
    from pilotfish_engine.distributed.collectives import join
    from pilotfish_engine.engine import assemble
    from pilotfish_engine.worker.leader import Load, follow
    from pilotfish_engine.worker.target import TargetWorker

    ranks = join(rank, size, store)

    def load(message: Load) -> TargetWorker:
        profile = None if message.profile is None else CostProfile.model_validate_json(message.profile)
        worker = assemble(CONFIG.validate_json(message.config), profile, lambda: ranks).worker
        settle()
        return worker

    try:
        follow(sys.stdin.buffer, load)
    except UsageError as error:
        time.sleep(_HEARD_SECONDS)  # rank 0 meets the same error, says it in the right place and ends this process
        print(error, file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
