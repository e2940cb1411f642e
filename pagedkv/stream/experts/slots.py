"""Experts on a card: slots for the experts that stay, and indices renumbered to slots.

A card has no addresses without memory, so experts lie in slots, and a call's index is renumbered to
slots. The host reads this index back once a layer, and a copy stream brings missing experts to the
slots: from pinned memory that holds all experts of the layer, or into which the host reads them.
Copies into slots begin when computation no longer uses them, computation begins when they are
filled, and the host writes to pinned memory when earlier copies have left it.

Renumbering changes the order of tokens that are sorted by experts. A card computes an element the
same way at every place, so bits should not depend on the order; a processor computes the end of a
vector differently. So an implementation that sorts is first compared with a computation from all
experts: in some calls for each number of tokens. This finds frequent differences; it is no proof.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.stream.arena import HostArena
from pagedkv.stream.stats import StreamStats
from pagedkv.stream.weights import ALIGNMENT

from .files import ExpertFiles
from .memory import WideMemory
from .residency import Experts

# Implementations whose results do not depend on the order of experts; eager adds in that order.
RENUMBERED = ("grouped_mm", "batched_mm")
TRIALS = 8  # so many calls, usually of different layers, must be equal before slots are trusted


class Staging(WideMemory):
    """The copy stream, and pinned host memory through which one layer's experts pass at a time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        cuda = device.type == "cuda"
        self._copies: Any = torch.cuda.Stream(device) if cuda else None
        self._filled: Any = torch.cuda.Event() if cuda else None
        self._computation: Any = None  # the stream of the computation before

    def writable(self) -> HostArena:
        """Waits until earlier copies have left the memory, and returns it."""
        if self._arena is None:
            self._arena = HostArena(self._nbytes, pin=self._copies is not None)
        if self._copies is not None:
            self._copies.synchronize()
        return self._arena

    def follow(self) -> None:
        """Makes the current stream wait for the previous one, if they differ.

        So earlier copies into slots have arrived, and copies that wait for it wait for both.
        """
        if self._copies is not None:
            now, before = torch.cuda.current_stream(self.device), self._computation
            if before is not None and before != now:
                now.wait_stream(before)
            self._computation = now

    def carry(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies sources to targets when computation no longer uses these; computation waits.

        The first wait costs nothing: the host has just waited for the index, so all earlier
        computation is done.
        """
        if self._copies is None:
            for source, target in pairs:
                target.copy_(source)
            return
        computation = torch.cuda.current_stream(self.device)
        self._copies.wait_stream(computation)
        with torch.cuda.stream(self._copies):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._filled.record(self._copies)
        computation.wait_event(self._filled)

    def close(self) -> None:
        """Waits for copies to slots, then gives the pinned memory back. Idempotent."""
        if self._copies is not None:
            self._copies.synchronize()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class SlottedExperts(Experts):
    """The experts of one module, of which some have slots on the device.

    Args:
        module: the module; while it computes from slots, its count of experts is that of its slots.
        staging: the memory through which experts pass; all layers may share it.
        home: `[E, ...]` tensors in pinned memory with all experts; None if they are read from
            files.
    """

    def __init__(
        self,
        files: ExpertFiles,
        slots: int,
        stats: StreamStats,
        module: nn.Module,
        staging: Staging,
        home: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(files, slots, stats)
        self._module: Any = module
        self._staging, self._home = staging, home
        # Places in the staging memory, with as many rows as there are slots.
        self._places, end = files.places(slots, ALIGNMENT)
        if home is None:
            staging.reserve(end)
        self._views: list[Tensor] = []
        for site, place in zip(self._sites, self._places):
            memory = torch.empty(place.shape, dtype=place.dtype, device=staging.device)
            self._views.append(site.like(memory))

    def fits(self, touched: list[int], most: float) -> bool:
        """Whether a call can compute from slots, and should not read the whole layer."""
        known = self._module.config._experts_implementation in RENUMBERED
        return known and len(touched) <= self._slots and super().fits(touched, most)

    def key(self, index: Tensor) -> Any:
        """Returns the implementation and number of tokens to try before slots are trusted.

        `batched_mm` gathers the rows of experts by the index, so that its products have the same
        operands with any numbering. `grouped_mm` sorts tokens by the index.
        """
        name = self._module.config._experts_implementation
        return None if name == "batched_mm" else (name, index.shape[0])

    def close(self) -> None:
        self._held.clear()
        self._views, self._home = [], None

    def bring(self, touched: list[int], index: Tensor) -> Tensor:
        """Brings experts as `Experts.bring` says; returns the index renumbered to slots."""
        self._staging.follow()
        self._copy(touched)
        self.bind(self._views)
        self._module.num_experts = self._slots
        return self._renumbered(index)

    def take_back(self) -> None:
        """Takes bound tensors back, and lets the module count all experts again."""
        super().take_back()
        if self._module.num_experts != self.count:
            self._module.num_experts = self.count

    def _copy(self, touched: list[int]) -> None:
        """Copies experts without a slot to slots."""
        assert len(touched) <= self._slots
        missing = self._missing(touched)
        free = [slot for slot in range(self._slots) if slot not in self._held.values()]
        for expert in self._to_evict(touched, missing):
            free.append(self._held.pop(expert))  # before its slot is written to
        if missing:
            sources = self._sources(missing)
            pairs = [
                (source, view[slot])
                for expert, slot in zip(missing, free)
                for source, view in zip(sources[expert], self._views)
            ]
            self._staging.carry(pairs)
            copied = sum(source.nbytes for source, _ in pairs)
            self._stats.bytes_copied += copied if self._staging.device.type == "cuda" else 0
        self._held |= zip(missing, free)
        for expert in touched:
            self._held.move_to_end(expert)

    def _sources(self, missing: list[int]) -> dict[int, list[Tensor]]:
        """Returns tensors of these experts in memory from which the device copies."""
        if self._home is not None:
            found = {expert: [tensor[expert] for tensor in self._home] for expert in missing}
            self._stats.expert_bytes += sum(map(self.files.nbytes, missing))
            return found
        arena = self._staging.writable()
        rows = {expert: row for row, expert in enumerate(missing)}
        self.files.read(rows, self._places, arena.bytes, arena.tensor)
        tensors = [place.view(arena.tensor) for place in self._places]
        return {expert: [tensor[row] for tensor in tensors] for expert, row in rows.items()}

    def _renumbered(self, index: Tensor) -> Tensor:
        """Returns an index of slots for an index of experts."""
        table = torch.zeros(self.count, dtype=index.dtype, device="cpu")
        for expert, slot in self._held.items():
            table[expert] = slot
        return table.to(index.device)[index.long()]


class Trust:
    """Remembers which implementations computed the same bits from slots, by number of tokens."""

    def __init__(self) -> None:
        self._equal: dict[Any, int] = {}  # how many calls were compared
        self._refused: set[Any] = set()

    def __getitem__(self, key: Any) -> bool | None:
        """Whether a key is trusted; None while it is tried."""
        if key in self._refused:
            return False
        return True if self._equal.get(key, 0) >= TRIALS else None

    def note(self, key: Any, expected: Tensor, found: Tensor) -> None:
        """Compares results from all experts and from slots; warns once if they differ."""
        self._equal[key] = self._equal.get(key, 0) + 1
        bits = [each.contiguous().view(torch.uint8) for each in (expected, found)]
        if not torch.equal(*bits):
            self._refused.add(key)
            warnings.warn(
                f"expert_slots: {key[0]} computes other bits from slots for {key[1]} tokens; such "
                "passes read whole layers",
                stacklevel=2,
            )
