"""Keeps a run in OUT/training, so that it goes on where a kill ended it.

run.json: whose head it is and what was chosen, written first. answers.jsonl: see `answers`. state.safetensors: the
weights in float32, the optimizer's moments, and in its header the step and the curve; it appears whole or not at all.
The order of batches follows from seed and step, so there is no other state of chance. No pickles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pilotfish_engine.errors import UsageError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """step: of the optimizer, done. seconds: of training so far. curve: a point each time the head was tried."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


class RunFolder:
    """OUT. Raises UsageError where it holds something else than this run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.training = out / "training"
        self.answers = self.training / "answers.jsonl"
        self.curve = self.training / "curve.json"
        self.picture = self.training / "curve.png"
        self._run = self.training / "run.json"
        self._state = self.training / "state.safetensors"

    def claim(self, identity: Mapping[str, Any]) -> None:
        """identity: of JSON values; `target` says whose head this is."""
        if not self._run.exists():
            foreign = [name for name in ("config.json", "model.safetensors") if (self.out / name).exists()]
            if foreign or (self.out.exists() and not self.out.is_dir()):
                raise UsageError(
                    f"--out {self.out} holds {foreign[0] if foreign else 'a file'} that no run of train-draft left; "
                    "a new folder would work"
                )
            self.training.mkdir(parents=True, exist_ok=True)
            write_whole(self._run, json.dumps(dict(identity), indent=2).encode() + b"\n")
            return
        try:
            found = json.loads(self._run.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{self._run}: not JSON ({error}); a new folder for --out would work") from error
        for name, value in identity.items():
            if found.get(name) == value:
                continue
            if name == "target":
                raise UsageError(
                    f"--out {self.out} holds a head for another target, {found.get('target_name')}; "
                    "a new folder would work"
                )
            raise UsageError(
                f"--out {self.out} holds a run with {name} {found.get(name)!r}, not {value!r}; the same one again, "
                "or a new folder, would work"
            )

    def save(self, progress: Progress, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in head.named_parameters():
            tensors[f"head.{name}"] = parameter.detach().cpu()
            for moment in MOMENTS:
                if moment in optimizer.state[parameter]:
                    tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu()
        write_whole(self._state, save(tensors, {"progress": json.dumps(vars(progress))}))
        write_whole(self.curve, json.dumps(progress.curve, indent=1).encode() + b"\n")

    def load(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Into head and optimizer; of a run that has not begun yet there is nothing to load."""
        if not self._state.exists():
            return Progress()
        try:
            with safe_open(self._state, framework="pt") as file:
                progress = Progress(**json.loads(file.metadata()["progress"]))
                for name, parameter in head.named_parameters():
                    parameter.data.copy_(file.get_tensor(f"head.{name}"))
                    if progress.step == 0:
                        continue
                    moments = {moment: file.get_tensor(f"{moment}.{name}").to(parameter.device) for moment in MOMENTS}
                    optimizer.state[parameter] = {"step": torch.tensor(float(progress.step)), **moments}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self._state}: not a state of this training ({error}); a new folder would work"
            ) from error
        return progress


def write_whole(path: Path, content: bytes) -> None:
    """The file is the old one or the new one, whenever the process ends."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
