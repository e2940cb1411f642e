"""`Experts`: which experts of a module are in memory, and having them in the module.

Of each layer a few experts stay, those used last. How they lie in memory, and what a call that
needs more of them does, is for `rows.py` and `slots.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pagedkv.stream.layers import forget_casts
from pagedkv.stream.stats import StreamStats

from .files import ExpertFiles

# Of a layer's experts, where nothing was measured: where more are lacking all of them come sooner.
# Between the rates of reads of single ones, as shares of that of a whole layer: 0.5 to 0.6 from a
# disk, 0.9 and more from the file cache.
MOST_ALONE = 0.7


class Experts(ABC):
    """The experts of one module.

    Args:
        slots: experts that stay in memory between passes.
    """

    def __init__(self, files: ExpertFiles, slots: int, stats: StreamStats) -> None:
        self.files, self.name, self.count = files, files.name, files.count
        self._sites, self._slots, self._stats = files.sites, slots, stats
        self._held: OrderedDict[int, int] = OrderedDict()  # their rows; the one used last is last
        self._bound: Sequence[Tensor] = ()

    def touched(self, index: Tensor) -> list[int] | None:
        """The experts of an index, ascending.

        None where it names what is no expert: what a forward makes of that may depend on all rows.
        """
        found: list[int] = index.unique().tolist()
        beyond = found and (found[0] < 0 or found[-1] >= self.count)
        return None if beyond else found

    def fits(self, touched: list[int], most: float) -> bool:
        """Whether a call is to read experts alone.

        It lacks no larger share than `most`, beside those that will stay once they are read.
        """
        lacking = sum(expert not in self._held for expert in touched)
        return lacking - (self._slots - len(self._held)) <= most * self.count

    @abstractmethod
    def key(self, index: Tensor) -> Any:
        """Returns what must be tried before it computes; None if results are exact by design."""

    @abstractmethod
    def bring(self, touched: list[int]) -> Callable[[Tensor], Tensor]:
        """Brings these experts into memory, and their tensors into the module, until `release`.

        Returns:
            What renumbers an index to the rows of these tensors.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
            StreamError: another tensor was put there.
        """

    def release(self) -> None:
        """Takes the tensors back, and the memory of what does not stay. Idempotent."""
        self.take_back()

    @abstractmethod
    def close(self) -> None:
        """Gives all memory back; nothing can be brought after. Idempotent."""

    def bind(self, views: Sequence[Tensor]) -> None:
        """Puts tensors into the module that hold what a call needs, until `release`.

        Raises:
            StreamError: another tensor was put there.
        """
        for site in self._sites:
            site.require_empty()
        forget_casts()
        self._bound = views
        for site, view in zip(self._sites, views):
            if view.requires_grad != site.empty.requires_grad:  # frozen, or thawed, since
                view.requires_grad_(site.empty.requires_grad)
            site.set(view)

    def take_back(self) -> None:
        """Takes back tensors that are bound; one that other code put there stays. Idempotent."""
        for site, view in zip(self._sites, self._bound):
            if site.where.get(site.key) is view:
                site.set(site.empty)
        self._bound = ()  # last, so that what an interrupt leaves is taken back by the next call

    def _missing(self, touched: list[int]) -> list[int]:
        """The experts that are not in memory; counts these as missing and the others as found."""
        missing = [expert for expert in touched if expert not in self._held]
        self._stats.expert_hits += len(touched) - len(missing)
        self._stats.expert_misses += len(missing)
        return missing

    def _to_evict(self, touched: list[int], missing: list[int]) -> list[int]:
        """Experts that have to go for the missing ones to stay, those used longest ago first."""
        spare = [expert for expert in self._held if expert not in touched]
        return spare[: max(0, len(self._held) + len(missing) - self._slots)]
