"""Puts one engine together: checkpoint, state, pools, method, controller, worker, scheduler.

The only place that knows every part. Knows nothing about HTTP or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pilotfish_engine.batch.state import RequestState
from pilotfish_engine.config import EngineConfig
from pilotfish_engine.contract.controller import Controller
from pilotfish_engine.contract.methods import NO_METHOD, WITHOUT_DRAFTS, Limits, Method
from pilotfish_engine.contract.preparation import worthwhile
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_engine.distributed.collectives import Ranks, check_devices
from pilotfish_engine.errors import CheckpointError, MethodError, UsageError
from pilotfish_engine.model.checkpoint import open_whole
from pilotfish_engine.model.loading import load
from pilotfish_engine.model.parallel import divide
from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.reservation import SLACK, Reservation
from pilotfish_engine.sampling.grammar import Grammars
from pilotfish_engine.scheduler.preparing import GrammarCompiler
from pilotfish_engine.scheduler.scheduler import Scheduler
from pilotfish_engine.scheduler.stops import StopTextFactory
from pilotfish_engine.source import resolve
from pilotfish_engine.speculation import registry
from pilotfish_engine.speculation.proposer import Models, ProposerContext
from pilotfish_engine.speculation.step import Step
from pilotfish_engine.tokenizer import StopStrings, Tokenizer
from pilotfish_engine.tokenizer import load as load_tokenizer
from pilotfish_engine.types import Worker, WorkerLimits
from pilotfish_engine.worker.ahead import record_ahead
from pilotfish_engine.worker.graphs import StepGraphs, recorder
from pilotfish_engine.worker.profile import measure
from pilotfish_engine.worker.target import Speculation, TargetWorker


@dataclass(frozen=True)
class Parts:
    """What `assemble` made; `stop_text` and `grammars` are None for a checkpoint without a tokenizer."""

    step: Step
    worker: TargetWorker
    chunk_size: int
    stop_text: StopTextFactory | None
    grammars: GrammarCompiler | None = None


def build(config: EngineConfig) -> Scheduler:
    """A whole engine in this process. Raises as `assemble`."""
    parts = assemble(config)
    return schedule(config, parts, parts.worker)


def schedule(config: EngineConfig, parts: Parts, worker: Worker) -> Scheduler:
    overlap = config.capacity.overlap
    if overlap is None:
        overlap = parts.step.state.device.type == "cuda"
    return Scheduler(worker, parts.chunk_size, parts.stop_text, overlap, grammars=parts.grammars)


def assemble(
    config: EngineConfig, profile: CostProfile | None = None, join: Callable[[], Ranks] | None = None
) -> Parts:
    """Loads the models and measures the cost profile unless it is given. Raises UsageError, if it can before weights.
    join: called when metadata says that it can work, makes this process one of the ranks that share the target."""
    path = resolve(config.model.source)
    shape = open_whole(path).shape
    method, models, draft_limits = _method(config, path, shape)
    device, ranks = _place(path, shape, config.capacity.tensor_parallel_size, join)
    dtype = resolve_dtype(config.model.dtype, device)
    max_model_len = _max_model_len(config, shape)
    capacity = config.capacity
    memory = Reservation(config, device, ranks)
    memory.check_before_weights(path, shape, models.draft, dtype, max_model_len)
    tokenizer = _tokenizer(path)
    vocab_size = shape.vocab_size if tokenizer is None else min(shape.vocab_size, tokenizer.vocab_size)
    state = RequestState(capacity.max_running_requests, max_model_len, capacity.page_size, SLACK, vocab_size, device)
    memory.loaded("state")
    target = load(path, dtype, device, max_positions=state.length, ranks=ranks)
    target.num_tokens = vocab_size
    memory.loaded("weights")
    proposer = None
    if method is not None:
        context = ProposerContext(models, target, state, 1, capacity.page_size, dtype)
        proposer = registry.load(method).build(context)
    step = Step(target, target.new_kv_cache(1, capacity.page_size), state, proposer, ranks)
    memory.loaded("draft")
    envelope = config.speculation.envelope
    if method is None:
        envelope = envelope.model_copy(update={"num_steps": 0})
    reserved = memory.size_kv(step, envelope)
    num_pages = reserved.kv_tokens // capacity.page_size
    if profile is None:
        profile = measure(step, capacity.max_running_requests, envelope, num_pages)
    ends = frozenset(shape.eos_token_ids) | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
    limits = WorkerLimits(
        max_running_requests=capacity.max_running_requests,
        max_model_len=max_model_len,
        page_size=capacity.page_size,
        num_pages=num_pages,
        eos_token_ids=frozenset(token for token in ends if token < vocab_size),
        lookahead=0 if proposer is None else proposer.lookahead,
        vocab_size=vocab_size,
        memory_sum=reserved.sentence(),
    )
    worker = TargetWorker(
        step,
        Controller(envelope, profile, capacity.max_running_requests, _kind(config, method, device, dtype)),
        limits,
        Speculation(NO_METHOD if method is None else method.name, draft_limits, profile),
        graphs=_recorded(step, profile, envelope),
        memory_bytes=reserved.parts(),
    )
    stop_text = None if tokenizer is None else lambda params: StopStrings.of(tokenizer, params)
    grammars = None
    if tokenizer is not None:
        grammars = Grammars(tokenizer.pieces, limits.eos_token_ids, vocab_size, tokenizer.encode_within).compile
    return Parts(step, worker, capacity.chunk_size, stop_text, grammars)


def _kind(config: EngineConfig, method: Method | None, device: torch.device, dtype: torch.dtype) -> str:
    """Names what engines have in common whose steps take equally long: model, draft, device, ranks."""
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu of {torch.get_num_threads()} threads"
    drafts = "no draft" if method is None else f"{method.name} {config.speculation.draft or ''}".strip()
    size = config.capacity.tensor_parallel_size
    return f"{config.model.source}, {drafts}, {dtype}, {on}, {size} ranks"[:1024]


def _recorded(step: Step, profile: CostProfile, envelope: Envelope) -> StepGraphs | None:
    """Steps that can win, as graphs; None where steps run as they are."""
    record = recorder(step)
    if record is None:
        return None
    graphs = StepGraphs(step, record)
    record_ahead(graphs, step.state, worthwhile(profile, envelope, graphs.sizes()))
    return graphs


def _place(
    path: Path, shape: ModelShape, size: int, join: Callable[[], Ranks] | None
) -> tuple[torch.device, Ranks | None]:
    if join is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    divide(shape, size, path)
    check_devices(size)
    ranks = join()
    return ranks.device, ranks


def _method(config: EngineConfig, path: Path, shape: ModelShape) -> tuple[Method | None, Models, Limits]:
    """Judge the configured method by both checkpoints' metadata."""
    wanted = config.speculation
    registry.check(wanted.method, wanted.draft, wanted.draft_corpus)
    draft = None if wanted.draft is None else resolve(wanted.draft)
    corpus = None if wanted.draft_corpus is None else Path(wanted.draft_corpus).expanduser().absolute()
    models = Models(
        target=path,
        target_shape=shape,
        draft=draft,
        check_vocabulary=lambda other, size: check_vocabulary(path, shape, other, size),
        corpus=corpus,
        tokenizer=lambda: _tokenizer(path),
    )
    method, draft_limits = registry.resolve(wanted.method, models), WITHOUT_DRAFTS
    if method is not None:
        draft_limits = registry.judge(method, models)
        if misfit := draft_limits.misfit(wanted.envelope):
            raise MethodError(misfit.sentence)
    return method, models, draft_limits


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        native = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise UsageError(f"--dtype is {name!r}; one of auto, {', '.join(dtypes)} would work")
    return dtypes[name]


def _max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """As asked for, or the checkpoint's own; no longer than the KV cache."""
    own, wanted = shape.max_position_embeddings, config.model.max_model_len
    if wanted is not None and wanted > own:
        raise UsageError(f"--max-model-len is {wanted}, and the checkpoint reaches {own}; at most {own} would work")
    return min(wanted or own, config.capacity.kv_tokens or own)


def check_vocabulary(target: Path, shape: ModelShape, draft: Path, found: int) -> None:
    """Raises MethodError unless both checkpoints have the same tokens under the same numbers. `found` are the rows
    of the draft's vocabulary. Rows that pad it, and tokens at the end that only one of both has, count for nothing.
    Of a draft without a tokenizer the size must be that of the target's rows, of its tokens, or between them."""
    own, other = _tokenizer(target), _tokenizer(draft)
    if own is None or other is None:
        sizes = (shape.vocab_size, shape.vocab_size if own is None else own.vocab_size)
        if not min(sizes) <= found <= max(sizes):
            raise MethodError(
                f"the draft {draft.name} has a vocabulary of {found} tokens and the target {target.name} one of "
                f"{shape.vocab_size}; a draft of the target's own family would work"
            )
        return
    pieces = list(zip(own.pieces, other.pieces, strict=False))
    differing = [number for number, (a, b) in enumerate(pieces) if a != b]
    if differing:
        number = differing[0]
        raise MethodError(
            f"token {number} is {other.pieces[number]!r} in the draft {draft.name} and {own.pieces[number]!r} in the "
            f"target {target.name} ({len(differing)} tokens differ); a draft of the target's own family would work"
        )


def _tokenizer(path: Path) -> Tokenizer | None:
    """None for a checkpoint without one: it can be served tokens, not text (the HTTP process refuses it by name)."""
    try:
        return load_tokenizer(path)
    except CheckpointError:
        return None
