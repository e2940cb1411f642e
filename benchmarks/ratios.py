"""Tables of a run's claims, and a file of its ratios with which another run is compared.

Seconds depend on the machine, ratios almost only on the code. For each ratio the file has the least
and the largest value of the runs that were saved in it; a ratio outside of them by more than a
factor of `NOISE` is marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.report import digits, markdown

NOISE = 1.1
Saved = dict[str, dict[str, list[float]]]  # by area, then "job: name": least, largest


@dataclass(frozen=True)
class Claim:
    """One figure of a job; a target is what it must not pass at full size."""

    area: str
    job: str
    name: str
    value: float
    unit: str = "x"
    target: float | None = None

    @property
    def key(self) -> str:
        return f"{self.job}: {self.name}"

    def said(self, value: float) -> str:
        words = f"{value:.2f}" if self.unit == "x" and value < 100 else digits(value)
        return f"{words}{self.unit}" if self.unit == "x" else f"{words} {self.unit}"

    def aim(self, full: bool) -> str:
        """The target, and at full size whether it is met."""
        if self.target is None:
            return ""
        met = ", met" if self.value <= self.target else ", missed"
        return self.said(self.target) + (met if full else "")

    def beside(self, saved: Saved) -> tuple[str, str]:
        """The file's range, and "lower" or "higher" if this lies outside of it."""
        low, high = saved.get(self.area, {}).get(self.key, (None, None))
        if low is None or high is None:
            return "", "new"
        outside = "lower" if self.value * NOISE < low else ""
        outside = "higher" if self.value > high * NOISE else outside
        words = self.said(low), self.said(high)
        return words[0] if words[0] == words[1] else f"{words[0][:-1]} to {words[1]}", outside


def tables(claims: Iterable[Claim], full: bool, saved: Saved | None = None) -> dict[str, list[str]]:
    """The lines of each area's table; a job is named in its first row.

    With a saved file, only ratios are listed, beside its ranges; targets hold at full size only.
    """
    extra = ["target"] if saved is None else ["baseline", "outside"]
    found = {}
    for area, group in groupby(claims, key=lambda claim: claim.area):
        rows, job = [["job", "claim", "measured", *extra]], ""
        for each in group:
            if saved is not None and each.unit != "x":
                continue
            beside = [each.aim(full)] if saved is None else each.beside(saved)
            name = "" if each.job == job else each.job
            rows.append([name, each.name, each.said(each.value), *beside])
            job = each.job
        found[area] = markdown(rows, names=2, widest=80)
    return found


def save(claims: Sequence[Claim], path: Path, size: str) -> None:
    """Writes the ratios; together with values that a file of the same size has they make ranges."""
    saved = load(path, size) if path.exists() else {}
    for each in claims:
        if each.unit == "x":
            value = round(each.value, 3)
            known = saved.setdefault(each.area, {}).get(each.key, [value])
            saved[each.area][each.key] = [min(*known, value), max(*known, value)]
    areas = (
        f'  "{area}": {{\n'
        + ",\n".join(f"   {json.dumps(name)}: {pair}" for name, pair in of_it.items())
        + "\n  }"
        for area, of_it in saved.items()
    )
    body = ",\n".join(areas)
    path.write_text(f'{{\n "size": "{size}",\n "ratios": {{\n{body}\n }}\n}}\n')


def load(path: Path, size: str) -> Saved:
    """The ratios of a file.

    Raises:
        ValueError: they are of another size.
    """
    data = json.loads(path.read_text())
    if data["size"] != size:
        raise ValueError(f"{path} has ratios of --size={data['size']}, this run is {size}")
    return data["ratios"]
