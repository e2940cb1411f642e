"""Checks that a file fits a cache's model and shape, and lays out its pages in the cache's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.errors import (
    CorruptFileError,
    PagedKVError,
    SequenceTooLongError,
    WrongModelError,
    WrongShapeError,
)
from pagedkv.storage import Storage
from pagedkv.storage.dense import Parts

from . import state

ByKind = dict[
    int, tuple[Ints, Parts]
]  # by kind of page: table columns, and the bytes of their pages


class Saved(NamedTuple):
    """A file's sequence, checked against a cache's configuration and laid out in its page size.

    Attributes:
        tokens: `[length]` ids; all -1 if the file has none.
        pending: prompt ids that were not computed.
        pages, statics: by group.
        state: the tensors of all state layers, in order; none for a text without tokens.
        before: for a piece, its first column: the cache itself has the pages before it. None for a
            whole text.
    """

    tokens: Tokens
    pending: Tokens
    pages: list[ByKind]
    statics: list[Parts]
    state: list[Tensor]
    before: int | None = None


class Found:
    """The contents of a file, to be checked against a cache.

    Args:
        name: the file's name, for errors.
        storage, config: the cache's storage and configuration.
    """

    def __init__(
        self,
        header: dict[str, Any],
        tensors: dict[str, Tensor],
        name: str,
        storage: Storage,
        config: CacheConfig,
    ) -> None:
        self.header, self._tensors, self._name = header, tensors, name
        self._storage, self._config = storage, config
        self._length = self._size = 0  # tokens of the text and of a page, once they are known

    def text(self, fingerprint: bytes) -> Saved:
        """Lays a whole text out in pages of the cache's size.

        Raises:
            WrongModelError, WrongShapeError: it belongs to another cache.
            SequenceTooLongError: it can never fit.
            CorruptFileError: it contradicts itself.
        """
        config, tensors = self._config, self._tensors
        with self._believed():
            self._read_size(fingerprint)
            length = self._length
            self._require_short(length)
            if config.staged and length and self._size != config.page_size:
                coded = next(format.kv_format for format in config.formats if format.staged)
                raise WrongShapeError(f"{self._change}: {coded} codes whole pages")
            tokens = _ids(tensors, "tokens", np.full(length, -1, dtype=np.int32))
            pending = _ids(tensors, "pending", np.empty(0, dtype=np.int32))
            _require(tokens.size == length, f"{tokens.size} ids for {length} tokens")
            self._require_short(length + pending.size)
            statics, stored = self._groups()
            pages = [self._laid(group, each) for group, each in enumerate(stored)]
            states = self._state(length > 0)
        return Saved(tokens, pending, pages, statics, states)

    def piece(self, key: bytes, tokens: Tokens, first: int, with_state: bool) -> Saved:
        """Checks that the file has the expected piece, as `pieces.take_out` made it.

        Args:
            key: the key of the piece, which the file has in place of a model's fingerprint.
            tokens: the text up to the end of the piece.
            first: the piece's first column.
            with_state: whether it has the recurrent state at its end.

        Raises:
            WrongModelError, WrongShapeError: it is another piece.
            CorruptFileError: it contradicts itself.
        """
        size, end = self._config.page_size, -(-tokens.size // self._config.page_size)
        with self._believed():
            self._read_size(key)
            got = self._length, self._size
            _require(got == (tokens.size, size), f"expected {tokens.size} tokens, got {got}")
            statics, pages = self._groups()
            for group, found in zip(self._config.groups, pages):
                at, wanted = columns_of(found), np.arange(first, end)
                whole = group.window is not None or at.size == wanted.size
                good = np.isin(at, wanted).all() and whole
                _require(bool(good), f"positions: expected pages {wanted}, got {at}")
            states = self._state(with_state)
        return Saved(tokens, np.empty(0, np.int32), pages, statics, states, first)

    @contextmanager
    def _believed(self) -> Iterator[None]:
        """Turns errors that a self-contradicting file causes into a CorruptFileError."""
        try:
            yield
        except PagedKVError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptFileError(f"{self._name}: contradicts itself: {error!s:.300}") from error

    @property
    def _change(self) -> str:
        ours = self._config.page_size
        return f"{self._name}: pages of {self._size} cannot become pages of {ours}"

    def _read_size(self, fingerprint: bytes) -> None:
        """Reads the lengths of the text and of a page; raises if model or shape differ."""
        header, name = self.header, self._name
        if header["model"] != fingerprint.hex():
            raise WrongModelError(
                f"{name}: expected K and V of the model {fingerprint.hex() or '(unnamed)'}, "
                f"got those of {header['model'] or '(unnamed)'!s:.200}"
            )
        for what, ours in shape_of(self._config).items():
            theirs = header["shape"].get(what, []) if what == "states" else header["shape"][what]
            if theirs != ours:
                raise WrongShapeError(f"{name}: expected {what} {ours!r:.200}, got {theirs!r:.200}")
        length, size = header["length"], header["page_size"]
        _require(type(length) is type(size) is int, f"length {length!r}, page_size {size!r}")
        _require(length >= 0 and size > 0, f"length {length}, page_size {size}")
        self._length, self._size = length, size

    def _require_short(self, tokens: int) -> None:
        most = self._config.max_sequence_length
        if tokens > most:
            raise SequenceTooLongError(
                f"{self._name}: has {tokens} tokens, a sequence can have {most} in this cache; "
                "this can never fit"
            )

    def _groups(self) -> tuple[list[Parts], list[ByKind]]:
        """Returns the static scales and the pages of each group, as the file has them."""
        groups = range(len(self._config.groups))
        statics = [self._statics(group) for group in groups]
        return statics, [self._stored(group) for group in groups]

    def _statics(self, group: int) -> Parts:
        prefix = f"{group}.all."
        mine = [name for name in self._tensors if name.startswith(prefix)]
        found = {name.removeprefix(prefix): self._tensors[name] for name in mine}
        ours = self._storage.statics(group)
        _require_layout(found, {name: _layout(x) for name, x in ours.items()})
        return found

    def _state(self, expected: bool) -> list[Tensor]:
        """Returns the tensors of all state layers, in order; none if none is expected."""
        layouts = state.layouts(self._config) if expected else {}
        found = state.found(self._tensors)
        _require_layout(found, layouts)
        return [found[name] for name in layouts]

    def _stored(self, group: int) -> ByKind:
        """Returns a group's columns in the file and their bytes, by kind, in the file's pages."""
        length, size = self._length, self._size
        parts: dict[int, Parts] = {}
        for name, tensor in self._tensors.items():
            if name.startswith(f"{group}.") and not name.startswith(f"{group}.all."):
                _, kind, part_name = name.split(".")
                parts.setdefault(int(kind), {})[part_name] = tensor
        found: ByKind = {}
        end, complete = -(-length // size), length // size
        for number, mine in parts.items():
            positions = mine.pop("positions").numpy()
            _require(positions.dtype == np.int64 and positions.ndim == 1, "positions: no integers")
            _require(not (positions % size).any(), "positions: not those of pages")
            at = positions // size
            staging = ((at == 0) | (at >= complete)) & self._config.staged
            _require(bool((staging == number).all()), f"positions: some not of kind {number}")
            _require_layout(mine, self._storage.layout(group, number, at.size, size))
            found[number] = at, mine
        columns = columns_of(found)
        _require(bool((np.diff(columns) > 0).all()), "positions: pages occur twice")
        _require(not columns.size or 0 <= columns[0] <= columns[-1] < end, "positions: strays")
        _require(not length % size or end - 1 in columns, "positions: the last page is missing")
        return found

    def _laid(self, group: int, pages: ByKind) -> ByKind:
        """Returns the pages of a group that the cache keeps, in the cache's page size."""
        config, length, size = self._config, self._length, self._size
        window, ours, columns = config.groups[group].window, config.page_size, columns_of(pages)
        end = -(-length // size)
        if window is None and columns.size < end:
            if config.policy is None:
                raise WrongShapeError(
                    f"{self._name}: has {columns.size} of the {end} pages of its text; a cache "
                    "needs `retention` to hold such a text"
                )
            if ours != size:
                raise WrongShapeError(f"{self._change}: some of the text was evicted")
            return pages
        if not end:
            return {}
        _require(columns.size > 0 and columns[-1] == end - 1, "positions: the end is missing")
        _require(columns.size == end - columns[0], "positions: pages are missing")
        begin = int(columns[0]) * size  # the first position stored
        needed = 0 if window is None else max(0, length - window)
        spare = 0 if window is None else max(0, length - window - config.rollback)
        _require(begin <= needed, f"group {group} begins at {begin}, {needed} is needed")
        first = max(-(-begin // ours), spare // ours)
        if ours == size:
            return {kind: _from(first, *found) for kind, found in pages.items()}
        if first * ours > needed:
            what = f"the stored tokens begin at {begin}, inside a page"
            raise WrongShapeError(f"{self._change}: {what}")
        ((kind, (_, parts)),) = pages.items()
        parts = self._storage.repage(parts, first * ours - begin, length - first * ours, ours)
        return {kind: (np.arange(first, -(-length // ours)), parts)}


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def _ids(tensors: dict[str, Tensor], name: str, default: Tokens) -> Tokens:
    if name not in tensors:
        return default
    ids = tensors[name].numpy().copy()  # a view would keep the whole file
    _require(ids.dtype == np.int32 and ids.ndim == 1 and bool((ids >= 0).all()), f"{name}: no ids")
    return ids


def _layout(tensor: Tensor) -> tuple[torch.dtype, list[int]]:
    return tensor.dtype, list(tensor.shape)


def _require_layout(parts: Parts, expected: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    got = {name: _layout(part) for name, part in parts.items()}
    _require(got == expected, f"expected tensors {expected}, got {got}")


def columns_of(pages: ByKind) -> Ints:
    """Returns the columns of all kinds, ascending: `[n]`."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *(at for at, _ in pages.values())]))


def _from(first: int, columns: Ints, parts: Parts) -> tuple[Ints, Parts]:
    """Returns the pages from a column on."""
    kept = columns >= first
    return columns[kept], {name: x[:, torch.from_numpy(kept)] for name, x in parts.items()}


def shape_of(config: CacheConfig) -> dict[str, Any]:
    """Returns the facts that two caches must share to hold the same bytes, as JSON values."""
    return {
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "dtype": config.dtype,
        "kv_format": list(config.kv_format),
        "groups": [_group(config, index) for index in range(len(config.groups))],
        "states": state.shapes(config),
    }


def _group(config: CacheConfig, index: int) -> list[Any]:
    """Returns a group's layers and window, and its shape if it differs from the cache's."""
    group, shape = config.groups[index], config.shapes[index]
    said: list[Any] = [list(group.layers), group.window]
    if group.chunked:
        said[1] = f"chunks of {group.window}"
    plain = (config.num_kv_heads, config.head_dim, config.head_dim, False)
    return said if shape == plain else [*said, list(shape)]
