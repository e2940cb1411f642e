"""Runs the kernels' checks of `tests/kernels/correctness.py` on a device; they need only torch.

Another package `tests` may be installed on a machine with a card, so ours is given by its path.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

package = ModuleType("tests")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
sys.modules.setdefault("tests", package)

from pagedkv.kernels.triton import proved  # noqa: E402
from tests.kernels import tried  # noqa: E402
from tests.kernels.correctness import PASSED, Case, cases, lost, outcome  # noqa: E402

OURS = "ours"  # beside the names of `proved.py`: stands for all kernels that are on
LOSSES = 3  # cases of one name that may lose the device before its others are left out


def cases_of(name: str, device: str) -> Iterator[Case]:
    """Yields the cases of all kernels that are on, or of a name of `proved.py` while it is on."""
    return cases(device) if name == OURS else tried.tried_cases(name, device)


def check(name: str, device: str, results: Any, deadline: float) -> str | None:
    """Runs the cases that the results lack; returns what became of all, None if time ran out.

    Raises:
        RuntimeError: the device is lost.
    """
    known = results.data["checks"].setdefault(name, {})
    with nullcontext() if name == OURS else proved.trying(name):
        for case in cases_of(name, device):
            if [where for where, _ in results.data["losses"]].count(name) >= LOSSES:
                break
            if case.title in known:
                continue
            if time.monotonic() > deadline:
                results.done()
                return None
            results.tries(name, case.title)
            known[case.title] = told = outcome(case, device)
            if told != PASSED:
                print(f"{name}: {case.title}: {told}", flush=True)
                if device == "cuda" and lost():
                    results.save()
                    raise RuntimeError("the device is lost")
    results.done()
    failed = sum(told != PASSED for told in known.values())
    return f"failed: {failed} of {len(known)} cases" if failed else PASSED
