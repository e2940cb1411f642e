"""The plan of a step over a caller's own pages, made once for all calls of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import index
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.kernels.sending import sent

from .backend import BACKENDS, choose_backend
from .checks import require_tensor, require_word

LAYOUTS = ("NHD", "HND")
ALIGNMENT = 16  # bytes; kernels take tensors whose addresses are multiples of it

_chosen = functools.cache(choose_backend)


class AttentionPlan:
    """The rows of a step over a caller's own pages, for `attend_pages` and `write_pages`.

    One plan serves all layers of a step: it keeps the work that a backend has planned. It is valid
    while table and lengths stay as they are. To capture a CUDA graph, make the plan inside of the
    capture: a replay reads table and lengths anew, with the same number of rows.

    Entries of the table that no query sees may be anything. On a CPU the other entries are checked;
    on a card this would have to wait for the device. A row of length 0 gives zeros.

    Args:
        page_table: `[B, columns]` integers, the pages of each row (FlashAttention 2: block_table).
        cache_seqlens: `[B]` integers, tokens of each row, with the new ones, on the table's device
            or on the host.
        cu_seqlens_q: `[B + 1]` integers, where each row's queries begin and end (FlashInfer:
            qo_indptr). The queries are a row's last tokens. On the host it costs no wait.
        page_size: tokens of a page.
        kv_layout: `"NHD"` for pages `[N, page_size, G, D]`, `"HND"` for `[N, G, page_size, D]`.
        seqlen_q: queries of each row, if there is no `cu_seqlens_q`.
        slot_mapping: `[T]` integers, where `write_pages` puts tokens: `page * page_size + offset`,
            -1 for nowhere; by default the slots that the table has for them.
        max_seqlen_k: an upper bound of the lengths; by default the table's room. A lower bound
            saves memory on a card.
        backend: as for `PagedKVCache`.

    Raises:
        TypeError, ValueError: a shape, dtype or device does not fit, or a length is out of range.
        NotImplementedError: the backend is not available.

    Examples:
        >>> import torch
        >>> from pagedkv import AttentionPlan
        >>> table = torch.tensor([[3, 0], [1, -1]])
        >>> plan = AttentionPlan(table, torch.tensor([5, 2]), page_size=4)
        >>> plan.positions, plan.slot_mapping
        (tensor([4, 1]), tensor([0, 5]))
    """

    def __init__(
        self,
        page_table: Tensor,
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        *,
        page_size: int,
        kv_layout: Literal["NHD", "HND"] = "NHD",
        seqlen_q: int = 1,
        slot_mapping: Tensor | None = None,
        max_seqlen_k: int | None = None,
        backend: str = "auto",
    ) -> None:
        require_word("kv_layout", kv_layout, LAYOUTS)
        require_word("backend", backend, BACKENDS)
        page_size = require_whole("page_size", page_size, 1)
        seqlen_q = require_whole("seqlen_q", seqlen_q, 1)
        _check_ints("page_table", page_table, (None, None))
        self.num_rows, columns = page_table.shape
        self.device, self.page_size, self.kv_layout = page_table.device, page_size, kv_layout
        self.backend = _chosen(backend, self.device)
        _check_ints("cache_seqlens", cache_seqlens, (self.num_rows,), self.device)
        # Checks on the host come first, so that mistakes are found before anything is sent.
        self.seqlen_q = None if cu_seqlens_q is not None else seqlen_q
        self.num_new = self._counts(cu_seqlens_q, seqlen_q)
        self.num_tokens = int(self.num_new.sum())
        self.lens: Ints | None = None
        room = columns * page_size
        bound = room if max_seqlen_k is None else require_whole("max_seqlen_k", max_seqlen_k, 1)
        self.max_seqlen_k = min(bound, room)
        if self.backend != "triton" or cache_seqlens.device.type == "cpu":
            self.lens = cache_seqlens.cpu().numpy().astype(np.int64)
            self._check_lens(self.lens, room)
            self.max_seqlen_k = int(self.lens.max(initial=0))
        self._memo: dict[Any, Any] = {}
        self.page_table = self._sent(page_table)
        self.cache_seqlens = self._sent(cache_seqlens)
        if cu_seqlens_q is None:  # made on the device, for captured graphs
            order = torch.arange(self.num_rows + 1, dtype=torch.int32, device=self.device)
            self.cu_seqlens_q = order * seqlen_q
        else:
            self.cu_seqlens_q = self._sent(cu_seqlens_q)
        self._slots: Tensor | None = None
        if slot_mapping is not None:
            _check_ints("slot_mapping", slot_mapping, (self.num_tokens,), self.device)
            self._slots = slot_mapping.to(self.device, torch.int64, copy=True).contiguous()

    def _counts(self, starts: Tensor | None, each: int) -> Ints:
        """Returns how many queries each row has."""
        if starts is None:
            return np.full(self.num_rows, each, np.int64)
        _check_ints("cu_seqlens_q", starts, (self.num_rows + 1,), self.device)
        bounds = starts.cpu().numpy().astype(np.int64)
        counts: Ints = np.diff(bounds)
        if bounds[0] or (counts < 0).any():
            raise ValueError(f"cu_seqlens_q: expected to rise from 0, got {bounds.tolist()}")
        return counts

    def _check_lens(self, lens: Ints, room: int) -> None:
        wrong = np.flatnonzero((lens < 0) | (lens > self.max_seqlen_k))
        if wrong.size:
            what = f"room in the {room // self.page_size} columns of page_table"
            what = what if self.max_seqlen_k == room else "max_seqlen_k"
            raise ValueError(
                f"cache_seqlens: expected 0..{self.max_seqlen_k}, {what}, got {lens[wrong[0]]} of "
                f"row {wrong[0]}"
            )

    def _sent(self, ints: Tensor) -> Tensor:
        """Returns integers as aligned int32 on the device; on a card without a copy if possible."""
        if self.device.type == "cpu":  # clamped, so that a page beyond 2**31 stays out of range
            return ints.clamp(-1, 2**31 - 1).to(torch.int32).contiguous()
        if ints.device != self.device:
            return sent(ints.to(torch.int32).numpy(), self.device)
        found = ints.to(torch.int32).contiguous()
        return found.clone() if found.data_ptr() % ALIGNMENT else found

    @property
    def positions(self) -> Tensor:
        """`[T]` int64, the position of every new token in its text; negative before the text."""
        return self.once("positions", lambda: self._placed()[1])

    @property
    def slot_mapping(self) -> Tensor:
        """`[T]` int64, where `write_pages` puts every new token; -1 for nowhere."""
        if self._slots is not None:
            return self._slots

        def build() -> Tensor:
            row, position = self._placed()
            if not self.page_table.shape[1]:
                return torch.full_like(position, -1)
            column = (position // self.page_size).clamp(0, self.page_table.shape[1] - 1)
            page = self.page_table[row, column].long()
            slots = page * self.page_size + position % self.page_size
            return slots.masked_fill_((page < 0) | (position < 0), -1)

        return self.once("slots", build)

    def _placed(self) -> tuple[Tensor, Tensor]:
        """Returns the row of every new token, and its position in the row's text."""
        tokens, lens = torch.arange(self.num_tokens, device=self.device), self.cache_seqlens
        if self.seqlen_q is not None:
            row = tokens // self.seqlen_q
        else:
            spans = self.cu_seqlens_q.diff().long()
            rows = torch.arange(self.num_rows, device=self.device)
            row = rows.repeat_interleave(spans, output_size=self.num_tokens)
        return row, tokens + (lens - self.cu_seqlens_q[1:])[row]

    def once(self, key: Any, build: Callable[[], Any]) -> Any:
        """Returns a value; `build` computes it for the first layer that asks for the key."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def check_pages(self, count: int, window: int | None) -> None:
        """Raises, on a CPU, if some query sees a page outside of 0 .. count - 1."""
        if self.device.type == "cpu":
            self.once(("seen", count, window), lambda: self._check_seen(count, window))

    def _check_seen(self, count: int, window: int | None) -> bool:
        assert self.lens is not None
        behind = 0 if window is None else self.lens - self.num_new - window + 1
        return self._check_entries(count, behind)

    def check_slots(self, count: int) -> None:
        """Raises, on a CPU, if a slot to write is outside of `count` pages."""
        if self.device.type == "cpu":
            assert self.lens is not None
            if self._slots is None:
                first = self.lens - self.num_new
                self.once(("written", count), lambda: self._check_entries(count, first))
            elif self.num_tokens:
                least, most = (int(x) for x in self._slots.aminmax())
                if least < -1 or most >= count * self.page_size:
                    raise ValueError(
                        f"slot_mapping: expected -1..{count * self.page_size - 1}, got "
                        f"{least}..{most}"
                    )

    def _check_entries(self, count: int, first: Any) -> bool:
        """Checks the table's entries from each row's token `first` to its last; returns True.

        A row without new tokens reads and writes nothing.
        """
        assert self.lens is not None
        table, size = self.page_table.numpy(), self.page_size
        columns, last = np.arange(table.shape[1]), -(-self.lens // size)
        looked = (columns >= np.atleast_1d(first // size)[:, None]) & (columns < last[:, None])
        looked &= (self.num_new > 0)[:, None]
        wrong = np.argwhere(looked & ((table < 0) | (table >= count)))
        if wrong.size:
            row, column = wrong[0].tolist()
            raise ValueError(
                f"page_table: expected a page 0..{count - 1} in column {column} of row {row}, "
                f"whose length is {self.lens[row]}, got {table[row, column]}"
            )
        return True


def require_whole(name: str, value: Any, least: int) -> int:
    """Returns a whole number of Python, numpy or torch as int; raises if it is below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return number


def _check_ints(
    name: str, ints: Tensor, shape: tuple[int | None, ...], device: torch.device | None = None
) -> None:
    """Raises unless a tensor has integers of this shape, on this device or on the host."""
    require_tensor(name, ints)
    if ints.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {ints.dtype}")
    if ints.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, ints.shape)):
        wanted = [x or "any" for x in shape]
        raise ValueError(f"{name}: expected shape {wanted}, got {list(ints.shape)}")
    if device is not None and ints.device not in (device, torch.device("cpu")):
        raise ValueError(f"{name}: expected device {device} or the host, got {ints.device}")
