"""Trees of drafts: which new tokens of its row a query sees, and its position in the text."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
from torch import Tensor

from pagedkv.kernels.scoring import FARTHEST
from pagedkv.kernels.sending import sent
from pagedkv.step.metadata import StepMetadata

from .checks import require_step

_WORD = 2**64 - 1


def tree_of(step: StepMetadata, parents: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns bits for attention, and positions, if the new tokens of a step are a tree.

    A token's slot follows from its place in the step, and its position from how many tokens it
    follows. `commit(step, accepted=...)` takes the places of the tokens to keep.

    Args:
        parents: for each sequence and each of its new tokens, the place of the new token that it
            follows, which is lower than its own place, or -1 if it follows the committed text.

    Returns:
        `[T]` int64 for `paged_attention(tree=)`, and `[T]` int64 positions in place of
        `step.positions`.

    Raises:
        ValueError: the counts differ from the step's, a parent does not come before its token, or
            more than 63 new tokens branch.

    Examples:
        >>> import torch
        >>> from pagedkv import CacheConfig, PagedKVCache, paged_attention, tree_of
        >>> config = CacheConfig(1, num_kv_heads=2, head_dim=16, dtype="float32", max_tokens=64)
        >>> cache = PagedKVCache(config, device="cpu")
        >>> q, k, v = torch.randn(4, 8, 16).split([4, 2, 2], dim=1)
        >>> step = cache.prepare([seq := cache.add()], tokens=[[5, 7, 8, 9]])
        >>> tree, positions = tree_of(step, [[-1, 0, 0, 2]])  # 5, then 7, or 8 and 9
        >>> positions.tolist()
        [0, 1, 1, 2]
        >>> out = paged_attention(q, k, v, step, layer=0, tree=tree)
        >>> cache.commit(step, accepted=[[0, 2, 3]])
        >>> cache.length(seq)
        3
    """
    require_step(step)
    try:
        rows = [list(map(index, row)) for row in parents]
    except TypeError:
        raise TypeError(f"parents: expected integers for each row, got {parents!r}") from None
    counts = [len(row) for row in rows]
    if counts != step.num_new.tolist():
        raise ValueError(f"parents: expected {step.num_new.tolist()} for the rows, got {counts}")
    told: list[tuple[int, int]] = []  # each token's bits and count of non-ancestors
    for row in rows:
        if len(row) > FARTHEST and any(parent != i - 1 for i, parent in enumerate(row)):
            raise ValueError(f"parents: expected at most {FARTHEST} that branch, got {len(row)}")
        bits, depths = [-1], [-1]  # the first entry is for the text, which is seen whole
        for place, parent in enumerate(row):
            if not -1 <= parent < place:
                raise ValueError(f"parents: expected -1 to {place - 1} at {place}, got {parent}")
            bits.append(bits[parent + 1] << (place - parent) | 1)
            depths.append(depths[parent + 1] + 1)
            told.append((bits[-1], place - depths[-1]))
    words = np.array([(bits & _WORD) - _WORD - 1 for bits, _ in told])
    behind = np.array([behind for _, behind in told])
    device = step.positions.device
    return sent(words, device), step.positions - sent(behind, device)
