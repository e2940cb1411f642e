"""Experts of a mixture: what they weigh, how many a pass touches, and how many it reads.

A pass of `T` tokens touches `E (1 - (1 - k/E)^T)` of the `E` experts of a layer, if a token's `k`
experts are equally likely. If `n` experts stay in memory, the share `n / E` of the touched ones is
there. Texts that go on alike find more of theirs, so a plan promises the least.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

# The rate of reading single experts, as a share of the link's. Measured on a CPU: 0.5 to 0.6 from a
# disk, 0.9 and more from the file cache.
ALONE = 0.5


@dataclass(frozen=True)
class RoutedExperts:
    """Experts that can be read alone.

    Attributes:
        layers: bytes of all experts of each layer; 0 for a layer without.
        count: experts of a layer.
        per_token: how many of them a token is routed to.
        in_slots: whether experts stay in slots of a card, where a pass that needs more experts than
            there are slots reads all of a layer.
    """

    layers: tuple[int, ...]
    count: int
    per_token: int
    in_slots: bool = False

    @property
    def total(self) -> int:
        """Bytes of all experts."""
        return sum(self.layers)

    @property
    def widest(self) -> int:
        """Bytes of all experts of the layer in which they take most."""
        return max(self.layers)

    def touched(self, tokens: int) -> float:
        """Returns the share of a layer's experts that a pass of `tokens` is routed to."""
        return 1 - (1 - self.per_token / self.count) ** tokens

    def lacking(self, tokens: int, slots: int) -> float:
        """Returns the share of experts that such a pass needs but lacks, if `slots` stay."""
        return self.touched(tokens) * (1 - slots / self.count)

    def read(self, tokens: int, slots: int, alone: float) -> float:
        """Returns the share that a pass reads: the experts it lacks, or all if that is faster.

        Args:
            alone: the rate at which experts are read alone, as a share of the link's.
        """
        lacking = self.lacking(tokens, slots)
        too_many = self.in_slots and round(self.touched(tokens) * self.count) > slots
        return 1.0 if too_many or lacking > alone else lacking

    def are_few(self, tokens: int, alone: float) -> bool:
        """Whether a pass of `tokens` never reads all experts of a layer."""
        return tokens * self.per_token <= alone * self.count and not self.in_slots

    def wide(self, tokens: int, slots: int, alone: float, depth: int) -> int:
        """Counts the bytes beside the slots while a pass of `tokens` computes one layer.

        Args:
            depth: layers that are in memory at once if all experts are read.
        """
        if self.in_slots:
            return depth * self.widest
        lacking = self.count - slots
        if self.are_few(tokens, alone):
            most = min(self.count, tokens * self.per_token)
            return self.widest * min(most, lacking) // self.count
        if lacking <= alone * self.count:  # no pass lacks so many that it reads all
            return self.widest * bool(lacking)
        return depth * self.widest


def can_read_alone(on_cpu: bool) -> bool:
    """Whether experts can be read alone: on a CPU only Linux gives memory to some rows alone."""
    return not on_cpu or sys.platform == "linux"


def require_slots(slots: Any, least: int, count: int) -> None:
    """Raises ValueError for slots that are no count, too few for a token, or more than all."""
    if type(slots) is not int or slots < 0:
        raise ValueError(f"expert_slots: expected None or a count of experts, got {slots!r}")
    if slots and not least <= slots <= count:
        raise ValueError(
            f"expert_slots: expected {least}, which a token needs, to {count}, of which a "
            f"layer has that many, got {slots}"
        )
