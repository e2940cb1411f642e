"""Draws a results file: `python -m benchmarks.gpu.plots cells.json out.png` (needs matplotlib).

On the left what decode reads, against how much there is to read, under the measured rate of reading
memory; on the right what prefill computes, against how much there is to compute, under the measured
rate of one large matrix product.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .table import MATRIX_BOUND, Record, main_time

SKIPPED = ("read", "copy")  # yardsticks: the ceiling says as much
MARKERS = "os^vDPX<>*hp"


def points(results: Record, bound_by_matrices: bool) -> dict[str, list[tuple[float, float]]]:
    """Of each implementation: amounts of work and rates, in the order of the amounts."""
    what, unit = ("flops", 1e6) if bound_by_matrices else ("bytes", 1e3)
    found: dict[str, list[tuple[float, float]]] = {}
    for record in results["cells"].values():
        many = record["flops"] > MATRIX_BOUND * record["bytes"]
        if record["kind"] != "attend" or many != bound_by_matrices:
            continue
        for name, way in record["ways"].items():
            spent = main_time(way)
            if spent and name not in SKIPPED:
                found.setdefault(name, []).append((record[what], record[what] / spent / unit))
    return {name: sorted(each) for name, each in found.items()}


def draw(results: Record, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    run = next(run for run in reversed(results["runs"]) if run["machine"])
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    panels = [
        (axes[0], False, "K, V, queries and output, bytes", "GB/s", "read_gbs", "reading memory"),
        (axes[1], True, "causal attention, FLOP", "TFLOPS", "matmul_tflops", "a matrix product"),
    ]
    for axis, matrices, amount, rate, ceiling, name in panels:
        panel(axis, points(results, matrices))
        if ceiling in run["ceilings"]:
            axis.axhline(run["ceilings"][ceiling], color="gray", linestyle="--", label=name)
        axis.set(xlabel=amount, ylabel=rate, xscale="log")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    machine = run["machine"]
    figure.suptitle(f"{machine['device']}, {machine['date']}, commit {machine['commit']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def panel(axis: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    for (name, each), marker in zip(series.items(), MARKERS * 2):
        # Cells of one size differ in shape: lines between them would say something that is not so.
        own = name == "ours"
        style = {"s": 40, "zorder": 3, "color": "black"} if own else {"s": 22, "alpha": 0.7}
        axis.scatter(*zip(*each), marker=marker, label=name, **style)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
