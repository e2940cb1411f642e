"""Kernels of others that run beside ours, each behind one interface.

`PEERS[name](case)` prepares whatever can be prepared ahead and returns a call without arguments
that attends (or writes) and returns the output tensor. A peer that cannot run here, or cannot run
this case, raises `Missing` with the reason. Names that end in `+plan` include the host's planning,
and so cannot be captured in a CUDA graph; the others plan ahead, which flatters the peer.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cells import Call, Case, Peer, Ready
from benchmarks.peers.dense import check_attention, sdpa

WORKSPACE = 256 << 20  # bytes of scratch FlashInfer splits rows into
# Folder that holds sglang's `sglang/srt/layers/attention/triton_ops`.
SGLANG = "PAGEDKV_SGLANG"
BLOCK = 8192  # 32 KB of int32: 8 warps, eight 16-byte loads in flight for each thread
TORCH_PAGE = 256  # tokens; pages of torch's FlashAttention have multiples of it
MAX_SPLITS = 64  # of a row in SGLang's decode; it ships with 8, which starves small batches


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


# SGLang: its Triton kernels, without its server


@cache
def sglang(name: str) -> ModuleType:
    default = Path(__file__).resolve().parents[2] / ".gpu" / "sglang"
    folder = Path(os.environ.get(SGLANG, default))
    if not (folder / "sglang").is_dir():
        raise Missing(f"no sglang folder; name one in {SGLANG}")
    utils = ModuleType("sglang.srt.utils")
    utils.is_cuda, utils.is_hip = torch.cuda.is_available, lambda: False  # type: ignore[attr-defined]
    sys.modules.setdefault(utils.__name__, utils)
    sys.path.append(str(folder))
    try:
        return importlib.import_module(f"sglang.srt.layers.attention.triton_ops.{name}")
    except ImportError as error:
        raise Missing(f"sglang's kernels do not import: {error}") from error
    finally:
        sys.path.remove(str(folder))


def sglang_slots(case: Case, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """SGLang's page table: `indptr` and slots of the first tokens of each row."""
    device, size = case.q.device, case.cell.page_size
    inside = torch.arange(size, device=device)
    slots = [
        (case.row_ids(row)[:, None] * size + inside).flatten()[:length]
        for row, length in enumerate(lengths)
    ]
    return int32([0, *lengths]).cumsum(0).int().to(device), torch.cat(slots)


def sglang_attend(case: Case) -> Call:
    h, g, d = case.cell.heads
    # SGLang wants slots of `[G, D]`, so it works on a copy.
    k, v = (x.transpose(1, 2).reshape(-1, g, d) for x in (case.k_pages, case.v_pages))
    out, device = case.output(), case.q.device
    if case.cell.decode:
        decode = sglang("decode_attention").decode_attention_fwd
        starts, slots = sglang_slots(case, list(case.cell.kv_lens))
        rows = len(case.cell.new)
        # A few waves of programs; each program takes up to 16 heads of a group.
        wanted = math.ceil(4 * 132 / (rows * g * math.ceil(h / g / 16)))
        splits = max(1, min(MAX_SPLITS, wanted))
        counts = torch.full((rows,), splits, dtype=torch.int32, device=device)
        logits = torch.empty(rows, h, splits, d, device=device)
        lse = torch.empty(rows, h, splits, device=device)

        def call() -> Tensor:
            tables = (starts, slots, logits, lse, counts, splits)
            decode(case.q, k, v, out, *tables, case.scale, 1.0, 1.0)
            return out

        return call
    extend = sglang("extend_attention").extend_attention_fwd
    prefix = [kv - new for kv, new in zip(case.cell.kv_lens, case.cell.new)]
    starts, slots = sglang_slots(case, prefix)
    k_new, v_new = k[case.slots], v[case.slots]
    longest = max(case.cell.new)

    def call_extend() -> Tensor:
        tables = (case.query_start_loc, starts, slots, None, True, None, longest)
        extend(case.q, k_new, v_new, out, k, v, *tables, 1.0, 1.0, sm_scale=case.scale)
        return out

    return call_extend


# torch: FlashAttention behind a page table, from the release on that has one


def torch_varlen(case: Case) -> Call:
    """Torch's own paged attention, on a copy: it wants `[P, G, D]` in pages of 256."""
    cell, device = case.cell, case.q.device
    if device.type != "cuda":
        raise Missing("torch attends to pages on a GPU only")
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(varlen).parameters:
        raise Missing(f"torch {torch.__version__} has no block_table")
    counts = [-(-n // TORCH_PAGE) for n in cell.kv_lens]
    ids = torch.randperm(sum(counts), device=device).split(counts)
    k, v = (_in_torch_pages(case, pool, ids) for pool in (case.k_pages, case.v_pages))
    table = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).int()
    lens = case.query_start_loc, None, max(cell.new), max(cell.kv_lens)
    pages: dict[str, Any] = {"seqused_k": case.kv_lens, "block_table": table}

    def call() -> Tensor:
        return varlen(
            case.q, k, v, *lens, scale=case.scale, window_size=(-1, 0), enable_gqa=True, **pages
        )

    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        raise Missing(f"torch does not attend so: {error}") from error
    return call


def _in_torch_pages(case: Case, pool: Tensor, ids: Sequence[Tensor]) -> Tensor:
    """The rows of K or V, each in pages of its own; `[N, 256, G, D]`."""
    _, g, d = case.cell.heads
    made = pool.new_zeros(sum(map(len, ids)), TORCH_PAGE, g, d)
    for row, (own, length) in enumerate(zip(ids, case.cell.kv_lens)):
        tokens = pool[case.row_ids(row)].transpose(1, 2).reshape(-1, g, d)[:length]
        room = tokens.new_zeros(len(own) * TORCH_PAGE, g, d)
        room[:length] = tokens
        made[own] = room.view(len(own), TORCH_PAGE, g, d)
    return made


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
    "sglang": sglang_attend,
    "torch-varlen": torch_varlen,
    "read": read,
    "copy": copy,
}


def available() -> dict[str, str]:
    """Returns what imports here, and why the rest does not."""
    found = {}
    loads: dict[str, Callable[[], Any]] = {
        "flashinfer": flashinfer,
        "sglang decode": lambda: sglang("decode_attention"),
        "sglang extend": lambda: sglang("extend_attention"),
    }
    for name, load in loads.items():
        try:
            found[name] = getattr(load(), "__version__", "imports")
        except Missing as missing:
            found[name] = str(missing)
    return found
