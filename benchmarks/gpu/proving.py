"""Turns on kernels that a card has shown right and not slower: see `kernels/triton/proved.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.measuring import main_time
from pagedkv.kernels.triton import proved

from .ours import TRIED

KEPT = ("device", "torch", "triton", "commit", "date")


def names_to_try() -> tuple[str, ...]:
    """Returns the names that are off on this machine's card; only Hopper has any."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return ()
    return tuple(name for name in proved.NAMES if not proved.is_on(name, 90))


def prove(data: dict[str, Any], folder: Path) -> list[str]:
    """Notes kernels that passed their cases and took no longer than those that they replace.

    Args:
        data: the data of a results file; its `tried` says what became of the cases.
        folder: gets a copy of the file that is changed, `proved.FILE`.

    Returns:
        A sentence for each name that was tried.
    """
    told, facts = [], data["runs"][-1]["machine"]
    for way, name in TRIED.items():
        state = data["tried"].get(name)
        ratios = _ratios(data["cells"].values(), way)
        if state == "passed" and ratios:
            ratio = geometric_mean(ratios)
            state = f"right, and {ratio:.3f} times as long as without it in {len(ratios)} cells"
            if ratio <= 1:
                state += ": on from now on"
                noted = json.loads(proved.FILE.read_text(encoding="utf-8"))
                kept = {key: facts.get(key) for key in KEPT}
                noted[name][str(facts["arch"])] = kept | {"ratio": round(ratio, 3)}
                for file in (proved.FILE, folder / proved.FILE.name):
                    file.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")
        if state:
            told.append(f"{name}: {state}")
    return told


def _ratios(cells: Any, way: str) -> list[float]:
    """Times of a way against ours, in cells that have both."""
    found = []
    for cell in cells:
        mine, other = (main_time(cell["ways"].get(name, {}).get("times")) for name in (way, "ours"))
        if mine and other:
            found.append(mine / other)
    return found
