"""Kernels of others that run beside ours, each behind one interface.

`PEERS[name](case)` prepares whatever can be prepared ahead and returns a call without arguments
that attends (or writes) and returns the output tensor. A peer that cannot run here, or cannot run
this case, raises `Missing` with the reason. Names that end in `+plan` include the host's planning,
and so cannot be captured in a CUDA graph; the others plan ahead, which flatters the peer.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cells import Call, Case, Peer, Ready
from benchmarks.peers.dense import check_attention, sdpa

WORKSPACE = 256 << 20  # bytes of scratch FlashInfer splits rows into
BLOCK = 8192  # 32 KB of int32: 8 warps, eight 16-byte loads in flight for each thread


class Missing(Exception):
    """A peer that cannot run, and why."""


# FlashInfer


@cache
def flashinfer() -> Any:
    # Read at import. A module that was not built ahead must fail rather than call nvcc for minutes.
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.gettempdir())
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # of any kind, for example if a library does not fit
        raise Missing(f"flashinfer does not import: {error!r}") from error


def scratch(case: Case) -> Tensor:
    if case.q.device.type != "cuda":
        raise Missing("flashinfer needs a GPU")
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=case.q.device)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def page_lists(case: Case, skip: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table: host `indptr`, device `indices`, host tokens in the last pages."""
    cell = case.cell
    rows = range(len(cell.new))
    starts = int32([0, *(count - skip for count in cell.row_pages)]).cumsum(0).int()
    indices = torch.cat([case.row_ids(row)[skip:] for row in rows]).int()
    last = int32([(n - 1) % cell.page_size + 1 for n in cell.kv_lens])
    return starts, indices, last


def planned(plan: Callable[[], None], run: Call, with_plan: bool) -> Call:
    """`run` after one `plan`, or both every time."""
    try:
        plan()
    except RuntimeError as error:
        if type(error).__name__ == "MissingJITCacheError":
            raise Missing("this flashinfer module was not built") from error
        raise

    def both() -> Tensor:
        plan()
        return run()

    return both if with_plan else run


def flashinfer_attend(backend: str | None = None, with_plan: bool = False) -> Peer:
    """FlashInfer's prefill by a backend; without a backend its decode."""

    def peer(case: Case) -> Call:
        (h, g, d), lib = case.cell.heads, flashinfer()
        starts, indices, last = page_lists(case)
        rows = starts, indices, last, h, g, d, case.cell.page_size
        types = {"q_data_type": case.q.dtype, "kv_data_type": case.k_pages.dtype}
        pages, out = (case.k_pages, case.v_pages), case.output()
        wrapper: Any
        if backend is None:
            # A wrapper that is not told of graphs plans for these very rows, its best case; its
            # launches can be captured all the same.
            wrapper = lib.BatchDecodeWithPagedKVCacheWrapper(
                scratch(case), "HND", use_tensor_cores=h // g >= 4
            )
        else:
            wrapper = lib.BatchPrefillWithPagedKVCacheWrapper(scratch(case), "HND", backend=backend)
            rows = int32([0, *case.cell.new]).cumsum(0).int(), *rows
            types["causal"] = True

        def plan() -> None:
            wrapper.plan(*rows, sm_scale=case.scale, **types)

        return planned(plan, lambda: wrapper.run(case.q, pages, out=out), with_plan)

    return peer


def flashinfer_mla(case: Case) -> Call:
    """FlashInfer's attention to latents, absorbed as ours is."""
    (h, _, d), width, lib = case.cell.heads, case.cell.latent, flashinfer()
    starts, indices, _ = page_lists(case)
    wrapper = lib.mla.BatchMLAPagedAttentionWrapper(scratch(case), backend="fa3")
    lens = int32([0, *case.cell.new]).cumsum(0).int(), starts, indices, int32([*case.cell.kv_lens])
    sizes = h, width, d - width, case.cell.page_size, True, case.scale
    parts = (*case.q.split(sizes[1:3], -1), *case.k_pages[:, 0].split(sizes[1:3], -1))

    def plan() -> None:
        wrapper.plan(*lens, *sizes, case.q.dtype, case.k_pages.dtype)

    return planned(plan, lambda: wrapper.run(*parts), False)


def flashinfer_fp8(case: Case) -> Ready:
    """FlashInfer's decoding over the same pages in fp8, compared with attention over those."""
    coded = [x.to(torch.float8_e4m3fn) for x in (case.k_pages, case.v_pages)]
    k, v = (x.to(case.q.dtype) for x in coded)
    call = PEERS["flashinfer"](replace(case, k_pages=coded[0], v_pages=coded[1]))
    check = check_attention(replace(case, k_pages=k, v_pages=v))
    return Ready(call, check, sum(x.nbytes for x in coded))


def flashinfer_cascade(case: Case) -> Call:
    """Two levels: the shared pages for all rows at once, then each row's own."""
    cell = case.cell
    common = cell.shared // cell.page_size
    if not common:
        raise Missing("no shared prefix")
    wrapper = flashinfer().MultiLevelCascadeAttentionWrapper(2, scratch(case), "HND")
    starts, indices, last = page_lists(case, skip=common)
    queries = int32([0, *cell.new]).cumsum(0).int()
    types = {"q_data_type": case.q.dtype, "kv_data_type": case.k_pages.dtype}

    def plan() -> None:
        wrapper.plan(
            [queries[[0, -1]], queries],
            [int32([0, common]), starts],
            [case.page_table[0, :common], indices],
            [int32([cell.page_size]), last],
            *cell.heads,
            cell.page_size,
            causal=True,
            sm_scale=case.scale,
            **types,
        )

    return planned(plan, lambda: wrapper.run(case.q, (case.k_pages, case.v_pages)), False)


def flashinfer_append(case: Case) -> Call:
    append, device = flashinfer().append_paged_kv_cache, case.q.device
    if device.type != "cuda":
        raise Missing("flashinfer needs a GPU")
    starts, indices, last = (x.to(device) for x in page_lists(case))
    rows = torch.repeat_interleave(torch.tensor(case.cell.new)).int()
    first = torch.tensor(case.cell.kv_lens) - torch.tensor((0, *case.cell.new)).cumsum(0)[1:]
    positions = (torch.arange(len(rows)) + first[rows]).int().to(device)
    rows, pages = rows.to(device), (case.k_pages, case.v_pages)

    def call() -> Tensor:
        append(*case.fresh, rows, positions, pages, indices, starts, last, kv_layout="HND")
        return case.k_pages

    return call


# Yardsticks: the same bytes, no arithmetic


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _read(words, sums, num_words, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    mixed = tl.zeros([BLOCK], tl.int32)
    while start < num_words:
        at = start + tl.arange(0, BLOCK)
        # Any use will do as long as the compiler cannot drop the load.
        mixed ^= tl.load(words + at, mask=at < num_words, other=0)
        start += step
    tl.store(sums + tl.program_id(0), tl.reduce(mixed, 0, _xor))


def read_all(tensors: list[Tensor]) -> Call:
    """Reads contiguous tensors from end to end: the ceiling of reading K and V once."""
    words = [tensor.flatten().view(torch.int32) for tensor in tensors]
    device = words[0].device
    on_gpu = device.type == "cuda"
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    sums = torch.zeros(len(words), programs, dtype=torch.int32, device=device)

    def call() -> Tensor:
        for row, tensor in zip(sums, words):
            if on_gpu:
                _read[(programs,)](tensor, row, tensor.numel(), BLOCK=BLOCK, num_warps=8)
            else:
                row[0] = tensor.sum()
        return sums

    return call


def read(case: Case) -> Call:
    pages = case.cell.num_pages
    pools = [case.k_pages] if case.cell.latent else [case.k_pages, case.v_pages]
    return read_all([pool[:pages] for pool in pools])


def copy(case: Case) -> Call:
    half = case.cell.bytes // 2
    source, target = torch.randint(256, (2, half), dtype=torch.uint8, device=case.q.device)
    return lambda: target.copy_(source)


YARDSTICKS = ("read", "copy")
PEERS: dict[str, Peer] = {
    "flashinfer": flashinfer_attend(),
    "flashinfer+plan": flashinfer_attend(with_plan=True),
    "flashinfer-fp8": flashinfer_fp8,
    "flashinfer-mla": flashinfer_mla,
    "flashinfer-fa2": flashinfer_attend("fa2"),
    "flashinfer-fa2+plan": flashinfer_attend("fa2", with_plan=True),
    "flashinfer-fa3": flashinfer_attend("fa3"),
    "flashinfer-cascade": flashinfer_cascade,
    "flashinfer-append": flashinfer_append,
    "sdpa": sdpa(gather=True),
    "sdpa-dense": sdpa(gather=False),
    "read": read,
    "copy": copy,
}


def available() -> str:
    """Returns the version of FlashInfer that imports here, or why none does."""
    try:
        return getattr(flashinfer(), "__version__", "imports")
    except Missing as missing:
        return str(missing)
