"""Functions that change ownership between steps: add, fork, truncate, free.

A call that raises has changed nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.errors import OutOfPagesError, SequenceTooLongError, TooManySequencesError

from .matches import Prompt, affordable, at_state, state_key
from .out_of_pages import out_of_pages
from .prefix import Match
from .salts import Salt
from .tables import PageTables


def add(
    tables: PageTables,
    tokens: Tokens | None = None,
    *,
    salt: Salt = b"",
    max_tokens: int | None = None,
) -> int:
    """Starts a sequence, on the pages of the longest findable prefix of `tokens`."""
    chain = tables.index.chain(salt)
    match = nothing = Match(0, [], np.empty((len(tables.windows), 0), dtype=np.int64))
    size = 0 if tokens is None else tokens.size
    if tokens is not None and not size:
        raise ValueError("tokens: expected at least one id, got none")
    require_fits(tables, size, max_tokens)
    if not tables.free_rows:
        raise TooManySequencesError(
            f"max_sequences: all {tables.max_sequences} are in use; free one or allow more"
        )
    if tokens is not None and size > 1:
        # The last token is always computed, because the caller needs its logits.
        match = tables.index.match(chain, tokens[:-1], tables.pool.filled)
    limit = limit_of(tables, max_tokens, size)
    promise = max_tokens is not None
    if tables.states is not None and promise:
        tables.states.require_slot("add")
    prompt = chain, tokens
    match, owners = affordable(tables, at_state(tables, match, prompt), limit, prompt)
    row = tables.free_rows[-1]
    if tables.states is not None and not _begin_state(tables, row, match, prompt, promise):
        # No slot is free to go on from a state that other rows or a checkpoint have, too.
        match, owners = affordable(tables, nothing, limit, prompt)
        _begin_state(tables, row, match, prompt, promise)

    tables.free_rows.pop()
    columns = match.pages.shape[1]
    if columns:
        for pages in match.pages:
            tables.pool.share(pages[pages >= 0])
        tables.set_table(row, match.pages)
    if tables.staged:
        tables.num_coded[row] = tables.coded_of(match.length)
    tables.lengths[row] = match.length
    tables.ids_known[row] = True
    tables.prefix_keys[row] = [chain.root, *match.keys]
    if chain.mixed:
        tables.mixed[row] = chain.mixed
    tables.check_tail[row] = match.length < columns * tables.page_size
    tables.check_tail[owners] = True
    tables.reservations.share_tail(owners)
    if limit:
        tables.lasting[row] = lasting_of(tables, max_tokens or 0)
        tables.reservations.start(row, limit, bool(tables.check_tail[row]))
    if tokens is not None:
        tables.pending[row] = tokens[match.length :].copy()
    tables.tokens_reused += match.length
    return tables.name(np.asarray([row]))[0]


def stored_prefix(tables: PageTables, tokens: Tokens, salt: Salt) -> tuple[int, int]:
    """Counts tokens of a prompt with findable pages, and those of them that `add` would find."""
    prompt = tables.index.chain(salt), tokens
    match = tables.index.match(prompt[0], tokens[:-1], tables.pool.filled)
    return match.length, at_state(tables, match, prompt).length


def kept_state(tables: PageTables, tokens: Tokens, salt: Salt) -> tuple[Ints, int] | None:
    """Returns a text's pages, `[groups, n]`, and its checkpoint's slot; None without one."""
    assert tables.states is not None, "the caller asks only where there are states"
    prompt = tables.index.chain(salt), tokens
    match = tables.index.match(prompt[0], tokens, tables.pool.filled)
    key = None if match.length < tokens.size else state_key(tables, match, prompt)
    slot = tables.states.checkpoints.slots.get(key) if key else None
    return None if slot is None else (match.pages, slot)


def limit_of(tables: PageTables, max_tokens: int | None, size: int) -> int:
    """Returns the pages that a reservation of `max_tokens` sets aside for `size` tokens."""
    if max_tokens is None:
        return 0
    limit = -(-max_tokens // tables.page_size) - tables.staged
    if tables.kept is not None:  # pages that are evicted on the way need no reservation
        limit = min(limit, max(lasting_of(tables, max_tokens), -(-size // tables.page_size)))
    return limit


def lasting_of(tables: PageTables, max_tokens: int) -> int:
    """Returns how many pages a text needs at most after its prompt, with the one being written."""
    whole = max_tokens // tables.page_size
    return 1 + (whole if tables.kept is None else min(whole, int(tables.kept.pages(whole))))


def require_fits(tables: PageTables, size: int, max_tokens: int | None) -> None:
    """Raises unless a text of `size` tokens can grow to `max_tokens` here."""
    if max_tokens is not None and max_tokens < max(size, 1):
        raise ValueError(f"max_tokens: expected at least the text's {size}, got {max_tokens}")
    longest = max(size, max_tokens or 0)
    if longest > tables.max_length:
        what = "tokens" if longest == size else "max_tokens"
        raise SequenceTooLongError(
            f"{what}: a sequence can have {tables.max_length} tokens in this cache, "
            f"got {longest}; this can never fit"
        )


def fork(tables: PageTables, seq: int, n: int = 1) -> list[int]:
    """Starts n sequences on all pages of `seq`."""
    source = tables.row_of(seq)
    tables.require_here([source])
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"n: expected an int, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n: expected at least 1, got {n}")
    if len(tables.free_rows) < n:
        raise TooManySequencesError(
            f"max_sequences: {n} forks were asked for, {len(tables.free_rows)} of "
            f"{tables.max_sequences} rows are free"
        )
    columns = int(tables.num_pages[source])
    partial = bool(tables.lengths[source] < columns * tables.page_size)
    forks = tables.free_rows[: -n - 1 : -1]
    rows = np.asarray(forks)
    if tables.states is not None and not tables.states.share(source, forks):
        raise tables.states.out_of_slots("fork of a reserved sequence", 1, tables.states.room())
    if partial and tables.reservations.limit[source] and not tables.staged:
        try:
            _reserve_extra(tables, source)
        except OutOfPagesError:
            if tables.states is not None:
                tables.states.release(rows)
            raise
    tables.check_tail[source] |= partial
    del tables.free_rows[-n:]
    pages = tables.tables[:, source, :columns]  # -1 at the end if pages were evicted
    tables.pool.add_owners(pages, n)
    tables.tables[:, rows, :columns] = pages[:, None]
    most = columns - int(tables.evicted[:, source].min()) if tables.compacted else columns
    tables.changed.mark(slice(None), rows[:, None], np.arange(most))
    tables.num_pages[rows] = columns
    tables.num_coded[rows] = tables.num_coded[source]
    tables.first_kept[:, rows] = tables.first_kept[:, source, None]
    tables.evicted[:, rows] = tables.evicted[:, source, None]
    tables.evicted_coded[:, rows] = tables.evicted_coded[:, source, None]
    tables.lengths[rows] = tables.lengths[source]
    tables.ids_known[rows] = tables.ids_known[source]
    tables.check_tail[rows] = tables.check_tail[source]
    for row in forks:
        tables.prefix_keys[row] = tables.prefix_keys[source].copy()
        if source in tables.mixed:
            tables.mixed[row] = tables.mixed[source]
        if source in tables.pending:
            tables.pending[row] = tables.pending[source]
        if source in tables.models:
            tables.models[row] = tables.models[source]
    tables.tokens_reused += n * int(tables.lengths[source])
    return tables.name(rows)


def _reserve_extra(tables: PageTables, row: int) -> None:
    """Sets a page aside for a reserved sequence whose tail is about to be shared."""
    rows = np.asarray([row])
    short = tables.reservations.missing_extra(rows) - tables.reservations.available()
    short[~tables.reservations.binding] = 0
    if short.max() > 0 and not tables.grow(short):
        group = int(short.argmax())
        raise out_of_pages(tables, "fork of a reserved sequence", group, 1, 0)
    tables.reservations.share_tail(rows)


def require_truncatable(tables: PageTables, seq: int, length: int) -> int:
    """Returns a sequence's row; raises if it cannot be shortened to `length` tokens."""
    row = tables.row_of(seq)
    tables.require_here([row])
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
        raise TypeError(f"n: expected an int, got {type(length).__name__}")
    held, named = tables.lengths[row], f"sequence {seq}"
    if not 0 <= length <= held:
        raise ValueError(f"n: expected 0..{held}, {named} has {held} computed tokens, got {length}")
    for first, window in zip(tables.first_kept[:, row], tables.windows):
        if window is not None and 0 < length < held:
            needed = max(0, length - window)
            if first > needed // tables.page_size:
                raise ValueError(
                    f"n: {length} tokens of {named} need positions from {needed}, its window of "
                    f"{window} has dropped those before {first * tables.page_size}; set "
                    "`rollback` to keep more"
                )
    if 0 < length < held and length < (kept_from := _intact_from(tables, row)):
        raise ValueError(
            f"n: expected {kept_from}..{held} or 0 for {named}, got {length}: "
            "some of the earlier tokens were evicted"
        )
    if tables.states is not None and 0 < length < held:
        kept = tables.states.checkpoints.lengths(row)
        if length not in kept:
            raise ValueError(
                f"n: expected 0, {held} or a length of {named} with a checkpoint "
                f"({', '.join(map(str, kept)) or 'there is none'}), got {length}: recurrent states "
                "cannot be taken back otherwise; `checkpoint` keeps one"
            )
        tables.states.require_way_back(row, length)
    return row


def _intact_from(tables: PageTables, row: int) -> int:
    """Returns the position behind the last evicted token."""
    columns = int(tables.num_pages[row])
    ends = [0]
    for group in np.flatnonzero(tables.evicted[:, row]).tolist():
        pages = tables.tables[group, row, : columns - int(tables.evicted[group, row])]
        held = np.zeros(columns, dtype=bool)
        held[tables.column_of[pages]] = True
        ends.append(int(np.flatnonzero(~held)[-1]) + 1)
    return max(ends) * tables.page_size


def truncate(tables: PageTables, seq: int, length: int) -> None:
    """Shortens a sequence to `length` tokens, dropping its references to later pages."""
    row = require_truncatable(tables, seq, length)
    if length == tables.lengths[row]:
        return
    columns = -(-length // tables.page_size)
    most = int(tables.num_pages[row] - tables.evicted[:, row].min())
    if tables.states is not None:
        tables.states.go_back(row, length)
    if length == 0:
        tables.evicted[:, row] = tables.evicted_coded[:, row] = 0
    where = tables.at(row, np.arange(columns, int(tables.num_pages[row]) if columns else most))
    dropped = tables.tables[where]
    tables.tables[where] = -1
    # Pages that other sequences own, or that a window dropped before, do not become free now.
    windowed = np.asarray([window is not None for window in tables.windows])[:, None]
    absent = (tables.pool.refcount[dropped] > 1) | ((dropped < 0) & windowed)
    absent &= dropped < tables.first_staging[:, None]
    lost = int(absent[tables.reservations.binding[:: tables.kinds]].sum(1).max(initial=0))
    tables.pool.drop(dropped[:, ::-1].reshape(-1))
    tables.num_pages[row] = columns
    if tables.staged:
        tables.num_coded[row] = tables.coded_of(length)
    tables.first_kept[:, row] = np.minimum(tables.first_kept[:, row], columns)
    tables.lengths[row] = length
    del tables.prefix_keys[row][length // tables.page_size + 1 :]
    tables.pending.pop(row, None)
    tables.check_tail[row] = True
    tail = tables.tables[tables.at(row, np.arange(max(0, columns - 1), columns))]
    offset = length % tables.page_size
    shared = bool(offset and (tables.pool.refcount[tail] > 1).any())
    tables.reservations.shorten(row, lost, shared)
    if offset and tables.reservations.limit[row] and not tables.staged:
        # If a prompt found tokens behind the end, the next write would need a page more to copy.
        for group, page in enumerate(tail[:, 0].tolist()):
            if tables.pool.refcount[page] == 1 and tables.pool.filled[page] > offset:
                tables.forget_behind(group, page, offset)


def free(tables: PageTables, seqs: Any) -> None:
    """Ends sequences; their committed prefixes stay findable until the pages are reused."""
    rows = tables.rows_of(seqs)
    columns = tables.num_pages[rows]  # more than held if pages were evicted
    most = min(int(columns.max()), tables.tables.shape[2])
    last = np.arange(most - 1, -1, -1)  # the end of a text is reused first
    pages = np.where(last < columns[:, None], tables.tables[:, rows[:, None], last], -1)
    tables.pool.drop(pages.reshape(-1))
    tables.tables[:, rows, :most] = -1
    for row in rows.tolist():
        tables.pending.pop(row, None)
        tables.models.pop(row, None)
        tables.mixed.pop(row, None)
        tables.prefix_keys[row] = []
        tables.free_rows.append(row)
    if tables.states is not None:
        tables.states.release(rows)
    tables.lengths[rows] = 0
    tables.reset(rows)
    tables.seqs[rows] = -1
    if tables.changed.many:
        tables.changed.forget_ended(tables.seqs >= 0, tables.num_pages - tables.evicted.min(0))


def clear_prefixes(tables: PageTables) -> None:
    """Forgets every findable prefix; live sequences are never published again."""
    tables.index.clear()
    if tables.states is not None:
        tables.states.clear()
    tables.pool.release_cached()
    tables.ids_known[tables.live_rows()] = False


def _begin_state(tables: PageTables, row: int, match: Match, prompt: Prompt, promise: bool) -> bool:
    """Starts a new row on the state at the end of its match; whether there was a slot for it."""
    assert tables.states is not None, "the caller asks only where there are states"
    key = state_key(tables, match, prompt)
    return tables.states.begin(row, match.length, key, promise)
