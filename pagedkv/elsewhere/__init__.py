"""How sequences leave a cache and come back: to the host, to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import Any, TypeVar

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.cache.debug import poison_tails
from pagedkv.cache.identity import Identity
from pagedkv.cache.pressure import Relief
from pagedkv.config import CacheConfig
from pagedkv.errors import HostMemoryError, OutOfPagesError
from pagedkv.interrupt import uninterrupted
from pagedkv.offload.tier import HostTier
from pagedkv.pages import sequences
from pagedkv.pages.tables import PageTables
from pagedkv.saving import sequence as saving
from pagedkv.storage import Storage
from pagedkv.storage.memory import memory_errors
from pagedkv.storage.page_statistics import PageStatistics

T = TypeVar("T")


class Elsewhere:
    """The part of `PagedKVCache` that knows of places other than pages."""

    config: CacheConfig
    debug: bool
    identity: Identity
    _tables: PageTables
    _storage: Storage
    _statistics: PageStatistics
    _tier: HostTier | None
    _relief: Relief | None

    # ------------------------------------------------------------------ host memory

    def offload(self, seqs: int | Sequence[int] | Ints) -> None:
        """Moves sequences to host memory; all of their pages go back.

        Until `restore`, `length`, `uncached` and `free` know them and nothing else does. What is
        findable of them stays so. A reservation is given up and made again by `restore`.

        Raises:
            HostMemoryError: `CacheConfig.host_tokens` or the machine does not allow it; nothing was
                changed.
            OffloadedError, OpenStepError: one of them is offloaded already, or in an open step.
        """
        self._free_released()
        names = several(seqs)
        if len(names) == 0:
            return
        rows = self._tables.rows_of(names).tolist()
        self._tables.require_here(rows)
        self._require_not_in_step(rows)
        if self._tier is None:
            raise HostMemoryError("offload: there is no host tier, set CacheConfig.host_tokens")
        with _host_memory("offload"):
            self._tier.offload(rows)

    def restore(self, seqs: int | Sequence[int] | Ints, *, max_tokens: int | None = None) -> None:
        """Brings offloaded sequences back, bit for bit; those that are here stay as they are.

        Args:
            max_tokens: as for `add`, for each; default what was set aside before they left.

        Raises:
            OutOfPagesError: not all of them fit; nothing was changed.
            HostMemoryError: there is no memory to copy them through; nothing was changed.
        """
        self._free_released()
        names = several(seqs)
        if len(names) == 0:
            return
        if max_tokens is not None:
            max_tokens = as_max_tokens(max_tokens)
        self._relieved("restore", names, partial(self._restore, names, max_tokens))

    def _restore(self, seqs: Sequence[int] | Ints, max_tokens: int | None) -> None:
        # Anew in every attempt: `on_pressure` may have freed some, or moved them.
        tables = self._tables
        rows = [row for row in tables.rows_of(seqs).tolist() if row in tables.away]
        if rows:
            assert self._tier is not None
            sequences.require_fits(tables, max(tables.size_of(row) for row in rows), max_tokens)
            with _host_memory("restore"):
                self._tier.restore(rows, max_tokens)
            self._poison_arrived(rows)

    def is_offloaded(self, seq: int) -> bool:
        """Whether a sequence is in host memory."""
        return self._tables.row_of(seq) in self._tables.away

    def copy_seconds(self, seq: int) -> float | None:
        """How long offloading and restoring a sequence would take, from copies made so far.

        None before the first one, and without a host tier.
        """
        row = self._tables.row_of(seq)
        return None if self._tier is None else self._tier.seconds(row)

    # ------------------------------------------------------------------ files

    def save(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Writes a sequence's committed state to a file, whole or not at all.

        The file holds what the text says, and is readable by its owner alone. It does not hold the
        salt. It belongs to the model that the sequence is `marked` with, by default as it is now.

        Raises:
            OSError: it cannot be written; a file that was there is as it was.
            HostMemoryError: there is no memory to copy it through.
            OffloadedError: it is in host memory.
        """
        row = self._tables.row_of(seq)
        self._tables.require_here([row])
        fingerprint = self._tables.models.get(row)
        if fingerprint is None:
            fingerprint = self.identity.fingerprint()
        with _host_memory("save"):
            saving.save(self._tables, self._storage, self.config, fingerprint, row, path)

    def mark(self, seqs: int | Sequence[int] | Ints) -> None:
        """Notes that sequences are computed with the model as it is now, for `save`."""
        names = several(seqs)
        if len(names):
            rows = self._tables.rows_of(names).tolist()
            self._tables.models.update(dict.fromkeys(rows, self.identity.fingerprint()))

    def load(self, path: str | os.PathLike[str], *, salt: bytes = b"") -> int:
        """Starts a sequence with what `save` wrote, also by a cache of another page size.

        It is found by its tokens if it was when it was saved.

        Args:
            salt: as for `add`.

        Raises:
            CorruptFileError, ForeignFileError, NewerFileError: nothing in the file is believed.
            WrongModelError, WrongShapeError: it belongs to another cache.
            OutOfPagesError, SequenceTooLongError, TooManySequencesError: it does not fit.
            HostMemoryError: the file does not fit into memory.
        """
        self._free_released()
        if not isinstance(salt, bytes):
            raise TypeError(f"salt: expected bytes, got {type(salt).__name__}")
        fingerprint = self.identity.fingerprint()
        with _host_memory("load"):
            saved = saving.read(path, self._storage, self.config, fingerprint)
        self.identity.forget_stale(self.clear_prefixes)  # what is found from now on is known to fit
        salt = self.identity.salted(salt)
        parts = self._tables, self._storage, self._statistics, saved, salt, self._rescue

        def land() -> int:
            with _host_memory("load"):
                seq = saving.land(*parts)
            row = self._tables.row_of(seq)
            self._tables.models[row] = fingerprint
            self._poison_arrived([row])
            return seq

        return self._relieved("load", (), land, self._take_back)

    # ------------------------------------------------------------------ helpers

    def _take_back(self, seqs: int | list[int]) -> None:
        """Ends sequences that their caller will not hear of."""
        sequences.free(self._tables, several(seqs))

    def _relieved(
        self,
        call: str,
        seqs: Any,
        attempt: Callable[[], T],
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Does what needs pages, as often as the user makes room for it, and as a whole."""
        while True:
            try:
                return uninterrupted(attempt, undo)
            except OutOfPagesError as error:
                names = [int(seq) for seq in seqs]
                if self._relief is None or not self._relief.ask(self, call, names, error):
                    raise

    def _rescue(self) -> None:
        if self._tier is not None:
            self._tier.rescue()

    def _poison_arrived(self, rows: Sequence[int]) -> None:
        if self.debug:
            poison_tails(self._tables, self._storage, np.asarray(rows))

    def clear_prefixes(self) -> None:
        raise NotImplementedError

    def _free_released(self) -> None:
        raise NotImplementedError

    def _require_not_in_step(self, rows: Sequence[int]) -> None:
        raise NotImplementedError


@contextmanager
def _host_memory(call: str) -> Iterator[None]:
    """Has a want of memory raise HostMemoryError."""
    try:
        with memory_errors():
            yield
    except HostMemoryError:
        raise
    except MemoryError as error:
        raise HostMemoryError(f"{call}: no memory to copy pages through: {error}") from error


def as_max_tokens(max_tokens: Any) -> int:
    """An argument of that name."""
    if isinstance(max_tokens, bool) or not hasattr(max_tokens, "__index__"):
        raise TypeError(f"max_tokens: expected an int, got {type(max_tokens).__name__}")
    return index(max_tokens)


def several(seqs: int | Sequence[int] | Ints) -> Any:
    """One id, or some, as some."""
    return np.atleast_1d(seqs) if np.ndim(seqs) == 0 else seqs
