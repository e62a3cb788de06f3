"""`python -m benchmarks.parts`: what a decode step costs by part on this machine's CPU, and what a disabled draft does.

Parts: the draft, the tree, the target's pass with the verdict, the draft-extend, and the rest (all other Python and
tensor work of the engine, from the scheduler's plan to its outputs). The EAGLE-3 head is random, so that a step commits
little more than one token; that changes no part's cost. A disabled engine has the head, keeps its cache in step, and
decodes plainly; beside it runs one that was started without a draft. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from benchmarks import prompts
from benchmarks.decode import Bar, encode
from benchmarks.reference import SOURCE
from benchmarks.shared import target_of
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.reservation import SLACK
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.speculation.step import Step

BATCHES = (1, 16)
ROUNDS = 3
STEPS = 24
LENGTH = 1024  # tokens of a prompt and its answer
DISABLED_STEPS = 192
DRAFT_VOCABULARY = 8192
HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 49152,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SETTINGS = {
    "chain of 4": EnvelopeUpdate(num_steps=4, topk=1, num_draft_tokens=5, tuning="Fixed", disable_threshold=1000),
    "tree of 8": EnvelopeUpdate(num_steps=4, topk=2, num_draft_tokens=8, tuning="Fixed", disable_threshold=1000),
}
PLAIN = EnvelopeUpdate(num_steps=0, topk=1, tuning="Fixed")
PARTS = ("draft", "tree", "verify", "extend", "rest")


def random_head(folder: Path) -> Path:
    """An EAGLE-3 checkpoint of SmolLM2's sizes."""
    hidden, inner, kv = HEAD["hidden_size"], HEAD["intermediate_size"], HEAD["num_key_value_heads"] * HEAD["head_dim"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (DRAFT_VOCABULARY, hidden),
    }
    torch.manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    tensors["d2t"] = torch.arange(DRAFT_VOCABULARY) * 5  # target ids 0, 6, 12, …
    (folder / "config.json").write_text(json.dumps(HEAD))
    save_file(tensors, folder / "model.safetensors")
    return folder


def build(method: str, draft: Path | None) -> Parts:
    return assemble(
        EngineConfig(
            model=ModelConfig(source=SOURCE, dtype="auto", max_model_len=LENGTH),
            speculation=SpeculationConfig(
                method=method,
                draft=None if draft is None else str(draft),
                envelope=Envelope(num_steps=4, topk=2, num_draft_tokens=8),
            ),
            # room for all at full length, or some would wait
            capacity=CapacityConfig(max_running_requests=max(BATCHES), kv_tokens=max(BATCHES) * (LENGTH + SLACK)),
        )
    )


@contextmanager
def stopwatches(parts: Parts) -> Iterator[dict[str, float]]:
    """Seconds spent within each part's functions while the context lasts."""
    spent: dict[str, float] = defaultdict(float)

    def watch(owner: Any, name: str, part: str) -> Any:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            spent[part] += time.perf_counter() - begun
            return result

        return patch.object(owner, name, timed)

    proposer = type(parts.step.proposer)
    with ExitStack() as stack:
        for owner, name, part in (
            (proposer, "propose", "draft"),
            (Step, "draft", "draft and tree"),
            (Step, "verify", "verify"),
            (proposer, "accepted", "extend"),
        ):
            stack.enter_context(watch(owner, name, part))
        yield spent


def by_part(parts: Parts, envelope: EnvelopeUpdate, batch: Sequence[list[int]]) -> dict[str, float]:
    """Milliseconds a step of each part, of the round that took least."""
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        scheduler = started(parts, envelope, batch)
        with stopwatches(parts) as spent:
            begun = time.perf_counter()
            for _ in range(STEPS):
                scheduler.step()
            seconds = time.perf_counter() - begun
        for number in range(len(batch)):
            scheduler.abort(str(number))
        spent["tree"] = spent.pop("draft and tree") - spent["draft"]
        spent["rest"] = seconds - sum(spent.values())
        if not best or seconds * 1e3 < sum(best.values()) * STEPS:
            best = {part: spent[part] * 1e3 / STEPS for part in PARTS}
    return best


def started(parts: Parts, envelope: EnvelopeUpdate, batch: Sequence[list[int]]) -> Scheduler:
    """Every request has its first token."""
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text)
    scheduler.set_envelope(envelope)
    for number, prompt in enumerate(batch):
        params = SamplingParams(max_tokens=5 * (STEPS + 8) + DISABLED_STEPS, temperature=0.0, ignore_eos=True)
        scheduler.submit(Submit(request_id=str(number), prompt=prompt, params=params))
    answered: set[str] = set()
    while len(answered) < len(batch):
        answered |= {output.request_id for output in scheduler.step()}
    return scheduler


def disabled_rates(with_draft: Parts, without: Parts, batch: Sequence[list[int]]) -> tuple[float, float]:
    """Decode tokens/s of both over the same requests. They step in turn, so that whatever slows the machine for a while
    slows both; a step that lasts twice its median, and the one beside it, is something else's doing and left out."""
    pair = [started(parts, PLAIN, batch) for parts in (with_draft, without)]
    seconds: list[tuple[float, float]] = []
    for number in range(DISABLED_STEPS):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            pair[which].step()
            took[which] = time.perf_counter() - begun
        seconds.append((took[0], took[1]))
    for scheduler, number in itertools.product(pair, range(len(batch))):
        scheduler.abort(str(number))
    most = 2 * statistics.median(plain for _, plain in seconds)
    quiet = [both for both in seconds if max(both) < most]
    disabled, plain = (len(batch) * len(quiet) / sum(one) for one in zip(*quiet, strict=True))
    return disabled, plain


def main() -> int:
    texts = encode(prompts.chat(max(BATCHES)))
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        head = build("EAGLE3", random_head(Path(folder)))
        with target_of(head):
            without, ngram = build("None", None), build("NGRAM", None)
        engines = {"EAGLE3": head, "NGRAM": ngram}
        print(f"ms a step, SmolLM2-135M-Instruct, {head.step.target.dtype}, {torch.get_num_threads()} threads")
        print(f"{'':26}" + "".join(f"{part:>9}" for part in PARTS) + "    rest/step")
        for batch in BATCHES:
            for (name, parts), (settings, envelope) in itertools.product(engines.items(), SETTINGS.items()):
                found = by_part(parts, envelope, texts[:batch])
                share = found["rest"] / sum(found.values())
                row = f"{name}, {settings}, ×{batch}"
                print(f"{row:26}" + "".join(f"{found[part]:9.2f}" for part in PARTS) + f"{share:12.1%}", flush=True)
                if batch == max(BATCHES):
                    bars.append(Bar(f"share of the parts in a step, {row}", 1 - share, 0.9))
        print("decode tokens/s, plain: with a disabled EAGLE-3 head and started without a draft")
        for batch in BATCHES:
            disabled, plain = disabled_rates(head, without, texts[:batch])
            print(f"×{batch:<4}{disabled:9.1f}{plain:9.1f}", flush=True)
            bars.append(Bar(f"disabled / started without a draft, batch {batch}", disabled / plain, 0.98))
    print(*bars, sep="\n")
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
