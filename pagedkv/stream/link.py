"""Measures how fast weights arrive on this machine, so that a plan can choose widths of passes."""

from __future__ import annotations

import os
from time import perf_counter

import torch

from pagedkv.planner.checkpoint import Checkpoint

from .arena import HostArena

SAMPLE = 64 << 20  # bytes: some 3 ms at 25 GB/s, against which starting a copy is nothing
TURNS = 3


def measure_link(checkpoint: Checkpoint, device: torch.device) -> float:
    """GB/s of the slowest link on the way of weights to a device; takes a tenth of a second.

    On CUDA it copies from pinned memory; on a CPU it reads from the checkpoint's largest file, as
    much as the file cache has.
    """
    copy = _to_card if device.type == "cuda" else _from_file
    return max(copy(checkpoint, device) for _ in range(TURNS))


def _to_card(checkpoint: Checkpoint, device: torch.device) -> float:
    host = HostArena(SAMPLE, pin=True)
    there = torch.empty_like(host.tensor, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    there.copy_(host.tensor, non_blocking=True)
    end.record()
    end.synchronize()
    host.close()
    return SAMPLE / begin.elapsed_time(end) / 1e6


def _from_file(checkpoint: Checkpoint, device: torch.device) -> float:
    largest = max(checkpoint.tensors.values(), key=lambda tensor: tensor.nbytes)
    wanted = min(SAMPLE, largest.nbytes)
    arena = HostArena(wanted)
    arena.tensor.zero_()  # its pages are there before the clock runs
    file = os.open(largest.file, os.O_RDONLY)
    try:
        start = perf_counter()
        count = os.preadv(file, [arena.bytes], largest.offset)
        return max(1, count) / (perf_counter() - start) / 1e9
    finally:
        os.close(file)
