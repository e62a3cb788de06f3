"""Has the engine answer prompts, and keeps the answers' token ids.

answers.jsonl: one object a line, `line` (the prompt's), `temperature` and `tokens`; {"done": true} behind the last.
Knows nothing about drafts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm  # type: ignore[import-untyped]

from pilotfish_engine.core import Core
from pilotfish_engine.errors import UsageError
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.train.prompts import Prompt
from pilotfish_engine.train.sequences import Answered

TEMPERATURES = (0.0, 0.0, 0.7, 0.0, 0.0, 1.0)  # of one prompt after the other
WAVE = 0.25  # of the engine's room: so much is free when prompts go in, so that few passes are of prompts


@dataclass(frozen=True)
class Answer:
    temperature: float
    tokens: list[int]

    def behind(self, prompt: Prompt) -> Answered:
        return Answered([*prompt.token_ids, *self.tokens], len(prompt.token_ids), greedy=self.temperature == 0)


class AnswerFile:
    """What is written of answers.jsonl. A line that a kill has cut is taken away when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[int, Answer] = {}
        self.done = False
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            entry = json.loads(line)
            if "done" in entry:
                self.done = True
            else:
                self.answers[entry["line"]] = Answer(entry["temperature"], entry["tokens"])
        if len(whole) < len(text):
            self.path.write_bytes(whole)

    def write(self, answers: Iterator[tuple[Prompt, Answer]]) -> None:
        """Adds them as they come, and that these were all."""
        with self.path.open("a", encoding="utf-8") as file:
            for prompt, answer in answers:
                self.answers[prompt.line] = answer
                _append(file, {"line": prompt.line, "temperature": answer.temperature, "tokens": answer.tokens})
            _append(file, {"done": True})
        self.done = True


def _append(file: IO[str], entry: dict[str, object]) -> None:
    file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    file.flush()


def generate(
    core: Core, prompts: Sequence[tuple[Prompt, float]], max_tokens: int, seed: int, seconds: float | None
) -> Iterator[tuple[Prompt, Answer]]:
    """Answers to prompts at a temperature each, in the order in which they end. max_tokens: of an answer. seconds:
    after so many what is under way is cut where it is, and the rest is not asked. Raises UsageError where the engine
    fails."""
    limits = core.limits
    ends = None if seconds is None else time.monotonic() + seconds
    waiting = list(reversed(prompts))
    running: dict[str, tuple[Prompt, Answer]] = {}
    while waiting or running:
        room = limits.max_running_requests - len(running)
        for _ in range(min(room, len(waiting)) if room >= WAVE * limits.max_running_requests else 0):
            prompt, temperature = waiting.pop()
            most = min(max_tokens, limits.max_model_len - len(prompt.token_ids))
            params = SamplingParams(max_tokens=most, temperature=temperature, seed=seed + prompt.line)
            running[str(prompt.line)] = prompt, Answer(temperature, [])
            core.submit(Submit(request_id=str(prompt.line), prompt=prompt.token_ids, params=params))
        for output in core.step():
            prompt, answer = running[output.request_id]
            answer.tokens.extend(output.token_ids)
            if output.error is not None:
                raise UsageError(f"the target does not answer the prompt of line {prompt.line}: {output.error}")
            if output.finish_reason is not None:
                del running[output.request_id]
                yield prompt, answer
        if ends is not None and time.monotonic() > ends:
            break
    for request_id, (prompt, answer) in running.items():
        core.abort(request_id)
        if answer.tokens:
            yield prompt, answer


def counted(answers: Iterator[tuple[Prompt, Answer]], total: int) -> Iterator[tuple[Prompt, Answer]]:
    """The same, with a bar on the terminal."""
    with tqdm(total=total, desc="answers", unit="answer", dynamic_ncols=True) as bar:
        tokens = 0
        for prompt, answer in answers:
            tokens += len(answer.tokens)
            bar.set_postfix(tokens=tokens, refresh=False)
            bar.update()
            yield prompt, answer
