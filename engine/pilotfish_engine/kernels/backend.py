"""Says which kernels a device has by operation, and where a call goes.

An operation may have several implementations beside each other. The first one that takes the call's shapes and phase
(decode, extend, a tree: an attention's inputs tell) does it; what none takes is the twin's, plain torch in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from pilotfish_engine.kernels.inputs import AttentionInputs

Rest = TypeVarTuple("Rest")  # the types of an operation's arguments behind the first, which is a tensor
Result = TypeVar("Result")


def _any_shape(*arguments: object) -> bool:
    return True


@dataclass(frozen=True)
class Implementation(Generic[*Rest, Result]):
    """One way to do an operation. takes: whether a call is for it, by shapes and phase, never by numbers on the device.
    Both have the twin's arguments, in its order."""

    run: Callable[[Tensor, *Rest], Result]
    takes: Callable[[Tensor, *Rest], bool] = _any_shape


Linear = Implementation[Tensor, Tensor | None, torch.dtype, Tensor]
Norm = Implementation[Tensor, float, Tensor]
AddNorm = Implementation[Tensor, Tensor, float, tuple[Tensor, Tensor]]
RopeAndWrite = Implementation[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Gate = Implementation[Tensor]
Attention = Implementation[Tensor, Tensor, int, AttentionInputs, float, int | None, Tensor]
TopLogProbs = Implementation[int, tuple[Tensor, Tensor]]
RuleOut = Implementation[Tensor, Tensor]
MatchRows = Implementation[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backend:
    """The kernels of one kind of device, for tensors of `dtypes`: by operation those that it has, in the order in which
    they are asked. The contracts stand with the twins in `reference`."""

    dtypes: frozenset[torch.dtype]
    linear: tuple[Linear, ...] = ()
    rms_norm: tuple[Norm, ...] = ()
    add_rms_norm: tuple[AddNorm, ...] = ()
    rope_and_write: tuple[RopeAndWrite, ...] = ()
    silu_and_mul: tuple[Gate, ...] = ()
    gelu_and_mul: tuple[Gate, ...] = ()
    paged_attention: tuple[Attention, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    rule_out: tuple[RuleOut, ...] = ()
    match_rows: tuple[MatchRows, ...] = ()


Backends = Mapping[str, Callable[[], Backend | None]]  # by torch's name of the device; called with its first tensor


@dataclass(frozen=True)
class Operation(Generic[*Rest, Result]):
    """check: raises where a call breaks the contract, for all implementations; twins take what torch takes. of: its
    implementations in a backend."""

    twin: Callable[[Tensor, *Rest], Result]
    check: Callable[[Tensor, *Rest], None]
    of: Callable[[Backend], tuple[Implementation[*Rest, Result], ...]]
    backends: Backends
    _known: dict[tuple[str, torch.dtype], tuple[Implementation[*Rest, Result], ...]] = field(
        default_factory=dict, init=False
    )

    def __call__(self, first: Tensor, *rest: *Rest) -> Result:
        for implementation in self._offered(first):
            if implementation.takes(first, *rest):
                self.check(first, *rest)
                return implementation.run(first, *rest)
        return self.twin(first, *rest)

    def _offered(self, first: Tensor) -> tuple[Implementation[*Rest, Result], ...]:
        kind = (first.device.type, first.dtype)
        if kind not in self._known:
            load = self.backends.get(kind[0])
            backend = None if load is None else load()
            fits = backend is not None and kind[1] in backend.dtypes
            self._known[kind] = self.of(backend) if backend is not None and fits else ()
        return self._known[kind]
