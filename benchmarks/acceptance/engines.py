"""The engines that are asked: the target with every method that it can run here, each loaded once.

A method that this machine or the target has not what it needs for is left out, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.acceptance.counting import COUNTED, Counted
from pilotfish_engine.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from pilotfish_engine.contract.speculation import CostProfile, Envelope
from pilotfish_engine.engine import Parts, assemble
from pilotfish_engine.errors import MethodError
from pilotfish_engine.reservation import SLACK

PLAIN, NGRAM, CORPUS, HEAD, ITSELF = "plain", "n-gram", "n-gram + corpus", "head", "target itself"
WIDEST = Envelope(num_steps=8, topk=4, num_draft_tokens=64)


@dataclass
class Engines:
    """draft: folder of a head, None where there is none. corpus: texts. prompts: how many tokens each has. tokens: of
    an answer. rows: requests at once. folder: for files of this run."""

    target: str
    draft: Path | None
    corpus: Sequence[str]
    prompts: Sequence[int]
    tokens: int
    rows: int
    folder: Path
    _counted: dict[str, Counted | None] = field(default_factory=dict)

    def counted(self, *methods: str) -> Iterator[tuple[str, Counted]]:
        """Those of the methods that there are."""
        for name in methods:
            if name not in self._counted:
                try:
                    self._counted[name] = Counted(self.build(name, WIDEST, self.rows, COUNTED, self.tokens))
                except MethodError as error:
                    self._counted[name] = None
                    print(f"left out: {name}: {error}", flush=True)
            found = self._counted[name]
            if found is not None:
                yield name, found

    @property
    def drafting(self) -> str:
        """The method where one is enough."""
        return NGRAM if self.draft is None else HEAD

    def build(self, name: str, envelope: Envelope, rows: int, profile: CostProfile | None, tokens: int) -> Parts:
        """profile None: measured. tokens: of an answer. Raises MethodError where the method cannot run here."""
        longest = max(self.prompts) + tokens
        kv_tokens = sum(self.prompts) + rows * (longest + SLACK)  # prompts stay in the prefix cache
        return assemble(
            EngineConfig(
                model=ModelConfig(source=self.target, max_model_len=longest),
                speculation=self._speculation(name, envelope),
                capacity=CapacityConfig(max_running_requests=rows, kv_tokens=kv_tokens),
            ),
            profile,
        )

    def _speculation(self, name: str, envelope: Envelope) -> SpeculationConfig:
        match name:
            case "plain":
                return SpeculationConfig(method="None", envelope=envelope)
            case "n-gram":
                return SpeculationConfig(method="NGRAM", envelope=envelope)
            case "n-gram + corpus":
                if not self.corpus:
                    raise MethodError("there is no corpus; a prompt file that holds one would work")
                file = self.folder / "corpus.jsonl"
                file.write_text("".join(json.dumps(text) + "\n" for text in self.corpus))
                return SpeculationConfig(method="NGRAM", draft_corpus=str(file), envelope=envelope)
            case "head":
                if self.draft is None:
                    raise MethodError("there is no head; --draft DIR would work")
                return SpeculationConfig(method="Auto", draft=str(self.draft), envelope=envelope)
            case "target itself":
                return SpeculationConfig(method="STANDALONE", draft=self.target, envelope=envelope)
        raise MethodError(f"no engine is called {name!r}")


def where() -> str:
    """What the defaults of a run go by."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> str:
    """What the engines run on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"
