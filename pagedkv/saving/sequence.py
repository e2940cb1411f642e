"""Sequences to files and back: what of a cache a file holds, and what of a file fits a cache.

A file has the K and V of the stored pages, the ids of the tokens if the sequence is findable by
them, the recurrent state (`state.py`), and what tells whether another cache may take it. It does
not have the salt: a salt keeps tenants apart, and whoever can read a file must not learn one.
Loading says the salt anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from pagedkv.pages import restore as arrive
from pagedkv.pages import sequences
from pagedkv.pages.prefix import page_key
from pagedkv.pages.restore import Incoming
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage
from pagedkv.storage.dense import Parts
from pagedkv.storage.page_statistics import PageStatistics
from pagedkv.storage.states import StateStorage

from . import format as files
from . import state

ByKind = dict[
    int, tuple[Ints, Parts]
]  # by kind of page, table columns and the bytes of their pages


class Saved(NamedTuple):
    """A file's sequence, held against a cache's configuration and laid out in its pages.

    Attributes:
        tokens: `[length]` ids; all -1 if the file has none.
        pending: prompt ids that were not computed.
        pages, statics: by group.
        state: the tensors of all state layers, in order; none for a text without tokens.
    """

    tokens: Tokens
    pending: Tokens
    pages: list[ByKind]
    statics: list[Parts]
    state: list[Tensor]


# ------------------------------------------------------------------ to a file


def save(
    tables: PageTables,
    storage: Storage,
    states: StateStorage | None,
    config: CacheConfig,
    fingerprint: bytes,
    row: int,
    path: str | os.PathLike[str],
) -> None:
    """Writes a sequence's committed state, computed with the model of that fingerprint."""
    length, size = int(tables.lengths[row]), tables.page_size
    tokens = arrive.text_of(tables, row)
    tensors: dict[str, Tensor] = {}
    if tables.ids_known[row] and (tokens >= 0).all():
        tensors["tokens"] = torch.from_numpy(tokens)
    if row in tables.pending:
        tensors["pending"] = torch.from_numpy(tables.pending[row].copy())
    for group, base in enumerate(tables.base[:-1].tolist()):
        pages, tail = arrive.stored(tables, group, row), length % size
        pages = pages[tables.column_of[pages] * size < length]  # an open step may have more
        columns = tables.column_of[pages]
        kinds = tables.kinds_of(group, pages)
        if tail and tables.staged:  # of a page coded as a whole, some is somebody else's
            kinds[-1:] = 1
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            parts = storage.take_out(group, pages[mine] - base, kind)
            if tail and mine[-1]:
                storage.blank(parts, tail)  # another text may go on there
            tensors[f"{group}.{kind}.positions"] = torch.from_numpy(columns[mine] * size)
            for name, part in parts.items():
                tensors[f"{group}.{kind}.{name}"] = part.contiguous()
        for name, part in storage.statics(group).items():
            tensors[f"{group}.all.{name}"] = part
    if tables.states is not None and states is not None and length:
        tensors |= state.take_out(config, states, int(tables.states.slot[row]))
    header = {"model": fingerprint.hex(), "length": length, "page_size": size}
    version = files.VERSION if config.states else files.WITHOUT_STATES
    files.write(path, header | {"shape": _shape(config)}, tensors, version)


def _shape(config: CacheConfig) -> dict[str, Any]:
    """What two caches must have in common to hold the same bytes, as JSON gives it back."""
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
    """Layers and window of a group, and its shape where it is not that of all."""
    group, shape = config.groups[index], config.shapes[index]
    said = [list(group.layers), group.window]
    plain = (config.num_kv_heads, config.head_dim, config.head_dim, False)
    return said if shape == plain else [*said, list(shape)]


# ------------------------------------------------------------------ from a file


def read(
    path: str | os.PathLike[str], storage: Storage, config: CacheConfig, fingerprint: bytes
) -> Saved:
    """A file's sequence, if it is whole and fits a cache whose model has that fingerprint."""
    header, tensors = files.read(path)
    return match(header, tensors, storage, config, fingerprint, str(path))


def load(
    tables: PageTables,
    storage: Storage,
    states: StateStorage | None,
    statistics: PageStatistics,
    saved: Saved,
    salt: bytes,
    rescue: Callable[[], None],
) -> int:
    """Starts a sequence with what was read.

    Args:
        rescue: called before pages that were taken are written.
    """
    seq = sequences.add(tables, None, salt=salt)
    row = tables.row_of(seq)
    try:
        if tables.states is not None and saved.state:
            tables.states.require_slot("load")
        arrival = arrive.take_pages(tables, [_text(row, saved)], "load")
        try:
            rescue()
            _fill(tables, storage, row, saved)
            pages = np.array([fresh.page for fresh in arrival.fresh], dtype=np.int64)
            statistics.reset(pages)
            if tables.states is not None and states is not None and saved.state:
                state.put_in(tables.states, states, row, saved.state)
        except BaseException:
            arrive.undo(tables, arrival)
            raise
    except BaseException:
        sequences.free(tables, [seq])
        raise
    tables.ids_known[row] = named = bool((saved.tokens >= 0).all())
    if named:
        tables.prefix_keys[row] = _chain(tables, tables.prefix_keys[row][0], saved.tokens)
    if saved.pending.size:
        tables.pending[row] = saved.pending
    arrive.publish(tables, arrival)
    return seq


def _text(row: int, saved: Saved) -> Incoming:
    columns = [_columns(pages) for pages in saved.pages]
    kinds = []
    for mine, pages in zip(columns, saved.pages):
        kinds.append(np.zeros_like(mine))
        for kind, (at, _) in pages.items():
            kinds[-1][np.searchsorted(mine, at)] = kind
    alone = [np.full_like(mine, -1) for mine in columns]
    return Incoming(row, saved.tokens, 0, columns, kinds, alone, alone)


def _fill(tables: PageTables, storage: Storage, row: int, saved: Saved) -> None:
    adopted = []
    for group, base in enumerate(tables.base[:-1].tolist()):
        for kind, (at, parts) in saved.pages[group].items():
            if not kind:
                parts, statics = storage.adopt(group, parts, saved.statics[group])
                adopted.append((group, statics))
            pages = arrive.stored(tables, group, row)
            chosen = pages[np.searchsorted(tables.column_of[pages], at)]
            storage.put_in(group, chosen - base, parts, kind)
    for group, statics in adopted:  # once no group is refused any more
        storage.set_statics(group, statics)


def _chain(tables: PageTables, root: bytes, tokens: Tokens) -> list[bytes]:
    chain, size = [root], tables.page_size
    for end in range(size, tokens.size + 1, size):
        chain.append(page_key(chain[-1], tokens[end - size : end].tobytes()))
    return chain


def match(
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    storage: Storage,
    config: CacheConfig,
    fingerprint: bytes,
    name: str,
) -> Saved:
    """Holds a file against a cache, and lays it out in pages of that cache's size.

    Raises:
        WrongModelError, WrongShapeError: it belongs to another one.
        SequenceTooLongError: it can never fit.
        CorruptFileError: it contradicts itself.
    """
    try:
        length, size = _text_size(header, config, fingerprint, name)
        _require_short(length, config, name)
        if config.staged and length and size != config.page_size:
            coded = next(format.kv_format for format in config.formats if format.staged)
            raise WrongShapeError(f"{_change(name, size, config)}: {coded} codes pages as a whole")
        tokens = _ids(tensors, "tokens", np.full(length, -1, dtype=np.int32))
        pending = _ids(tensors, "pending", np.empty(0, dtype=np.int32))
        _require(tokens.size == length, f"{tokens.size} ids for {length} tokens")
        _require_short(length + pending.size, config, name)
        groups = range(len(config.groups))
        statics = [_statics(tensors, storage, group) for group in groups]
        stored = [_stored(tensors, storage, config, group, length, size) for group in groups]
        pages = [_laid(stored[g], storage, config, g, length, size, name) for g in groups]
        found, layouts = state.found(tensors), state.layouts(config) if length else {}
        _require_layout(found, layouts)
    except PagedKVError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFileError(f"{name}: contradicts itself: {error!s:.300}") from error
    return Saved(tokens, pending, pages, statics, [found[name] for name in layouts])


def _change(name: str, size: int, config: CacheConfig) -> str:
    return f"{name}: pages of {size} cannot become pages of {config.page_size}"


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def _text_size(
    header: dict[str, Any], config: CacheConfig, fingerprint: bytes, name: str
) -> tuple[int, int]:
    """Tokens of the text and of a page, if it is a text of this cache's model."""
    if header["model"] != fingerprint.hex():
        raise WrongModelError(
            f"{name}: expected K and V of the model {fingerprint.hex() or '(unnamed)'}, "
            f"got those of {header['model'] or '(unnamed)'!s:.200}"
        )
    for what, ours in _shape(config).items():
        theirs = header["shape"].get(what, []) if what == "states" else header["shape"][what]
        if theirs != ours:
            raise WrongShapeError(f"{name}: expected {what} {ours!r:.200}, got {theirs!r:.200}")
    length, size = header["length"], header["page_size"]
    _require(type(length) is type(size) is int, f"length {length!r}, page_size {size!r}")
    _require(length >= 0 and size > 0, f"length {length}, page_size {size}")
    return length, size


def _require_short(tokens: int, config: CacheConfig, name: str) -> None:
    if tokens > config.max_sequence_length:
        raise SequenceTooLongError(
            f"{name}: has {tokens} tokens, a sequence can have {config.max_sequence_length} in "
            "this cache; this can never fit"
        )


def _ids(tensors: dict[str, Tensor], name: str, default: Tokens) -> Tokens:
    if name not in tensors:
        return default
    ids = tensors[name].numpy().copy()  # not a view that keeps the whole file
    _require(ids.dtype == np.int32 and ids.ndim == 1 and bool((ids >= 0).all()), f"{name}: no ids")
    return ids


def _statics(tensors: dict[str, Tensor], storage: Storage, group: int) -> Parts:
    prefix = f"{group}.all."
    mine = [name for name in tensors if name.startswith(prefix)]
    found = {name.removeprefix(prefix): tensors[name] for name in mine}
    _require_layout(found, {name: _layout(x) for name, x in storage.statics(group).items()})
    return found


def _layout(tensor: Tensor) -> tuple[torch.dtype, list[int]]:
    return tensor.dtype, list(tensor.shape)


def _require_layout(parts: Parts, expected: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    got = {name: _layout(part) for name, part in parts.items()}
    _require(got == expected, f"expected tensors {expected}, got {got}")


def _stored(
    tensors: dict[str, Tensor],
    storage: Storage,
    config: CacheConfig,
    group: int,
    length: int,
    size: int,
) -> ByKind:
    """By kind the columns a file has of a group and their bytes, in the file's pages."""
    parts: dict[int, Parts] = {}
    for name, tensor in tensors.items():
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
        staging = (at == 0) | (at >= complete) if config.staged else np.zeros_like(at, dtype=bool)
        _require(bool((staging == number).all()), f"positions: some not of kind {number}")
        _require_layout(mine, storage.layout(group, number, at.size, size))
        found[number] = at, mine
    columns = _columns(found)
    _require(bool((np.diff(columns) > 0).all()), "positions: pages occur twice")
    _require(not columns.size or 0 <= columns[0] <= columns[-1] < end, "positions: strays")
    _require(not length % size or end - 1 in columns, "positions: the last page is missing")
    return found


def _columns(pages: ByKind) -> Ints:
    """`[n]`, all of them, ascending."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *(at for at, _ in pages.values())]))


def _laid(
    pages: ByKind,
    storage: Storage,
    config: CacheConfig,
    group: int,
    length: int,
    size: int,
    name: str,
) -> ByKind:
    """The pages that the cache keeps of a group, in its size."""
    window, ours, columns = config.groups[group].window, config.page_size, _columns(pages)
    end = -(-length // size)
    change = _change(name, size, config)
    if window is None and columns.size < end:
        if config.policy is None:
            raise WrongShapeError(
                f"{name}: has {columns.size} of the {end} pages of its text; a cache needs "
                "`retention` to hold such a text"
            )
        if ours != size:
            raise WrongShapeError(f"{change}: of the text between them some was evicted")
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
        raise WrongShapeError(f"{change}: what is stored begins at {begin}, within one")
    ((kind, (_, parts)),) = pages.items()
    parts = storage.repage(parts, first * ours - begin, length - first * ours, ours)
    return {kind: (np.arange(first, -(-length // ours)), parts)}


def _from(first: int, columns: Ints, parts: Parts) -> tuple[Ints, Parts]:
    """Pages from a column on."""
    kept = columns >= first
    return columns[kept], {name: x[:, torch.from_numpy(kept)] for name, x in parts.items()}
