"""Decoding steps as captured CUDA graphs: one launch for a whole forward.

A graph is captured for a number of rows and replayed for any step of at most so many; the rows that
are left over are empty. What changes from step to step lies in buffers whose addresses last, and
the work of a step is cut on the device, so nothing else does.

A capture costs as much as some hundred replays save, so a number of rows has to come back before
it gets a graph of its own; until then the next larger one is replayed.
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
WARM_UP = 2  # forwards before a capture: what is compiled or allocated once is so by then
AFTER = 16  # steps of a size until it is captured
ATTEMPTS = 2  # captures in a row that fail; one may be another thread's doing, two are the model's


def capture(forward: Forward, device: torch.device, pool: Any) -> tuple[Replay, Tensor]:
    """Captures a forward; returns what replays it, and the tensor that it writes.

    What other threads do with the device meanwhile is theirs: a capture that watched all of them
    would fail because a loader pins memory.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = forward()
    return graph.replay, out


def can_capture(packed: PackedModel) -> bool:
    """Whether decoding steps of a model are the same launches on the same addresses each time."""
    kv = packed.kv
    return (
        not kv.config.states
        and kv.ranks.size == 1  # transfers between ranks were never captured
        and kv.backend == "triton"
        and kv.device.type == "cuda"
        and not kv.placement.is_divided
        # Weights that are streamed have another address in every pass.
        and not any(parameter.is_meta for parameter in packed.model.parameters())
    )


class DecodeGraphs:
    """The graphs of one packed model.

    Args:
        capture: turns a forward into what replays it.
        after: steps of a size until it is captured.
    """

    def __init__(self, packed: PackedModel, capture: Any = capture, after: int = AFTER) -> None:
        self._packed = packed
        self._capture = capture
        self._after = after
        self._replays: dict[int, tuple[Replay, Tensor]] = {}  # by rows
        self._uses: Counter[int] = Counter()  # steps of each size since a capture failed
        self._sharing: set[int] = set()  # groups in which rows of some step shared a prefix
        self._rooms: dict[tuple[int, int], Any] = {}  # by rows and group
        self._weights: tuple[Any, ...] = ()
        self._pool = torch.cuda.graph_pool_handle() if packed.kv.device.type == "cuda" else None
        # Of captures in a row. What an indexer chooses is asked of the device, row by row, and what
        # rows share is planned for one count of query heads.
        kinds = layer_kinds(text_config(packed.model))
        chooses = any(kind.indexer is not None for kind in kinds)
        never = chooses or query_heads(packed.model) is None
        self._failures = ATTEMPTS if never else 0

    @property
    def refused(self) -> bool:
        """Whether the model cannot be captured."""
        return self._failures >= ATTEMPTS

    def logits(self, step: StepMetadata) -> Tensor | None:
        """Logits `[B, vocab]` of a step of one token a row; None if it has to run without a graph.

        The tensor is overwritten by the next call.
        """
        if self.refused or step.num_tokens != len(step.seqs):
            return None
        if step.queries is not None:  # what it looks at is no part of a graph
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
        step.mark_written()  # a forward that leaves layers out is not captured
        return out[:rows]

    def _shared(self, step: StepMetadata, size: int) -> dict[int, Any]:
        """Returns the work of prefixes that rows share, by group, at places that graphs read.

        Graphs read it for every group in which rows ever shared some, so that a row that leaves
        and ends the sharing calls for no other graph.
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

        Graphs hold on to addresses, and to which of them are read.
        """
        model = self._packed.model
        places = (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
        now = state_of(model), *places
        if now != self._weights:
            self._replays.clear()
        self._weights = now

    def _record(self, size: int, padded: StepMetadata) -> bool:
        """Captures a forward of such steps; returns whether that worked."""
        device = padded.positions.device
        forward = self._packed.logits
        try:
            for _ in range(WARM_UP):
                forward(padded.again())
            self._replays[size] = self._capture(lambda: forward(padded.again()), device, self._pool)
        except RuntimeError as error:  # a forward that asks the device for a number, say
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
    """Returns the rows of a graph for `rows`: few sizes, from 64 on at most an eighth is empty."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, most)
