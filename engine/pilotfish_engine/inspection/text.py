"""A description as lines of name and value, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import TypeAdapter

from pilotfish_engine.inspection.description import Description, Memory
from pilotfish_engine.worker.memory_sum import size


def json_of(found: Description) -> str:
    return TypeAdapter(Description).dump_json(found, indent=1).decode()


def text_of(found: Description) -> str:
    lines = list(_lines(found))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _lines(found: Description) -> Iterator[tuple[str, str]]:
    sizes = found.sizes
    yield "path", found.path
    yield "family", found.family
    inner = "" if sizes.intermediate_size is None else f", intermediate {sizes.intermediate_size}"
    window = f"; {sizes.windowed} of them see {sizes.window} tokens" if sizes.windowed else ""
    yield "layers", f"{sizes.layers} of hidden size {sizes.hidden_size}{inner}{window}"
    yield "heads", f"{sizes.heads} of {sizes.head_dim}, {sizes.kv_heads} for keys and values"
    yield "vocabulary", f"{sizes.vocab_size}{', head tied to the embedding' if sizes.tied else ''}"
    if sizes.context is not None:
        yield "context", f"{sizes.context} tokens"
    beside = f", {_count(found.beside)} beside the model's own" if found.beside and found.is_model else ""
    yield "parameters", f"{_count(found.parameters)}{beside}, {size(found.stored.bytes)} on disk"
    total = sum(found.stored.dtypes.values())
    yield "stored as", ", ".join(f"{name} {_share(count / total)}" for name, count in found.stored.dtypes.items())
    yield "tokenizer", found.tokenizer
    yield from _methods(found)
    for dtype, memory in found.memory.items():
        yield f"memory, {dtype}", _memory(found, memory)


def _methods(found: Description) -> Iterator[tuple[str, str]]:
    offers = found.offers
    if offers is not None:
        first, *others = offers.alone or ("none",)
        yield "methods", ", ".join([f"{first} (Auto)", *others])
        for name, reason in offers.refused.items():
            yield f"not {name}", reason
        yield "with a draft", ", ".join(offers.with_draft)
    if found.draft_of:
        which = ", for targets of its vocabulary" if found.is_model else ""
        yield "draft of", ", ".join(found.draft_of) + which
    if found.fit is not None:
        fit = found.fit
        yield "beside", f"{fit.target}: {fit.method} {'fits' if fit.fits else 'does not fit'}"
        if fit.reason is not None:
            yield "because", fit.reason
        if fit.limits is not None:
            yield "limits", fit.limits


def _memory(found: Description, memory: Memory) -> str:
    parts = [f"{size(memory.weights)} weights", f"{size(memory.kv_token)} KV a token"]
    if memory.kv_context is not None:
        parts.append(f"{size(memory.kv_context)} a whole context")
    if memory.kv is not None:
        parts.append(f"{size(memory.kv)} {found.max_running_requests} requests of {found.max_model_len} tokens")
    return ", ".join(parts)


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"
