"""A trace as a timeline in Chrome's format, which Perfetto and chrome://tracing open.

One track has the steps, one each sequence from its beginning to its end, one the counts of pages.
"""

from __future__ import annotations

import json
from typing import Any

from .history import History

STEPS, SEQUENCES = 1, 2


def chrome(history: History) -> str:
    """The timeline as JSON, times in microseconds."""
    sequences = _sequences(history)
    named = [_named(STEPS, history.trace.name), _named(STEPS, "steps", 1)]
    named.append(_named(SEQUENCES, "sequences"))
    for tid in sorted({event["tid"] for event in sequences}):
        named.append(_named(SEQUENCES, f"sequence {tid - 1}" if tid else "the cache", tid))
    events = [*named, *_steps(history), *sequences]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _named(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    """What a group of tracks is called, or one track of it."""
    kind = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
    return {"ph": "M", "pid": pid, **kind, "args": {"name": name}}


def _steps(history: History) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for number, step in enumerate(history.steps):
        common = {"pid": STEPS, "tid": 1}
        if step.rows:
            args = {"rows": step.rows, "tokens": step.tokens, "shared bytes spared": step.spared}
            span = {"ph": "X", "ts": step.begin, "dur": step.end - step.begin}
            events.append({**common, **span, "name": f"step {number}", "args": args})
        counts = {"live": step.live - step.shared, "shared": step.shared, "cached": step.cached}
        events.append({**common, "ph": "C", "ts": step.end, "name": "pages", "args": counts})
    return events


def _sequences(history: History) -> list[dict[str, Any]]:
    """A span for each sequence; those that live at the end end with the trace."""
    events: list[dict[str, Any]] = []
    begun: dict[int, int] = {}
    last = 0
    for event in history.trace.events:
        op, last = event["op"], event.get("us", last)
        seqs = event.get("seqs") or [event.get("seq")]
        if op in ("add", "load", "fork"):
            begun |= dict.fromkeys(seqs, last)
        elif op == "free":
            events += [_span(seq, begun.pop(seq), last) for seq in seqs]
        elif op in ("offload", "restore", "truncate", "splice", "checkpoint", "failed", "clear"):
            name = f"{event['call']}: {event['error']}" if op == "failed" else op
            for seq in seqs:
                place = {"pid": SEQUENCES, "tid": 0 if seq is None else seq + 1}
                events.append({**place, "ph": "i", "ts": last, "s": "t", "name": name})
    return events + [_span(seq, begin, last) for seq, begin in begun.items()]


def _span(seq: int, begin: int, end: int) -> dict[str, Any]:
    place = {"pid": SEQUENCES, "tid": seq + 1, "ph": "X", "ts": begin, "dur": end - begin}
    return {**place, "name": f"sequence {seq}"}
