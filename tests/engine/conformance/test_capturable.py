"""The step of every method is tensor code over fixed shapes: nothing that a CUDA graph could not hold."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish_engine.contract.speculation import Settings
from tests.engine.conformance.conftest import prompts, settings_of
from tests.engine.conformance.harness import Harness, fixed

DATA_DEPENDENT = (
    "aten::_local_scalar_dense",  # .item(), int(), bool()
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
)


class Breach(AssertionError):
    pass


class Capturable(TorchDispatchMode):
    """Refuses operators whose output shape or host value depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith(DATA_DEPENDENT):
            raise Breach(f"{name} copies to the host or has a data-dependent shape")
        if name.startswith(("aten::index", "aten::_index_put")):
            indices = args[1] if isinstance(args[1], (list, tuple)) else ()
            if any(index is not None and index.dtype == torch.bool for index in indices):
                raise Breach(f"{name} with a boolean index has a data-dependent shape")
        return func(*args, **(kwargs or {}))


def refuse(*_args, **_kwargs):
    raise Breach("a tensor was copied to the host")


HOST_COPIES = ("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("method", "draft", "num_steps", "topk"), settings_of([(0, 1), (4, 1), (4, 4)], "equal", "random")
)
def test_a_step_is_capturable(engine, monkeypatch, method, draft, num_steps, topk, greedy):
    parts = engine(method, draft, 16)
    harness = Harness(parts)
    harness.scheduler.set_envelope(fixed(num_steps, topk))
    sampling = {} if greedy else {"temperature": 0.8, "top_p": 0.9, "top_k": 11}
    for prompt in prompts(3, seed=41):
        harness.submit(prompt, max_tokens=30, ignore_eos=True, **sampling)
    harness.step()
    settings = Settings(num_steps=num_steps, topk=topk, num_draft_tokens=1 if num_steps == 0 else 9)
    rows = parts.step.state.rows([0, 1, 2])
    lags = torch.tensor([2, 0, 1]).to(rows.device)
    for name in HOST_COPIES:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with torch.inference_mode(), Capturable():
        parts.step.catch_up(rows, settings)
        result = parts.step(rows, settings)
        if num_steps > 0:
            parts.step.proposer.catch_up(rows, lags, 2)
    monkeypatch.undo()
    assert min(result.accept_lens.tolist()) >= 1


@pytest.mark.parametrize(
    "breach",
    [
        lambda t: t.sum().item(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.masked_select(t, t > 0),
        lambda t: t.index_put_((t > 0,), torch.tensor(1.0)),
        lambda t: bool(t.sum() > 0),
    ],
)
def test_the_mode_refuses_what_it_should(breach):
    with pytest.raises(Breach), Capturable():
        breach(torch.ones(3))
