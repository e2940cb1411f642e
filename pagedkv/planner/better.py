"""Tries other arguments of the same call, and says what each would give; decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .costs import Asked
from .plan import MemoryPlan
from .shapes import ModelShape, shape_of
from .sizes import largest

MOST_BATCH = 1 << 16  # where the search for the largest batch ends
MUCH = 1.05  # what another choice has to gain before it is spoken of

Try = Callable[[ModelShape, Asked], MemoryPlan | None]


def with_more(plan: MemoryPlan, asked: Asked, tried: Try) -> MemoryPlan:
    """The plan, with the largest batch and with better rates that it may name.

    Args:
        tried: the plan of a request, if there is one.
    """
    return replace(
        plan,
        largest_batch=_largest_batch(plan, asked, tried),
        rate_in_4_bits=_in_4_bits(plan, asked, tried),
        rate_by_slots=_by_slots(plan, asked, tried),
    )


def _largest_batch(plan: MemoryPlan, asked: Asked, tried: Try) -> int:
    """Sequences of this length for which there is room at once, if they are planned for."""

    def fits(batch: int) -> bool:
        if asked.step_tokens and asked.step_tokens < batch:
            return False
        other = tried(plan.shape, replace(asked, batch=batch))
        return other is not None and other.max_length() >= asked.length

    if plan.max_length() < asked.length:
        return plan.max_batch()
    low, high = asked.batch, 2 * asked.batch
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    return largest(fits, low, high)


def _in_4_bits(plan: MemoryPlan, asked: Asked, tried: Try) -> float | None:
    """Tokens a second of the model in 4 bits, under the same options, where these are more."""
    shape = plan.shape
    if not plan.streams or shape.packed or shape.unpacked:
        return None
    packed = shape_of(shape.model, "int4", on_cpu=not asked.cuda)
    other = tried(packed, asked)
    found = 0.0 if other is None else other.predict()
    return found if found > plan.predict() else None


def _by_slots(plan: MemoryPlan, asked: Asked, tried: Try) -> tuple[int, float] | None:
    """Slots of experts with which a card decodes sooner, and tokens a second, if there are any.

    A plan for a card takes none by itself: how fast they are there was not measured.
    """
    experts = plan.shape.experts
    if experts is None or not (plan.streams and asked.cuda) or asked.expert_slots is not None:
        return None

    def rate(slots: int) -> float:
        other = tried(plan.shape, replace(asked, expert_slots=slots))
        return 0.0 if other is None else other.predict()

    least, most = experts.per_token, experts.count
    counts = {least, most, *(least << i for i in range(most.bit_length()) if least << i <= most)}
    best = max(counts, key=lambda slots: (rate(slots), -slots))
    step = best // 2
    while step:
        near = [n for n in (best - step, best, best + step) if least <= n <= most]
        best, step = max(near, key=lambda slots: (rate(slots), -slots)), step // 2
    found = rate(best)
    return (best, found) if found > MUCH * plan.predict() else None
