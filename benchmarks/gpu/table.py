"""Renders a results file as one Markdown table: `python -m benchmarks.gpu.table FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]
HEADER = ("cell", "us", "warm", "rate", "eager", "host", "vs base", "beside it", "target")
MATRIX_BOUND = 200  # operations per byte from which a cell's rate is given in TFLOPS


def main_time(way: Record | None) -> float | None:
    """The time that is compared: graph replay with a cold L2, or eager where there is none."""
    if not way or "times" not in way:
        return None
    times = way["times"]
    return times.get("graph_cold", times.get("eager_cold", times.get("eager")))


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def rate(record: Record, spent: float | None) -> str:
    if spent is None:
        return "–"
    if record["flops"] > MATRIX_BOUND * record["bytes"]:
        return f"{record['flops'] / spent / 1e6:.0f} TFLOPS"
    return f"{record['bytes'] / spent / 1e3:.0f} GB/s"


def versus(record: Record, cells: dict[str, Record]) -> str:
    """Our time per byte over that of the cell it is compared with."""
    base = cells.get(record["base"] or "")
    if base is None:
        return "–"
    pair = [(main_time(each["ways"].get("ours")), each["bytes"]) for each in (record, base)]
    (spent, size), (other, other_size) = pair
    if spent is None or other is None:
        return "–"
    return f"{(spent / size) / (other / other_size):.2f}x"


def beside(name: str, way: Record, ways: dict[str, Record]) -> str:
    """A peer's time, and how many times as long as ours it takes, planning in both or in none."""
    other = main_time(way)
    if other is None:
        reason = next((key for key in ("wrong", "failed", "missing") if key in way), "not timed")
        return f"{name} {reason}"
    planned = name.endswith("+plan") and name != "ours+plan"
    mine = ways.get("ours+plan" if planned and "ours+plan" in ways else "ours", {})
    # What cannot be captured is compared with ours as launched by the host, too.
    eager = "graph_cold" not in way["times"] and "eager_cold" in way["times"]
    spent = mine.get("times", {}).get("eager_cold") if eager else main_time(mine)
    return f"{name} {number(other)}" + (f" ({other / spent:.2f}x)" if spent else "")


def row(record: Record, cells: dict[str, Record]) -> tuple[str, ...]:
    ways = record["ways"]
    ours = ways.get("ours")
    spent = main_time(ours)
    times = ours.get("times", {}) if ours else {}
    first = number(spent) if spent or not ours else beside("", ours, {}).strip()
    others = [beside(name, way, ways) for name, way in ways.items() if name != "ours"]
    return (
        record["id"],
        first,
        number(times.get("graph_warm")),
        rate(record, spent),
        number(times.get("eager")),
        number(times.get("host")),
        versus(record, cells),
        ", ".join(others),
        record["target"],
    )


def render(results: Record) -> str:
    """What was measured, on what: lines about each run, then a table with a line per cell."""
    cells = results["cells"]
    lines = []
    for run in results["runs"]:
        ceilings = ", ".join(f"{name} {number(v)}" for name, v in run["ceilings"].items())
        machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
        lines.append(f"{machine}; correctness {run['correctness']}; {ceilings}")
    lines += ["", "Microseconds; N× beside a peer: it takes N times as long as ours.", ""]
    rows = [HEADER, ("---",) * len(HEADER), *(row(each, cells) for each in cells.values())]
    return "\n".join(lines + [f"| {' | '.join(each)} |" for each in rows])


if __name__ == "__main__":
    print(render(json.loads(Path(sys.argv[1]).read_text())))
