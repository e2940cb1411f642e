"""`Placement`: what a plan decides, of which all of its bytes follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where weights are and how wide a pass is.

    Attributes:
        resident: layers that stay on the device.
        embedding, head: whether these do; with tied weights both or neither.
        tables: whether larger tables stay: where all weights do.
        step_tokens: tokens computed in one pass, at most.
        verify_width: tokens of one sequence computed in one decoding pass.
        expert_slots: experts of a layer that stay while others come as they are routed to; 0 where
            they come with their layer. Resident layers are then such without their experts.
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
