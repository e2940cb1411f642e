"""A trace as a timeline in Chrome's format, which Perfetto and chrome://tracing open.

One track has the steps, each sequence has a track, and one track has the counts of pages.
"""

from __future__ import annotations

import json

from .history import History

STEPS, SEQUENCES = 1, 2


def chrome(history: History) -> str:
    """Returns the timeline as JSON, with times in microseconds."""
    sequences = _sequences(history)
    named = [_named(STEPS, history.trace.name), _named(STEPS, "steps", 1)]
    named.append(_named(SEQUENCES, "sequences"))
    seqs = {seq for seq, *_ in history.spans} | {seq for _, seq, _ in history.marks}
    for tid in sorted(seq + 1 for seq in seqs):
        named.append(_named(SEQUENCES, f"sequence {tid - 1}" if tid else "the cache", tid))
    events = [*named, *_steps(history), *sequences]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _named(pid: int, name: str, tid: int | None = None) -> dict[str, object]:
    """Returns the event that names a group of tracks, or one track of it."""
    kind = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
    return {"ph": "M", "pid": pid, **kind, "args": {"name": name}}


def _steps(history: History) -> list[dict[str, object]]:
    events: list[dict[str, object]] = []
    for number, step in enumerate(history.steps):
        common = {"pid": STEPS, "tid": 1}
        if step.rows:
            args = {"rows": step.rows, "tokens": step.tokens, "shared bytes spared": step.spared}
            span = {"ph": "X", "ts": step.begin, "dur": step.end - step.begin}
            events.append({**common, **span, "name": f"step {number}", "args": args})
        counts = {"live": step.live - step.shared, "shared": step.shared, "cached": step.cached}
        events.append({**common, "ph": "C", "ts": step.end, "name": "pages", "args": counts})
    return events


def _sequences(history: History) -> list[dict[str, object]]:
    """Returns spans and marks of sequences; a sequence that still lives ends with the trace."""
    events: list[dict[str, object]] = []
    for seq, begin, end in history.spans:
        place = {"pid": SEQUENCES, "tid": seq + 1, "ph": "X", "ts": begin, "dur": end - begin}
        events.append({**place, "name": f"sequence {seq}"})
    for when, seq, name in history.marks:
        place = {"pid": SEQUENCES, "tid": seq + 1, "ph": "i", "ts": when}
        events.append({**place, "s": "t", "name": name})
    return events
