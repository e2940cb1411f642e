"""Advice where memory does not suffice: what is needed, and changes that fit, each tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagedkv.errors import BudgetExceeded

from .costs import Asked
from .sizes import largest, readable, rounded_up, size_in_bytes

MOST_RANKS = 1024


class Short(Exception):
    """A budget that does not suffice, before anything was tried instead.

    Attributes:
        parameter: the budget by name.
        items: bytes that are needed at least, by item.
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
        """The item that takes most."""
        return max(self.items, key=lambda name: self.items[name])


def exceeded(
    short: Short, model: str, asked: Asked, fits: Callable[[Asked], bool]
) -> BudgetExceeded:
    """The error that names what is needed and given, what takes most, and what would fit."""
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
    """One request for less that fits. Each is tried: advice that fails is worse than none."""
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
    """The most experts that may stay of those that were asked for; 0 if layers fit as a whole."""
    assert asked.expert_slots
    found = largest(lambda n: fits(replace(asked, expert_slots=n)), 0, asked.expert_slots)
    found = found if found >= asked.least_slots else 0
    return {"expert_slots": found} if fits(replace(asked, expert_slots=found)) else {}


def _more_ranks(asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """The next power of two of processes that fits, where several share out the model already."""
    ranks = asked.ranks
    while 1 < ranks < MOST_RANKS:
        ranks = 1 << ranks.bit_length()
        if fits(replace(asked, ranks=ranks)):
            return {"ranks": ranks}
    return {}


def _more_memory(short: Short, asked: Asked, fits: Callable[[Asked], bool]) -> dict[str, int | str]:
    """A budget that fits, as it can be given back."""
    needed = short.needed
    while True:
        size = rounded_up(needed)
        given: dict[str, Any] = {short.parameter: size_in_bytes(short.parameter, size)}
        if fits(replace(asked, **given)):
            return {short.parameter: size}
        needed += needed // 8
