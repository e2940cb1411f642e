"""`WideMemory`: room for all experts of one layer, in which wide passes compute layer by layer."""

from __future__ import annotations

from .arena import HostArena


class WideMemory:
    """Memory that layers take turns with, so that it is made once and not for each of them.

    What it holds is only known to the layer that filled it last, while that computes.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._arena: HostArena | None = None

    def reserve(self, nbytes: int) -> None:
        """Has so many bytes at least, from the first use on."""
        self._nbytes = max(self._nbytes, nbytes)

    def writable(self) -> HostArena:
        """The memory, which is made if it is not there."""
        if self._arena is None:
            self._arena = HostArena(self._nbytes)
        return self._arena

    def give_back(self) -> None:
        """Gives the memory back, where no tensor over it is left. Idempotent."""
        self._arena = None
