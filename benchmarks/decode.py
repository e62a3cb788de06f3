"""`python -m benchmarks.decode`: decode tokens/s on this machine's CPU, every engine beside the floor, in one run.

Rows: the model's linear layers alone (torch's own, and the engine's), plain decoding, n-gram drafts, adaptive, and the
reference library's `generate`. All are run in turn, several times over, and the best time of each is kept: what
disturbs a run only adds to it. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks import prompts
from benchmarks.reference import SOURCE, smollm2
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.model.attention import GroupedQueryAttention
from pilotfish_engine.model.layers import GatedMLP
from pilotfish_engine.model.linear import Linear
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.source import resolve
from pilotfish_engine.tokenizer import load

BATCHES = (1, 4, 16)
ROUNDS = 4
REFERENCE_ROUNDS = 2
SOLO = 4  # prompts that are run one after another at batch 1
TOKENS = 128
REFERENCE_TOKENS = 24
PROMPT_TOKENS = 160
NUM_STEPS = 4
PLAIN = EnvelopeUpdate(num_steps=0, tuning="Adaptive")
NGRAM = EnvelopeUpdate(
    num_steps=NUM_STEPS, topk=1, num_draft_tokens=NUM_STEPS + 1, tuning="Fixed", disable_threshold=1000
)
ADAPTIVE = EnvelopeUpdate(
    num_steps=NUM_STEPS, topk=1, num_draft_tokens=NUM_STEPS + 1, tuning="Adaptive", disable_threshold="Auto"
)
SETTINGS = {"plain": PLAIN, "n-gram": NGRAM, "adaptive": ADAPTIVE}


@dataclass(frozen=True)
class Bar:
    """`value` must be at least `least`."""

    name: str
    value: float
    least: float

    @property
    def met(self) -> bool:
        return self.value >= self.least

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.value:.2f} (bar {self.least:.2f})"


def engine_rate(parts: Parts, envelope: EnvelopeUpdate, groups: Sequence[Sequence[list[int]]]) -> float:
    """Decode tokens/s over all groups, each of which is a batch of its own; prompts are not counted."""
    runs = [decode(parts, envelope, group) for group in groups]
    return sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs)


def decode(parts: Parts, envelope: EnvelopeUpdate, batch: Sequence[list[int]]) -> tuple[int, float]:
    """Tokens and seconds from the first decode step until the first request ends: the batch is whole all the while."""
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text)
    scheduler.set_envelope(envelope)
    for number, prompt in enumerate(batch):
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        scheduler.submit(Submit(request_id=str(number), prompt=prompt, params=params))
    emitted, begun, ended = 0, 0.0, False
    while not ended:
        outputs = scheduler.step()
        if begun:
            emitted += sum(len(output.token_ids) for output in outputs)
            ended = any(output.finish_reason for output in outputs)
        elif len(outputs) >= len(batch):  # every prompt is through
            begun = time.perf_counter()
    seconds = time.perf_counter() - begun
    for number in range(len(batch)):
        scheduler.abort(str(number))
    return emitted, seconds


def torch_linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    return functional.linear(x, layer.weight)


def linear_rate(parts: Parts, batch: int, apply: Callable[[torch.Tensor, Linear], torch.Tensor]) -> float:
    """Tokens/s of the model's linear layers alone, `batch` rows at a time."""
    decoder = parts.step.target
    linears = [decoder.lm_head]
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, GroupedQueryAttention), "SmolLM2 is a Llama"
        assert isinstance(mlp, GatedMLP), "SmolLM2 is a Llama"
        linears += [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    inputs = {width: torch.randn(batch, width, dtype=decoder.dtype) for width in {x.weight.shape[1] for x in linears}}
    best = float("inf")
    with torch.inference_mode():
        for _ in range(12):
            begun = time.perf_counter()
            for linear in linears:
                apply(inputs[linear.weight.shape[1]], linear)
            best = min(best, time.perf_counter() - begun)
    return batch / best


def reference_rate(model: LlamaForCausalLM, batch: Sequence[list[int]]) -> float:
    """Decode tokens/s of `generate`, greedy, prompts left-padded: the difference of a long run and one of one token."""
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])

    def seconds(tokens: int) -> float:
        begun = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
        return time.perf_counter() - begun

    with torch.inference_mode():
        return len(batch) * (REFERENCE_TOKENS - 1) / (seconds(REFERENCE_TOKENS) - seconds(1))


def build(dtype: str) -> Parts:
    return assemble(
        EngineConfig(
            model=ModelConfig(source=SOURCE, dtype=dtype, max_model_len=1024),
            speculation=SpeculationConfig(
                method="NGRAM", envelope=Envelope(num_steps=NUM_STEPS, topk=1, num_draft_tokens=NUM_STEPS + 1)
            ),
            capacity=CapacityConfig(max_running_requests=max(BATCHES)),
        )
    )


def encode(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = load(resolve(SOURCE))
    return [tokenizer.encode_chat([{"role": "user", "content": text}])[-PROMPT_TOKENS:] for text in texts]


def run(dtype: str) -> list[Bar]:
    parts = build(dtype)
    model = smollm2(parts.step.target.dtype)
    kinds = {"code": encode(prompts.code(max(BATCHES))), "chat": encode(prompts.chat(max(BATCHES)))}
    rates: dict[tuple[str, str, int], float] = {}

    def keep(row: str, kind: str, batch: int, rate: float) -> None:
        rates[row, kind, batch] = max(rates.get((row, kind, batch), 0.0), rate)

    for turn, batch in itertools.product(range(ROUNDS), BATCHES):
        print(f"\rround {turn + 1}/{ROUNDS}, batch {batch} ", end="", file=sys.stderr, flush=True)
        linear = {"torch linear": torch_linear, "own linear": lambda x, layer: layer(x)}
        bare = {row: linear_rate(parts, batch, apply) for row, apply in linear.items()}
        if turn < REFERENCE_ROUNDS:
            bare["transformers"] = reference_rate(model, kinds["chat"][:batch])
        for kind, texts in kinds.items():
            for row, rate in bare.items():  # the same work whatever the text says
                keep(row, kind, batch, rate)
            groups = [[text] for text in texts[:SOLO]] if batch == 1 else [texts[:batch]]
            for row, envelope in SETTINGS.items():
                keep(row, kind, batch, engine_rate(parts, envelope, groups))
    print("\r", end="", file=sys.stderr)
    show(rates, dtype)
    return bars(rates)


def show(rates: dict[tuple[str, str, int], float], dtype: str) -> None:
    columns = [(kind, batch) for kind in ("code", "chat") for batch in BATCHES]
    threads = torch.get_num_threads()
    print(f"decode tokens/s, SmolLM2-135M-Instruct, {dtype}, {threads} threads, {TOKENS} tokens a request")
    print(f"{'':14}" + "".join(f"{kind:>7} ×{batch:<3}" for kind, batch in columns))
    for row in ("torch linear", "own linear", *SETTINGS, "transformers"):
        print(f"{row:14}" + "".join(f"{rates[row, kind, batch]:>11.1f} " for kind, batch in columns))


def bars(rates: dict[tuple[str, str, int], float]) -> list[Bar]:
    """The floor is torch's linear layers, called bare on the same shapes."""
    found = []
    for kind in ("code", "chat"):
        for batch in BATCHES:
            of = {row: rates[row, kind, batch] for row in ("torch linear", "transformers", *SETTINGS)}
            where = f"{kind}, batch {batch}"
            if batch in (1, 16):
                least = 0.8 if batch == 1 else 0.85
                found.append(Bar(f"plain / floor, {where}", of["plain"] / of["torch linear"], least))
            found.append(Bar(f"plain / transformers, {where}", of["plain"] / of["transformers"], 1.3))
            better = max(of["plain"], of["n-gram"])
            found.append(Bar(f"adaptive / better of plain and n-gram, {where}", of["adaptive"] / better, 0.97))
    gain = rates["n-gram", "code", 1] / rates["plain", "code", 1]
    return [*found, Bar("n-gram / plain, code, batch 1", gain, 1.15)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    arguments = parser.parse_args()
    found = run(arguments.dtype)
    print(*found, sep="\n")
    return 0 if all(bar.met for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
