"""EAGLE and EAGLE-2: a head of one decoder layer estimates the target's next final hidden state, step after step.

What a checkpoint must be, and how it must fit the target, is the same for EAGLE-3 and stands here too.
"""

from __future__ import annotations

from pilotfish_engine.contract.methods import Limit, Limits
from pilotfish_engine.errors import MethodError
from pilotfish_engine.model.eagle import load_head
from pilotfish_engine.model.eagle_checkpoint import HeadCheckpoint, head_method
from pilotfish_engine.model.eagle_shape import METHODS, HeadShape, Method
from pilotfish_engine.speculation.proposer import Models, ProposerContext
from pilotfish_engine.speculation.recurrent import RecurrentProposer


def recognises(models: Models) -> bool:
    return is_head(models, "EAGLE")


def check(models: Models) -> Limits:
    return check_head(models, "EAGLE")


def build(context: ProposerContext) -> RecurrentProposer:
    assert context.models.draft is not None, "the registry has checked that a draft is given"
    head = load_head(context.models.draft, context.target, context.dtype, context.state.length)
    return RecurrentProposer(head, context.state, context.num_pages, context.page_size)


def is_head(models: Models, method: Method) -> bool:
    return models.draft is not None and head_method(models.draft) == method


def check_head(models: Models, method: Method) -> Limits:
    """As MethodModule.check, for the head of this method."""
    assert models.draft is not None, "the registry has checked that a draft is given"
    checkpoint = HeadCheckpoint(models.draft)
    found = checkpoint.method
    if found is None:
        raise MethodError(
            f"the draft {checkpoint.path} is {checkpoint.kind}, not {METHODS[method]}; "
            "a head, --method Auto or, for a whole model, --method STANDALONE would work"
        )
    if found != method:
        raise MethodError(
            f"the draft {checkpoint.path} is {METHODS[found]}, not {METHODS[method]}; --method {found} would work"
        )
    shape = checkpoint.check()
    _check_fit(shape, models, checkpoint)
    tokens = f"the draft {checkpoint.path} knows {shape.draft_vocab_size} tokens"
    return Limits(topk=Limit(shape.draft_vocab_size, tokens))


def _check_fit(shape: HeadShape, models: Models, checkpoint: HeadCheckpoint) -> None:
    """Raises MethodError where head and target do not go together."""
    target, block = models.target_shape, shape.block
    pair, would_work = f"the draft {checkpoint.path}", f"a draft trained beside {models.target} would work"
    if shape.verifier and target.architecture not in shape.verifier:
        raise MethodError(
            f"{pair} is for {' or '.join(shape.verifier)}, and the target is {target.architecture}; {would_work}"
        )
    if shape.target_hidden_size != target.hidden_size:
        raise MethodError(
            f"{pair} reads hidden states of {shape.target_hidden_size}, and the target's have {target.hidden_size}; "
            f"{would_work}"
        )
    models.check_vocabulary(checkpoint.path, block.vocab_size)
    if block.hidden_size != target.hidden_size:
        shared = [
            name
            for name, is_shared in (
                ("embed_tokens.weight", not shape.own_embed),
                ("lm_head.weight", shape.lm_head == "target"),
                ("fc.weight", not shape.fc),
            )
            if is_shared
        ]
        if shared:
            raise MethodError(
                f"{pair} has no {shared[0]}, but hidden size {block.hidden_size} and not the target's "
                f"{target.hidden_size}, so that it needs one; {would_work}"
            )
    shape.aux_layers(target.num_layers, checkpoint.where)
