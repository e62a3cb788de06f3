"""The process of a rank that follows: `python -m pilotfish_engine.train.follower RANK SIZE STORE PARENT_PID`.

What it is to do comes through standard input, its replies go to standard output, and it never outlives its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

from pilotfish_engine.config import share_cores
from pilotfish_engine.distributed.children import die_with, framed, received
from pilotfish_engine.errors import UsageError

if TYPE_CHECKING:
    from pilotfish_engine.train.group import Reply

_HEARD_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    rank, size, store, parent = (int(argument) for argument in arguments)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all ranks: rank 0 ends the others
    share_cores()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    import msgspec

    from pilotfish_engine.distributed.collectives import join
    from pilotfish_engine.train.group import Message, follow

    def reply(message: Reply) -> None:
        replies.write(framed(message))
        replies.flush()

    try:
        follow(join(rank, size, store), received(sys.stdin.buffer, msgspec.msgpack.Decoder(Message)), reply)
    except UsageError as error:
        time.sleep(_HEARD_SECONDS)  # where rank 0 meets the same error, it says it and ends this process
        print(error, file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # at once: rank 0 waits for this rank's part of a step, and its end is the cause of what follows
