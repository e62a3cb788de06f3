"""Joins the ranks of a group, and names what they do together: all_reduce, all_gather, broadcast.

Ranks meet through a file in memory and on the loopback interface only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pilotfish_engine.config import stay_on_this_machine
from pilotfish_engine.errors import UsageError


class Ranks:
    """This process's place in torch.distributed's default group, and what the ranks do together.

    Every rank makes the same calls in the same order. Shapes are fixed and nothing is copied to the host. A call over
    no elements does nothing.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, in place, with the same bits on every rank."""
        if x.numel() > 0:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, …] of every rank → [size, n, …]."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel() > 0:
            dist.all_gather_into_tensor(gathered, x.contiguous())
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank."""
        sent = x.contiguous()
        if x.numel() > 0:
            dist.broadcast(sent, 0)
        return sent


def check_devices(size: int, flag: str = "--tensor-parallel-size") -> None:
    """flag: the one that says the size. Raises UsageError where the ranks are more than the GPUs; on a machine without
    any they share its CPU."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else size
    if size > found:
        raise UsageError(
            f"{flag} is {size}, and this machine has {found} GPU{'s' if found > 1 else ''}; at most {found} would work"
        )


def join(rank: int, size: int, store: int) -> Ranks:
    """This process becomes a rank; returns when all have. store: a descriptor of the file through which they meet."""
    stay_on_this_machine()
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store}", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = Ranks(rank, size, device)
    ranks.broadcast(torch.zeros(1, device=device))
    return ranks
