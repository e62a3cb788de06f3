"""Lists the speculative methods, and what a checkpoint's drafts can do of what is asked.

One row a method: the engine's registry, its command line, and the operator's API read it. How a method drafts stands
in `speculation/<name in lower case>.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pilotfish_engine.contract.speculation import Envelope

NO_METHOD = "None"
AUTO = "Auto"


@dataclass(frozen=True)
class Method:
    """summary: how it drafts, in words that `kubectl explain` shows. draft: whether a draft's checkpoint has to be, may
    be, or cannot be given. trees: topk above 1 works. takes_corpus: so does a file of texts. Auto asks the methods by
    `preference`, largest first, which of them the checkpoints fit; 0 is never asked."""

    name: str
    summary: str
    draft: Literal["needed", "allowed", "none"] = "none"
    trees: bool = True
    takes_corpus: bool = False
    preference: int = 0

    @property
    def needs_draft(self) -> bool:
        return self.draft == "needed"

    @property
    def takes_draft(self) -> bool:
        return self.draft != "none"


METHODS = (
    Method("NGRAM", "copies from the text so far", takes_corpus=True, preference=1),
    Method("STANDALONE", "a small model of the same vocabulary", "needed", preference=1),
    Method("EAGLE", "a head that reads the target's last hidden state", "needed", preference=3),
    Method("EAGLE3", "a head that reads three of the target's layers", "needed", preference=3),
    Method("MTP", "heads in the model's checkpoint, or in a draft's", "allowed", preference=2),
    Method("DFLASH", "drafts a block at once", "needed", preference=4),
)


@dataclass(frozen=True)
class Limit:
    """The most of one setting. because: a clause that reads on from "num_steps is 9, but"."""

    most: int
    because: str


class Misfit(NamedTuple):
    """The first setting of an envelope that is beyond a limit. sentence: its value, the reason and what would work."""

    field: str
    sentence: str


@dataclass(frozen=True)
class Limits:
    """What a proposer declares of its drafts; None: the contract's bounds."""

    num_steps: Limit | None = None
    topk: Limit | None = None

    def misfit(self, envelope: Envelope) -> Misfit | None:
        """The one place where what is asked meets what can be done."""
        for field, limit in (("num_steps", self.num_steps), ("topk", self.topk)):
            value: int = getattr(envelope, field)
            if limit is not None and value > limit.most:
                return Misfit(field, f"{field} is {value}, but {limit.because}; at most {limit.most} would work")
        return None


WITHOUT_DRAFTS = Limits(Limit(0, "this engine has no draft"), Limit(1, "this engine has no draft"))
