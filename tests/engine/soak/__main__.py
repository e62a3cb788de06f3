"""`python -m tests.engine.soak --minutes 20 --seed 1`: random traffic until the time is over.

Prints what was done and how much memory is held, and after a failure the command that shows it again. Memory is flat
when it is no more at the end than after a third of the time, but for MOST_GROWTH.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.engine.soak.soak import Failure, Soak

MOST_GROWTH = 24  # MiB: the answers kept for comparison, and what allocators do


def resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(soaking: Soak, minutes: float, requests: int) -> bool:
    """False: memory grew."""
    begun = said = time.monotonic()
    after_a_third = 0.0
    for number in itertools.count():
        passed = (time.monotonic() - begun) / 60
        if passed >= minutes:
            break
        if passed >= minutes / 3 and not after_a_third and number >= 3 * len(soaking.variants):
            after_a_third = resident()
        soaking.round(number, requests)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"{passed:5.1f} min, {resident():6.0f} MiB, {soaking.sums}", flush=True)
    grown = resident() - (after_a_third or resident())
    print(f"{minutes:g} minutes, {soaking.sums}; memory grew by {grown:.1f} MiB since the first third")
    return grown <= MOST_GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40, help="a round")
    parser.add_argument("--faults", type=float, default=0, help="the share of requests with which something is wrong")
    parser.add_argument("--answers", type=int, help="the end comes with so many requests, however long it takes")
    parser.add_argument("--round", type=int, help="only this one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        soaking = Soak(Path(folder), asked.seed, asked.faults)
        try:
            if asked.round is None and asked.answers is not None:
                for number in range(-(-asked.answers // asked.requests)):
                    soaking.round(number, asked.requests)
                print(soaking.sums)
                return 0
            if asked.round is None:
                return 0 if soak(soaking, asked.minutes, asked.requests) else 1
            soaking.round(asked.round, asked.requests)
            print(soaking.sums)
        except Failure as failure:
            print(failure, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
