"""`RowExperts`: experts in their own rows of a layer's tensors; only some rows have memory.

A module of experts is called with its routing, so the needed experts are known just before it
computes. Its tensors have one row for each expert. All rows have addresses; experts that are routed
to are read into their own rows. Indices, shapes and forwards stay transformers' own, so results
have the same bits.

A pass that needs more experts than may stay fills free room and evicts no expert, because decoding
uses them. It computes in memory that layers use in turn; if there is no room for this memory, it
gives back the experts that it read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedkv.stream.stats import StreamStats

from .files import ExpertFiles
from .memory import PAGE, RowMemory, WideMemory
from .residency import Experts


class RowExperts(Experts):
    """The experts of one module, on a CPU.

    Args:
        wide: memory for passes that need more experts than stay; None if there is no room for it.
        moves: whether the memory of one expert may become another's.
    """

    def __init__(
        self,
        files: ExpertFiles,
        slots: int,
        stats: StreamStats,
        wide: WideMemory | None = None,
        moves: bool = False,
    ) -> None:
        super().__init__(files, slots, stats)
        self._places, end = files.places(self.count, PAGE)
        try:
            self._memory = RowMemory(self._places, end, moves)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expert_slots: no {end:,} bytes of addresses for the {self.name}: "
                f"{error.strerror}; expert_slots=0 streams whole layers",
            ) from error
        self._views = self._over(self._memory.tensor)
        self._passing: list[int] = []  # experts that a call read and that do not stay
        self._wide = wide
        if wide is not None:
            wide.reserve(end)

    def key(self, index: Tensor) -> Any:
        """Returns None: these results are exact by design."""
        return None

    def close(self) -> None:
        self._held.clear()
        self._views, self._passing = [], []
        self._memory.close()

    def bring(self, touched: list[int], index: Tensor) -> Tensor:
        """Brings experts as `Experts.bring` says; each has its own row, so the index stays."""
        while len(self._held) > self._slots:  # an interrupt left more
            self._drop(next(iter(self._held)))
        wide = len(touched) > self._slots
        self._stats.wide_passes += wide
        if wide and self._wide is not None:
            self.bind(self._gather(touched, self._wide))
            return index
        if self._wide is not None:
            self._wide.give_back()
        missing = self._missing(touched)
        going = [] if wide else self._to_evict(touched, missing)
        self._passing = missing if wide else []
        self._read(missing, going)
        for expert in () if wide else touched:
            self._held.move_to_end(expert)
        self.bind(self._views)
        return index

    def release(self) -> None:
        super().release()
        while self._passing and len(self._held) > self._slots:
            self._drop(self._passing.pop())

    def _gather(self, touched: list[int], memory: WideMemory) -> list[Tensor]:
        """Returns tensors in the wide memory; held experts are copied there, others read."""
        missing = self._missing(touched)
        room = self._slots - len(self._held)
        try:
            arena = memory.writable()
            self._read(missing[:room], [])
            rows = {expert: expert for expert in missing[room:]}
            self.files.read(rows, self._places, arena.bytes, arena.tensor)
        except BaseException:
            memory.give_back()  # so that no forward sees bytes of a failed read
            raise
        for expert in touched:
            if expert in self._held:
                for place in self._places:
                    row = slice(place.row(expert), place.row(expert) + place.row_bytes)
                    arena.bytes[row] = self._memory.bytes[row]
        return self._over(arena.tensor)

    def _read(self, missing: list[int], going: list[int]) -> None:
        """Reads experts into their rows, with the memory of evicted rows as far as it suffices.

        Experts are evicted first, so that memory never exceeds the slots.
        """
        try:
            for expert in going:
                del self._held[expert]
            for old, new in zip(going, missing):
                self._memory.move(old, new, self._held)
            rows = {expert: expert for expert in missing}
            self.files.read(rows, self._places, self._memory.bytes, self._memory.tensor)
            self._held |= rows
        except BaseException:
            for expert in (*going, *missing):
                if expert not in self._held:  # an interrupt may have left some held
                    self._memory.give_back(expert, self._held)
            raise

    def _over(self, memory: Tensor) -> list[Tensor]:
        """Returns the tensors over memory that has them in their places."""
        with torch.inference_mode(False):  # they may outlast a pass in inference mode
            return [site.like(p.view(memory)) for site, p in zip(self._sites, self._places)]

    def _drop(self, expert: int) -> None:
        del self._held[expert]
        self._memory.give_back(expert, self._held)
