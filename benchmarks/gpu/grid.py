"""The grid of cells for a GPU. What matters most comes first: a run cut short has measured it."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.cells import Cell, Heads
from benchmarks.gpu import capacity, delta_rule

HEADS = {
    "A": Heads(32, 8, 128),  # Llama 8B
    "B": Heads(64, 8, 128),  # Llama 70B
    "C": Heads(32, 4, 128),  # Qwen3 30B-A3B
    "D": Heads(32, 32, 128),  # no grouping
    "E": Heads(16, 2, 64),
    "F": Heads(8, 1, 256),
    "G": Heads(28, 4, 128),  # a group of 7
    "M": Heads(128, 1, 576),  # DeepSeek V3: latents of 512 and 64
}
K = 1024
DECODE = ("flashinfer", "flashinfer+plan", "read")
PREFILL = ("flashinfer-fa2", "flashinfer-fa3", "sdpa", "sdpa-dense")
PLANNED = ("flashinfer-fa2", "flashinfer-fa2+plan")
BIG = "must >= 0.95x flashinfer, >= 90% of read; goal >= 1.03x, >= 95% of read"
MID = "must >= 1.0x flashinfer; goal >= 1.15x"
ONE = "must <= 10 us; goal <= 7.5 us"
RAGGED = "must >= 85% of the uniform rate, >= 1.2x flashinfer+plan; goal >= 95%, >= 2x"
LATENT = "must >= 1.1x flashinfer-mla"
VERIFY = "must <= 1.15x the time of one token; goal <= 1.08x"
PAGES = "must within 5% (page 1: 25%) of page 64; goal 2% (12%)"
FULL = "must >= 450 TFLOPS, >= 0.70x fa3, > sdpa; goal >= 600 TFLOPS, >= 0.92x fa3"
CHUNK = "must >= 0.75x fa3; goal >= 0.95x"
CASCADE = "must >= 0.9x cascade, 5x without; goal >= 1.1x, 10x (n=64, 8K)"
APPEND = "must >= 70% of copy; goal >= 90% (from 4096 tokens)"
HOST = "must <= 20 us of host time; goal <= 8 us"


def short(n: int) -> str:
    return f"{n // K}k" if n >= K and n % K == 0 else str(n)


def alike(
    name: str,
    heads: str,
    rows: int,
    length: int,
    target: str,
    new: int = 1,
    page: int = 16,
    peers: tuple[str, ...] = DECODE,
    **more: Any,
) -> Cell:
    """A cell of rows that are all the same."""
    return Cell(name, HEADS[heads], (length,) * rows, (new,) * rows, page, peers, target, **more)


def decode_cells() -> list[Cell]:
    def cell(name: str, rows: int, length: int, page: int, target: str) -> Cell:
        where = f"decode/{name}/b{rows}/{short(length)}/p{page}"
        return alike(where, name, rows, length, target, page=page)

    big = [(32, 4 * K), (64, 4 * K), (128, 4 * K), (32, 16 * K), (8, 64 * K), (1, 128 * K)]
    mid = [(8, 512), (16, K), (4, 4 * K), (32, K), (8, 4 * K), (16, 4 * K)]
    cells = [cell("A", *shape, 16, BIG) for shape in big]
    cells += [cell("A", *shape, 16, MID) for shape in mid]
    cells += [cell("A", 1, length, 16, ONE) for length in (K, 4 * K)]
    cells += [cell("B", 1, 4 * K, 16, ONE), cell("B", 32, 4 * K, 16, BIG)]
    cells += [cell("B", 32, 16 * K, 64, BIG), cell("C", 32, 4 * K, 16, MID)]
    cells += [cell("C", 64, 16 * K, 64, BIG), cell("D", 8, 4 * K, 16, BIG)]
    cells += [cell("D", 32, 4 * K, 64, BIG), cell("E", 64, 4 * K, 16, MID)]
    facts: dict[str, Any] = {"page": 64, "peers": ("flashinfer-mla", "read"), "latent": 512}
    cells += [alike("decode/M/b64/8k/p64", "M", 64, 8 * K, LATENT, **facts)]
    return [*cells, cell("F", 64, 4 * K, 16, MID), cell("G", 32, 4 * K, 16, MID)]


def page_cells() -> list[Cell]:
    name, base = "pages/A/b32/8k/p{}", "pages/A/b32/8k/p64"
    sizes = (64, 16, 1, 48, 128)
    return [alike(name.format(n), "A", 32, 8 * K, PAGES, page=n, base=base) for n in sizes]


def ragged_cells() -> list[Cell]:
    rows, base = 64, "decode/A/b64/4k/p16"
    spread = [round(128 * 256 ** (i / (rows - 1))) for i in range(rows)]
    zipf = [32 * K // (i + 1) for i in range(rows)]
    mixer = random.Random(0)
    mixer.shuffle(spread)
    mixer.shuffle(zipf)
    kinds = {"log": spread, "zipf": zipf, "one-long": [128 * K] + [512] * (rows - 1)}
    same = ((1,) * rows, 16, DECODE, RAGGED)
    return [
        Cell(f"ragged/A/{name}", HEADS["A"], tuple(lens), *same, base=base)
        for name, lens in kinds.items()
    ]


def verify_cells() -> list[Cell]:
    def cell(name: str, new: int) -> Cell:
        facts = {"peers": (*PLANNED, "read"), "base": f"decode/{name}/b32/4k/p16"}
        return alike(f"verify/{name}/q{new}/b32/4k", name, 32, 4 * K, VERIFY, new, **facts)

    return [cell("A", 4), cell("A", 8), cell("A", 2), cell("A", 16), cell("C", 4)]


def prefill_cells() -> list[Cell]:
    def full(name: str, length: int, page: int = 64) -> Cell:
        rows = 32 * K // length
        where = f"prefill/{name}/b{rows}/{short(length)}/p{page}"
        # Only D = 128 has a Hopper module at hand.
        peers = tuple(p for p in PREFILL if HEADS[name].d == 128 or p != "flashinfer-fa3")
        return alike(where, name, rows, length, FULL, length, page, peers)

    def chunk(new: int, prefix: int) -> Cell:
        where = f"chunk/A/{short(new)}-on-{short(prefix)}"
        return alike(where, "A", 1, prefix + new, CHUNK, new, peers=PREFILL)

    cells = [full("A", 8 * K), full("A", 32 * K), full("A", 2 * K), full("A", 8 * K, 16)]
    cells += [full("B", 8 * K), full("E", 8 * K), full("F", 8 * K)]
    cells += [chunk(2 * K, 64 * K), chunk(2 * K, 8 * K), chunk(512, 8 * K), chunk(8 * K, 64 * K)]
    lens, new = (8 * K,) * 64, (4 * K,) + (1,) * 63
    peers = (*PLANNED, "flashinfer-fa3")
    return [*cells, Cell("mixed/A/4k+63x8k", HEADS["A"], lens, new, 16, peers, CHUNK)]


def append_cells() -> list[Cell]:
    facts: dict[str, Any] = {"peers": ("flashinfer-append", "copy"), "kind": "append"}
    return [
        alike(f"append/A/{rows}x{short(new)}", "A", rows, max(new, K), APPEND, new, **facts)
        for rows, new in ((256, 1), (1, 4 * K), (16, 4 * K))
    ]


def shared_cells() -> list[Cell]:
    peers = ("flashinfer-cascade", "flashinfer")
    return [
        alike(
            f"shared/A/n{rows}/{short(prefix)}+{short(own)}",
            *("A", rows, prefix + own, CASCADE),
            peers=peers,
            shared=prefix,
        )
        for rows, prefix, own in ((64, 8 * K, 64), (256, 4 * K, 64), (16, 32 * K, K))
    ]


def other_cells() -> list[Cell]:
    def overhead(rows: int, length: int) -> Cell:
        where = f"overhead/A/b{rows}/{short(length)}"
        return alike(where, "A", rows, length, HOST, peers=DECODE[:3])

    pages = alike("copy/A/16k", "A", 2, 16 * K, APPEND, peers=("copy",), kind="copy")
    attention = [*append_cells(), pages, *shared_cells(), overhead(32, K), overhead(1, 512)]
    return [*delta_rule.cells(), *attention]


def core() -> list[Cell]:
    groups = (decode_cells, page_cells, prefill_cells, verify_cells, ragged_cells, other_cells)
    return [cell for group in groups for cell in group()]


def everything() -> list[Cell]:
    return [*core(), *capacity.cells()]


def one_of_each(cells: list[Cell]) -> list[Cell]:
    """The first cell of each kind, also of latents; host times wait for a machine at rest."""
    kinds: dict[Any, Cell] = {}
    for cell in cells:
        kinds.setdefault((cell.id.partition("/")[0], cell.latent > 0), cell)
    return [cell for (kind, _), cell in kinds.items() if kind != "overhead"]


GRIDS = {"all": everything, "core": core, "decode": decode_cells, "prefill": prefill_cells}
GRIDS |= {"capacity": capacity.cells}
