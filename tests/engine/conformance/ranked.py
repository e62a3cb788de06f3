"""A rank that follows, and writes down what each of its decode steps committed: JOURNAL OPINION, then what every
follower is given. With the opinion "contrary" it would draft, choose and accept otherwise than rank 0.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pilotfish_engine import engine, group
from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.speculation import step, verify

CALL, CHOOSE, VERIFY = step.Step.__call__, RequestState.choose, verify.verify


def write_down(journal: Path) -> None:
    def call(self: step.Step, *arguments: Any) -> step.StepResult:
        result = CALL(self, *arguments)
        counts = result.accept_lens.tolist()
        tokens = result.next_token_ids.view(len(counts), -1).tolist()
        with journal.open("a") as file:
            file.write(json.dumps([row[:count] for row, count in zip(tokens, counts, strict=True)]) + "\n")
        return result

    step.Step.__call__ = call  # type: ignore[method-assign, assignment]


class Contrary:
    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, *arguments: Any) -> Any:
        found = self._proposer.propose(*arguments)
        return replace(found, token_ids=found.token_ids.flip(1) + 1, scores=found.scores.flip(1))


def disagree() -> None:
    def choose(self: RequestState, *arguments: Any, **options: Any) -> torch.Tensor:
        return (CHOOSE(self, *arguments, **options) + 1) % self.vocab_size

    def accept_nothing(*arguments: Any) -> Any:
        found = VERIFY(*arguments)
        return replace(found, accept_lens=torch.ones_like(found.accept_lens), path=found.path.flip(1))

    def assembled(target: Any, kv: Any, state: Any, proposer: Any, ranks: Any) -> step.Step:
        return step.Step(target, kv, state, None if proposer is None else Contrary(proposer), ranks)

    RequestState.choose = choose  # type: ignore[method-assign]
    setattr(step, "verify", accept_nothing)  # noqa: B010
    setattr(engine, "Step", assembled)  # noqa: B010


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_down(Path(sys.argv[1]))
    if sys.argv[2] == "contrary":
        disagree()
    sys.exit(group.main(sys.argv[3:]))
