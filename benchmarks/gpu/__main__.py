"""`python -m benchmarks.gpu [--sections start,plain,…]`: the Llama-3.1-8B shape on one GPU.

start: the engine with every default under a cap of memory, its sum, and its first request. plain: an engine without a
draft; kernels: where its steps' time goes; arrivals: times between tokens while long prompts come. chain: an engine
with an EAGLE-3 head, drafting chains of 3 that are made to commit 2.6 tokens a step, and with its drafts disabled.
chain-kernels: where these two's time goes. adaptive: at several shares of acceptance, beside plain and every chain.
guided: answers that follow a grammar beside free ones, as the drafts of a head without training come out.
Each row is the step loop's own time, and beside it that of its graph replayed alone: what is between the two the GPU
waits. Figures of other engines: SGLang 0.5.16 and vLLM 0.25.0 on an H200 (2026-11), prompt 512, 256 tokens out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import adaptive, guided, shapes, steps
from benchmarks.gpu.forced import forced, share_for
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import Envelope, EnvelopeUpdate
from pilotfish_engine.distributed.children import settle
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.messages import SamplingParams, Submit
from pilotfish_engine.scheduler.scheduler import Scheduler

BATCHES = (1, 8, 32, 64, 128, 256)
PEERS = {  # the better one's tokens/s, plain and with a chain of 3 at 2.6 tokens a step
    1: (207, 390),
    8: (1564, 3095),
    32: (5517, 10109),
    64: (9359, 15401),
    128: (14305, 18120),
    256: (17885, 19288),
}
TOKENS_A_STEP = 2.6
CAP = 80 * 10**9
PLAIN, CHAIN = adaptive.static(0), adaptive.static(3)


def build(folder: Path, head: bool, capacity: CapacityConfig, max_model_len: int | None = 4096) -> Parts:
    target, draft = shapes.target(folder / "target"), shapes.head(folder / "head")
    begun = time.perf_counter()
    with shapes.random_weights(torch.device("cuda")):
        parts = assemble(
            EngineConfig(
                model=ModelConfig(source=str(target), dtype="bfloat16", max_model_len=max_model_len),
                speculation=SpeculationConfig(
                    method="EAGLE3" if head else "None",
                    draft=str(draft) if head else None,
                    envelope=Envelope(num_steps=5, topk=1, num_draft_tokens=6),
                ),
                capacity=capacity,
            )
        )
    settle()  # as a model process does
    device = parts.worker.speculation_report().device
    recorded = f"{device.recorded} steps recorded in {device.recording_seconds:.1f} s, {device.recording_failures} not"
    print(f"ready in {time.perf_counter() - begun:.1f} s; {recorded}\n{parts.worker.limits.memory_sum}", flush=True)
    return parts


def start(folder: Path) -> None:
    """Every default but the share of memory, which stands for a device of 80 GB; no program may take more."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    parts = build(folder, head=True, capacity=CapacityConfig(memory_fraction=0.9 * CAP / total), max_model_len=None)
    scheduler = Scheduler(parts.worker, parts.chunk_size, parts.stop_text)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    scheduler.submit(Submit(request_id="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=32, ignore_eos=True)))
    tokens = sum(len(output.token_ids) for _ in range(80) for output in scheduler.step())
    taken = torch.cuda.max_memory_reserved() / 1e9
    print(f"limit {parts.worker.limits.max_model_len}, first request: {tokens} tokens; at most {taken:.1f} GB reserved")
    print(f"allocations while it ran: {torch.cuda.memory_stats()['allocation.all.allocated'] - before}", flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)


def show(name: str, batch: int, cell: steps.Cell, peer: float | None) -> None:
    device = "" if cell.device_ms is None else f"{cell.device_ms:8.2f} {cell.waits:7.1%}"
    beside = "" if peer is None else f"{cell.tokens_per_second / peer:8.2f}"
    rate = f"{cell.tokens_per_second:9.0f} {cell.tokens_a_step:6.2f}"
    print(f"{name:>14} {batch:>5} {rate} {cell.step_ms:8.2f} {device:>16} {beside} {cell.prefill_s:8.2f}", flush=True)


def table(parts: Parts, rows: dict[str, EnvelopeUpdate], batches: Sequence[int], overlap: bool) -> None:
    print(f"overlap {overlap}\n{'':14} batch     tok/s a step  step ms  device   waits   ÷ peer   prompts s")
    for number, batch in enumerate(batches):
        for name, envelope in rows.items():
            cell = steps.run(parts, envelope, steps.Load(batch, seed=100 * number + len(name)), overlap)
            peer = PEERS.get(batch, (None, None))["chain" in name]
            show(name, batch, cell, peer)


def by_kernel(parts: Parts, batches: Sequence[int], envelope: EnvelopeUpdate) -> None:
    for batch in batches:
        steps.run(parts, envelope, steps.Load(batch, seed=batch, steps=8), overlap=True)
        found = steps.kernels(parts)
        total = sum(us for _, us, _ in found) / 1e3
        print(f"kernels of a step at {batch}: {total:.2f} ms")
        for name, us, count in found[:14]:
            print(f"  {us:9.1f} us {count:>4} x {name[:90]}", flush=True)


def under_arrivals(parts: Parts, overlaps: Sequence[bool]) -> None:
    for overlap in overlaps:
        for every in (50, 20, 8):
            p50, p90, p99 = steps.arrivals(parts, 64, overlap, prompt=2000, every=every)
            found = f"p50 {p50:.1f} p90 {p90:.1f} p99 {p99:.1f} ms, p99 / p50 {p99 / p50:.2f}"
            print(f"a prompt of 2,000 each {every} steps at 64, overlap {overlap}: between tokens {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="start,plain,kernels,arrivals,chain,adaptive")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--loads", default="1,4,16,64,128,256", help="of adaptive, at once")
    parser.add_argument("--record", type=Path, help="a file for every step and decision of adaptive")
    parser.add_argument("--overlap", default="false,true", help="false, true or both")
    arguments = parser.parse_args()
    sections, batches = arguments.sections.split(","), [int(n) for n in arguments.batches.split(",")]
    loads = [int(n) for n in arguments.loads.split(",")]
    overlaps = [word == "true" for word in arguments.overlap.split(",")]
    capacity = CapacityConfig(max_running_requests=max(96, *batches), chunk_size=2048)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "start" in sections:
            start(folder)
            _free()
        if "guided" in sections:
            parts = build(folder, True, capacity)
            guided.show(parts, {"disabled": PLAIN, "chain of 3": CHAIN}, batches, overlaps[-1])
            del parts
            _free()
        if {"plain", "kernels", "arrivals"} & set(sections):
            parts = build(folder, False, capacity)
            for overlap in overlaps if "plain" in sections else []:
                table(parts, {"plain": PLAIN}, batches, overlap)
            if "kernels" in sections:
                by_kernel(parts, batches, PLAIN)
            if "arrivals" in sections:
                under_arrivals(parts, overlaps)
            del parts
            _free()
        if {"chain", "adaptive", "chain-kernels"} & set(sections):
            with forced(torch.device("cuda")) as acceptance:
                parts = build(folder, True, capacity)
                acceptance.set(share_for(TOKENS_A_STEP, 3))
                for overlap in overlaps if "chain" in sections else []:
                    table(parts, {"chain of 3": CHAIN, "disabled": PLAIN}, batches, overlap)
                if "chain-kernels" in sections:
                    for envelope in (PLAIN, CHAIN):
                        by_kernel(parts, batches, envelope)
                if "adaptive" in sections:
                    adaptive.show(parts, acceptance, loads, overlaps[-1], arguments.record)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
