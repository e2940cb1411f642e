"""Token ids as callers give them, in and out of packed int32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.config.checks import require_int
from pagedkv.errors import SequenceTooLongError

from .plan import PagePlan
from .pool import within
from .prefix import UNKNOWN_TOKEN
from .tables import PageTables


def as_ids(name: str, tokens: Any) -> Tokens:
    """Checks token ids and returns them as int32, `[n]`."""
    ids = np.asarray(tokens)
    if ids.size == 0 and ids.dtype.kind == "f":  # an empty list has no integer type
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        came = type(tokens).__name__ if ids.ndim == 0 else ids.dtype
        raise TypeError(f"{name}: expected integer ids, got {came}")
    if ids.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {ids.shape}")
    if ids.size and (ids.min() < 0 or (ids.itemsize > 4 and ids.max() > 2**31 - 1)):
        raise ValueError(f"{name}: expected ids in 0..2**31 - 1, got {ids.min()}..{ids.max()}")
    packed = ids.astype(np.int32)
    if ids.dtype == np.uint32 and (packed < 0).any():
        raise ValueError(f"{name}: expected ids in 0..2**31 - 1, got {ids.max()}")
    return packed


def pack(name: str, tokens: Any, batch: int, may_be_empty: bool = False) -> tuple[Tokens, Ints]:
    """Returns ids of several sequences, packed, and how many each has."""
    if not _has_lists(name, tokens):
        flat = np.asarray(tokens)
        if flat.ndim == 0 or flat.shape[0] != batch or flat.ndim > 2:
            raise ValueError(
                f"{name}: expected ids of {batch} sequences, got shape {list(flat.shape)}"
            )
        each = 1 if flat.ndim == 1 else flat.shape[1]
        parts, new = as_ids(name, flat.reshape(-1)), np.full(batch, each, dtype=np.int64)
    else:
        if len(tokens) != batch:
            raise ValueError(f"{name}: expected ids of {batch} sequences, got {len(tokens)}")
        if all(_is_plain(part) for part in tokens):
            lists, parts = tokens, as_ids(name, np.concatenate(tokens))  # checked at once
        else:
            lists = [as_ids(name, part) for part in tokens]
            parts = np.concatenate(lists)
        new = np.asarray([part.size for part in lists])
    if not may_be_empty and not new.all():
        raise ValueError(f"{name}: expected at least one id for every sequence, got none")
    return parts, new


def _is_plain(part: Any) -> bool:
    return type(part) is np.ndarray and part.ndim == 1 and part.dtype.kind == "i"


def _has_lists(name: str, given: Any) -> bool:
    """Whether what is given for the sequences of a step has a list for each, not one number."""
    if hasattr(given, "dtype"):
        return False
    if not hasattr(given, "__len__"):
        raise TypeError(f"{name}: expected a list, got {type(given).__name__}")
    return any(map(_has_length, given))


def _has_length(item: Any) -> bool:
    return getattr(item, "ndim", 1) > 0 and hasattr(item, "__len__")


def _first_of_each(count: Ints, kept: Ints) -> Ints:
    """Returns indices of every sequence's first `kept[b]` of its `count[b]` packed items."""
    return np.repeat(np.cumsum(count) - count, kept) + within(kept)


def feed(
    tables: PageTables, rows: Ints, tokens: Any, num_new: Any, most: int
) -> tuple[Tokens | None, Ints]:
    """Returns the new ids of a step, packed, and how many each row gets.

    Without `tokens`, rows with an uncached prompt take their ids from it; the ids of other rows
    are -1. If no row has an uncached prompt, the ids are None.

    Args:
        most: how many tokens one step may add.
    """
    pending = tables.pending
    if tokens is not None:
        if num_new is not None:
            raise ValueError("num_new: expected None when tokens are given as ids")
        ids, new = pack("tokens", tokens, rows.size)
        if pending:
            _require_prompts(tables, rows, ids, new)
        return ids, new
    if num_new is None:
        nothing = np.empty(0, dtype=np.int32)
        parts = [pending.get(row, nothing) for row in rows.tolist()]
        new = np.asarray([part.size for part in parts])
        if not new.all():
            seq = tables.seqs[rows[int(new.argmin())]]
            raise ValueError(f"tokens: sequence {seq} has no uncached ids, pass its new ones")
        return np.concatenate(parts), new
    new = np.asarray(num_new)
    if new.dtype.kind not in "iu":
        raise TypeError(f"num_new: expected integers, got {new.dtype}")
    if new.shape not in ((), (rows.size,)):
        raise ValueError(f"num_new: expected one count or {rows.size}, got shape {new.shape}")
    new = np.broadcast_to(new, rows.size).astype(np.int64)
    if new.min() < 1:
        raise ValueError(f"num_new: expected at least 1 for every sequence, got {new.min()}")
    if not pending:
        return None, new
    require_short(tables, rows, tables.lengths[rows] + new, new, most)  # before the ids are made
    parts = []
    for row, count in zip(rows.tolist(), new.tolist()):
        left = pending.get(row)
        if left is None:
            parts.append(np.full(count, UNKNOWN_TOKEN, dtype=np.int32))
        elif count > left.size:
            raise ValueError(
                f"num_new: sequence {tables.seqs[row]} has {left.size} uncached ids, got {count}"
            )
        else:
            parts.append(left[:count])
    ids = np.concatenate(parts)
    return (None if (ids == UNKNOWN_TOKEN).all() else ids), new


def require_short(tables: PageTables, rows: Ints, end: Ints, new: Ints, most: int) -> int:
    """Returns how many tokens a step has; raises if it or one of its sequences becomes too long.

    Args:
        end: `[B]`, committed and new tokens of each row.
        most: how many tokens one step may add.

    Raises:
        SequenceTooLongError: the step or a sequence would be longer than this cache allows.
    """
    unsigned = end.view(np.uint64)  # a sum that overflowed is large, too
    if unsigned.max() > tables.max_length:
        i = int(unsigned.argmax())
        raise SequenceTooLongError(
            f"sequence {tables.seqs[rows[i]]} would have {unsigned[i]} tokens, this cache allows "
            f"{tables.max_length}; this can never fit"
        )
    total = int(new.sum())
    if total > most:
        raise SequenceTooLongError(
            f"max_step_tokens: a step can add {most} tokens, got {total}; feed the prompts in "
            "chunks (generate: prefill_chunk_size) or configure a larger step"
        )
    return total


def _require_prompts(tables: PageTables, rows: Ints, ids: Tokens, new: Ints) -> None:
    """Raises ValueError if a row with an uncached prompt gets ids that do not continue it."""
    stops = np.cumsum(new).tolist()
    for row, stop, count in zip(rows.tolist(), stops, new.tolist()):
        left = tables.pending.get(row)
        if left is None:
            continue
        given, left = ids[stop - count : stop], left[:count]
        if given[: left.size].tobytes() != left.tobytes():
            at = int((given[: left.size] != left).argmax())
            raise ValueError(
                f"tokens: sequence {tables.seqs[row]} must finish its prompt first (`uncached` "
                f"lists the ids): expected {left[at]} at {at}, got {given[at]}"
            )


def as_accepted(accepted: Any, new: Ints) -> tuple[Ints, Ints | None]:
    """Checks and returns how many of its new tokens each sequence keeps, `[B]`, and which.

    Args:
        accepted: counts, or lists of places among the new tokens of each sequence.

    Returns:
        The counts, and the places of all kept tokens; None if each sequence keeps its first ones.
    """
    if _has_lists("accepted", accepted):
        return _as_paths(accepted, new)
    kept = np.asarray(accepted)
    if kept.dtype.kind not in "iu":
        raise TypeError(f"accepted: expected integers, got {kept.dtype}")
    if kept.shape != new.shape or (kept < 0).any() or (kept > new).any():
        raise ValueError(
            f"accepted: expected 0 <= accepted <= new = {new.tolist()}, got {kept.tolist()}"
        )
    return kept.astype(np.int64), None


def _as_paths(accepted: Any, new: Ints) -> tuple[Ints, Ints | None]:
    ids, count = pack("accepted", accepted, new.size, may_be_empty=True)
    kept, places = count.astype(np.int64), ids.astype(np.int64)
    firsts = within(kept)
    rises = (np.diff(places, prepend=0) > 0) | (firsts == 0)
    if not rises.all() or (places >= np.repeat(new, kept)).any():
        raise ValueError(
            f"accepted: expected rising places below new = {new.tolist()}, got "
            f"{[list(path) for path in accepted]}"
        )
    return kept, None if np.array_equal(places, firsts) else places


def require_whole(plan: PagePlan, kept: Ints | None) -> None:
    """Raises ValueError if a sequence keeps some of its new tokens but not all."""
    if kept is not None and ((kept > 0) & (kept < plan.new)).any():
        raise ValueError(
            f"accepted: expected 0 or all of {plan.new.tolist()} for each sequence, got "
            f"{kept.tolist()}: the recurrent state after fewer tokens is not known"
        )


def committed_ids(
    plan: PagePlan, kept: Ints | None, tokens: Any, places: Ints | None = None
) -> Tokens | None:
    """Returns the ids of the tokens that a step keeps, packed; None if none is known.

    Args:
        kept: how many tokens each sequence keeps; None for all.
        tokens: the argument of `commit`, or None.
        places: places of the kept tokens among their sequence's new ones; None for the first ones.
    """
    if places is not None and kept is not None:
        if tokens is not None:
            raise ValueError("tokens: expected None with places, of ids given at prepare")
        begins = np.repeat(np.cumsum(plan.new) - plan.new, kept)
        return None if plan.tokens is None else plan.tokens[begins + places]
    wanted = plan.new if kept is None else kept
    if tokens is None:
        if plan.tokens is None or kept is None:
            return plan.tokens
        return plan.tokens[_first_of_each(plan.new, kept)]
    ids, count = pack("tokens", tokens, plan.rows.size, may_be_empty=True)
    if (count < wanted).any():
        raise ValueError(f"tokens: expected at least {wanted.tolist()} ids, got {count.tolist()}")
    ids = ids[_first_of_each(count, wanted)]
    if plan.tokens is not None:
        before = plan.tokens[_first_of_each(plan.new, wanted)]
        if ((before != ids) & (before != UNKNOWN_TOKEN)).any():
            raise ValueError("tokens: expected the ids given at prepare, got others")
    return ids


def as_max_tokens(max_tokens: Any) -> int:
    """Checks the argument `max_tokens` and returns it as an int."""
    require_int("max_tokens", max_tokens)
    return index(max_tokens)


def several(seqs: int | Sequence[int] | Ints) -> Any:
    """One sequence id as a list of one; several stay as they are."""
    return np.atleast_1d(seqs) if np.ndim(seqs) == 0 else seqs
