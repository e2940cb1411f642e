"""A walk of random operations on a `World`, and the shortest one that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.cases import Case, long_step, random_op
from tests.world import World

TRIES = 150  # walks that are made to find a shorter one


def operations(case: Case, seed: Any, count: int) -> list[tuple[Any, ...]]:
    """Operations that are the same for the same seed; texts outgrow a budget, if there is one."""
    source, found = random.Random(f"{seed} {case.name}"), []
    while len(found) < count:
        op = random_op(source, case.config)
        if case.config.policy is not None and (op[0] == "free" or source.random() < 0.3):
            op = long_step(source, case.config)
        found.append(op)
    return found


def walk(
    case: Case,
    seed: Any = 0,
    count: int = 100,
    everything: int = 1,
    make: Callable[..., World] = World,
) -> World:
    """Applies operations; every `everything`-th is followed by a look at all contents.

    A failure names the operations that it took, as few as were found.
    """
    ops = operations(case, seed, count)
    world, at, error = applied(case, ops, everything, make)
    if error is not None:
        raise AssertionError(
            f"{case.name}, seed {seed}: operation {at} failed; these do as well:\n"
            + "\n".join(map(repr, shortest(case, ops[: at + 1], error, make)))
        ) from error
    return world


def applied(
    case: Case,
    ops: Sequence[tuple[Any, ...]],
    everything: int = 1,
    make: Callable[..., World] = World,
) -> tuple[World, int, Exception | None]:
    """The world, the last operation, and what it raised."""
    world = make(case, everything=everything == 1)
    for at, op in enumerate(ops):
        try:
            world.apply(op)
            if everything > 1 and at % everything == 0:
                world.verify(all_of_them=True)
        except Exception as error:
            return world, at, error
    return world, len(ops), None


def shortest(
    case: Case, ops: list[tuple[Any, ...]], error: Exception, make: Callable[..., World] = World
) -> list[tuple[Any, ...]]:
    """Fewer operations that end in an error of the same type."""
    size, tries = len(ops) // 2, TRIES
    while size and tries:
        at, before = 0, len(ops)
        while at < len(ops) and tries:
            fewer, tries = ops[:at] + ops[at + size :], tries - 1
            _, last, found = applied(case, fewer, make=make)
            if type(found) is type(error):
                ops = fewer[: last + 1]
            else:
                at += size
        size = size if len(ops) < before and size == 1 else size // 2
    return ops


def end(world: World) -> None:
    """Free + cached = total once nobody is left, free = total once nothing is cached."""
    world.free(range(64))
    stats = world.cache.stats()
    assert (stats.live, stats.offloaded, stats.free + stats.cached) == (0, 0, stats.pages)
    world.clear()
    stats = world.cache.stats()
    assert (stats.free, stats.host_cached, stats.states) == (stats.pages, 0, 0)
    world.verify()


def hosted(case: Case) -> Case:
    """Adds a host tier to a case, which is too small for all."""
    tokens = case.config.host_tokens or case.config.max_tokens // 4
    return replace(case, config=replace(case.config, host_tokens=tokens))
