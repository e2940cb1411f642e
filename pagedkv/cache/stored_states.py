"""Stored prefixes of models with recurrent states: pieces, and the states of checkpoints.

A state is useful only at its own length, so the key of its file is made of all ids up to there.
The file holds the state and the pages behind the last whole piece. A state is written when
`checkpoint` keeps it within a prompt; it is loaded if `add` would find less without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.config import CacheConfig
from pagedkv.pages import sequences
from pagedkv.pages.salts import Salt
from pagedkv.saving import pieces

from .stored_prefixes import SaltedText, StoredPrefixes

EMPTY = np.empty(0, dtype=np.int32)


class StoredStates(StoredPrefixes):
    """The stored prefixes of one cache with states."""

    def __init__(self, store: Any, config: CacheConfig) -> None:
        super().__init__(store, config)
        self._rows = config.max_sequences
        # By row, the prompt of its last sequence with one; a sequence's row is its id modulo rows.
        self._prompts: dict[int, tuple[Tokens, Salt]] = {}

    def reach(self, text: SaltedText) -> int:
        there = self._stored_to(self._keys(text), self._in_cache(text))
        return self._longest(text.cut(-1), self._held(text), there)[0]

    def _fetch(self, text: SaltedText) -> None:
        """Loads pages first, also the pages behind the last state.

        From the pages that are there the caller sees where a state is worth keeping.
        """
        before, held = self.tokens_found, self._held(text)
        super()._fetch(text)
        self._fetch_state(text)
        self.tokens_found = before + max(0, self._held(text) - held)

    def _fetch_state(self, text: SaltedText) -> None:
        held, here = self._held(text), self._in_cache(text)
        length, key = self._longest(text.cut(-1), held, here)
        if length:
            until, first = text.cut(length), length // self._size * self._columns
            if self._is_current(text.cache) and self._load(until, key, first, with_state=True):
                self.store.use([*self._keys(until), key])
        elif held:  # a second text has it
            self._write_state(text.cut(held), first=False)

    def _held(self, text: SaltedText) -> int:
        return sequences.stored_prefix(text.tables, text.tokens, text.salt)[1]

    def expect(self, seq: int, tokens: Tokens, salt: Salt) -> None:
        super().expect(seq, tokens, salt)
        self._prompts[seq % self._rows] = tokens, salt

    def checkpointed(self, cache: Any, seq: int) -> None:
        tokens, salt = self._prompts.get(seq % self._rows, (EMPTY, b""))
        length = cache.length(seq)
        if length <= tokens.size and cache.open_step is None and self.store.may_write_first():
            self._write_state(SaltedText(cache, tokens[:length], salt), first=True)

    def keep(self, cache: Any, seq: int, salt: Salt) -> int:
        """Writes like `StoredPrefixes.keep`, and keeps the sequence's current state, too."""
        super().keep(cache, seq, salt)
        text = self._text_of(cache, seq, salt)
        if text.tokens.size:
            cache.checkpoint(seq)
        for length in cache.checkpoints(seq):
            self._write_state(text.cut(length), first=False)
        return self._longest(text, 0, self._stored_to(self._keys(text), 0))[0]

    # ------------------------------------------------------------------ one state

    def _longest(self, text: SaltedText, above: int, pieces_there: int) -> tuple[int, bytes]:
        """Finds the longest prefix with a stored state: its length, and the key of the file.

        Args:
            above: only prefixes longer than this are looked for.
            pieces_there: how many leading pieces are at hand; a state beyond them is useless.

        Returns:
            Length 0 if there is none.
        """
        chain, tokens = self._chain(text), text.tokens
        if not chain.root or above >= tokens.size:
            return 0, b""
        before = [chain.root, *self._keys(text)]
        for number in reversed(range(above // self._size, min(pieces_there + 1, len(before)))):
            start = number * self._size
            behind = tokens[start : start + self._size - 1]
            keys = pieces.state_keys(chain, before[number], number, behind)
            for count in reversed(range(max(0, above + 1 - start), len(keys))):
                if start + count and self.store.has(keys[count]):
                    return start + count, keys[count]
        return 0, b""

    def _write_state(self, text: SaltedText, first: bool) -> None:
        """Writes the state at a text's end, if the cache keeps one, and the pieces before it."""
        keys, chain, tokens = self._keys(text), self._chain(text), text.tokens
        number = len(keys)
        before, behind = [chain.root, *keys][-1], tokens[number * self._size :]
        key = pieces.state_keys(chain, before, number, behind)[-1]
        if not chain.root or self.store.has(key):
            return
        self._write(text, range(number), first)
        is_current = self._is_current(text.cache)
        kept = sequences.kept_state(text.tables, tokens, text.salt)
        if kept is None or not is_current or not self.store.may_write():
            return
        pages, slot = kept
        tail = pages[:, number * self._columns :]
        if self._write_piece(text.cache, key, tail, tokens.size, first, slot):
            self.store.use([*keys, key])
