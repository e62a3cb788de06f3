"""Says in one of a few forms, for people, what was decided and why.

Status, events, `explain` and logs all have their sentences from here, none longer than LONGEST characters. Three
numbers with strokes between them are bounds (steps/top-k/tokens), written out they are a choice. The same numbers stand
beside the sentence as fields. Pure: knows nothing about how a decision is made.
"""

from __future__ import annotations

from pilotfish_engine.contract.speculation import Envelope, Settings

LONGEST = 160
Rated = tuple[Settings, float]  # settings and their tokens/s of the whole batch


def settings_text(settings: Settings) -> str:
    """Returns `plain decoding`, or `2 steps, top-1, 3 tokens`."""
    if settings.num_steps == 0:
        return "plain decoding"
    return f"{_count(settings.num_steps, 'step')}, top-{settings.topk}, {_count(settings.num_draft_tokens, 'token')}"


def bounds_text(envelope: Envelope) -> str:
    """Returns `2/2/5, threshold Auto`: most steps, top-k and tokens, and the requests from which it is plain."""
    numbers = f"{envelope.num_steps}/{envelope.topk}/{envelope.num_draft_tokens}"
    return f"{numbers}, threshold {envelope.disable_threshold}"


def chose(chosen: Rated, running: int, plain: float, next_best: Rated | None, envelope: Envelope) -> str:
    """The form of a choice. plain: tokens/s of plain decoding at this load."""
    return _told("Chose", chosen, running, plain, next_best, envelope)


def fixed(chosen: Rated, running: int, plain: float, envelope: Envelope) -> str:
    """The form of settings that the resource gives and nobody chooses."""
    return _told("Fixed at", chosen, running, plain, None, envelope)


def disabled(plain: float, running: int, envelope: Envelope) -> str:
    """The form of plain decoding because the threshold is reached."""
    return (
        f"Plain decoding from {envelope.disable_threshold} running on: {plain:.0f} tok/s at {running} running. "
        f"Bounds: {bounds_text(envelope)}."
    )


def kept(runs: Rated, running: int, plain: float, best: Rated, envelope: Envelope) -> str:
    """The form of settings that go on. Others are a little better, or would have to be prepared first."""
    return _told("Keeps", runs, running, plain, best, envelope)


def bounds_kept(envelope: Envelope, why: str) -> str:
    """The form of bounds that nothing is known to judge by. why: a clause."""
    return f"Bounds stay {bounds_text(envelope)}: {why}."


def bounds_changed(before: Envelope, after: Envelope, running: int, was: float, gives: float) -> str:
    """The form of a change of bounds. was, gives: tokens/s of what runs within them."""
    change = f"{bounds_text(before)} → {bounds_text(after)}"
    return f"Bounds {change}: {gives:.0f} tok/s at {running} running, before {was:.0f}."


def threshold_changed(before: Envelope, after: Envelope, running: int) -> str:
    """The form of a change of bounds. The old threshold is far from where speculation stops paying."""
    return (
        f"Bounds {bounds_text(before)} → {bounds_text(after)}: beyond the new one drafts do not pay, as "
        f"measured at {running} running."
    )


def overtaken(verdict: str, others: int, engines: int, plain: bool) -> str:
    """The form of a verdict on the load of a while. Engines, who judge each step, do otherwise now.

    others: of so many engines, those that do. plain: what they do is plain decoding. The bounds stand in the fields.
    """
    first = verdict.partition(". ")[0].removesuffix(".")
    return f"{first}. Newer: {others} of {_count(engines, 'engine')} {'decode plainly' if plain else 'speculate'} now."


def replicas(number: int, load: float, seconds: float, each: float, burst: bool) -> str:
    """The form of replicas that follow the load. load: requests at once, the mean over so many seconds."""
    over = f"over {seconds:.0f} s" + (" (a burst)" if burst else "")
    return f"{count(number)} for {load:.1f} requests at once {over}, {each:g} each."


def replicas_kept(number: int, why: str) -> str:
    """The form of replicas that stay although the load may want others. why: a clause."""
    return f"{count(number)} stay{'s' if number == 1 else ''}: {why}."


def count(number: int) -> str:
    """Returns `1 replica`, `2 replicas`."""
    return _count(number, "replica")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _told(verb: str, chosen: Rated, running: int, plain: float, other: Rated | None, envelope: Envelope) -> str:
    settings, rate = chosen
    gain = "" if settings.num_steps == 0 else f" ({rate / plain:.2f} × plain)"
    text = f"{verb} {settings_text(settings)}: {rate:.0f} tok/s at {running} running{gain}."
    if other is not None:
        text += f" {'Best' if verb == 'Keeps' else 'Next best'}: {_short(other[0])}, {other[1]:.0f}."
    return f"{text} Bounds: {bounds_text(envelope)}."


def _short(settings: Settings) -> str:
    """A chain by its steps alone."""
    if settings.num_steps == 0:
        return "plain"
    chain = settings.topk == 1 and settings.num_draft_tokens == settings.num_steps + 1
    return _count(settings.num_steps, "step") if chain else settings_text(settings)
