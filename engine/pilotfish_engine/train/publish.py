"""The head as engines load it: an EAGLE-3 checkpoint of the public form, its card, and the picture of its curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from pilotfish_engine.model.shape import ModelShape
from pilotfish_engine.train.head import TrainedHead
from pilotfish_engine.train.progress import write_whole
from pilotfish_engine.train.vocabulary import DraftVocabulary

CARD = """# EAGLE-3 head for {target}

A draft for speculative decoding of {target}, distilled from its own answers. {parameters} parameters in bfloat16, of
one decoder layer and a vocabulary of {draft_vocab} tokens; the embedding is the target's.

| | |
|---|---|
{rows}

On held-out prompts at temperature 0, as training saw them (chains of {chain}):

| | |
|---|---|
{results}

`training/curve.json` has the whole curve.
"""


def publish(out: Path, head: TrainedHead, vocabulary: DraftVocabulary, target: ModelShape) -> None:
    """config.json and model.safetensors, each whole at any moment."""
    d2t, t2d = vocabulary.maps(target.vocab_size)
    tensors = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    write_whole(out / "config.json", json.dumps(head.sizes.config(target), indent=2).encode() + b"\n")
    write_whole(out / "model.safetensors", save({**tensors, "d2t": d2t, "t2d": t2d}, {"format": "pt"}))


def write_card(
    out: Path, target: str, head: TrainedHead, facts: Mapping[str, str], curve: Sequence[Mapping[str, Any]], chain: int
) -> None:
    last = curve[-1]
    results = {"acceptance length": f"{last['acceptance_length']:.2f}"} | {
        f"agreement at depth {depth}": f"{share:.1%}" for depth, share in enumerate(last["agreed"], start=1)
    }
    card = CARD.format(
        target=target,
        parameters=f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.1f} million",
        draft_vocab=head.sizes.draft_vocab_size,
        chain=chain,
        rows=_rows(facts),
        results=_rows(results),
    )
    write_whole(out / "README.md", card.encode())


def _rows(values: Mapping[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in values.items())


def draw(path: Path, curve: Sequence[Mapping[str, Any]]) -> bool:
    """Loss and acceptance by step as a picture; False where there is nothing to draw with."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    steps = [point["step"] for point in curve]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(steps, [point["loss"] for point in curve])
    left.set(xlabel="step", ylabel="loss")
    right.plot(steps, [point["acceptance_length"] for point in curve], label="acceptance length")
    for depth in range(len(curve[-1]["agreed"])):
        right.plot(steps, [point["agreed"][depth] for point in curve], lw=0.8, label=f"agreement, depth {depth + 1}")
    right.set(xlabel="step", title="held-out prompts, temperature 0")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
