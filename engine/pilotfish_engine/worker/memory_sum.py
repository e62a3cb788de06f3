"""Divides a device's memory: what the weights, the state and the largest pass take, and the KV cache that is left.

One sum, for a person (`sentence`), for /metrics (`parts`) and for a refusal. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish_engine.errors import UsageError
from pilotfish_engine.model.shape import ModelShape

STATE_BYTES = 64  # of a row, beside its tokens and pages
TOKEN_BYTES = 8


@dataclass(frozen=True)
class MemorySum:
    """Bytes. others: taken by other programs, the driver and what this process is beside the parts below. largest_pass:
    what a pass takes while it runs. kv_token: of one token, in every layer of target and draft."""

    device: str
    total: int
    fraction: float
    others: int
    weights: int
    draft: int
    state: int
    largest_pass: int
    graphs: int
    kv_token: int
    kv_tokens: int = 0

    @property
    def usable(self) -> int:
        return int(self.total * self.fraction)

    @property
    def taken(self) -> int:
        """By all but the KV cache."""
        return self.others + self.weights + self.draft + self.state + self.largest_pass + self.graphs

    @property
    def left(self) -> int:
        return self.usable - self.taken

    def parts(self) -> dict[str, int]:
        """By name, without those that are nothing."""
        found = {
            "others": self.others,
            "weights": self.weights,
            "draft": self.draft,
            "state": self.state,
            "largest_pass": self.largest_pass,
            "graphs": self.graphs,
            "kv": self.kv_token * self.kv_tokens,
        }
        return {name: count for name, count in found.items() if count}

    def sentence(self) -> str:
        kv = f"{size(self.kv_token * self.kv_tokens)} hold KV of {self.kv_tokens:,} tokens"
        return f"{self._of_it()} {self._takers()}; {kv} ({size(self.kv_token)} each)"

    def check(self, needed_tokens: int, wanted: str, ways: list[str]) -> None:
        """Raises UsageError where so many tokens of KV do not fit. It tells the sum and what would. wanted: what
        needs them; ways: others that would work."""
        needed = self.kv_token * needed_tokens
        if needed <= self.left:
            return
        lacking = (
            f"{wanted} needs KV of {needed_tokens:,} tokens, {size(needed)}, and {size(max(0, self.left))} is left"
        )
        fits = " or ".join(ways) or "a device with more memory"
        raise UsageError(f"{self._of_it()} {self._takers()}; {lacking}; {fits} would work")

    def _of_it(self) -> str:
        share = f"--memory-fraction {self.fraction:g}"
        return f"of {size(self.total)} of {self.device} {size(self.usable)} may be used ({share}):"

    def _takers(self) -> str:
        names = {
            "weights": "weights",
            "draft": "draft",
            "state": "state of requests",
            "largest_pass": "largest pass",
            "graphs": "recorded steps",
            "others": "others and the runtime",
        }
        parts = self.parts()
        return ", ".join(f"{size(parts[name])} {words}" for name, words in names.items() if name in parts)


def state_bytes(rows: int, length: int, page_size: int) -> int:
    """Of RequestState, but for what only some requests need."""
    return (rows + 1) * (length * TOKEN_BYTES + (length // page_size + 2) * 4 + STATE_BYTES)


def pass_bytes(shape: ModelShape, tokens: int, scored: int, width: int) -> int:
    """A pass over so many tokens, of which `scored` get logits: an estimate, where it is not measured. width: bytes of
    a number. Residual stream, an MLP's inner product and its gate, heads; logits are float32, and drawing keeps several
    tensors of their size."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = shape.intermediate_size if shape.moe is None else max(shape.intermediate_size, shape.moe.expert_size)
    return tokens * width * (4 * shape.hidden_size + 3 * inner + 2 * heads) + scored * shape.vocab_size * 4 * 4


def longest_that_fits(found: MemorySum, rows: int, slack: int) -> int:
    """The context length with which one request's KV and all rows' state fit."""
    without_state = found.left + found.state
    return without_state // (found.kv_token + (rows + 1) * (TOKEN_BYTES + 1)) - slack


def size(count: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"
