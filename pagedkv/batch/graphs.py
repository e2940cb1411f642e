"""Decoding steps as captured CUDA graphs: one launch for a whole forward.

A graph is captured for a number of rows and replayed for every step of at most that many rows; the
rows left over are empty. The launches are the same in every step: all that changes lies in buffers
with lasting addresses, and the device itself divides the work of a step.

A capture costs as much as a few hundred replays save. So a number of rows gets a graph of its own
only after it has come back several times; until then the next larger graph is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.hf.adapters import state_of
from pagedkv.hf.model import query_heads, text_config
from pagedkv.hf.telling import warn
from pagedkv.models import layer_kinds
from pagedkv.step.metadata import StepMetadata

if TYPE_CHECKING:
    from .packed import PackedModel

Forward = Callable[[], Tensor]
Replay = Callable[[], None]
WARM_UP = 2  # forwards before a capture, which compile and allocate what is needed once
AFTER = 16  # steps of a size before a graph is captured for it
ATTEMPTS = 2  # failed captures in a row: another thread may spoil one, two are the model's fault


def capture(forward: Forward, device: torch.device, pool: Any) -> tuple[Replay, Tensor]:
    """Captures a forward; returns a function that replays it, and the tensor that it writes.

    The capture ignores what other threads do with the device meanwhile: one that watched all
    threads would fail when a data loader pins memory.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = forward()
    return graph.replay, out


def can_capture(packed: PackedModel) -> bool:
    """Whether a model's decoding steps make the same launches on the same addresses each time."""
    kv = packed.kv
    return (
        not kv.config.states
        and kv.ranks.size == 1  # capturing transfers between ranks was never tried
        and kv.backend == "triton"
        and kv.device.type == "cuda"
        and not kv.placement.is_divided
        # Streamed weights have other addresses in every pass.
        and not any(parameter.is_meta for parameter in packed.model.parameters())
    )


class DecodeGraphs:
    """The graphs of one packed model.

    Args:
        capture: captures a forward, as the function `capture` does.
        after: steps of a size before a graph is captured for it.
    """

    def __init__(self, packed: PackedModel, capture: Any = capture, after: int = AFTER) -> None:
        self._packed = packed
        self._capture = capture
        self._after = after
        self._replays: dict[int, tuple[Replay, Tensor]] = {}  # by rows
        self._uses: Counter[int] = Counter()  # steps of each size since its last failed capture
        self._sharing: set[int] = set()  # layer groups in which rows have ever shared a prefix
        self._rooms: dict[tuple[int, int], Any] = {}  # by rows and group
        self._weights: tuple[Any, ...] = ()
        self._pool = torch.cuda.graph_pool_handle() if packed.kv.device.type == "cuda" else None
        # Failed captures in a row. Two kinds of models begin with all attempts used: an indexer's
        # choice is read back from the device, and shared prefixes need one count of query heads.
        kinds = layer_kinds(text_config(packed.model))
        chooses = any(kind.indexer is not None for kind in kinds)
        never = chooses or query_heads(packed.model) is None
        self._failures = ATTEMPTS if never else 0

    @property
    def refused(self) -> bool:
        """Whether the model cannot be captured."""
        return self._failures >= ATTEMPTS

    def logits(self, step: StepMetadata) -> Tensor | None:
        """Returns logits `[B, vocab]` of a step of one token a row; None if no graph can run it.

        The tensor is overwritten by the next call.
        """
        if self.refused or step.num_tokens != len(step.seqs):
            return None
        if step.queries is not None:  # a policy watches them, which graphs cannot
            return None
        rows, config = len(step.seqs), self._packed.kv.config
        size = padded_size(rows, min(config.max_sequences, config.max_step_tokens))
        self._uses[size] += 1
        if self._uses[size] < self._after:
            size = min((have for have in self._replays if have >= size), default=0)
            if not size:
                return None
        padded = step.padded(size, self._shared(step, size))
        if size not in self._replays and not self._record(size, padded):
            return None
        replay, out = self._replays[size]
        replay()
        step.mark_written()  # no captured forward leaves layers out
        return out[:rows]

    def _shared(self, step: StepMetadata, size: int) -> dict[int, Any]:
        """Returns the work of shared prefixes, by group, in the buffers that graphs read.

        Graphs read a buffer for every group in which rows have ever shared a prefix, so no other
        graph is needed when a row leaves and the sharing ends.
        """
        from pagedkv.attention import on_triton  # there are no graphs where there is no Triton

        heads = query_heads(self._packed.model)
        assert heads is not None  # else nothing is captured
        groups = range(len(step.config.groups))
        works = {group: on_triton.shared_work(step, group, heads) for group in groups}
        new = {group for group, work in works.items() if work is not None} - self._sharing
        if new:
            self._sharing |= new
            self._replays.clear()
        filled = {}
        for group in sorted(self._sharing):
            if (size, group) not in self._rooms:
                room = on_triton.room_for_prefixes(step, group, size, heads)
                self._rooms[size, group] = room
            room = filled[group] = self._rooms[size, group]
            room.fill(works[group])
        return filled

    def forget_stale(self) -> None:
        """Drops the graphs if the model's weights have moved, or other adapters act.

        A graph has recorded the addresses of weights, and which of them it reads.
        """
        model = self._packed.model
        places = (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        now = state_of(model), *places
        if now != self._weights:
            self._replays.clear()
        self._weights = now

    def _record(self, size: int, padded: StepMetadata) -> bool:
        """Captures a forward of steps of a size; returns whether that worked."""
        device = padded.positions.device
        forward = self._packed.logits
        try:
            for _ in range(WARM_UP):
                forward(padded.again())
            self._replays[size] = self._capture(lambda: forward(padded.again()), device, self._pool)
        except RuntimeError as error:  # for example because the forward reads a number back
            self._uses[size] = 0
            self._failures += 1
            if self.refused:
                name = type(self._packed.model).__name__
                reason = f"{name} cannot be captured as a CUDA graph, it runs without: {error}"
                warn(reason)
            return False
        self._failures = 0
        return True


def padded_size(rows: int, most: int) -> int:
    """Returns the rows of a graph for `rows`, out of few sizes: less than a fifth stays empty."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, most)
