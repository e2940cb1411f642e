"""Estimates how long a pass takes: moving and computing overlap, and the slowest counts."""

from __future__ import annotations

from dataclasses import dataclass

from .model_shape import ModelShape
from .placement import Placement


@dataclass(frozen=True)
class Machine:
    """Rates of a machine.

    Attributes:
        link_gbps: the rate of the link to the device.
        memory_gbps: the rate of the device's own memory.
        compute_tflops: the rate of its arithmetic.
        alone: the rate of experts that are read alone, as a share of the link's.
    """

    link_gbps: float
    memory_gbps: float
    compute_tflops: float
    alone: float


def streamed_bytes(shape: ModelShape, placement: Placement) -> int:
    """Counts the bytes that cross the link in each pass, without experts that are read alone."""
    away = placement.streamed(len(shape.layers))
    head = 0 if placement.head else shape.head_bytes
    return sum(shape.layer(i, placement.expert_slots) for i in away) + head


def seconds_of_pass(
    shape: ModelShape,
    placement: Placement,
    tokens: int,
    machine: Machine,
    disk_bytes: int = 0,
    disk_gbps: float | None = None,
    held_experts: int = 0,
) -> float:
    """Returns the seconds of a pass over `tokens`.

    Weights of a layer arrive while others compute. Experts that are read alone do not: only as a
    layer computes is it known which it lacks, so the pass waits.

    Args:
        disk_bytes: how many of the streamed bytes come from a disk.
        disk_gbps: the disk's rate; by default as fast as the link takes them.
        held_experts: bytes of experts in pinned host memory, which the link brings at its own rate.
    """
    link, disk = streamed_bytes(shape, placement), disk_bytes
    memory = sum(shape.layers) + shape.head_bytes
    waits, experts = 0.0, shape.experts
    if experts is not None:
        memory -= int(experts.total * (1 - experts.touched(tokens)))
    if experts is not None and placement.expert_slots:
        share = experts.read(tokens, placement.expert_slots, machine.alone)
        if share < 1:
            rate = min(machine.link_gbps, disk_gbps or machine.link_gbps) * machine.alone
            waits = share * (experts.total - held_experts) / (1e9 * rate)
            waits += share * held_experts / (1e9 * machine.link_gbps)
        else:
            link, disk = link + experts.total, disk + experts.total - held_experts
    return waits + max(
        link / (1e9 * machine.link_gbps),
        disk / (1e9 * disk_gbps) if disk_gbps else 0.0,
        memory / (1e9 * machine.memory_gbps),
        2 * shape.active * tokens / (1e12 * machine.compute_tflops),
    )
