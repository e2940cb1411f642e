"""Advice: other arguments for the same call, each of them tried; it decides nothing.

If memory does not suffice, advice says what is needed and what would fit; beside a plan, it says
what would give more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagedkv.errors import BudgetExceeded

from .byte_sizes import largest, readable, rounded_up, size_in_bytes
from .costs import Asked
from .model_shape import ModelShape, shape_of
from .plan import MemoryPlan

MOST_RANKS = 1024
MOST_BATCH = 1 << 16  # where the search for the largest batch ends
MUCH = 1.05  # another choice is named only if it gains as much

Try = Callable[[ModelShape, Asked], MemoryPlan | None]


class Short(Exception):
    """A budget that does not suffice, before other arguments were tried.

    Attributes:
        parameter: the name of the budget.
        items: the bytes that are needed at least, by item.
    """

    def __init__(self, parameter: str, items: dict[str, int]) -> None:
        self.parameter, self.items = parameter, items
        super().__init__(parameter)

    @property
    def needed(self) -> int:
        """Bytes of all items."""
        return sum(self.items.values())

    @property
    def largest(self) -> str:
        """The item that takes the most bytes."""
        return max(self.items, key=lambda name: self.items[name])


def exceeded(
    short: Short, model: str, asked: Asked, fits: Callable[[Asked], bool]
) -> BudgetExceeded:
    """Makes the error that names what is needed and given, the largest item, and what would fit."""
    needed, available = short.needed, getattr(asked, short.parameter)
    advice = _smaller(short, asked, fits)
    more = _more_ranks(asked, fits)
    memory = _more_memory(short, asked, fits)
    words = " or ".join(
        f"{name}={value!r}" for each in (advice, more, memory) for name, value in each.items()
    )
    tokens = f"{asked.batch} sequence{'s' * (asked.batch > 1)} of {asked.length:,} tokens"
    if asked.max_tokens:
        tokens = f"{asked.max_tokens:,} tokens"
    item = f"{short.largest} ({readable(short.items[short.largest])})"
    each = f" on each of {asked.ranks} ranks" if asked.ranks > 1 else ""
    return BudgetExceeded(
        f"{short.parameter}: {model} with pages for {tokens} needs at least {readable(needed)} "
        f"({needed:,} bytes){each}, {readable(available)} are given; the largest item is {item}. "
        f"{words} would fit",
        needed=needed,
        available=available,
        largest=short.largest,
        advice=advice or more or memory,
    )


def _smaller(short: Short, asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """Finds a request for less that fits. It is tried: advice that fails is worse than none."""
    page, on_device = asked.page_size, short.parameter == "device_memory"

    def most(name: str, unit: int, below: int) -> dict[str, int | str]:
        def fitting(count: int) -> bool:
            change: dict[str, Any] = {name: count * unit}
            return fits(replace(asked, **change))

        found = largest(fitting, 0, below)
        return {name: found * unit} if found else {}

    if asked.expert_slots:
        return _fewer_slots(asked, fits)
    if asked.pack_weights and fits(replace(asked, pack_weights=False)):
        return {"pack_weights": False}
    if on_device and asked.max_tokens:
        return most("max_tokens", page, asked.max_tokens // page)
    if on_device and short.largest == "KV pages":
        return most("length", page, asked.length // page) or most("batch", 1, asked.batch)
    if on_device and short.largest == "states":
        return most("batch", 1, asked.batch)
    if short.largest == "activations" and asked.step_tokens:
        return most("step_tokens", asked.batch, asked.step_tokens // asked.batch + 1)
    return {}


def _fewer_slots(asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """Finds how many of the experts asked for may stay; 0 if only whole layers fit."""
    assert asked.expert_slots
    found = largest(lambda n: fits(replace(asked, expert_slots=n)), 0, asked.expert_slots)
    found = found if found >= asked.least_slots else 0
    return {"expert_slots": found} if fits(replace(asked, expert_slots=found)) else {}


def _more_ranks(asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """Finds more processes that fit, a power of two, if several share out the model already."""
    ranks = asked.ranks
    while 1 < ranks < MOST_RANKS:
        ranks = 1 << ranks.bit_length()
        if fits(replace(asked, ranks=ranks)):
            return {"ranks": ranks}
    return {}


def _more_memory(short: Short, asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """Finds a budget that fits, as text that the same call takes."""
    needed = short.needed
    while True:
        size = rounded_up(needed)
        given: dict[str, Any] = {short.parameter: size_in_bytes(short.parameter, size)}
        if fits(replace(asked, **given)):
            return {short.parameter: size}
        needed += needed // 8


# ------------------------------------------------------------------ beside a plan


def with_more(plan: MemoryPlan, asked: Asked, tried: Try) -> MemoryPlan:
    """Adds the largest batch to a plan, and better rates of other arguments.

    Args:
        tried: returns the plan of a request, if there is one.
    """
    return replace(
        plan,
        largest_batch=_largest_batch(plan, asked, tried),
        rate_in_4_bits=_in_4_bits(plan, asked, tried),
        rate_by_slots=_by_slots(plan, asked, tried),
    )


def _largest_batch(plan: MemoryPlan, asked: Asked, tried: Try) -> int:
    """Finds how many sequences of this length have room at once, if they are planned for."""

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
    """Returns tokens a second of the model in 4 bits, by the same options, if they are more."""
    shape = plan.shape
    if not plan.streams or shape.packed or shape.unpacked:
        return None
    packed = shape_of(shape.model, "int4", on_cpu=not asked.cuda)
    other = tried(packed, asked)
    found = 0.0 if other is None else other.predict()
    return found if found > plan.predict() else None


def _by_slots(plan: MemoryPlan, asked: Asked, tried: Try) -> tuple[int, float] | None:
    """Finds slots of experts with which a card decodes faster, and its tokens a second.

    A plan for a card takes no slots by itself, because their speed was not measured there.
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
