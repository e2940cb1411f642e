"""Decoding steps as captured CUDA graphs: one launch for a whole forward.

A graph is captured for a number of rows and replayed for any step of at most so many; the rows that
are left over are empty. What changes from step to step lies in buffers whose addresses last, and
the work of a step is cut on the device, so nothing else does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.hf.adapters import state_of
from pagedkv.hf.model import text_config
from pagedkv.step.metadata import StepMetadata

if TYPE_CHECKING:
    from .packed import PackedModel

Forward = Callable[[], Tensor]
Replay = Callable[[], None]
Key = tuple[int, tuple[int, ...]]  # rows, and the groups in which some share a prefix
WARM_UP = 2  # forwards before a capture: what is compiled or allocated once is so by then


def capture(forward: Forward, device: torch.device, pool: Any) -> tuple[Replay, Tensor]:
    """Captures a forward: what replays it, and the tensor that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = forward()
    return graph.replay, out


class DecodeGraphs:
    """The graphs of one packed model.

    Args:
        capture: turns a forward into what replays it.
    """

    def __init__(self, packed: PackedModel, capture: Any = capture) -> None:
        self._packed = packed
        self._capture = capture
        self._replays: dict[Key, tuple[Replay, Tensor]] = {}
        self._rooms: dict[tuple[int, int], Any] = {}  # by rows and group
        self._weights: tuple[Any, ...] = ()
        self._pool = torch.cuda.graph_pool_handle() if packed.kv.device.type == "cuda" else None
        self.refused = False

    def logits(self, step: StepMetadata) -> Tensor | None:
        """Logits `[B, vocab]` of a step of one token a row; None if it is no such step.

        The tensor is overwritten by the next call.
        """
        if self.refused or step.num_tokens != len(step.seqs):
            return None
        if step.queries is not None:  # what it looks at is no part of a graph
            return None
        rows = len(step.seqs)
        config = self._packed.kv.config
        size = padded_size(rows, min(config.max_sequences, config.max_step_tokens))
        shared = self._shared(step, size)
        padded = step.padded(size, shared)
        key = size, tuple(shared)
        if key not in self._replays and not self._record(key, padded):
            return None
        replay, out = self._replays[key]
        replay()
        step.mark_written()  # a forward that leaves layers out is not captured
        return out[:rows]

    def _shared(self, step: StepMetadata, size: int) -> dict[int, Any]:
        """By group, the work of prefixes that rows have in common, where graphs will read it."""
        from pagedkv.attention import on_triton  # there are no graphs where there is no Triton

        heads = text_config(self._packed.model).num_attention_heads
        filled = {}
        for group in range(len(step.config.groups)):
            work = on_triton.shared_work(step, group, heads)
            if work is None:
                continue
            if (size, group) not in self._rooms:
                room = on_triton.room_for_prefixes(step, group, size, heads)
                self._rooms[size, group] = room
            room = filled[group] = self._rooms[size, group]
            room.fill(work)
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

    def _record(self, key: Key, padded: StepMetadata) -> bool:
        """Captures a forward of such steps; whether the model can be captured."""
        device = padded.positions.device
        forward = self._packed.logits
        try:
            for _ in range(WARM_UP):
                forward(padded.again())
            self._replays[key] = self._capture(lambda: forward(padded.again()), device, self._pool)
        except RuntimeError as error:  # a forward that asks the device for a number, say
            self.refused = True
            name = type(self._packed.model).__name__
            warnings.warn(
                f"{name} cannot be captured as a CUDA graph, it runs without: {error}", stacklevel=2
            )
        return not self.refused


def padded_size(rows: int, most: int) -> int:
    """Rows that a graph for so many has: few sizes, at most an eighth of them empty from 64 on."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, most)
