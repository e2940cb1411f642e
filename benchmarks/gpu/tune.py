"""Measures configurations of the attention kernels on a card and prints lines for their tables.

    python -m benchmarks.gpu.tune --head-dim 128 --dtype bfloat16 --page 16

Configurations that spill or do not fit are dropped by their compiled code
(`benchmarks/kernel_report.py`). This takes cores but no device: `--dry-run` stops there and works
on any machine. The others are compared with float64 on every workload, then timed in turns. The
best compilations are timed again with other splits. A score is the geometric mean over workloads of
the time over the best time. The lines are to be reviewed and put into TUNING of
`kernels/triton/decode_tuning.py` and `prefill.py` with the date and the card: nothing is tuned
while a user waits.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from benchmarks import measuring
from benchmarks.cells import Cell, Heads, make_case
from benchmarks.compiled.launched import compiled_by
from benchmarks.gpu import ours
from benchmarks.gpu.measure import ready
from benchmarks.kernel_report import Shipped, analyse, problems
from benchmarks.peers.dense import check_attention
from pagedkv.kernels.triton import decode, geometry, prefill
from pagedkv.kernels.triton.card import CHIPS, absent_card
from pagedkv.kernels.triton.decode_tuning import MOST_QUERIES

K = 1024
ROWS = (16, 32, 64)  # of decode's products; its table has an entry for each
LOADS = {  # rows of a batch, and their length
    16: ((1, 4 * K), (8, 4 * K), (32, K), (32, 4 * K), (64, 4 * K), (8, 32 * K)),
    32: ((4, 4 * K), (32, 4 * K), (32, K)),
    64: ((4, 4 * K), (32, 4 * K), (32, K)),
}
CHUNKS = ((1, 8 * K, 8 * K), (4, 2 * K, 2 * K), (1, 2 * K, 10 * K))  # rows, new tokens, length
WARPS, STAGES = (4, 8), (2, 3, 4)
DECODE_N, PREFILL_M, PREFILL_N = (16, 32, 64, 128), (64, 128), (32, 64, 128)
SPLIT, SPLITS = (128, 256, 512, 1024), (32, 64, 128)
KEPT = 2  # compilations of decode that are timed with every split
SHOWN = 5
TOLERANCE = {2: 1e-2, 4: 1e-4}  # most relative error norm, by bytes an element

Change = dict[str, int]  # fields of a Tuning


class Layer(NamedTuple):
    """The shapes, dtype and architecture that are tuned for."""

    heads: Heads
    page: int
    dtype: torch.dtype
    arch: int


class Candidate(NamedTuple):
    """A configuration, and how many of its blocks fit beside each other; with 0 it is out."""

    change: Change
    blocks: int
    told: str


def workloads(layer: Layer, rows: int | None) -> list[Cell]:
    """Returns decode's cells for products of `rows` rows, if batches make them, or prefill's."""

    def cell(batch: int, new: int, length: int) -> Cell:
        name = f"{batch} rows, {new} new of {length}"
        return Cell(name, layer.heads, (length,) * batch, (new,) * batch, layer.page, (), "")

    if rows is None:
        return [cell(*load) for load in CHUNKS]
    ratio = layer.heads.h // layer.heads.g
    least = max(16, triton.next_power_of_2(ratio))  # with one new token
    new = 1 if rows == least else max(2, rows // ratio)
    possible = rows == least or (rows > least and new <= MOST_QUERIES and new * ratio <= 64)
    return [cell(batch, new, length) for batch, length in LOADS[rows]] if possible else []


def changes(rows: int | None, asked: argparse.Namespace) -> list[Change]:
    """Returns the configurations to compile."""
    names: tuple[str, ...] = ("block_n", "num_warps", "num_stages")
    values = [asked.block_n or (DECODE_N if rows else PREFILL_N), asked.warps, asked.stages]
    if rows is None:
        names, values = ("block_m", *names), [PREFILL_M, *values]
    return [dict(zip(names, each)) for each in itertools.product(*values)]


def inspect(layer: Layer, rows: int | None, change: Change) -> Candidate:
    """Compiles one configuration for its architecture and reads the code."""
    wanted = "_prefill" if rows is None else "_decode"
    case = make_case(workloads(layer, rows)[0], "meta", layer.dtype)
    with absent_card(layer.arch), ours.tuned(wanted[1:], **change):
        try:
            made = compiled_by(wanted, lambda: ours.attend(case)())
            figures = analyse(made)
        except Exception as error:  # some do not even compile
            return Candidate(change, 0, f"{type(error).__name__}: {error}".splitlines()[0][:120])
    # It needs one buffer beside the one in use; the clock judges how it makes products.
    promise = Shipped(wanted, lambda: made, 1, figures.mma, repeats=figures.repeats)
    wrong = problems(figures, promise, layer.arch)
    if wrong or not figures.blocks:
        return Candidate(change, 0, "; ".join(wrong) or "no block of it fits")
    told = f"{figures.registers} registers, {figures.shared >> 10} KiB, {figures.blocks} blocks, "
    return Candidate(change, figures.blocks, f"{told}{figures.buffers} buffers, {figures.mma}")


def survivors(layer: Layer, rows: int | None, every: list[Change], workers: int) -> list[Candidate]:
    """Returns the candidates that compile well, and prints why the others are out."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(every)), spawn) as pool:
        found = list(pool.map(partial(inspect, layer, rows), every))
    for change, blocks, told in found:
        print(f"  {'stays' if blocks else '  out'} {text(change)}: {told}", flush=True)
    return [each for each in found if each.blocks]


def text(change: Change) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items())


def score(times: list[dict[str, float]]) -> dict[str, float]:
    """Returns the scores of configurations that are right in every workload, the best first."""
    names = set.intersection(*(set(one) for one in times))
    ratios = {name: [one[name] / min(one.values()) for one in times] for name in names}
    means = {name: math.exp(sum(map(math.log, r)) / len(r)) for name, r in ratios.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def race(
    cell: Cell, module: str, every: list[Change], layer: Layer, device: str
) -> dict[str, float]:
    """Microseconds of each configuration in one workload; wrong ones and failures are left out."""
    case = make_case(cell, device, layer.dtype)
    check, ways = check_attention(case), {}
    for change in every:
        with ours.tuned(module, **change):
            told, way = ready(ours.attend, case, "ours", check, TOLERANCE[layer.dtype.itemsize])
        if way:
            ways[text(change)] = way
        else:
            print(f"  {told}: {text(change)} in {cell.id}"[:300])
    found = measuring.measure(ways)
    spent = {name: measuring.main_time(times) or math.inf for name, times in found.items()}
    best = sorted(spent.items(), key=lambda item: item[1])[:SHOWN]
    print(f"| {cell.id} | " + " | ".join(f"{us:.1f} us {name}" for name, us in best) + " |")
    torch.cuda.empty_cache()
    return spent


def fastest(
    cells: list[Cell], module: str, every: list[Change], layer: Layer, device: str
) -> list[Change]:
    """Configurations by their score, best first."""
    times = [race(cell, module, every, layer, device) for cell in cells]
    by_name = {text(change): change for change in every}
    ranked = score(times)
    for name, mean in list(ranked.items())[:SHOWN]:
        print(f"  {mean:.3f} {name}")
    return [by_name[name] for name in ranked]


def tune_decode(layer: Layer, rows: int, good: list[Candidate], device: str) -> Change:
    """Tunes first what is compiled, then how work is cut."""
    cells = workloads(layer, rows)
    # As many programs as fit beside each other; each walks through its share of the work.
    fitting = [each.change | {"programs": each.blocks} for each in good]
    kept = fastest(cells, "decode", fitting, layer, device)[:KEPT]
    cuts = [
        change | {"programs": change["programs"] * times} | split
        for change in kept
        for times, split in itertools.product((1, 2), splits())
    ]
    return next(iter(fastest(cells, "decode", cuts, layer, device)), {})


def splits() -> list[Change]:
    """How rows may be cut: by the rule, and into splits of one length."""
    fixed = [{"split": size, "longest": 0, "splits": most} for size in SPLIT for most in SPLITS]
    return [{}, *fixed]


def written(tuning: Any) -> str:
    """Writes a Tuning as a table has it: by position, without defaults at the end."""
    values, usual = list(tuning), tuning._field_defaults
    while usual.get(tuning._fields[len(values) - 1]) == values[-1]:
        values.pop()
    return f"Tuning({', '.join(map(str, values))})"


def line(layer: Layer, entry: str) -> str:
    dim = max(64, triton.next_power_of_2(layer.heads.d))
    roomy = geometry.Target(0, layer.arch, CHIPS[layer.arch].shared, 1).roomy
    return f"    ({layer.arch}, {roomy}, {dim}, {layer.dtype.itemsize}): {entry},"


def known(layer: Layer, module: Any, *more: int) -> Any:
    """Returns the table's present configuration."""
    chip = CHIPS[layer.arch]
    target = geometry.Target(0, layer.arch, chip.shared, chip.processors)
    case = make_case(workloads(layer, None)[0], "meta", layer.dtype)
    return module.tuning(target, geometry.Geometry.of(case.q, case.k_pages), *more)


def tune(layer: Layer, asked: argparse.Namespace) -> list[str]:
    """Lines for the tables."""
    lines = []
    if asked.kernel != "prefill":
        entries = []
        for rows in ROWS:
            entry = known(layer, decode, rows)
            if rows in asked.rows and workloads(layer, rows):
                print(f"decode, products of {rows} rows")
                good = survivors(layer, rows, changes(rows, asked), asked.jobs)
                if good and not asked.dry_run:
                    entry = entry._replace(**tune_decode(layer, rows, good, asked.device))
            print(f"rows {rows}: {written(entry)}")  # now, because the rest may be stopped
            entries.append(written(entry))
        lines.append(line(layer, f"({', '.join(entries)})"))
    if asked.kernel != "decode":
        print("prefill")
        entry = known(layer, prefill)
        good = survivors(layer, None, changes(None, asked), asked.jobs)
        if good and not asked.dry_run:
            every = [each.change for each in good]
            cells = workloads(layer, None)
            best = fastest(cells, "prefill", every, layer, asked.device)
            entry = entry._replace(**next(iter(best), {}))
        lines.append(line(layer, written(entry)))
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tune", description="Measures kernel configurations.")
    parser.add_argument("--kernel", choices=("decode", "prefill", "both"), default="both")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "G"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--block-n", type=int, nargs="*", help="default: all that may do")
    parser.add_argument("--warps", type=int, nargs="*", default=WARPS)
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    parser.add_argument("--arch", type=int, choices=CHIPS, default=90, help="with --dry-run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry-run", action="store_true", help="list what would be timed")
    asked = parser.parse_args(arguments)
    asked.device = "cuda"
    return asked


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a run that is cut off keeps what it printed
    arch = asked.arch
    if not asked.dry_run:
        if not torch.cuda.is_available():
            print("There is no GPU; --dry-run works without one.", file=sys.stderr)
            return 2
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    heads = Heads(*asked.heads, asked.head_dim)
    lines = tune(Layer(heads, asked.page, getattr(torch, asked.dtype), arch), asked)
    print("as it is" if asked.dry_run else "to be reviewed", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    # Imported by its module's name, so that processes know the classes of what they are sent.
    from benchmarks.gpu.tune import main as run

    sys.exit(run())
