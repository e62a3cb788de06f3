"""Records steps before anybody waits for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.contract.speculation import Settings
from pilotfish_engine.messages import SamplingParams
from pilotfish_engine.types import Admission
from pilotfish_engine.worker.graphs import MOST_GRAPHS, StepGraphs

MOST_AHEAD = 3 * MOST_GRAPHS // 4  # what comes up while serving has room beside them
BAR = 30
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, temperature=1.0)


def record_ahead(graphs: StepGraphs, state: RequestState, wanted: Sequence[tuple[int, Settings]]) -> None:
    """Records steps of `wanted` batch sizes and settings, for greedy and for sampled rows. Where they are too many
    these are the first ones. In order of falling size: smaller ones find room in what larger ones took."""
    kinds = [(params, *kind) for kind in wanted for params in (GREEDY, SAMPLED)][:MOST_AHEAD]
    kinds.sort(key=lambda kind: -kind[1] * kind[2].num_draft_tokens)
    done = 0
    for params in (SAMPLED, GREEDY):
        with _admitted(state, params):
            for asked, batch, settings in kinds:
                if asked is params:
                    graphs.ahead(batch, settings)
                    done += 1
                    _show(done, len(kinds))


@contextmanager
def _admitted(state: RequestState, params: SamplingParams) -> Iterator[None]:
    """Every row as a request of one token, with no page but the scratch page."""
    rows = range(state.padding_row)
    for row in rows:
        state.admit(Admission(row, [0], 0, [], params, 0))
    try:
        yield
    finally:
        for row in rows:
            state.release(row)


def _show(done: int, of: int) -> None:
    if sys.stderr.isatty():
        filled = BAR * done // of
        line = f"\rsteps recorded [{'#' * filled}{'.' * (BAR - filled)}] {done}/{of}"
        print(line, end="\n" if done == of else "", file=sys.stderr, flush=True)
