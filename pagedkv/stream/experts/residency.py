"""`Experts`: knows which experts of a module are in memory, and puts them into the module.

The few most recently used experts of each layer stay. `rows.py` and `slots.py` decide how they lie
in memory, and how a call proceeds that needs more of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pagedkv.stream.layers import forget_casts
from pagedkv.stream.stats import StreamStats

from .files import ExpertFiles

# A share of a layer's experts: if a call lacks more, reading all of them is faster. Used if nothing
# was measured. Single experts are read at 0.5 to 0.6 of a whole layer's rate from a disk, and at
# 0.9 and more from the file cache; the number is in between.
MOST_ALONE = 0.7


class Experts(ABC):
    """The experts of one module.

    Args:
        slots: how many experts stay in memory between passes.
    """

    def __init__(self, files: ExpertFiles, slots: int, stats: StreamStats) -> None:
        self.files, self.name, self.count = files, files.name, files.count
        self._sites, self._slots, self._stats = files.sites, slots, stats
        self._held: OrderedDict[int, int] = OrderedDict()  # rows by expert, last used last
        self._bound: Sequence[Tensor] = ()

    def touched(self, index: Tensor) -> list[int] | None:
        """Returns the experts of an index, ascending.

        None if it has other numbers: a forward's result for these may depend on all rows.
        """
        found: list[int] = index.unique().tolist()
        beyond = found and (found[0] < 0 or found[-1] >= self.count)
        return None if beyond else found

    def fits(self, touched: list[int], most: float) -> bool:
        """Whether a call should read single experts, not the whole layer.

        It should if at most a share `most` is lacking, without experts that free slots can take.
        """
        lacking = sum(expert not in self._held for expert in touched)
        return lacking - (self._slots - len(self._held)) <= most * self.count

    @abstractmethod
    def key(self, index: Tensor) -> Any:
        """Returns a key whose results must be tried first; None if results are exact by design."""

    @abstractmethod
    def bring(self, touched: list[int], index: Tensor) -> Tensor:
        """Brings these experts into memory, and their tensors into the module, until `release`.

        Returns:
            The index, by the rows that experts have in these tensors.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
            StreamError: another tensor was put there.
        """

    def release(self) -> None:
        """Takes the tensors back, and the memory of experts that do not stay. Idempotent."""
        self.take_back()

    @abstractmethod
    def close(self) -> None:
        """Gives all memory back; nothing can be brought after. Idempotent."""

    def bind(self, views: Sequence[Tensor]) -> None:
        """Puts tensors with the experts of a call into the module, until `release`.

        Raises:
            StreamError: another tensor was put there.
        """
        for site in self._sites:
            site.require_empty()
        forget_casts()
        self._bound = views
        for site, view in zip(self._sites, views):
            site.bind(view)

    def take_back(self) -> None:
        """Takes bound tensors back. Idempotent."""
        for site, view in zip(self._sites, self._bound):
            site.take_back(view)
        self._bound = ()  # last, so that after an interrupt the next call takes the rest back

    def _missing(self, touched: list[int]) -> list[int]:
        """Returns the experts that are not in memory, and counts hits and misses."""
        missing = [expert for expert in touched if expert not in self._held]
        self._stats.expert_hits += len(touched) - len(missing)
        self._stats.expert_misses += len(missing)
        return missing

    def _to_evict(self, touched: list[int], missing: list[int]) -> list[int]:
        """Returns experts to evict so that the missing ones can stay, least recently used first."""
        spare = [expert for expert in self._held if expert not in touched]
        return spare[: max(0, len(self._held) + len(missing) - self._slots)]
