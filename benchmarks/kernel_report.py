"""Reports what the compiler makes of every shipped kernel, and checks it; no GPU is needed.

A page id read in the same iteration as its page halves the pipeline; a stride that is not known to
be a multiple of 16 makes copies narrow; a product in int32 reads elsewhere once a pool is large.
All three pass every test of values, and all three show in compiled code.

    python -m benchmarks.kernel_report --arch 90 -k decode
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import CompiledKernel

from benchmarks.compiled import hazards
from benchmarks.compiled.flow import (
    Flow,
    int32_products,
    narrow_copies,
    operands_by,
    pipeline,
    times_made,
)
from benchmarks.compiled.sass import Machine, accesses, disassemble
from benchmarks.report import markdown
from pagedkv.kernels.triton.card import CHIPS, REGISTERS, WARP, absent_card

MMA = {
    "tcgen05": ("UTCHMMA",),
    "hgmma": ("HGMMA", "QGMMA", "IGMMA"),
    "hmma": ("HMMA", "QMMA", "IMMA"),
    "ffma": ("FFMA",),
}


class Shipped(NamedTuple):
    """A kernel as it is shipped, and what is promised of it.

    Attributes:
        name: same in every architecture.
        compile: called while the architecture's driver is active.
        buffers: least depth of the pipeline of K and V, at most its stages less one; 0 without one.
        mma: "hmma", "hgmma", "tcgen05", "ffma" or "none".
        wide: pages are read and written 16 bytes at a time.
        stack: most bytes that a thread spills, outside of the main loop.
        measured: a card has shown that it is the fastest although it spills in that loop, too.
        int64_args: arguments that point at pools, where int32 offsets may overflow.
        hidden: least exponentials of the main loop that are made while products run.
        repeats: most times that warps make the same product.
    """

    name: str
    compile: Callable[[], CompiledKernel]
    buffers: int
    mma: str
    wide: bool = True
    stack: int = 0
    measured: bool = False
    int64_args: tuple[str, ...] = ("k_ptr", "v_ptr")
    hidden: int = 0
    repeats: int = 1


class Figures(NamedTuple):
    """The figures that `analyse` finds; `loop` and `length` are of the main loop, see `sass.py`."""

    registers: int
    stack: int
    shared: int
    blocks: int  # resident at once on a multiprocessor
    buffers: int
    mma: str
    tf32: bool
    length: int
    loop: dict[str, int]
    narrow: tuple[str, ...] = ()
    int32: tuple[str, ...] = ()
    hidden: int = 0
    repeats: int = 1
    hazards: tuple[str, ...] = ()
    stages: int = 3


def analyse(compiled: CompiledKernel, pools: tuple[str, ...] = ("k_ptr", "v_ptr")) -> Figures:
    """Reads the figures of a kernel compiled for one of `CHIPS`; `pools` as `int64_args`."""
    meta = compiled.metadata
    paths = {Path(name).suffix[1:]: Path(path) for name, path in compiled.metadata_group.items()}
    machine = disassemble(paths["cubin"], compiled.name)
    if "ttir" not in paths:  # Gluon: hardware makes its copies, and its source says which
        figures = _figures(compiled, machine, 0, _mma(machine.loop, machine.code))
        return figures._replace(
            hazards=hazards.found(machine.listing, meta.num_warps, {"SYNCS.ARRIVE"})
        )
    ttir, ttgir = (Flow(str(paths[kind]), meta.target) for kind in ("ttir", "ttgir"))
    if unknown := set(pools) - set(ttir.arguments.values()):  # or nothing would be checked
        raise ValueError(f"expected pools among {[*ttir.arguments.values()]}, got {unknown}")
    ptx = compiled.asm["ptx"]
    narrow, tiles = narrow_copies(ttir, accesses(ptx), pools, meta.num_warps * WARP)
    multiplies = any(op.name == "tt.dot" for op in ttir.ops)  # else FFMA is nothing but arithmetic
    mma = _mma(machine.loop, machine.code) if multiplies else "none"
    figures = _figures(compiled, machine, pipeline(ttgir, tiles), mma)
    return figures._replace(
        narrow=narrow,
        int32=int32_products(ttir, pools),
        repeats=times_made(ttgir),
        hazards=hazards.found(machine.listing, meta.num_warps, operands_by(ttgir)),
    )


def _figures(compiled: CompiledKernel, machine: Machine, buffers: int, mma: str) -> Figures:
    meta = compiled.metadata
    return Figures(
        registers=machine.registers,
        stack=machine.stack,
        shared=meta.shared,
        blocks=resident(machine.registers, meta.shared, meta.num_warps, meta.target.arch),
        buffers=buffers,
        mma=mma,
        tf32=machine.tf32 or ".tf32" in compiled.asm["ptx"],
        length=machine.length,
        loop=machine.loop,
        hidden=machine.hidden,
        stages=meta.num_stages,
    )


def _mma(*codes: dict[str, int]) -> str:
    kinds = (kind for code in codes for kind, names in MMA.items() if code.keys() & names)
    return next(kinds, "none")


def resident(registers: int, shared: int, warps: int, arch: int) -> int:
    """Blocks that a multiprocessor holds at once."""
    chip = CHIPS[arch]
    # A warp gets registers in units of 256, from one of four equal parts; the system takes 1 KiB
    # of shared memory for each block.
    a_warp = math.ceil(max(registers, 1) / 8) * 8 * WARP
    by_registers = REGISTERS // 4 // a_warp * 4 // warps
    by_shared = (chip.shared + 1024) // (math.ceil(shared / 128) * 128 + 1024)
    return min(by_registers, by_shared, chip.threads // (warps * WARP), chip.blocks)


def problems(figures: Figures, shipped: Shipped, arch: int) -> list[str]:
    """Returns the reasons for which a kernel must not be shipped, a sentence each."""
    limit, depth = CHIPS[arch].shared, min(shipped.buffers, figures.stages - 1)
    checks = {
        f"it spills, {figures.stack} bytes of stack a thread": (
            figures.stack > shipped.stack
            or (figures.loop.keys() & {"STL", "LDL"} and not shipped.measured)
        ),
        f"it copies pages in pieces ({', '.join(figures.narrow)})": shipped.wide and figures.narrow,
        f"its pipeline has {figures.buffers} buffers, not {depth}": figures.buffers < depth,
        f"it takes {figures.shared} bytes of shared memory, of {limit}": figures.shared > limit,
        f"it multiplies by {figures.mma}, not {shipped.mma}": figures.mma != shipped.mma,
        "it rounds fp32 to TF32": figures.tf32,
        f"it makes {figures.hidden} exponentials while products run, not {shipped.hidden}": (
            figures.hidden < shipped.hidden
        ),
        f"int32 products reach its pages ({', '.join(figures.int32)})": figures.int32,
        f"warps make a product {figures.repeats} times, not {shipped.repeats}": (
            figures.repeats > shipped.repeats
        ),
        f"operands may change while products run ({', '.join(figures.hazards)})": figures.hazards,
    }
    return [f"sm_{arch} {shipped.name}: {what}." for what, found in checks.items() if found]


class Row(NamedTuple):
    """A kernel of the report; one that does not compile has no figures."""

    arch: int
    name: str
    figures: Figures | None
    problems: list[str]


def measure(module: str, arch: int, substring: str, core: bool, part: int, parts: int) -> list[Row]:
    """Compiles and judges one part of an architecture's kernels."""
    rows = []
    with absent_card(arch):
        listed = importlib.import_module(module)
        every: list[Shipped] = listed.shipped(arch)
        chosen = [one for one in every if substring in one.name]
        chosen = [one for one in chosen if not core or one.name in listed.CORE]
        for one in chosen[len(chosen) * part // parts : len(chosen) * (part + 1) // parts]:
            try:
                compiled = one.compile()
                if (found := compiled.metadata.target.arch) != arch:
                    raise ValueError(f"expected a kernel for sm_{arch}, got one for sm_{found}")
                figures = analyse(compiled, one.int64_args)
            except Exception as error:  # one that does not compile hides no other
                lines = str(error).strip().splitlines()  # triton quotes the source between them
                told = " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))
                why = f"sm_{arch} {one.name}: {type(error).__name__}: {told}"
                rows.append(Row(arch, one.name, None, [why]))
            else:
                rows.append(Row(arch, one.name, figures, problems(figures, one, arch)))
    return rows


def measure_all(module: str, archs: list[int], substring: str, core: bool, jobs: int) -> list[Row]:
    parts = math.ceil(jobs / len(archs))
    cut = [(arch, part) for arch in archs for part in range(parts)]
    tasks = [(module, arch, substring, core, part, parts) for arch, part in cut]
    # A process sees one architecture: what the package caches about its device stays right.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        return [row for rows in pool.map(measure, *zip(*tasks)) for row in rows]


def table(rows: list[Row]) -> str:
    heads = "kernel,arch,registers,stack,shared,blocks/SM,buffers,loop,async 128/less,"
    heads += "LDG 128/less,TMA,multiply,times,LDS (bytes)/LDSM,BAR,MUFU"
    lines = [heads.split(",")]
    for arch, name, found, _ in rows:
        if not found:
            lines.append([name, f"sm_{arch}", *["–"] * (len(lines[0]) - 2)])
            continue
        n = Counter(found.loop)
        multiply = sum(n[one] for one in MMA.get(found.mma, ()))
        lines.append(
            [name, f"sm_{arch}"]
            + [str(one) for one in (found.registers, found.stack, found.shared)]
            + [str(one) for one in (found.blocks, found.buffers, found.length)]
            + [f"{n['LDGSTS.128']}/{n['LDGSTS']}", f"{n['LDG.128']}/{n['LDG']}", str(n["UTMALDG"])]
            + [f"{multiply} {found.mma}" if multiply else found.mma, str(found.repeats)]
            + [f"{n['LDS'] + n['LDS.U8']} ({n['LDS.U8']})/{n['LDSM']}"]
            + [str(n["BAR"]), str(n["MUFU"])]
        )
    return "\n".join(markdown(lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernel_report", description="Reads compiled kernels.")
    parser.add_argument("--arch", type=int, action="append", choices=CHIPS, help="default: all")
    parser.add_argument("-k", default="", metavar="SUBSTRING", help="kernels with it in their name")
    parser.add_argument("--core", action="store_true", help="only those in the module's CORE")
    parser.add_argument("--json", type=Path, help="file for all figures, to compare two runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--module", default="benchmarks.compiled.shipped", help="its shipped(arch) is read"
    )
    parser.add_argument("--triton", metavar="VERSION", help="refuse to run with another")
    asked = parser.parse_args(arguments)
    if asked.triton not in (None, triton.__version__):
        parser.error(f"--triton: expected {asked.triton}, found {triton.__version__}")

    archs, jobs = asked.arch or list(CHIPS), max(1, asked.jobs)
    rows = measure_all(asked.module, archs, asked.k, asked.core, jobs)
    print(table(rows))
    compiled = sum(row.figures is not None for row in rows)
    print(f"{compiled} of {len(rows)} kernels compiled by triton {triton.__version__}")
    if asked.json:
        every = [row._asdict() | {"figures": row.figures and row.figures._asdict()} for row in rows]
        asked.json.write_text(
            json.dumps({"triton": triton.__version__, "kernels": every}, indent=1)
        )
    wrong = [line for row in rows for line in row.problems]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    if not rows:
        print(f"No kernel is called {asked.k!r}.", file=sys.stderr)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    # Imported by its module's name, so that objects from processes have the same classes here.
    from benchmarks.kernel_report import main as run

    sys.exit(run())
