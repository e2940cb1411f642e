"""Saves sequences to files and loads them; `match.py` checks that a file fits a cache.

A file has the K and V of the stored pages, the ids of the tokens if the sequence is findable by
them, the recurrent state (`state.py`), and the facts by which another cache accepts or refuses it.
It does not have the salt: a salt separates tenants, and a reader of the file must not learn it.
The caller of `load` gives the salt anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.pages import restore as arrive
from pagedkv.pages import sequences
from pagedkv.pages.prefix import page_keys
from pagedkv.pages.restore import Incoming
from pagedkv.pages.salts import Salt
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage
from pagedkv.storage.page_statistics import PageStatistics
from pagedkv.storage.states import StateStorage

from . import format as files
from . import state
from .match import Found, Saved, shape_of

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
    """Writes a sequence's committed tokens, K and V; `fingerprint` is that of its model."""
    length, size = int(tables.lengths[row]), tables.page_size
    tokens = arrive.text_of(tables, row)
    tensors: dict[str, Tensor] = {}
    if tables.ids_known[row] and (tokens >= 0).all():
        tensors["tokens"] = torch.from_numpy(tokens)
    if row in tables.pending:
        tensors["pending"] = torch.from_numpy(tables.pending[row].copy())
    for group in range(len(tables.windows)):
        pages, tail = arrive.stored(tables, group, row), length % size
        pages = pages[tables.column_of[pages] * size < length]  # an open step may have more
        tensors |= take_out(tables, storage, group, pages, tables.column_of[pages], tail)
    if tables.states is not None and states is not None and length:
        tensors |= state.take_out(config, states, int(tables.states.slot[row]))
    header = {"model": fingerprint.hex(), "length": length, "page_size": size}
    files.write(path, header | {"shape": shape_of(config)}, tensors)


def take_out(
    tables: PageTables, storage: Storage, group: int, pages: Ints, columns: Ints, tail: int = 0
) -> dict[str, Tensor]:
    """Returns the tensors of some pages of a group, and its static scales, by names in a file.

    Args:
        columns: the columns of the pages, ascending.
        tail: how many tokens the last page has; 0 if it is full.
    """
    tensors: dict[str, Tensor] = {}
    base = int(tables.base[group])
    kinds = tables.kinds_of(group, pages)
    if tail and tables.staged:  # a coded page may hold later tokens of other texts
        kinds[-1:] = 1
    for kind in np.unique(kinds).tolist():
        mine = kinds == kind
        parts = storage.take_out(group, pages[mine] - base, kind)
        if tail and mine[-1]:
            storage.blank(parts, tail)  # other texts may have later tokens there
        parts["positions"] = torch.from_numpy(columns[mine] * tables.page_size)
        tensors |= {f"{group}.{kind}.{name}": part.contiguous() for name, part in parts.items()}
    return tensors | {f"{group}.all.{name}": x for name, x in storage.statics(group).items()}


# ------------------------------------------------------------------ from a file


def read(
    path: str | os.PathLike[str], storage: Storage, config: CacheConfig, fingerprint: bytes
) -> Saved:
    """Reads a sequence; raises if it is damaged, or does not fit the cache or the fingerprint."""
    return Found(*files.read(path), str(path), storage, config).text(fingerprint)


def load(
    tables: PageTables,
    storage: Storage,
    states: StateStorage | None,
    statistics: PageStatistics,
    saved: Saved,
    salt: Salt,
    rescue: Callable[[], None],
) -> int:
    """Starts a sequence with the content of a file.

    Args:
        rescue: called before the taken pages are written.
    """
    seq = sequences.add(tables, None, salt=salt)
    row = tables.row_of(seq)
    named = bool((saved.tokens >= 0).all())
    keys = page_keys(tables.chain(row), saved.tokens, tables.page_size)
    chain = [*tables.prefix_keys[row], *keys] if named else []
    try:
        if tables.states is not None and saved.state:
            tables.states.require_slot("load")
        arrival = arrive.take_pages(tables, [_text(tables, row, saved, chain)], "load")
        try:
            rescue()
            pages = np.array([fresh.page for fresh in arrival.fresh], dtype=np.int64)
            _fill(tables, storage, row, saved, pages)
            statistics.reset(pages)
            if tables.states is not None and states is not None and saved.state:
                state.put_in(tables.states, states, row, saved.state)
        except BaseException:
            arrive.undo(tables, arrival)
            raise
    except BaseException:
        sequences.free(tables, [seq])
        tables.take_back_name(seq)  # a trace says that a failed load changed nothing
        raise
    tables.ids_known[row] = named
    if named:
        tables.prefix_keys[row] = chain
    if saved.pending.size:
        tables.pending[row] = saved.pending
    arrive.publish(tables, arrival)
    return seq


def _text(tables: PageTables, row: int, saved: Saved, chain: list[bytes]) -> Incoming:
    """Returns the pages that the row will have.

    A piece shares the pages before it, and its own pages that the cache already has.
    """
    end = -(-saved.tokens.size // tables.page_size)
    columns, kinds, shared = [], [], []
    for group, pages in enumerate(saved.pages):
        kind = np.full(end, -1)
        for number, (at, _) in pages.items():
            kind[at] = number
        here = np.full(end, -1)
        if saved.before is not None:
            # Only complete pages are shared.
            here[: len(chain) - 1] = tables.index.find_all(chain[1:])[group]
            kind = np.where(here >= 0, tables.kinds_of(group, here), kind)
            if tables.windows[group] is not None:  # only pages behind the last gap
                kind[: np.flatnonzero(np.append(-1, kind) < 0)[-1]] = -1
        mine = np.flatnonzero(kind >= 0)
        columns.append(mine)
        kinds.append(kind[mine])
        shared.append(here[mine])
    alone = [np.full_like(mine, -1) for mine in columns]
    return Incoming(row, saved.tokens, 0, columns, kinds, shared, alone)


def _fill(tables: PageTables, storage: Storage, row: int, saved: Saved, fresh: Ints) -> None:
    """Puts a file's bytes into the row's fresh pages."""
    adopted = []
    for group, base in enumerate(tables.base[:-1].tolist()):
        pages = arrive.stored(tables, group, row)
        columns = tables.column_of[pages]
        for kind, (at, parts) in saved.pages[group].items():
            chosen = np.isin(at, columns[np.isin(pages, fresh)])
            if not chosen.all():
                which = torch.from_numpy(np.flatnonzero(chosen))
                parts = {name: part.index_select(1, which) for name, part in parts.items()}
                at = at[chosen]
            if not at.size:
                continue
            mine = pages[np.searchsorted(columns, at)] - base
            if not kind:
                parts, statics = storage.adopt(group, parts, saved.statics[group])
                adopted.append((group, statics, mine))
            storage.put_in(group, mine, parts, kind)
    for group, statics, mine in adopted:  # only after every group was accepted
        storage.set_statics(group, statics)
        if statics:
            storage.bounds.update(group, mine)  # which are of numbers, not of their codes
