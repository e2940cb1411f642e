"""Checks that a file fits a cache's model and shape, and lays out its pages in the cache's size."""

from __future__ import annotations

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
]  # by kind of page, table columns and the bytes of their pages


# What fingerprints of models are made of. Those of 1 had no configuration and no buffers in them.
FINGERPRINTS = 2
OLDER = ", a fingerprint as an older pagedkv made them: compute the text anew"


class Saved(NamedTuple):
    """A file's sequence, held against a cache's configuration and laid out in its pages.

    Attributes:
        tokens: `[length]` ids; all -1 if the file has none.
        pending: prompt ids that were not computed.
        pages, statics: by group.
        state: the tensors of all state layers, in order; none for a text without tokens.
        before: of a piece, its first column: pages before it are the cache's own. None for a whole
            text.
    """

    tokens: Tokens
    pending: Tokens
    pages: list[ByKind]
    statics: list[Parts]
    state: list[Tensor]
    before: int | None = None


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
        is_older = header.get("fingerprints") != FINGERPRINTS
        length, size = _text_size(header, config, fingerprint, name, OLDER * is_older)
        _require_short(length, config, name)
        if config.staged and length and size != config.page_size:
            coded = next(format.kv_format for format in config.formats if format.staged)
            raise WrongShapeError(f"{_change(name, size, config)}: {coded} codes whole pages")
        tokens = _ids(tensors, "tokens", np.full(length, -1, dtype=np.int32))
        pending = _ids(tensors, "pending", np.empty(0, dtype=np.int32))
        _require(tokens.size == length, f"{tokens.size} ids for {length} tokens")
        _require_short(length + pending.size, config, name)
        groups = range(len(config.groups))
        statics = [_statics(tensors, storage, group) for group in groups]
        stored = [_stored(tensors, storage, config, group, length, size) for group in groups]
        pages = [_laid(stored[g], storage, config, g, length, size, name) for g in groups]
        states = _state(tensors, config, length > 0)
    except PagedKVError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFileError(f"{name}: contradicts itself: {error!s:.300}") from error
    return Saved(tokens, pending, pages, statics, states)


def match_piece(
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str,
    storage: Storage,
    config: CacheConfig,
    key: bytes,
    tokens: Tokens,
    first: int,
    with_state: bool = False,
) -> Saved:
    """Holds the file of a piece, `pieces.take_out`, against a cache.

    Args:
        key: of the piece, which the file has in place of a model's fingerprint.
        tokens: the text up to the end of the piece.
        first: the piece's first column.
        with_state: whether it has the recurrent state at its end.

    Raises:
        WrongModelError, WrongShapeError: it is another piece.
        CorruptFileError: it contradicts itself.
    """
    size, end = config.page_size, -(-tokens.size // config.page_size)
    try:
        got = _text_size(header, config, key, name)
        _require(got == (tokens.size, size), f"expected {tokens.size} tokens, got {got}")
        groups = range(len(config.groups))
        statics = [_statics(tensors, storage, group) for group in groups]
        pages = [_stored(tensors, storage, config, g, tokens.size, size) for g in groups]
        for group, found in zip(config.groups, pages):
            at, wanted = columns_of(found), np.arange(first, end)
            whole = group.window is not None or at.size == wanted.size
            good = np.isin(at, wanted).all() and whole
            _require(bool(good), f"positions: expected pages {wanted}, got {at}")
        states = _state(tensors, config, with_state)
    except PagedKVError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptFileError(f"{name}: contradicts itself: {error!s:.300}") from error
    return Saved(tokens, np.empty(0, np.int32), pages, statics, states, first)


def _change(name: str, size: int, config: CacheConfig) -> str:
    return f"{name}: pages of {size} cannot become pages of {config.page_size}"


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def _text_size(
    header: dict[str, Any], config: CacheConfig, fingerprint: bytes, name: str, what: str = ""
) -> tuple[int, int]:
    """Tokens of the text and of a page, if it is a text of this cache's model.

    Args:
        what: what is known of the file's fingerprint where it is another one.
    """
    if header["model"] != fingerprint.hex():
        raise WrongModelError(
            f"{name}: expected K and V of the model {fingerprint.hex() or '(unnamed)'}, "
            f"got those of {header['model'] or '(unnamed)'!s:.200}{what}"
        )
    for what, ours in shape_of(config).items():
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


def _state(tensors: dict[str, Tensor], config: CacheConfig, expected: bool) -> list[Tensor]:
    """The tensors of all state layers, in order; there are none where none is expected."""
    found, layouts = state.found(tensors), state.layouts(config) if expected else {}
    _require_layout(found, layouts)
    return [found[name] for name in layouts]


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
    columns = columns_of(found)
    _require(bool((np.diff(columns) > 0).all()), "positions: pages occur twice")
    _require(not columns.size or 0 <= columns[0] <= columns[-1] < end, "positions: strays")
    _require(not length % size or end - 1 in columns, "positions: the last page is missing")
    return found


def columns_of(pages: ByKind) -> Ints:
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
    window, ours, columns = config.groups[group].window, config.page_size, columns_of(pages)
    end = -(-length // size)
    change = _change(name, size, config)
    if window is None and columns.size < end:
        if config.policy is None:
            raise WrongShapeError(
                f"{name}: has {columns.size} of the {end} pages of its text; a cache needs "
                "`retention` to hold such a text"
            )
        if ours != size:
            raise WrongShapeError(f"{change}: some of the text was evicted")
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
        raise WrongShapeError(f"{change}: the stored tokens begin at {begin}, inside a page")
    ((kind, (_, parts)),) = pages.items()
    parts = storage.repage(parts, first * ours - begin, length - first * ours, ours)
    return {kind: (np.arange(first, -(-length // ours)), parts)}


def _from(first: int, columns: Ints, parts: Parts) -> tuple[Ints, Parts]:
    """Pages from a column on."""
    kept = columns >= first
    return columns[kept], {name: x[:, torch.from_numpy(kept)] for name, x in parts.items()}


def shape_of(config: CacheConfig) -> dict[str, Any]:
    """Returns what caches that hold the same bytes have in common, as JSON gives it back."""
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
    said: list[Any] = [list(group.layers), group.window]
    if group.chunked:
        said[1] = f"chunks of {group.window}"
    plain = (config.num_kv_heads, config.head_dim, config.head_dim, False)
    return said if shape == plain else [*said, list(shape)]
