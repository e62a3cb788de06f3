"""What the registered methods say of a checkpoint: as a target, as a draft, as the draft of a certain target.

Knows none of them: it asks each, by its own functions, as the engine does before it loads anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pilotfish_engine.contract.methods import AUTO, Method
from pilotfish_engine.contract.speculation import MAX_NUM_DRAFT_TOKENS, MAX_NUM_STEPS, MAX_TOPK, Envelope
from pilotfish_engine.engine import check_vocabulary
from pilotfish_engine.errors import CheckpointError, MethodError, UsageError
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.speculation import registry
from pilotfish_engine.speculation.proposer import Models

NOWHERE = Path("/nowhere/at/all")
MANY_LAYERS = 1 << 16  # of a target that is not known: whatever layer a draft reads is there


@dataclass(frozen=True)
class Fit:
    """Of a draft beside a target. reason: why it does not fit. limits: the first of the widest settings that it cannot
    do, None where all of them work."""

    target: str
    method: str
    fits: bool
    reason: str | None = None
    limits: str | None = None


@dataclass(frozen=True)
class Offers:
    """Of a model as a target. alone: methods that work without a draft, the one that Auto takes first. refused: those
    that would, each with its reason. with_draft: those that need one."""

    alone: tuple[str, ...]
    refused: Mapping[str, str]
    with_draft: tuple[str, ...]


def as_target(path: Path, shape: ModelShape) -> Offers:
    models = _models(path, shape, None)
    usual = registry.resolve(AUTO, models)
    refused = {}
    alone = []
    for method in registry.methods():
        if method.needs_draft:
            continue
        reason = _refusal(method, models)
        if reason is None:
            alone.append(method.name)
        else:
            refused[method.name] = reason
    alone.sort(key=lambda name: usual is None or name != usual.name)
    needing = tuple(method.name for method in registry.methods() if method.needs_draft)
    return Offers(tuple(alone), refused, needing)


def as_draft(path: Path, shape: ModelShape) -> tuple[str, ...]:
    """The methods whose draft a whole model can be, for a target of its vocabulary."""
    models = _with_any_vocabulary(_models(path, shape, path))
    return tuple(
        method.name for method in _drafting() if _recognises(method, models) and not _refusal(method, models)
    )


def draft_method(path: Path, shapes: Sequence[ModelShape]) -> Method | None:
    """Whose draft a checkpoint says it is; None: nobody's. shapes: what its target may be, as far as that is known.
    Raises CheckpointError where it is a method's, and not whole."""
    broken: list[CheckpointError] = []
    for method in sorted(_drafting(), key=lambda method: -method.preference):
        if _recognises(method, _models(NOWHERE, shapes[0], NOWHERE)):
            continue  # to one that recognises even what is not there, no checkpoint is its own
        for shape in shapes:
            models = _with_any_vocabulary(_models(path, shape, path))
            if not _recognises(method, models):
                continue
            try:
                registry.judge(method, models)
            except MethodError:  # of what it is beside this target
                return method
            except CheckpointError as error:
                broken.append(error)
            else:
                return method
    if broken:
        raise broken[0]
    return None


def beside(target: Path, shape: ModelShape, draft: Path, method: Method | None = None) -> Fit:
    """method: whose draft it is, None: the one that Auto takes. Raises MethodError where there is none."""
    models = _models(target, shape, draft)
    method = method or registry.resolve(AUTO, models)
    assert method is not None, "Auto is a method or an error"
    reason = _refusal(method, models)
    if reason is not None:
        return Fit(str(target), method.name, False, reason)
    widest = Envelope(num_steps=MAX_NUM_STEPS, topk=MAX_TOPK, num_draft_tokens=MAX_NUM_DRAFT_TOKENS)
    misfit = registry.judge(method, models).misfit(widest)
    return Fit(str(target), method.name, True, limits=misfit.sentence if misfit else None)


def _drafting() -> list[Method]:
    return [method for method in registry.methods() if method.takes_draft]


def _recognises(method: Method, models: Models) -> bool:
    return registry.load(method).recognises(models)


def _refusal(method: Method, models: Models) -> str | None:
    try:
        registry.judge(method, models)
    except UsageError as error:
        return str(error)
    return None


def _with_any_vocabulary(models: Models) -> Models:
    return replace(models, check_vocabulary=lambda other, size: None)


def _models(target: Path, shape: ModelShape, draft: Path | None) -> Models:
    compare: Callable[[Path, int], None] = lambda other, size: check_vocabulary(target, shape, other, size)  # noqa: E731
    return Models(target=target, target_shape=shape, draft=draft, check_vocabulary=compare)
