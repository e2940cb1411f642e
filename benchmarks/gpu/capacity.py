"""Fewer bytes on a card: `python3 -m benchmarks.gpu.capacity --out DIR`.

Decoding over pages of every format against bf16 pages, over chosen pages against all of them, and
steps whose attention is looked at for a policy against those that are not, through
`paged_attention` as a model calls it. Everything is first held against attention in float32 over
what the pages hold. FlashInfer's decoding over bf16 and fp8 pages of the same shape runs beside it,
where it is installed. Each line is written to `DIR/capacity.json` as it is measured, a table comes
last. `--shrink --device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.grid import Cell, Heads, make_case
from benchmarks.gpu.peers import PEERS, Missing
from benchmarks.gpu.timing import Way, ceilings, measure
from pagedkv import CacheConfig, PagedKVCache, paged_attention, write_kv
from pagedkv.attention import gather_kv

Record = dict[str, Any]
HEADS, KV_HEADS, DIM = 32, 8, 128
PEER = {"flashinfer bf16": torch.bfloat16, "flashinfer fp8": torch.float8_e4m3fn}
CHUNK = 8192  # tokens written in one step


class Line(NamedTuple):
    """One cache.

    Attributes:
        batch, length: sequences, and tokens of each; 512 MiB or more in bf16.
        fields: of its `CacheConfig`; none for a peer, which has no cache.
        base: the line it is compared with.
    """

    name: str
    batch: int
    length: int
    fields: dict[str, Any]
    base: str


FORMATS = ("dense", "int8", "fp8", "int4", "int8/int4")


def lines(shrink: bool) -> Iterator[Line]:
    """What matters most first."""
    shapes = [(2, 300)] if shrink else [(16, 16_384), (8, 32_768), (32, 4096)]
    for batch, length in shapes:
        base = f"dense {batch} x {length}"
        for name in FORMATS:
            pair = tuple(name.split("/"))
            fields = {"kv_format": pair if len(pair) == 2 else name}
            yield Line(f"{name} {batch} x {length}", batch, length, fields, base)
        for name in PEER:
            yield Line(f"{name} {batch} x {length}", batch, length, {}, base)
    batch, length = (2, 300) if shrink else (8, 32_768)
    read = 128 if shrink else 4096
    for name in ("dense", "int4"):
        fields = {"kv_format": name, "read_tokens": read}
        base = f"{name} {batch} x {length}"
        yield Line(f"{name} {batch} x {length}, {read} read", batch, length, fields, base)
    fields = {"retention": "importance", "budget": length}
    base = f"dense {batch} x {length}"
    yield Line(f"dense {batch} x {length}, looked at", batch, length, fields, base)


def fill(line: Line, device: torch.device) -> tuple[PagedKVCache, list[int]]:
    """A cache of one layer whose sequences hold random K and V."""
    tokens = line.batch * (line.length + 64)
    sizes = {"max_tokens": tokens, "max_sequences": line.batch, "max_step_tokens": CHUNK}
    config = CacheConfig(1, KV_HEADS, DIM, "bfloat16", **sizes, **line.fields)
    cache = PagedKVCache(config, device=device)
    source = torch.Generator(device).manual_seed(0)
    size = torch.rand(KV_HEADS, DIM, generator=source, device=device) * 4  # of K's channels
    seqs = [cache.add() for _ in range(line.batch)]
    for seq in seqs:
        for begin in range(0, line.length, CHUNK):
            count = min(CHUNK, line.length - begin)
            shape = 2, count, KV_HEADS, DIM
            kv = torch.randn(shape, generator=source, device=device)
            with cache.step([seq], num_new=count) as step:
                write_kv((kv[0] * size).bfloat16(), kv[1].bfloat16(), step, 0)
    return cache, seqs


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query `[H, D]` over K and V `[n, G, D]`, in float32."""
    k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.float(), k) * DIM**-0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


def farthest(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference; NaN if there is one anywhere."""
    return float(torch.stack([(a.float() - b).abs().max() for a, b in pairs]).max())


def measure_peer(line: Line, dtype: torch.dtype, device: torch.device) -> Record:
    """The same of FlashInfer, planned ahead, over pages of 16 tokens that lie anywhere."""
    lengths, one = (line.length + 1,) * line.batch, (1,) * line.batch
    cell = Cell(line.name, Heads(HEADS, KV_HEADS, DIM), lengths, one, 16, (), "")
    case = make_case(cell, device)
    case.k_pages, case.v_pages = case.k_pages.to(dtype), case.v_pages.to(dtype)
    try:
        call = PEERS["flashinfer"](case)
    except Missing as error:
        return {"missing": str(error)}
    pairs = []
    for row, (x, out) in enumerate(zip(case.q, call())):
        pages = case.row_ids(row)
        held = (x[pages].transpose(1, 2).flatten(0, 1) for x in (case.k_pages, case.v_pages))
        pairs.append((out, truth(x, *(kept[: line.length + 1].float() for kept in held))))
    way = Way(call, True, device)
    nbytes = case.k_pages.nbytes + case.v_pages.nbytes
    times = measure({line.name: way})[line.name]
    return {"bytes": nbytes, "error": farthest(pairs), **times}


def measure_line(line: Line, device: torch.device) -> Record:
    """Error and time of one decoding step's attention."""
    name = line.name.partition(f" {line.batch} x ")[0]
    if name in PEER:
        return measure_peer(line, PEER[name], device)
    cache, seqs = fill(line, device)
    nbytes = cache._storage.nbytes
    step = cache.prepare(seqs, num_new=1)
    source = torch.Generator(device).manual_seed(1)
    shape = line.batch, HEADS + 2 * KV_HEADS, DIM
    qkv = torch.randn(shape, generator=source, device=device).bfloat16()
    q, k, v = (x.contiguous() for x in qkv.split([HEADS, KV_HEADS, KV_HEADS], 1))
    if "looked at" in line.name:
        step.queries = step.num_new  # as in every 16th step
    out = paged_attention(q, k, v, step, 0)
    # Chosen pages leave something out on purpose: tests hold them against what was chosen.
    error = None
    if not cache.config.read_tokens:
        error = farthest((o, truth(x, *kv)) for o, x, kv in zip(out, q, gather_kv(step, 0)))
    way = Way(lambda: paged_attention(q, k, v, step, 0), True, device)
    times = measure({line.name: way})[line.name]
    cache.abort(step)
    return {"bytes": nbytes, "error": error, **times}


def table(found: dict[str, Record], every: list[Line]) -> str:
    """Times and ratios, one line each."""
    rows = [f"{'':<34}{'MiB':>8}{'error':>9}{'us':>9}{'x faster':>10}"]
    for line in every:
        if (record := found.get(line.name)) is None:
            continue
        if "missing" in record:
            rows.append(f"{line.name:<34}  {record['missing']}")
            continue
        spent, base = (_main(found.get(name)) for name in (line.name, line.base))
        ratio = f"{base / spent:.2f}" if spent and base else ""
        mib = record["bytes"] / 2**20
        error = "" if record["error"] is None else f"{record['error']:.4f}"
        rows.append(f"{line.name:<34}{mib:>8.0f}{error:>9}{spent:>9.1f}{ratio:>10}")
    return "\n".join(rows)


def _main(record: Record | None) -> float:
    """Microseconds; 0 where nothing was measured."""
    return 0.0 if record is None else record.get("graph_cold", record.get("eager", 0.0))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", action="store_true")
    options = parser.parse_args(arguments)
    device, every = torch.device(options.device), list(lines(options.shrink))
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Record] = {}
    data = {"device": str(device), "torch": torch.__version__, "lines": found}
    if device.type == "cuda":
        data |= {"device": torch.cuda.get_device_name(device), "ceilings": ceilings(device)}
    right = True
    for line in every:
        found[line.name] = measure_line(line, device)
        (options.out / "capacity.json").write_text(json.dumps(data, indent=1))
        print(f"{line.name}: {_main(found[line.name]):.1f} us", flush=True)
        error = found[line.name].get("error")
        right &= error is None or error < 0.02  # bf16 of values of about 1; NaN is wrong
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(table(found, every))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
