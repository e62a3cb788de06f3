"""Writes a row out whole and reads it back. That may be here or in another engine of the same models and method.

Beside what an admission says again (tokens, parameters, seed and grammar; draws are keyed by seed and position) that is
the KV of target and draft, and what the draft keeps of a request. Format: safetensors, as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.errors import HandoverError
from pilotfish_engine.model.inputs import KVCache

LENGTH = "seq_len"


@torch.inference_mode()
def write_out(state: RequestState, pools: Sequence[KVCache], row: int) -> bytes:
    """Between steps, of a row whose prompt is through. pools: the target's and then the draft's, if it has one."""
    seq_len = state.seq_lens[row]
    slots = _slots(state, row, int(seq_len))
    kept = {LENGTH: seq_len.cpu(), **state.kept.of(row)}
    for name, tensor in _by_name(pools):
        kept[name] = tensor[:, slots].cpu().contiguous()
    return save(kept)


@torch.inference_mode()
def read_in(state: RequestState, pools: Sequence[KVCache], row: int, written: bytes) -> None:
    """Behind the admission of the row's tokens, with pages that are nobody else's. Raises HandoverError where this
    engine is another one; then nothing has been read."""
    try:
        kept = load(written)
        seq_len = int(kept.pop(LENGTH))
    except (SafetensorError, KeyError) as error:
        raise HandoverError(f"the request's state cannot be read ({error}); the whole of it would work") from error
    slots = _slots(state, row, seq_len)
    pairs = [(tensor, _taken(kept, name, tensor, len(slots))) for name, tensor in _by_name(pools)]
    state.kept.check(kept)
    for tensor, rows in pairs:
        tensor[:, slots] = rows.to(tensor.device)
    state.kept.put(row, kept)
    state.seq_lens[row] = seq_len


def _by_name(pools: Sequence[KVCache]) -> list[tuple[str, Tensor]]:
    return [(f"kv.{number}.{part}", getattr(pool, part)) for number, pool in enumerate(pools) for part in "kv"]


def _slots(state: RequestState, row: int, seq_len: int) -> Tensor:
    """Of the KV rows that are committed and of the last known token's, which a draft may have read already."""
    at = torch.arange(seq_len + 1, device=state.device)
    return state.slots(torch.tensor([row], device=state.device), at.unsqueeze(0)).squeeze(0)


def _taken(kept: dict[str, Tensor], name: str, pool: Tensor, count: int) -> Tensor:
    """The rows of this name, out of `kept`."""
    size = (pool.shape[0], count, *pool.shape[2:])
    rows = kept.pop(name, None)
    if rows is None or tuple(rows.shape) != size or rows.dtype is not pool.dtype:
        found = "nothing" if rows is None else f"{rows.dtype} {list(rows.shape)}"
        raise HandoverError(
            f"{name} of the request is {found}, and this engine keeps {pool.dtype} {list(size)}; an engine of the same "
            "models and method would work"
        )
    return rows
