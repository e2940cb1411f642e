"""Renders what `benchmarks.gpu.run` saved as Markdown: `python -m benchmarks.report cells.json`.

A table for each operation, its cases one after the other, each way of a case beside ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring import Times, main_time

Record = dict[str, Any]
RATES = ("GB/s", "TFLOPS")
CEILINGS = {"read stream": ("GB/s", "read_gbs"), "matmul": ("TFLOPS", "matmul_tflops")}
BESIDE = ("warm L2 (us)", "eager (us)", "host (us)", "per byte / other cell", "target")
HEADER = ("case", "way", "median", *RATES, "share", "time / ours", *BESIDE)
YARDSTICKS = ("read", "copy")  # of a card; they make no arithmetic, so they have no TFLOPS
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))
NOTHING = "–"


class Line(NamedTuple):
    """One way of a cell: seconds, if it was timed, and what was recorded beside them."""

    op: str
    case: str
    way: str
    median: float | None
    info: dict[str, Any]

    @property
    def bound(self) -> tuple[float, str] | None:
        """The share of the nearer ceiling that was reached, and its name."""
        tops = self.info.get("tops", {})
        shares = (
            (self.info[unit] / tops[top], name)
            for name, (unit, top) in CEILINGS.items()
            if unit in self.info and tops.get(top)
        )
        return max(shares, default=None)


def digits(value: float | str | None) -> str:
    """A number with three digits and no exponent; text as it is."""
    if value is None or isinstance(value, str):
        return value or NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    scale, unit = next(pair for pair in UNITS if seconds >= pair[0])
    return f"{digits(seconds / (scale or 1e-9))} {unit}"


def of_card(data: dict[str, Any]) -> Iterator[Line]:
    """Makes a line of each way of each cell."""
    for cell in data["cells"].values():
        tops = data["runs"][cell["run"]]["ceilings"]
        for name, way in cell["ways"].items():
            info = info_of(name, way, cell, data["cells"], tops)
            spent = main_time(way.get("times"))
            op = cell["id"].partition("/")[0]
            yield Line(op, cell["id"], name, spent and spent / 1e6, info)


def info_of(
    name: str, way: Record, cell: Record, cells: dict[str, Record], tops: dict[str, float]
) -> dict[str, Any]:
    """Collects what stands beside the time of one way of a cell."""
    times = way.get("times", {})
    spent = main_time(times)
    info: dict[str, Any] = {"warm L2 (us)": times.get("graph_warm")}
    info |= {"eager (us)": times.get("eager"), "host (us)": times.get("host")}
    if name == "ours":
        info |= {"target": cell["target"], "per byte / other cell": per_byte(cell, cells)}
    if spent is None:
        reasons = (f"{key}: {way[key]}" for key in ("wrong", "failed", "missing") if key in way)
        return info | {"why": next(reasons, "not timed")}
    mine = beside(name, times, cell["ways"])
    nbytes = way.get("bytes", cell["bytes"])
    info |= {"ratio": mine and spent / mine, "tops": tops}
    info["GB/s"] = nbytes / spent / 1e3
    if cell["flops"] and name not in YARDSTICKS:
        info["TFLOPS"] = cell["flops"] / spent / 1e6
    return info


def per_byte(cell: Record, cells: dict[str, Record]) -> str | None:
    """Our time per byte over that of the cell it is compared with."""
    pair = cell, cells.get(cell["base"] or "", {"ways": {}})
    spent = [main_time(each["ways"].get("ours", {}).get("times")) for each in pair]
    if not all(spent):
        return None
    one, other = (time / each["bytes"] for time, each in zip(spent, pair))
    return f"{one / other:.2f}x"


def beside(name: str, times: Times, ways: dict[str, Record]) -> float | None:
    """Returns our time to compare a way with: both plan or neither, eager beside eager."""
    planned = name.endswith("+plan") and name != "ours+plan" and "ours+plan" in ways
    mine = ways.get("ours+plan" if planned else "ours", {}).get("times")
    # A way that cannot be captured is compared with ours as the host launches it.
    if mine and "graph_cold" not in times and "eager_cold" in times:
        return mine.get("eager_cold")
    return main_time(mine)


def load(data: dict[str, Any]) -> list[Line]:
    """All lines, those of one operation next to each other."""
    lines = list(of_card(data))
    order = list(dict.fromkeys(line.op for line in lines))
    return sorted(lines, key=lambda line: order.index(line.op))


def cells(line: Line) -> tuple[str, ...]:
    share = NOTHING if line.bound is None else f"{100 * line.bound[0]:.0f}% of {line.bound[1]}"
    ratio = f"{line.info['ratio']:.2f}x" if line.info.get("ratio") else NOTHING
    rates, beside = ([digits(line.info.get(key)) for key in keys] for keys in (RATES, BESIDE))
    spent = line.info.get("why") or time(line.median)
    return (line.case, line.way, spent, *rates, share, ratio, *beside)


def table(lines: list[Line]) -> list[str]:
    """The table of one operation, without columns that are empty in all rows."""
    rows = [cells(line) for line in lines]
    kept = [i for i in range(len(HEADER)) if any(row[i] != NOTHING for row in rows)]
    return markdown([[row[i] for i in kept] for row in (HEADER, *rows)])


def markdown(rows: Sequence[Sequence[str]], names: int = 1, widest: int = 40) -> list[str]:
    """Returns the lines of a table whose first row is its head; sentences are not aligned.

    Args:
        names: how many columns, the first ones, are aligned on the left.
        widest: characters that make a cell a sentence, such as an error.
    """
    widths = [max(len(x) for x in column if len(x) < widest) for column in zip(*rows)]
    rule = ["-" * (n - (i >= names)) + ":" * (i >= names) for i, n in enumerate(widths)]
    return [
        "| "
        + " | ".join(x.rjust(n) if i >= names else x.ljust(n) for i, (x, n) in enumerate(cells))
        + " |"
        for cells in (list(zip(row, widths)) for row in (rows[0], rule, *rows[1:]))
    ]


def run_of(run: Record) -> list[str]:
    """A card's machine, whether its kernels were right and well compiled, its ceilings."""
    machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
    ceilings = ", ".join(f"{name} {digits(value)}" for name, value in run["ceilings"].items())
    binaries = [f"binaries {run['binaries']}"] if "binaries" in run else []
    return [machine, f"correctness {run['correctness']}", *binaries, ceilings]


def render(data: dict[str, Any]) -> str:
    """The whole report in Markdown."""
    parts = [f"- {'; '.join(run_of(run))}" for run in data["runs"]]
    for op, group in groupby(load(data), key=lambda line: line.op):
        parts += ["", f"### {op}", "", *table(list(group))]
    return "\n".join(parts)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="cells.json of a card")
    options = parser.parse_args(arguments)
    print(render(json.loads(options.file.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
