"""A bar for long passes: half a minute of silence would look like a hang."""

from __future__ import annotations

from time import perf_counter

from tqdm.auto import tqdm

PATIENCE = 3.0  # seconds before a pass shows a bar


class PassBar:
    """Shows the layers of the current pass on a terminal if it takes long.

    Args:
        shown: False if the caller shows `done` and `total` in another way.

    Attributes:
        done: streamed layers of this pass that began to compute.
        total: streamed layers of a pass.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self.done, self.total, self._shown = 0, total, shown
        self._begun = 0.0
        self._bar: tqdm | None = None

    def begin(self) -> None:
        """Notes that a pass begins."""
        self.done, self._begun = 0, perf_counter()

    def step(self) -> None:
        """Notes that a layer computes; shows the bar if the pass takes long."""
        self.done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown and perf_counter() - self._begun > PATIENCE:
            # Without a terminal tqdm itself disables it.
            self._bar = tqdm(
                total=self.total, initial=self.done, unit="layer", leave=False, disable=None
            )

    def end(self) -> None:
        """Notes that the pass is over, or has failed."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
