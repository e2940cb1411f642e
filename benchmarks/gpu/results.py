"""The results file of a card: finished runs, cases and cells, and attempts that lost the device.

The file is replaced after each of them. So a run that was cut off can go on where it stopped, also
on another machine that the file was carried to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.kernels import PEERS

from . import measure
from .correctness import PASSED
from .ours import TRIED

Record = dict[str, Any]
NOT_CHECKED = "not checked"
LOST = "the device was lost, or the process never came back"


class Results:
    """The results in the file.

    Attributes:
        data: as it is saved; `checks` holds what became of each case, by name of `proved.py` or
            `correctness.OURS`; `tried` says what became of each name.
    """

    def __init__(self, path: Path, resume: Path | None = None) -> None:
        self.path = path
        known = next((p for p in (path, resume) if p and p.is_file()), None)
        self.data: Record = {"runs": [], "checks": {}, "tried": {}, "cells": {}, "kernels": []}
        self.data |= {"losses": [], "trying": None}
        if known:
            self.data |= json.loads(known.read_text())

    def save(self) -> None:
        """Replaces the file in one step, so that readers always find all of it."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data))
        part.replace(self.path)

    def begin(self, commit: str, check: bool) -> None:
        """Begins a run; cases that passed at the same commit need not run again.

        Args:
            check: whether cases run; otherwise what earlier ones showed stays.
        """
        data, runs = self.data, self.data["runs"]
        if not runs or commit == "unknown" or runs[-1]["machine"].get("commit") != commit:
            data |= {"checks": {}, "tried": {}, "losses": []}
        elif check:
            data["tried"] = {}
            for name, known in data["checks"].items():
                data["checks"][name] = {
                    title: told for title, told in known.items() if told == PASSED
                }
        data["kernels"] = []
        state = {"correctness": NOT_CHECKED, "binaries": NOT_CHECKED}
        runs.append(state | {"machine": {}, "ceilings": {}})
        self.save()

    def tries(self, where: str, what: str) -> None:
        """Notes what is about to be tried, so that a later run sees if it was never finished.

        Args:
            where: a cell, or the name whose case it is.
        """
        self.data["trying"] = [where, what]
        self.save()

    def done(self) -> None:
        """Notes that nothing is under way any more."""
        self.data["trying"] = None
        self.save()

    def note_loss(self) -> None:
        """Notes what a process was trying when it died; later runs leave it out."""
        if trying := self.data["trying"]:
            where, what = trying
            self.data["losses"].append(trying)
            if where in self.data["checks"]:
                self.data["checks"][where].setdefault(what, LOST)
        self.done()

    def without(self, cell: str) -> set[str]:
        """Returns attempts that lost the device in this cell or twice, and ways that failed."""
        losses = self.data["losses"]
        here = [what for where, what in losses if where == cell]
        if here.count(measure.TIMING) > 1:  # it was not the peers
            here.append(measure.INPUTS)
        names = [what for _, what in losses if what not in (measure.TIMING, measure.INPUTS)]
        tried = self.data["tried"]
        failed = (way for way, name in TRIED.items() if tried.get(name, PASSED) != PASSED)
        return {*here, *failed, *(name for name in names if names.count(name) > 1)}

    def failures(self) -> list[str]:
        """A sentence for each kernel, case and way of ours that is not as it should be."""
        found = [f"kernel: {error}" for error in self.data["kernels"]]
        for name, known in self.data["checks"].items():
            found += [f"{name}: {title}: {told}" for title, told in known.items() if told != PASSED]
        for cell in self.data["cells"].values():
            mine = {way: facts for way, facts in cell["ways"].items() if way not in PEERS}
            for way, facts in mine.items():
                told = facts.get("wrong") or facts.get("failed", measure.LEFT_OUT)
                found += [f"{cell['id']}: {way}: {told}"] if told != measure.LEFT_OUT else []
        return found
