"""Measures how fast weights arrive on this machine, so that a plan can choose widths of passes."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from time import perf_counter

import torch

from pagedkv.models.checkpoint import Checkpoint

from .arena import HostArena
from .experts.memory import moves
from .mxfp4 import packed_in

SAMPLE = 64 << 20  # bytes: some 3 ms at 25 GB/s, so starting a copy does not matter
TURNS = 3


def measure_link(checkpoint: Checkpoint, device: torch.device) -> float:
    """Measures GB/s of the slowest link from weights to a device; takes a tenth of a second.

    On CUDA it copies from pinned memory; on a CPU it reads from one of the checkpoint's files.
    """
    copy = _to_card if device.type == "cuda" else _from_file
    return _unpacked(checkpoint, max(copy(checkpoint, device) for _ in range(TURNS)))


def measure_experts(checkpoint: Checkpoint, nbytes: int) -> float:
    """Measures GB/s of reading `nbytes` at a time, here and there, as a CPU reads experts.

    It reads into existing memory, like that of evicted experts; for tensors so small that their
    memory does not move, it reads into memory that the system makes as they arrive.

    Args:
        nbytes: bytes of the largest tensor of an expert.
    """
    path, size = _file_of(checkpoint)
    nbytes = min(nbytes, size)
    count = max(1, min(SAMPLE, size) // nbytes)
    offsets = random.Random(0).sample(range(size // nbytes), count)
    file = os.open(path, os.O_RDONLY)
    try:
        gbps = max(_here_and_there(file, offsets, nbytes) for _ in range(TURNS))
        return _unpacked(checkpoint, gbps)
    finally:
        os.close(file)


def _unpacked(checkpoint: Checkpoint, gbps: float) -> float:
    """Returns GB/s of weights in memory, if files are read at `gbps`."""
    for packed in packed_in(checkpoint).values():
        sizes = [nbytes for *_, nbytes in packed.parts(0)]
        raw = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
        target = torch.empty(packed.shape[1:], dtype=torch.bfloat16, device="cpu")
        packed.unpack(raw, target)  # makes its memory before the clock runs
        started = perf_counter()
        packed.unpack(raw, target)
        seconds = perf_counter() - started + sum(map(len, raw)) / (1e9 * gbps)
        return target.nbytes / seconds / 1e9
    return gbps


def _file_of(checkpoint: Checkpoint) -> tuple[Path, int]:
    """Returns the file of the largest tensor, and its size."""
    largest = max(checkpoint.tensors.values(), key=lambda tensor: tensor.nbytes)
    return largest.file, os.path.getsize(largest.file)


def _here_and_there(file: int, offsets: list[int], nbytes: int) -> float:
    with mmap.mmap(-1, len(offsets) * nbytes) as memory, memoryview(memory) as view:
        if moves(nbytes):
            view[:: mmap.PAGESIZE] = bytes(-(-len(view) // mmap.PAGESIZE))  # it is there
        start = perf_counter()
        for i, offset in enumerate(offsets):
            with view[i * nbytes : (i + 1) * nbytes] as there:
                os.preadv(file, [there], offset * nbytes)
        return len(offsets) * nbytes / (perf_counter() - start) / 1e9


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
    path, size = _file_of(checkpoint)
    arena = HostArena(min(SAMPLE, size))
    arena.tensor.zero_()  # makes its pages before the clock runs
    file = os.open(path, os.O_RDONLY)
    try:
        start = perf_counter()
        count = os.preadv(file, [arena.bytes], 0)
        return max(1, count) / (perf_counter() - start) / 1e9
    finally:
        os.close(file)
