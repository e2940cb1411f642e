"""`Placement`: the decisions of a plan, from which all of its bytes follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where weights are and how wide a pass is.

    Attributes:
        resident: layers that stay on the device.
        embedding, head: whether these stay; with tied weights both or neither.
        tables: whether larger tables stay, which they do only if all weights stay.
        step_tokens: most tokens computed in one pass.
        verify_width: tokens of one sequence computed in one decoding pass.
        expert_slots: experts of a layer that stay, while others are read as tokens are routed to
            them; resident layers then stay without their experts. 0 if experts come with layers.
    """

    resident: tuple[int, ...]
    embedding: bool
    tables: bool
    head: bool
    step_tokens: int
    verify_width: int
    expert_slots: int = 0

    def streamed(self, count: int) -> list[int]:
        """Returns the layers, of `count`, that pass through the ring."""
        held = set(self.resident)
        return [i for i in range(count) if i not in held]
