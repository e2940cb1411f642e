"""A `World` whose cache has a prefix store that others wrote to, and that somebody damages."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagedkv import PagedKVCache
from tests import world
from tests.cache.stored import files
from tests.cases import Case
from tests.world_states import StateBooks


class StoredBooks(StateBooks):
    """The states of a world, any of which may come from a file: no slot is counted."""

    def short(self, *_: Any) -> None:
        """States that came from files may have taken the slots."""

    def snapshot(self) -> tuple[Any, ...]:
        return ()

    def verify(self) -> None:
        for seq, text in self.texts.items():
            assert set(self.cache.checkpoints(seq)) <= set(text.marks)


class StoredWorld(world.World):
    """A world that shares a folder, and what is findable, with those before it.

    Of each base there is a twin that differs in one token, so that of two pieces one alone may be
    found.
    """

    def __init__(self, case: Case, everything: bool = False, *, before: tuple[Any, Any]) -> None:
        config = replace(case.config, fingerprint=case.name.encode())
        super().__init__(replace(case, config=config), everything)
        self.findable, kept = before
        if self.states is not None:
            self.states = StoredBooks(self.config, self.cache, self.texts, self.away)
            self.states.kept = kept
        for place, text in enumerate([*self.bases]):
            at = place % config.page_size if place % 2 else len(text) // 2
            self.bases.append([*text[:at], 3 - text[at], *text[at + 1 :]])

    def clear(self, *_: Any) -> None:
        """Prefixes stay: after they were cleared a cache leaves its store alone."""

    def unchanged(self, before: tuple[Any, ...]) -> None:
        """After a call that failed prefixes may have come from the store, and nothing else."""
        after = self.snapshot()
        assert after[1:] == before[1:]
        for name in ("live", "shared", "sequences", "tokens", "tokens_reused", "promised"):
            assert getattr(after[0], name) == getattr(before[0], name), name
        self.verify(all_of_them=True)

    def store(self, number: int) -> None:
        """Writes a text by hand."""
        seq = self.pick(number)
        if seq is not None and not self.in_step and seq not in self.away:
            self.cache.store(seq, salt=self.texts[seq].salt)
            if self.states is not None and self.texts[seq].tokens:
                self.states.keep(seq)


def stored_walks(patch: pytest.MonkeyPatch, case: Case, folder: Path) -> Callable[[], StoredWorld]:
    """Returns a maker of worlds over one folder, with small pieces in its files."""
    patch.setattr("pagedkv.saving.pieces.TOKENS", case.config.page_size)
    patch.setattr("pagedkv.saving.store.TRUSTED_S", 0.0)
    patch.setattr(world, "PagedKVCache", partial(PagedKVCache, prefix_store=folder))
    return partial(StoredWorld, case, before=(set(), {}))


def damage(folder: Path, source: random.Random) -> str:
    """Does something to a file of a store; what it did."""
    there = [path for path in files(folder) if path.is_file() and not path.is_symlink()]
    if len(there) < 2:
        return "nothing"
    one, other = source.sample(there, 2)
    whole = one.read_bytes()
    how = source.choice(("flip", "cut", "zero", "swap", "swap", "link", "folder", "remove", "half"))
    if how == "flip":
        at = source.randrange(len(whole))
        one.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << source.randrange(8)]) + whole[at + 1 :]
        )
    elif how in ("cut", "half"):  # as a machine that lost its power leaves it
        kept = source.randrange(len(whole))
        one.write_bytes(whole[:kept] + bytes(len(whole) - kept if how == "half" else 0))
    elif how == "zero":
        one.write_bytes(bytes(len(whole)))
    elif how == "swap":  # each is whole, and says another key
        second = other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(whole)
    else:
        one.unlink()
        if how == "link":
            os.symlink(other, one)
        elif how == "folder":
            one.mkdir()
    return how


def clean(folder: Path) -> None:
    """Removes what no store removes."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
