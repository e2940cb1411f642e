"""Experts of a mixture: what they weigh, how many a pass touches, and which of them it reads.

A pass of `T` tokens touches `E (1 - (1 - k/E)^T)` of the `E` experts of a layer, if each of the `k`
of a token is as likely as another. Of those, the share `n / E` is in memory where `n` stay: texts
that go on in the same vein find more, so what follows from it is the least that a plan promises.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

# Of the link's rate: that of reads of an expert. Measured on a CPU: 0.5 to 0.6 from a disk, 0.9 and
# more from the file cache.
ALONE = 0.5


@dataclass(frozen=True)
class RoutedExperts:
    """Experts that can be read alone.

    Attributes:
        layers: bytes of all experts of each layer; 0 for a layer without.
        count: experts of a layer.
        per_token: how many of them a token is routed to.
        in_slots: those that stay are in slots of a card: a pass that needs more than there are
            reads all of a layer.
    """

    layers: tuple[int, ...]
    count: int
    per_token: int
    in_slots: bool = False

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.layers)

    @property
    def widest(self) -> int:
        """Bytes of all experts of the layer in which they are most."""
        return max(self.layers)

    @property
    def layer_count(self) -> int:
        """Layers that have some."""
        return sum(map(bool, self.layers))

    def touched(self, tokens: int) -> float:
        """Returns the share of a layer's experts that a pass of `tokens` is routed to."""
        return 1 - (1 - self.per_token / self.count) ** tokens

    def lacking(self, tokens: int, slots: int) -> float:
        """The share of them that it does not find in memory, where `slots` stay."""
        return self.touched(tokens) * (1 - slots / self.count)

    def read(self, tokens: int, slots: int, alone: float) -> float:
        """The share that a pass reads: those it lacks, or all where that is sooner.

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
            depth: layers that are in memory at once where all experts are read.
        """
        if self.in_slots:
            return depth * self.widest
        lacking = self.count - slots
        if self.are_few(tokens, alone):
            most = min(self.count, tokens * self.per_token)
            return self.widest * min(most, lacking) // self.count
        if lacking <= alone * self.count:  # no pass lacks enough for all to be read
            return self.widest * bool(lacking)
        return depth * self.widest


def can_read_alone(on_cpu: bool) -> bool:
    """Whether this system can read experts alone: a CPU needs memory for some rows of a tensor."""
    return not on_cpu or sys.platform == "linux"


def require_slots(slots: Any, least: int, count: int) -> None:
    """Raises ValueError for slots that are no count, or that a token or a layer cannot use."""
    if type(slots) is not int or slots < 0:
        raise ValueError(f"expert_slots: expected None or a count of experts, got {slots!r}")
    if slots and not least <= slots <= count:
        raise ValueError(
            f"expert_slots: expected {least}, which a token needs, to {count}, of which a "
            f"layer has that many, got {slots}"
        )
