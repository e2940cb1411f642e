"""A layer's call, described to C once a step for all layers of its kind.

The first layer's call is described in full; for later layers only addresses change. A call whose
tensors have another layout than the first one's is not served here. Pages are dense.
"""

from __future__ import annotations

from ctypes import byref, c_int64

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.like import Like
from pagedkv.kernels.prefixes import Ints
from pagedkv.kernels.scoring import Scoring

from .backend import call_of
from .library import library
from .page_coding import Write, of_step

New = tuple[Tensor, Tensor, Tensor]  # q, k and v of a step's new tokens
Pair = tuple[Tensor, Tensor]  # K and V pages of a layer


class Bound:
    """The call of a kind of layers in one step.

    Args:
        new, pages: the first layer's; `new` as `binds` requires.
        slots: slots of the new tokens.
        rows: the page table, new tokens of each row, and its length.
        scoring: the checked terms of its scores, without tensors.
    """

    def __init__(
        self,
        new: New,
        pages: Pair,
        slots: Tensor,
        rows: tuple[Tensor, Ints, Ints],
        scoring: Scoring,
    ) -> None:
        (q, k, v), self._scoring = new, scoring
        self._like = [Like.of(x) for x in new]
        self._shape, self._dtype = (*q.shape[:2], pages[1].shape[3]), q.dtype
        self._call = call_of(q, pages, *rows, scoring, (q, None))
        self._v_is_k = bool(self._call.v_is_k)
        halves = ((k, pages[0]), (v, pages[1]))[: 1 if self._v_is_k else 2]
        described = [of_step(x, Pages.of(into), None, slots, whole=False) for x, into in halves]
        # Keeps the tensors that layers share; the first layer's q, k and v may be freed.
        tensors, *host = self._call.kept
        self._call.kept = tensors[3:], host
        self._kept, count = [write.kept[1:] for write in described], len(described)
        writes = (Write * count)(*described)
        self._writes = [(write, write.pages) for write in writes]
        self._pages = self._call.k, self._call.v
        self._bytes = [x.nbytes for x in pages]
        self._arguments = writes, c_int64(count), byref(self._call)

    def __call__(self, new: New, pages: Pair, scoring: Scoring) -> Tensor | None:
        """Writes and attends, without a log-sum-exp.

        Args:
            pages: pages of a layer of the same group; only their addresses may differ from the
                first layer's.
            scoring: the caller's terms.

        Returns:
            The output; None if nothing was done and the call has to go the ordinary way.
        """
        mine, call = self._scoring, self._call
        same = scoring.scale.__class__ is float and scoring.scale == mine.scale
        none = scoring.sinks is scoring.alibi_slopes is scoring.distance_bias is None
        if not (same and none) or scoring.softcap is not mine.softcap:
            return None
        if scoring.tree is not mine.tree:
            return None
        if not all(like.fits(x) for like, x in zip(self._like, new)):
            return None
        addresses = [x.data_ptr() for x in new]
        if not all(addresses):
            return None  # the ordinary way refuses tensors without memory
        if self._v_is_k and addresses[1] != addresses[2]:
            return None
        into = [x.data_ptr() for x in pages]
        if any(0 <= x - at < size for x, at, size in zip(addresses[1:], into, self._bytes)):
            return None  # torch refuses views of the pages
        out = torch.empty(self._shape, dtype=self._dtype, device=new[0].device)
        call.q, call.out = addresses[0], out.data_ptr()
        for half, address in zip(self._pages, into):
            half.data = address
        for (write, half), x, address in zip(self._writes, addresses[1:], into):
            write.x, half.data = x, address
        if library().write_and_attend(*self._arguments):
            raise MemoryError("paged attention: no memory for scratch")
        return out


def binds(*new: Tensor) -> bool:
    """Whether C may read q, k and v as they are."""
    return all(x.stride(2) == 1 and Like.of(x).fits(x) for x in new)
