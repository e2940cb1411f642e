"""Faults that are planted, and how many random operations it takes until one is found.

`python -m tests.planted` plants each in turn and prints the counts; a fault that is not found
within `MOST` operations ends it with status 1. A test does the same with fewer.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cache.stored_world import damage, stored_walks
from tests.cases import CASES, random_op
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATEFUL
from tests.world import World

MOST = 20_000
EACH = 100  # operations of a world
EVERY = [case for both in zip(CASES, [*STATEFUL, *EVICTING] * 2) for case in both]


def revocable_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Windows drop pages at a revocable commit as at any other."""
    from pagedkv.pages import step

    inner = step.commit
    patch.setattr(step, "commit", lambda *args: inner(*args[:5]))


def layers_unasked(patch: pytest.MonkeyPatch) -> None:
    """Tokens that some layers did not write are found as a prefix."""
    from pagedkv.cache import cache

    inner = cache.require_written
    patch.setattr(cache, "require_written", lambda *args: inner(*args) or True)


def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    """Prefixes are found across salts."""
    from pagedkv.pages.prefix import PrefixIndex

    inner = PrefixIndex.root
    patch.setattr(PrefixIndex, "root", lambda index, salt: inner(index, b""))


def other_rows(patch: pytest.MonkeyPatch) -> None:
    """`attend_again` reads the pages of the rows in another order."""
    from pagedkv.attention import api

    inner = api.backend_of

    class Turned:
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def attend(self, call: Any, plan: Any) -> Any:
            table = call.step.page_table(call.group)
            before = table.clone()
            table.copy_(before.roll(1, 0))
            try:
                return self.backend.attend(call, plan)
            finally:
                table.copy_(before)

    def turned(step: Any) -> Any:
        again = sys._getframe(1).f_code.co_name == "attend_again"
        return Turned(inner(step)) if again else inner(step)

    patch.setattr(api, "backend_of", turned)


def other_state(patch: pytest.MonkeyPatch) -> None:
    """A step reads the state of the row beside."""
    from pagedkv.step.states import StepStates

    inner = StepStates.read
    patch.setattr(
        StepStates, "read", lambda states, layer: [x.roll(1, 0) for x in inner(states, layer)]
    )


def piece_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A piece of a store is taken whatever key it says."""
    from pagedkv.saving.match import Found

    inner = Found.piece

    def piece(found: Found, key: bytes, *rest: Any) -> Any:
        found.header = {**found.header, "model": key.hex()}
        return inner(found, key, *rest)

    patch.setattr(Found, "piece", piece)


def key_of_another_text(patch: pytest.MonkeyPatch) -> None:
    """The keys of pieces leave the first token out."""
    from pagedkv.cache.stored_prefixes import SaltedText, StoredPrefixes

    inner = StoredPrefixes._keys

    def keys(prefixes: Any, text: SaltedText) -> list[bytes]:
        tokens = text.tokens.copy()
        tokens[:1] = 0
        return inner(prefixes, SaltedText(text.cache, tokens, text.salt))

    patch.setattr(StoredPrefixes, "_keys", keys)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    fault.__name__: fault
    for fault in (
        revocable_forgotten, layers_unasked, salt_ignored, other_rows, other_state,
        piece_unchecked, key_of_another_text,
    )
}  # fmt: skip
OF_THE_STORE = {piece_unchecked, key_of_another_text}


def worlds(name: str, folder: Path) -> Iterator[tuple[World, Callable[[random.Random], Any]]]:
    """Worlds without an end, and what happens to their files between operations."""
    if PLANTED[name] not in OF_THE_STORE:
        while True:
            for case in EVERY:
                yield World(case, everything=False), lambda _: None
    while True:
        for place, case in enumerate(CASES):
            with pytest.MonkeyPatch.context() as patch:
                own = folder / f"{place}"
                make = stored_walks(patch, case, own)
                for _ in range(2):
                    yield (
                        make(),
                        lambda source, own=own: source.random() < 0.3 and damage(own, source),
                    )


def found_after(name: str, most: int = MOST, seed: int = 0) -> int | None:
    """Operations until a planted fault is found; None if it is not."""
    source, done = random.Random(f"{name} {seed}"), 0
    with tempfile.TemporaryDirectory() as folder, planted(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for world, between in worlds(name, Path(folder)):
            for _ in range(EACH):
                between(source)
                done += 1
                try:
                    world.apply(random_op(source, world.config))
                except AssertionError:
                    return done
                if done >= most:
                    return None
    return None


@contextmanager
def planted(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[name](patch)
        yield


def main(names: Iterable[str]) -> int:
    missed = 0
    for name in names or PLANTED:
        found = found_after(name)
        missed += found is None
        print(f"{name:20} {'not found' if found is None else found:>9}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
