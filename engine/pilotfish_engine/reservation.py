"""Sizes the KV cache by what is left. Refuses what cannot fit before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from pilotfish_engine.config import EngineConfig
from pilotfish_engine.contract.speculation import MAX_NUM_DRAFT_TOKENS, Envelope
from pilotfish_engine.distributed.collectives import Ranks
from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.decoder import resize
from pilotfish_engine.model.parallel import divide
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.scheduler.policy import pages_for
from pilotfish_engine.speculation.step import Step
from pilotfish_engine.worker.machine_memory import memory_of, own_bytes
from pilotfish_engine.worker.memory_sum import MemorySum, longest_that_fits, pass_bytes, state_bytes
from pilotfish_engine.worker.trial import measure_needs

# a step writes at most 64 rows past the last known token, with overlap after another one that the host does not know
SLACK = 2 * MAX_NUM_DRAFT_TOKENS + 2


class Reservation:
    """One per engine start, from before anything is loaded. ranks: processes that share the target; on a CPU they share
    the memory too."""

    def __init__(self, config: EngineConfig, device: torch.device, ranks: Ranks | None) -> None:
        self._config = config
        self._device = device
        self._group = ranks
        self._ranks = 1 if ranks is None else ranks.size
        self._memory = memory_of(device)
        self._others = self._memory.used
        self._own = own_bytes(device)
        self._loaded: dict[str, int] = {}
        self._pass_of: Callable[[int], int] | None = None  # the largest pass by rows, where it is reckoned

    def check_before_weights(
        self, path: Path, shape: ModelShape, draft: Path | None, dtype: torch.dtype, max_model_len: int
    ) -> None:
        """Raises UsageError where weights, state and the KV of one request do not go together. It reads metadata
        alone."""
        width = dtype.itemsize
        own = shape if self._ranks == 1 else divide(shape, self._ranks, path)
        found = self._sum(
            weights=sum(map(prod, dict(own.tensor_shapes()).values())) * width,
            draft=0 if draft is None else _stored_bytes(draft),
            state=self._state_bytes(max_model_len),
            largest_pass=0,
            graphs=0,
            kv_token=own.kv_elements_per_token * width,
        )
        self._check_one(found, shape, max_model_len)

    def loaded(self, part: str) -> None:
        """This part is in memory now; it is what has been taken since the last call."""
        own = own_bytes(self._device)
        self._loaded[part], self._own = max(0, own - self._own), own

    def size_kv(self, step: Step, envelope: Envelope) -> MemorySum:
        """Gives the pools of target and draft their pages. Raises UsageError where one request does not fit."""
        config, state = self._config, step.state
        page_size, shape = step.kv.page_size, step.target.shape
        caches = step.caches
        largest_pass, graphs = self._needs(step, envelope)
        rows = state.padding_row
        found = self._sum(
            weights=self._loaded["weights"],
            draft=self._loaded["draft"] if step.proposer is not None else 0,
            state=max(self._loaded["state"], self._state_bytes(state.length - SLACK)),
            largest_pass=largest_pass,
            graphs=graphs,
            kv_token=sum(cache.token_bytes for cache in caches),
        )
        self._check_one(found, shape, state.length - SLACK)
        asked, one = config.capacity.kv_tokens, state.length
        if asked is not None:
            pages = pages_for(max(one, asked), page_size)
            found.check((pages + 1) * page_size, f"--kv-tokens {asked}", [f"--kv-tokens {_tokens(found)}"])
        else:
            # on a CPU memory is everybody's, so a quarter of the rows at full length is enough
            full = rows * one if self._device.type == "cuda" else max(one, rows * one // 4)
            pages = max(pages_for(one, page_size), min(pages_for(full, page_size), _tokens(found) // page_size - 1))
        if self._group is not None:
            pages = int(self._group.all_gather(torch.tensor([pages], device=self._group.device)).min())
        for cache in caches:
            resize(cache, pages)
        return replace(found, kv_tokens=pages * page_size)

    def _needs(self, step: Step, envelope: Envelope) -> tuple[int, int]:
        capacity, shape = self._config.capacity, step.target.shape
        if self._device.type == "cuda":
            needs = measure_needs(step, envelope, capacity.chunk_size)
            # kernels were loaded: what is not the allocator's is everybody else's
            self._others = self._memory.total - torch.cuda.mem_get_info(self._device)[0]
            self._others -= torch.cuda.memory_reserved(self._device)
            return needs.largest_pass, needs.graphs
        nodes = 1 if step.proposer is None or envelope.num_steps == 0 else envelope.num_draft_tokens
        width, chunk = step.target.dtype.itemsize, capacity.chunk_size
        self._pass_of = lambda rows: pass_bytes(shape, max(chunk, nodes * rows), nodes * rows, width)
        return self._pass_of(capacity.max_running_requests), 0

    def _check_one(self, found: MemorySum, shape: ModelShape, max_model_len: int) -> None:
        capacity = self._config.capacity
        ways = []
        shorter = min(max_model_len - 1, longest_that_fits(found, capacity.max_running_requests, SLACK))
        if shorter >= capacity.page_size:
            ways.append(f"--max-model-len {shorter // capacity.page_size * capacity.page_size}")
        one = pages_for(max_model_len + SLACK, capacity.page_size) + 1
        needed = found.kv_token * one * capacity.page_size
        fewer = capacity.max_running_requests
        while fewer > 1 and self._left_with(found, max_model_len, fewer) < needed:
            fewer //= 2
        fits = self._left_with(found, max_model_len, fewer) >= needed
        if fewer < capacity.max_running_requests and fits:
            ways.append(f"--max-running-requests {fewer}")
        ranks = self._ranks_that_fit(found, shape, needed)
        if ranks is not None:
            ways.append(f"--tensor-parallel-size {ranks}")
        found.check(one * capacity.page_size, f"one request of --max-model-len {max_model_len}", ways)

    def _left_with(self, found: MemorySum, max_model_len: int, rows: int) -> int:
        """What would be left for KV with so many rows."""
        largest_pass = found.largest_pass if self._pass_of is None else self._pass_of(rows)
        return found.left + found.state + found.largest_pass - self._state_bytes(max_model_len, rows) - largest_pass

    def _ranks_that_fit(self, found: MemorySum, shape: ModelShape, needed: int) -> int | None:
        """The fewest ranks whose devices, one each, hold their share."""
        if self._device.type != "cuda":
            return None
        for more in range(2, torch.cuda.device_count() // self._ranks + 1):
            try:
                divide(shape, more * self._ranks, Path())
            except UsageError:
                continue
            if (found.weights + needed) / more <= found.left + found.weights:
                return more * self._ranks
        return None

    def _state_bytes(self, max_model_len: int, rows: int | None = None) -> int:
        capacity = self._config.capacity
        rows = rows or capacity.max_running_requests
        return state_bytes(rows, max_model_len + SLACK, capacity.page_size)

    def _sum(self, **parts: int) -> MemorySum:
        shared = self._ranks if self._device.type == "cpu" else 1
        return MemorySum(
            device=self._memory.name,
            total=self._memory.used + self._memory.free // shared,
            fraction=self._config.capacity.memory_fraction,
            others=self._others,
            **parts,
        )


def _tokens(found: MemorySum) -> int:
    return max(0, found.left) // found.kv_token


def _stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
