"""Cuts a job into shards of about equal work, with each prefix in as few shards as possible.

In the order of their token ids, prompts that share a prefix stand together, and a prompt shares as
much with the one just before as with any earlier one. So a shard is a stretch of that order, and a
cut costs the tokens shared across it, which the second shard has to compute again.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from pagedkv.arrays import Ints

SLACK = 0.05  # a shard may exceed the least possible size by this, for a cheaper cut


def split_by_prefix(
    prompts: Sequence[Sequence[int]], n: int, new_tokens: int | Sequence[int] = 0
) -> list[list[int]]:
    """Cuts a job into shards that share no more prefixes than they must.

    The shards follow from the arguments alone, so every process gets the same. For texts and chats,
    give the ids that the tokenizer or the chat template makes of them.

    Args:
        prompts: token ids of every prompt.
        n: how many shards.
        new_tokens: tokens that each prompt is going to get, or one number for all; the sum, for
            several samples.

    Returns:
        The indices of the prompts of each shard, in an order in which prefixes stand together. With
        fewer prompts than shards, some shards are empty.

    Raises:
        ValueError, TypeError: an argument is not as described; the message names it.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n: expected a number of shards from 1 on, got {n!r}")
    keys = [_packed(ids, index) for index, ids in enumerate(prompts)]
    new = _counts(new_tokens, len(keys))
    return [shard.tolist() for shard in shards_of(keys, n, new)]


def _counts(new_tokens: int | Sequence[int], rows: int) -> Ints:
    with suppress(ValueError):  # sequences of unlike lengths
        new = np.asarray(new_tokens)
        counts = new.size == 0 or (new.dtype.kind in "iu" and 0 <= new.min() <= new.max() < 2**32)
        if counts and new.shape in ((), (rows,)):
            return new
    raise ValueError(
        f"new_tokens: expected a count below 2**32, or {rows} of them, got {new_tokens!r:.80}"
    )


def _packed(ids: Sequence[int], index: int) -> bytes:
    if isinstance(ids, (str, bytes, dict)):
        raise TypeError(
            f"prompts: expected token ids, got {type(ids).__name__} as prompt {index}; "
            "tokenizer(prompts)['input_ids'] makes them of texts"
        )
    try:
        return packed(ids)
    except (struct.error, TypeError) as error:
        raise TypeError(
            "prompts: expected token ids, integers from 0 on and below 2**32, "
            f"got {ids!r:.80} as prompt {index}"
        ) from error


def packed(ids: Sequence[int]) -> bytes:
    """Packs token ids into bytes that sort like the ids, a tenth of the size of a list."""
    return struct.pack(f">{len(ids)}I", *ids)


def shards_of(keys: Sequence[bytes], n: int, new_tokens: Ints | Sequence[int]) -> list[Ints]:
    """Returns the indices of each shard's prompts, for prompts that are `packed`."""
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    shared = shared_before([keys[i] for i in order])
    lengths = np.fromiter((len(key) // 4 for key in keys), np.int64, len(keys))[order]
    new = np.broadcast_to(np.asarray(new_tokens, np.int64), len(keys))[order]
    return np.split(order, _cuts(lengths + new, shared, n))


def shared_before(keys: Sequence[bytes]) -> Ints:
    """Counts the tokens of each prompt that earlier ones have computed, for prompts in order."""
    shared = np.zeros(len(keys), dtype=np.int64)
    for i, (before, key) in enumerate(pairwise(keys), start=1):
        size = min(len(before), len(key) - 4)  # the last token is always computed, for its logits
        if before[:size] != key[:size]:
            x, y = (np.frombuffer(each, np.uint32, size // 4) for each in (before, key))
            shared[i] = (x != y).argmax()
        else:
            shared[i] = max(0, size // 4)
    return shared


def own_tokens(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Counts the tokens of each prompt that are computed for it, if all shared ones are shared."""
    keys = [packed(ids) for ids in prompts]
    order = sorted(filter(keys.__getitem__, range(len(keys))), key=keys.__getitem__)
    own = [0] * len(keys)
    for i, shared in zip(order, shared_before([keys[i] for i in order]).tolist()):
        own[i] = len(prompts[i]) - shared
    return own


def _cuts(whole: Ints, shared: Ints, n: int) -> list[int]:
    """Returns where shards 1 to n - 1 begin.

    First it finds the least size that the largest shard can have. Then it makes each cut where the
    least is shared across it, so that no shard exceeds that size by more than `SLACK`.

    Args:
        whole: the work of each prompt if it is computed alone.
        shared: how much of this work the prompt before has done.
    """
    rows = len(whole)
    # The work of prompts a to b - 1 in one shard is ends[b] - begins[a]. Without a it is never
    # more, for a shares no more with the next than its own work; so both rise, and bisection works.
    ends = np.concatenate([[0], np.cumsum(whole - shared)]).tolist()
    begins = [end - each for end, each in zip(ends, shared.tolist())]

    def last(begin: int, size: int) -> int:
        """Returns where a shard that begins here ends at the latest."""
        return rows if begin >= rows else bisect_right(ends, begins[begin] + size) - 1

    def fits(size: int) -> bool:
        end = 0
        for _ in range(n):
            end = last(end, size)
        return end == rows

    def firsts(size: int) -> list[int]:
        """Returns where shards begin at the earliest, if all behind have to fit."""
        found = [rows]
        for _ in range(n - 1):
            found.append(bisect_left(begins, ends[found[-1]] - size, 0, found[-1]))
        return found[::-1]

    least = max(-(-ends[-1] // n), int(whole.max(initial=0)))
    least += bisect_left(range(ends[-1] - least), True, key=lambda more: fits(least + more))
    most = least + int(least * SLACK)
    cost = np.append(shared, 0)
    cuts, begin = [], 0
    for tight, loose in zip(firsts(least), firsts(most)[: n - 1]):
        even = (max(begin, tight) + last(begin, least) + 1) // 2
        first, end = min(max(begin + 1, loose), rows), last(begin, most) + 1
        cheapest = first + np.flatnonzero(cost[first:end] == cost[first:end].min())
        begin = int(cheapest[abs(cheapest - even).argmin()])
        cuts.append(begin)
    return cuts
