"""A history as one HTML page that needs nothing else: no network, no server, no package.

The page is `page.html` with two insertions: a few lines of JSON, and arrays of 32-bit numbers,
packed with zlib and written in base64, which a browser can unpack.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from importlib.resources import files
from typing import Any

import numpy as np

from .history import FREE, History

COUNTS = ("rows", "tokens", "live", "shared", "cached", "existing", "host", "end")


def page(history: History) -> str:
    """Returns the page's text."""
    template = files("pagedkv.trace").joinpath("page.html").read_text(encoding="utf-8")
    facts, arrays = _facts(history), _arrays(history)
    packed = b64encode(zlib.compress(arrays.astype("<u4").tobytes(), 9)).decode()
    text = json.dumps(facts).replace("<", "\\u003c")  # so that no name can end the script
    return template.replace("/*FACTS*/null", text).replace("/*ARRAYS*/", packed)


def totals(history: History) -> dict[str, Any]:
    """Returns numbers of the whole trace, by name."""
    steps = history.steps
    peak = max(range(len(steps)), key=lambda i: steps[i].live)
    return {
        "steps": sum(step.rows > 0 for step in steps),
        "sequences": len(history.seqs),
        "tokens": sum(step.tokens for step in steps),
        "pages": sum(pages for _, pages in history.segments),
        "peak": steps[peak].live,
        "peak_step": peak,
        "spared": max(step.spared for step in steps),
        "seconds": steps[-1].end / 1e6,
    }


def _facts(history: History) -> dict[str, Any]:
    return {
        "name": history.trace.name,
        "torn": history.trace.torn,
        "pageSize": history.trace.header["page_size"],
        "segments": history.segments,
        "seqs": history.seqs,
        "numRuns": len(history.runs),
        "numSteps": len(history.steps),
        "counts": COUNTS,
        "totals": totals(history),
        "events": [step.events for step in history.steps],
    }


def _arrays(history: History) -> Any:
    """Returns runs as columns, then counts by step.

    A run's page is written as the difference to the run before, and its begin as the gap between
    them: small numbers, which pack well.
    """
    runs = history.runs
    page, start, length, kind, owner, refs, filled, more = runs.T
    ahead = np.diff(page, prepend=0)
    behind = np.concatenate([[0], (start + length)[:-1]])
    behind = np.where(np.diff(page, prepend=-1) > 0, 0, behind)
    assert not (kind == FREE).any()
    columns = ahead, start - behind, length, 2 * kind + more, owner + 1, refs, filled
    steps = [[getattr(step, name) for step in history.steps] for name in COUNTS]
    steps[COUNTS.index("end")] = [step.end // 1000 for step in history.steps]  # as ms: 49 days
    return np.concatenate([*columns, *(np.array(column, np.int64) for column in steps)])
