"""An embedding that stays in its file or in host memory, and a head that passes through the ring.

The embedding's own forward runs over the rows of the call's ids, gathered on the host. The head is
a linear map: it runs over blocks of its rows and concatenates their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagedkv.errors import UnsupportedModelError

from .arena import HostArena
from .layers import TensorSite
from .stats import StreamStats
from .weights import Unit, WeightStore


class EmbeddingRows:
    """Serves an embedding from its file, or from host memory.

    Args:
        site: the site of the embedding's weight.
        name: the weight's name in the store.
        device: the device that gathered rows are sent to.
        table: the embedding in host memory; None if its rows are read from the file.
    """

    def __init__(
        self,
        store: WeightStore,
        site: TensorSite,
        name: str,
        device: torch.device,
        stats: StreamStats,
        table: Tensor | None,
    ) -> None:
        module = site.owner
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModelError(
                f"{name}: {type(module).__name__} is no nn.Embedding; it has to stay resident"
            )
        self._store, self._device, self._stats = store, device, stats
        self._rows = store.rows_of(name, module.embedding_dim)
        self._site, self._padding = site, module.padding_idx
        self._count, self._table = module.num_embeddings, table
        self._row_bytes = self._rows.row_bytes if table is None else table[0].nbytes
        self._staging = HostArena(1)
        # It only names a row without gradient, and would be compared with indices of gathered rows.
        module.padding_idx = None
        self.module, self._forward = module, module.forward

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the embedding's own forward over the rows of these ids."""
        self._site.require_empty()
        found, places = torch.unique(ids.cpu(), return_inverse=True)
        try:
            self._site.set(self._site.like(self._gather(found, ids.numel())))
            return self._forward(places.to(ids.device), *args, **kwargs)
        finally:
            self._site.set(self._site.empty)

    def _gather(self, rows: Tensor, most: int) -> Tensor:
        """Returns rows of these ascending indices, on the device.

        Args:
            most: how many rows a call of this width can want; so many have memory from now on.
        """
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self._count:
            wrong = rows[0] if rows[0] < 0 else rows[-1]
            raise IndexError(f"input_ids: expected ids below {self._count}, got {wrong}")
        size = self._row_bytes * min(most, self._count)
        if size > len(self._staging.bytes):
            self._staging.close()
            self._staging = HostArena(size, pin=self._device.type == "cuda")
        if self._table is None:
            values = self._store.read_rows(self._rows, rows.tolist(), self._staging)
            self._stats.bytes_read += values.nbytes
        else:
            values = self._staging.tensor[: len(rows) * self._row_bytes].view(self._table.dtype)
            values = values.view(len(rows), self._rows.width)
            torch.index_select(self._table, 0, rows, out=values)
        # The copy waits, because the next call gathers into the same memory.
        return values.to(self._device, self._site.empty.dtype)

    def close(self) -> None:
        """Gives the embedding its padding back, and frees host memory. Idempotent."""
        self.module.padding_idx = self._padding
        self._table = None
        self._staging.close()
        self._staging = HostArena(1)


def head_units(store: WeightStore, head: TensorSite, name: str, rows: int) -> list[Unit]:
    """Returns the blocks of a head, `rows` rows each.

    Raises:
        UnsupportedModelError: the head is no plain linear map with the rows of one tensor.
    """
    if type(head.owner) is not nn.Linear:
        raise UnsupportedModelError(
            f"{name}: {type(head.owner).__name__} is no nn.Linear; it has to stay resident"
        )
    count = head.empty.shape[0]
    return [
        store.rows(f"{name}[{a}:{min(a + rows, count)}]", name, head.empty, a, min(rows, count - a))
        for a in range(0, count, rows)
    ]


def blockwise(
    module: nn.Linear, blocks: int, borrow: Callable[[int], Tensor], give_back: Callable[[], None]
) -> Callable[[Tensor], Tensor]:
    """Makes a forward of a linear map whose rows come in blocks.

    Args:
        borrow: waits for a block and returns its rows, `[rows, in]`.
        give_back: called when the rows were used.
    """

    def forward(x: Tensor) -> Tensor:
        out, first = x, 0
        for block in range(blocks):
            weight = borrow(block)
            try:
                stop = first + len(weight)
                bias = None if module.bias is None else module.bias[first:stop]
                part = functional.linear(x, weight, bias)
                if not block:  # autocast may have chosen another dtype than that of `x`
                    out = part.new_empty((*x.shape[:-1], module.out_features))
                out[..., first:stop] = part
            finally:
                give_back()
            first = stop
        return out

    return forward
