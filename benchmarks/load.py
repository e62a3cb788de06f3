"""`python -m benchmarks.load`: what Python costs around the model's step at 64 requests, and what waiting costs.

Two models of random weights: SmolLM2's sizes with four of its layers, and one of two layers a ninth as wide, where
little but Python is left. Greedy requests, and mixed ones: half of these have stop strings, a quarter a temperature, an
eighth log-probabilities. Times are the thread's own CPU time with torch on one thread, so that other work on the
machine hardly counts; of a few rounds the one with the least is kept. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode import Bar
from benchmarks.reference import SOURCE
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile, Envelope, EnvelopeUpdate
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import Outputs, SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.source import resolve
from pilotfish_engine.speculation.step import Step
from pilotfish_engine.tokenizer import StopStrings, Tokenizer, load
from pilotfish_engine.worker.target import TargetWorker

REQUESTS = 64
PROMPT, STEPS = 48, 16  # tokens of a prompt, steps that are timed
ROUNDS = 2
QUEUE_ROUNDS = 6  # in which the queues are taken in turn
VOCABULARY = 8192
SHAPES = {
    "four layers of SmolLM2": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3
    ),
    "two layers, a ninth as wide": LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
}
SETTINGS = {
    "plain": EnvelopeUpdate(num_steps=0, tuning="Fixed"),
    "n-gram": EnvelopeUpdate(num_steps=4, topk=1, num_draft_tokens=5, tuning="Fixed", disable_threshold=1000),
}
PARTS = ("step", "worker", "scheduler", "messages")
WAITING = (0, 128, 512)  # requests beside the 64
MOST_AROUND = 0.15  # of the step's time
MOST_GROWTH = 1.15  # of what a place in the queue costs


def build(shape: LlamaConfig, folder: Path) -> Parts:
    torch.manual_seed(0)
    config = LlamaConfig(**shape.to_diff_dict() | {"vocab_size": VOCABULARY, "eos_token_id": None})
    LlamaForCausalLM(config).save_pretrained(folder)
    return assemble(
        EngineConfig(
            model=ModelConfig(source=str(folder), dtype="float32"),
            speculation=SpeculationConfig(method="NGRAM", envelope=Envelope(num_steps=4, topk=1, num_draft_tokens=5)),
            capacity=CapacityConfig(max_running_requests=REQUESTS),
        ),
        CostProfile(verify_ms=((1, 1.0),)),  # of no matter where settings are fixed
    )


def submits(count: int, tokens: int, mixed: bool, seed: int = 0) -> list[bytes]:
    """As they come out of the socket."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.7 if mixed and number % 4 == 1 else 0.0,
            seed=number,
            stop=("\n\nUser:", "</answer>") if mixed and number % 2 else (),
            logprobs=1 if mixed and number % 8 == 3 else None,
        )
        made.append(msgspec.msgpack.encode(Submit(request_id=f"{number:032x}-0-0", prompt=prompt, params=params)))
    return made


@contextmanager
def stopwatches() -> Iterator[dict[str, float]]:
    """Seconds of CPU within each of the nested parts' functions."""
    spent: dict[str, float] = defaultdict(float)

    def watch(owner: Any, name: str, part: str) -> Any:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            result = function(*args, **kwargs)
            spent[part] += time.thread_time() - begun
            return result

        return patch.object(owner, name, timed)

    with ExitStack() as stack:
        stack.enter_context(watch(Step, "__call__", "step"))
        stack.enter_context(watch(TargetWorker, "launch", "worker"))
        stack.enter_context(watch(Scheduler, "step", "scheduler"))
        yield spent


def engine(parts: Parts, tokenizer: Tokenizer, settings: EnvelopeUpdate) -> Scheduler:
    scheduler = Scheduler(parts.worker, parts.chunk_size, lambda params: StopStrings(tokenizer, params.stop))
    scheduler.set_envelope(settings)
    return scheduler


def by_part(parts: Parts, tokenizer: Tokenizer, settings: EnvelopeUpdate, mixed: bool) -> dict[str, float]:
    """Milliseconds of a decode step of all requests by part. They are of the round that took least."""
    encoder = msgspec.msgpack.Encoder()
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        scheduler = engine(parts, tokenizer, settings)
        for body in submits(REQUESTS, 8 * STEPS, mixed):
            scheduler.submit(msgspec.msgpack.decode(body, type=Submit))
        answered: set[str] = set()
        while len(answered) < REQUESTS:
            answered |= {output.request_id for output in scheduler.step()}
        with stopwatches() as spent:
            begun = time.thread_time()
            for _ in range(STEPS):
                encoder.encode(Outputs(scheduler.step()))
            whole = time.thread_time() - begun
        for request_id in answered:
            scheduler.abort(request_id)
        found = {
            "step": spent["step"],
            "worker": spent["worker"] - spent["step"],
            "scheduler": spent["scheduler"] - spent["worker"],
            "messages": whole - spent["scheduler"],
        }
        if not best or whole * 1e3 < sum(best.values()) * STEPS:
            best = {part: found[part] * 1e3 / STEPS for part in PARTS}
    return best


def first_token_ms(parts: Parts, tokenizer: Tokenizer, waiting: int, seed: int) -> tuple[float, float]:
    """Of the first and of the last of 64 + `waiting` requests that come at once."""
    scheduler = engine(parts, tokenizer, SETTINGS["plain"])
    bodies = submits(REQUESTS + waiting, 8, mixed=False, seed=seed)
    requests = [msgspec.msgpack.decode(body, type=Submit) for body in bodies]
    ends = [requests[0].request_id, requests[-1].request_id]
    begun = time.thread_time()
    for request in requests:
        scheduler.submit(request)
    first: dict[str, float] = {}
    while scheduler.has_work:
        for output in scheduler.step():
            if output.request_id in ends:
                first.setdefault(output.request_id, (time.thread_time() - begun) * 1e3)
    return first[ends[0]], first[ends[1]]


def main() -> int:
    torch.set_num_threads(1)
    tokenizer = load(resolve(SOURCE))
    bars: list[Bar] = []
    print(f"ms of CPU a step of {REQUESTS} requests, vocabulary {VOCABULARY}, float32, one thread")
    print(f"{'':50}" + "".join(f"{part:>11}" for part in PARTS) + "   around/step")
    for shape, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            parts = build(config, Path(folder))
        for mixed, (name, settings) in itertools.product((False, True), SETTINGS.items()):
            found = by_part(parts, tokenizer, settings, mixed)
            around = sum(found.values()) / found["step"] - 1
            row = f"{shape}, {'mixed' if mixed else 'greedy'}, {name}"
            print(f"{row:50}" + "".join(f"{found[part]:11.2f}" for part in PARTS) + f"{around:14.1%}", flush=True)
            bars.append(Bar(f"step / all of it, {row}", 1 / (1 + around), 1 / (1 + MOST_AROUND)))
    print("ms of CPU until a first token, of requests that come at once (prompt 48, answer 8)")
    print(f"{'waiting':>10}{'the first':>12}{'the last':>12}{'a place':>10}")
    rounds = [[first_token_ms(parts, tokenizer, waiting, turn) for waiting in WAITING] for turn in range(QUEUE_ROUNDS)]
    places = []
    for number, waiting in enumerate(WAITING):
        first, last = (min(found[number][end] for found in rounds) for end in (0, 1))
        places.append(last / (REQUESTS + waiting))
        print(f"{waiting:10}{first:12.1f}{last:12.1f}{places[-1]:10.2f}", flush=True)
    bars.append(Bar("a place in the shorter queue / in the longest", places[1] / places[-1], 1 / MOST_GROWTH))
    print(*bars, sep="\n")
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
