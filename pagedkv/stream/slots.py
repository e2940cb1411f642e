"""Experts on a card: memory for those that stay, and an index that counts their slots.

A card has no addresses without memory, so experts lie in slots, and a call's index is renumbered to
these. The host reads that index back once a layer, reads what is missing into pinned memory, and a
copy stream takes it to the slots. Events order it: copies into slots begin once the computation
before is done with them, computation begins once the slots are filled, and the host writes to
pinned memory once the copies before have left it.

Sums over renumbered experts may be computed in another order, so an implementation of experts is
trusted with slots once it computed the same bits from them as from all experts of a layer: for each
number of tokens, as it first occurs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .arena import HostArena
from .experts import Experts
from .weights import ALIGNMENT

# Implementations whose results do not depend on the order of experts; eager adds in that order.
RENUMBERED = ("grouped_mm", "batched_mm")


class Staging:
    """Pinned host memory that experts pass through, one layer's at a time, and the copy stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._nbytes = device, 0
        self._arena: HostArena | None = None
        cuda = device.type == "cuda"
        self._copies: Any = torch.cuda.Stream(device) if cuda else None
        self._filled = self.event()

    def event(self) -> Any:
        """An event of the device; None on a CPU, where nothing runs ahead."""
        return torch.cuda.Event() if self._copies is not None else None

    def reserve(self, nbytes: int) -> None:
        """Has so many bytes at least, from the first use on."""
        self._nbytes = max(self._nbytes, nbytes)

    def writable(self) -> HostArena:
        """The memory, once the copies before have left it."""
        if self._arena is None:
            self._arena = HostArena(self._nbytes, pin=self._copies is not None)
        if self._copies is not None:
            self._filled.synchronize()
        return self._arena

    def carry(self, pairs: Sequence[tuple[Tensor, Tensor]], free: Any) -> None:
        """Copies sources to targets, once computation is done with these; computation waits."""
        if self._copies is None:
            for source, target in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(free)
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._filled.record(self._copies)
        torch.cuda.current_stream(self.device).wait_event(self._filled)

    def set_free(self, free: Any) -> None:
        """Notes that the computation that is asked for so far is what copies have to wait for."""
        if free is not None:
            free.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Gives the pinned memory back, once nothing is copied from it. Idempotent."""
        if self._arena is not None:
            if self._copies is not None:
                self._filled.synchronize()
            self._arena.close()
            self._arena = None


class SlottedExperts(Experts):
    """The experts of one module, of which some have slots on the device.

    Args:
        module: the module, whose count of experts is that of its slots while it computes from them.
        staging: what experts pass through; those of all layers may share it.
        args: as for `Experts`.
    """

    def __init__(self, module: nn.Module, staging: Staging, *args: Any) -> None:
        self._module: Any = module
        self._staging, self._free = staging, staging.event()
        super().__init__(*args)

    def _make(self) -> None:
        """Makes the slots; the places are those of as many rows in the staging memory."""
        self._staging.reserve(self._place(self._slots, ALIGNMENT))
        for site, place in zip(self._sites, self._places):
            slots = torch.empty(place.shape, dtype=place.dtype, device=self._staging.device)
            self._views.append(site.like(slots))
        self._staging.set_free(self._free)  # the memory may still be read as what it was before

    def fits(self, touched: list[int], most: float) -> bool:
        """Whether a call can compute from slots, and is not to read all of a layer."""
        known = self._module.config._experts_implementation in RENUMBERED
        return known and len(touched) <= self._slots and super().fits(touched, most)

    def key(self, index: Tensor) -> Any:
        """What has to compute the same bits before it computes from slots."""
        return self._module.config._experts_implementation, index.shape[0]

    @contextmanager
    def alone(self, touched: list[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Has these experts in slots, and the slots in the module; yields what renumbers an index.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
            StreamError: another tensor was put there.
        """
        self._bring(touched)
        try:
            with self.bound(self._views):
                self._module.num_experts = self._slots
                yield self._renumbered
        finally:
            self._staging.set_free(self._free)

    def take_back(self) -> None:
        """Takes back tensors that are bound, and has the module count all experts again."""
        super().take_back()
        if self._module.num_experts != self.count:
            self._module.num_experts = self.count

    def _bring(self, touched: list[int]) -> list[int]:
        """Reads experts that have no slot, each to a slot of its own."""
        assert len(touched) <= self._slots
        missing = [expert for expert in touched if expert not in self._held]
        spare = [expert for expert in self._held if expert not in touched]
        taken = {expert: self._held[expert] for expert in spare}
        free = [slot for slot in range(self._slots) if slot not in self._held.values()]
        for expert in spare[: max(0, len(missing) - len(free))]:
            del self._held[expert]  # before its slot is written to
            free.append(taken[expert])
        if missing:
            arena = self._staging.writable()
            self._memory, self._whole = arena.bytes, arena.tensor
        self._stats.expert_hits += len(touched) - len(missing)
        rows = {expert: row for row, expert in enumerate(missing)}
        self._read(rows, self._memory, self._whole)
        pairs = [
            (place.view(self._whole)[row], view[slot])
            for row, slot in enumerate(free[: len(missing)])
            for place, view in zip(self._places, self._views)
        ]
        if missing:
            self._staging.carry(pairs, self._free)
            copied = sum(source.nbytes for source, _ in pairs)
            self._stats.bytes_copied += copied if self._free is not None else 0
        self._held |= zip(missing, free)
        for expert in touched:
            self._held.move_to_end(expert)
        return missing

    def _renumbered(self, index: Tensor) -> Tensor:
        """An index of experts as one of slots; what names no expert names no slot."""
        table = torch.full((self.count + 1,), self._slots, dtype=index.dtype)
        for expert, slot in self._held.items():
            table[expert] = slot
        beyond = (index < 0) | (index >= self.count)
        return table.to(index.device)[index.masked_fill(beyond, self.count).long()]


class Trust:
    """Which implementations of experts computed the same bits from slots, by number of tokens."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def __getitem__(self, key: Any) -> bool | None:
        """Whether it did; None before it was tried."""
        return self._known.get(key)

    def note(self, key: Any, expected: Tensor, found: Tensor) -> None:
        """Compares what one computed from all experts and from slots; a difference is told once."""
        self._known[key] = torch.equal(expected, found)
        if not self._known[key]:
            warnings.warn(
                f"expert_slots: {key[0]} computes other bits from slots for {key[1]} tokens; such "
                "passes read whole layers",
                stacklevel=2,
            )
