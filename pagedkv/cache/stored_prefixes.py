"""Prefixes that outlast the process: a cache reads them from a `PrefixStore` and writes them there.

A text is stored in pieces of a few whole pages. `fetch` brings pieces that the cache does not have
into pages, where the ordinary lookup of `add` finds them. While few pieces have been written, a
prompt's pieces are written as soon as it is computed. Later a piece is written only when a second
prompt has it, so a job of many prompts with one beginning writes only the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.errors import HostMemoryError, OpenStepError, OutOfPagesError, WrongShapeError
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.prefix import leading, page_keys
from pagedkv.pages.restore import text_of
from pagedkv.pages.salts import Chain, Salt, first_of, mixed_in
from pagedkv.pages.states import NO_SLOT
from pagedkv.pages.tables import PageTables
from pagedkv.saving import pieces, state
from pagedkv.saving.match import Found, Saved
from pagedkv.saving.store import PrefixStore
from pagedkv.storage.memory import host_memory

MOST_ROOTS = 4096  # at most so many salts' first keys are remembered


class SaltedText:
    """A text under a salt, and the cache that is asked for it.

    Args:
        cache: a `PagedKVCache`.
        tokens: `[n]` ids.
    """

    def __init__(self, cache: Any, tokens: Tokens, salt: Salt) -> None:
        self.cache, self.tokens, self.salt = cache, tokens, salt
        self.tables: PageTables = cache._tables

    def cut(self, length: int) -> SaltedText:
        """Returns a `SaltedText` of the first tokens."""
        return SaltedText(self.cache, self.tokens[:length], self.salt)

    def pages(self) -> Ints:
        """Returns `[groups, n]`: the page of each complete page of the text; -1 if not cached."""
        index = self.tables.index
        keys = page_keys(index.chain(self.salt), self.tokens, self.tables.page_size)
        return index.find_all(keys)

    def found(self) -> int:
        """Counts the text's leading tokens that the cache has in pages."""
        index, filled = self.tables.index, self.tables.pool.filled
        return index.match(index.chain(self.salt), self.tokens, filled).length


class StoredPrefixes:
    """The stored prefixes of one cache.

    Attributes:
        tokens_found: how many tokens were loaded from files.

    Raises:
        ValueError: prefixes of such a cache cannot be stored.
    """

    def __init__(self, store: Any, config: CacheConfig) -> None:
        for given, wrong, why in (
            ("retention", config.policy is not None, "K and V depend on what a policy evicted"),
            (
                "no fingerprint",
                not config.fingerprint,
                "a store must know whose K and V they are. Give the CacheConfig one, or give "
                "`prefix_store` to PagedCache or BatchGenerator; weights that another library "
                "offloaded have none",
            ),
        ):
            if wrong:
                raise ValueError(f"prefix_store: not for a cache with {given}: {why}")
        self.store = store if isinstance(store, PrefixStore) else PrefixStore(store)
        self._columns = pieces.columns_of_piece(config)
        self._size = self._columns * config.page_size
        windows = [group.window for group in config.groups]
        self._bounded = [window for window in windows if window is not None]
        self._whole = [g for g, window in enumerate(windows) if window is None]
        self._identity: Any = None
        self._roots: dict[bytes, bytes] = {}  # by salt
        self._used: set[bytes] = set()  # digests of weights, used since prefixes were forgotten
        self._ambiguous: set[bytes] = set()  # digests that other weights may have as well
        self._windows_tried: set[bytes] = set()  # last keys; no second fetch for windows
        self._computing: dict[int, tuple[Tokens, Salt]] = {}  # prompts, by sequence
        self.tokens_found = 0

    def forget_weights(self) -> None:
        """Notes that prefixes were forgotten, because the weights may have changed.

        A digest samples weights, so changed weights may have the old digest. Nothing is found or
        stored any more under a digest that was used before.
        """
        self._ambiguous |= self._used
        self._used.clear()
        self._roots.clear()
        self._windows_tried.clear()

    # ------------------------------------------------------------------ explain

    def is_on(self, cache: Any) -> bool:
        """Whether prefixes can be found: the cache must know which model computes its K and V."""
        return bool(self._root(cache, b""))

    def reach(self, text: SaltedText) -> int:
        """Counts a prompt's tokens in files, with the pages before them; 0 if no file has more."""
        here = self._in_cache(text)
        there = self._stored_to(self._keys(text), here)
        return 0 if there == here else there * self._size

    # ------------------------------------------------------------------ prompts come and are done

    def fetch(self, text: SaltedText) -> None:
        """Loads stored pieces of a prompt that the cache lacks into pages."""
        has_room = text.tables.free_rows and text.tokens.size <= text.tables.max_length
        if text.cache.open_step is None and has_room:
            self._fetch(text)

    def _fetch(self, text: SaltedText) -> None:
        keys = self._keys(text)
        if not keys:
            return
        here = self._in_cache(text)
        there = self._stored_to(keys, here)
        first = self._first_needed(text, keys, here, there)
        if first < there and not self._is_current(text.cache):
            return self._fetch(text)
        for number in range(first, there):
            until = text.cut((number + 1) * self._size)
            if not self._load(until, keys[number], number * self._columns):
                there = max(here, number)
                break
            self.tokens_found += self._size
        self.store.use(keys[:there])
        missing = [number for number in range(here) if not self.store.has(keys[number])]
        if missing:  # a second text has them
            self._write(text, missing, first=False)

    def checkpointed(self, cache: Any, seq: int) -> None:
        """Writes the state that a sequence keeps; does nothing for models without states."""

    def expect(self, seq: int, tokens: Tokens, salt: Salt) -> None:
        """Notes a prompt that will be computed in part, to be stored then."""
        if tokens.size >= self._size:
            self._computing[seq] = tokens, salt

    def committed(self, cache: Any) -> None:
        """Writes prompts that have been computed; called after each step.

        With windows it also writes the computed part of others: later its pages may be gone.
        """
        tables = cache._tables
        for seq in list(self._computing):
            is_live = tables.is_live(seq)
            if is_live and tables.row_of(seq) in tables.pending and not self._bounded:
                continue
            tokens, salt = self._computing[seq]
            computed = cache.length(seq) if is_live else 0
            if not is_live or tables.row_of(seq) not in tables.pending:
                del self._computing[seq]
            if self.store.may_write_first():
                whole = min(computed, tokens.size) // self._size
                self._write(SaltedText(cache, tokens, salt), range(whole), first=True)

    def keep(self, cache: Any, seq: int, salt: Salt) -> int:
        """Writes the findable part of a text; returns how many of its tokens are stored."""
        if cache.open_step is not None:
            raise OpenStepError("store: a step is open, commit or abort it first")
        text = self._text_of(cache, seq, salt)
        keys = self._keys(text)
        self._write(text, range(len(keys)), first=False)
        return self._stored_to(keys, 0) * self._size

    def _text_of(self, cache: Any, seq: int, salt: Salt) -> SaltedText:
        return SaltedText(cache, text_of(cache._tables, cache._tables.row_of(seq)), salt)

    # ------------------------------------------------------------------ one piece

    def _load(self, text: SaltedText, key: bytes, first: int, with_state: bool = False) -> bool:
        """Loads a piece into pages that are findable and have no owner; returns whether it did.

        Args:
            text: the text up to the end of the piece, whose first column is `first`.
            with_state: whether the piece ends in a state, which becomes a checkpoint.
        """
        cache = text.cache

        def use(header: dict[str, Any], tensors: dict[str, Tensor], name: str) -> Saved:
            found = Found(header, tensors, name, cache._storage, cache.config)
            return found.piece(key, text.tokens, first, with_state)

        saved = self.store.read(key, use)
        if saved is None:
            return False
        try:
            with Uninterrupted():
                seq = cache._load(saved, text.salt, b"")
                if with_state:
                    cache.checkpoint(seq)
                cache._end([text.tables.row_of(seq)])
        except WrongShapeError as error:  # fp8 numbers too large for this cache's scales
            self.store.pass_over(key, error)
            return False
        except (OutOfPagesError, MemoryError):  # then the piece is computed
            return False
        return True

    def _write(self, text: SaltedText, numbers: Iterable[int], first: bool) -> None:
        """Writes pieces of a text that are not stored yet, if the cache has their pages."""
        keys = self._keys(text)
        numbers = [n for n in numbers if n < len(keys) and not self.store.has(keys[n])]
        if not numbers or not self._is_current(text.cache):  # else its pages are not findable
            return
        pages = text.pages()
        written = False
        # The last piece is written first, so that a text is found only once all of it is there.
        for number in reversed(numbers):
            if not self.store.may_write():
                break
            begin, end = number * self._columns, (number + 1) * self._columns
            piece = keys[number], pages[:, begin:end], (number + 1) * self._size
            written |= self._write_piece(text.cache, *piece, first)
        if written:
            self.store.use(keys)

    def _write_piece(
        self, cache: Any, key: bytes, pages: Ints, length: int, first: bool, slot: int = NO_SLOT
    ) -> bool:
        """Writes pages up to a length, and the state of a slot; whether the piece is stored now."""
        try:
            with host_memory("add"):
                parts = cache._tables, cache._storage, cache.config
                piece = pieces.take_out(*parts, key, pages, length)
                if piece is not None and slot != NO_SLOT:
                    piece[1].update(state.take_out(cache.config, cache._states, slot))
        except HostMemoryError:
            return False
        return piece is not None and self.store.write(key, *piece, first)

    # ------------------------------------------------------------------ keys

    def _stored_to(self, keys: list[bytes], there: int) -> int:
        """Counts the leading keys whose pieces are at hand, if the first `there` are."""
        while there < len(keys) and self.store.has(keys[there]):
            there += 1
        return there

    def _is_current(self, cache: Any) -> bool:
        """Forgets prefixes of former weights; whether the known keys are still valid."""
        cache.identity.forget_stale(cache.clear_prefixes)
        return bool(self._roots)

    def _keys(self, text: SaltedText) -> list[bytes]:
        """Returns the keys of a text's pieces; none while the model of its K and V is unknown."""
        if text.tokens.size < self._size:
            return []
        chain = self._chain(text)
        return page_keys(chain, text.tokens, self._size) if chain.root else []

    def _chain(self, text: SaltedText) -> Chain:
        """Returns the chain of the keys of pieces."""
        mixed = mixed_in(text.salt, self._size)
        return Chain(self._root(text.cache, first_of(text.salt)), mixed)

    def _root(self, cache: Any, salt: bytes) -> bytes:
        """Returns the key before the first piece; empty while the model of K and V is unknown."""
        if self._identity is not cache.identity or len(self._roots) > MOST_ROOTS:
            self._identity = cache.identity
            self._roots.clear()
        root = self._roots.get(salt)
        if root is None:
            weights = cache.identity.weights()
            if weights in self._ambiguous:
                weights = b""
            self._used.add(weights)
            root = self._roots[salt] = weights and pieces.root(weights, cache.config, salt)
        return root

    def _in_cache(self, text: SaltedText) -> int:
        """Counts leading pieces in the cache; windows matter only if all groups have one."""
        whole = text.cut(text.tokens.size // self._size * self._size)
        if not self._whole:
            return whole.found() // self._size
        here: Any = whole.pages()[self._whole] >= 0
        return leading(here.all(0)) // self._columns

    def _first_needed(self, text: SaltedText, keys: list[bytes], here: int, there: int) -> int:
        """Returns the first of `there` pieces to load, if the cache has `here` of them."""
        if not self._bounded or not there or keys[there - 1] in self._windows_tried:
            return here
        end = there * self._size
        if text.cut(end).found() >= end:
            return there
        self._windows_tried.add(keys[there - 1])
        # Groups with a window need the end, wherever the other groups' pages are.
        return min(here, max(0, there - 1 - -(-max(self._bounded) // self._size)))
