"""`python -m benchmarks.decode`: decode tokens/s on this machine's CPU, every engine beside the floor, in one run.

Rows: the model's linear layers alone (torch's own, and the engine's), plain decoding, n-gram drafts, adaptive, and the
reference library's `generate`. All are run in turn, several times over; the table has the best of each, and a bar is
judged by the median of the rounds' ratios. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

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
ROUNDS = 6
REFERENCE_ROUNDS = 2
PASSES = 24  # over the linear layers
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


Rates = dict[tuple[str, str, int], list[float]]  # tokens/s of each round by row, kind of text and batch


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
    return functional.linear(x, layer.dense())


LINEAR: dict[str, Callable[[torch.Tensor, Linear], torch.Tensor]] = {
    "torch linear": torch_linear,
    "own linear": lambda x, layer: layer(x),
}


def linear_rate(parts: Parts, batch: int, apply: Callable[[torch.Tensor, Linear], torch.Tensor]) -> float:
    """Tokens/s of the model's linear layers alone, `batch` rows at a time: of the median pass."""
    decoder = parts.step.target
    linears = [decoder.lm_head]
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, GroupedQueryAttention), "SmolLM2 is a Llama"
        assert isinstance(mlp, GatedMLP), "SmolLM2 is a Llama"
        linears += [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    inputs = {width: torch.randn(batch, width, dtype=decoder.dtype) for width in {x.dense().shape[1] for x in linears}}
    seconds = []
    with torch.inference_mode():
        for _ in range(PASSES):
            begun = time.perf_counter()
            for linear in linears:
                apply(inputs[linear.dense().shape[1]], linear)
            seconds.append(time.perf_counter() - begun)
    return batch / median(seconds)


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
    rates: Rates = defaultdict(list)
    for turn, batch in itertools.product(range(ROUNDS), BATCHES):
        print(f"\rround {turn + 1}/{ROUNDS}, batch {batch} ", end="", file=sys.stderr, flush=True)
        for kind, texts in kinds.items():
            for row, apply in LINEAR.items():
                rates[row, kind, batch].append(linear_rate(parts, batch, apply))
            if turn < REFERENCE_ROUNDS:
                rates["transformers", kind, batch].append(reference_rate(model, texts[:batch]))
            groups = [[text] for text in texts[:SOLO]] if batch == 1 else [texts[:batch]]
            for row in list(SETTINGS)[:: 1 if turn % 2 else -1]:
                rates[row, kind, batch].append(engine_rate(parts, SETTINGS[row], groups))
    print("\r", end="", file=sys.stderr)
    show(rates, dtype)
    return bars(rates)


def show(rates: Rates, dtype: str) -> None:
    columns = [(kind, batch) for kind in ("code", "chat") for batch in BATCHES]
    threads = torch.get_num_threads()
    print(f"decode tokens/s, SmolLM2-135M-Instruct, {dtype}, {threads} threads, {TOKENS} tokens a request, best round")
    print(f"{'':14}" + "".join(f"{kind:>7} ×{batch:<3}" for kind, batch in columns))
    for row in ("torch linear", "own linear", *SETTINGS, "transformers"):
        print(f"{row:14}" + "".join(f"{max(rates[row, kind, batch]):>11.1f} " for kind, batch in columns))


def bars(rates: Rates) -> list[Bar]:
    """The floor is torch's linear layers, called bare on the same shapes. Each figure is the median of the rounds'
    ratios: what is compared ran within the same seconds, and a machine that is shared is not equally fast for long."""
    found = []

    def bar(name: str, rows: tuple[str, str], kind: str, batch: int, least: float) -> None:
        pairs = zip(*(rates[row, kind, batch] for row in rows), strict=False)  # the reference runs in fewer rounds
        found.append(Bar(f"{name}, {kind}, batch {batch}", median(one / other for one, other in pairs), least))

    for kind, batch in itertools.product(("code", "chat"), BATCHES):
        if batch in (1, 16):
            bar("plain / floor", ("plain", "torch linear"), kind, batch, 0.8 if batch == 1 else 0.85)
        bar("plain / transformers", ("plain", "transformers"), kind, batch, 1.3)
        plain, ngram = (median(rates[row, kind, batch]) for row in ("plain", "n-gram"))
        better = "plain" if plain > ngram else "n-gram"
        bar("adaptive / better of plain and n-gram", ("adaptive", better), kind, batch, 0.97)
    bar("n-gram / plain", ("n-gram", "plain"), "code", 1, 1.15)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    arguments = parser.parse_args()
    found = run(arguments.dtype)
    print(*found, sep="\n")
    return 0 if all(bar.met for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
