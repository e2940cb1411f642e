"""The history of pages by step, as the page and the timeline show it."""

import json

import pytest

from pagedkv import PagedKVCache
from pagedkv.trace.chrome import chrome
from pagedkv.trace.history import CACHED, EVICTED, FREE, LIVE, OFFLOADED, history_of
from pagedkv.trace.page import page, totals
from pagedkv.trace.read import Trace
from tests.cases import one_group
from tests.contents import advance, start


def at(history, page, step):
    """(kind, owner's id, references, tokens) of a page in a step."""
    for where, begin, length, kind, owner, refs, filled, more in history.runs.tolist():
        if where == page and begin <= step < begin + length:
            return kind, history.seqs[owner], refs, filled + more * (step - begin)
    return FREE, None, 0, 0


def history(path):
    return history_of(Trace(path), check=True)


@pytest.fixture
def cache(tmp_path):
    config = one_group(host_tokens=64)
    return PagedKVCache(config, device="cpu", trace=tmp_path / "a.trace")


def test_a_page_fills_up_is_shared_and_is_cached(cache, tmp_path):
    seq = start(cache, [1, 2])  # step 0
    advance(cache, {seq: [1, 2, 3]})
    advance(cache, {seq: [1, 2, 3, 4]})
    fork = cache.fork(seq)[0]
    advance(cache, {seq: [1, 2, 3, 4, 5]})  # step 3
    cache.free([seq, fork])
    start(cache, [9])  # step 4
    found = history(tmp_path / "a.trace")
    assert [at(found, 0, step) for step in range(5)] == [
        (LIVE, seq, 1, 2), (LIVE, seq, 1, 3), (LIVE, seq, 1, 4), (LIVE, seq, 2, 4),
        (CACHED, seq, 0, 4),
    ]  # fmt: skip
    assert [step.shared for step in found.steps] == [0, 0, 0, 1, 0]
    assert found.steps[3].spared == cache.config.bytes_per_page()
    assert found.steps[3].events == ["fork 0 to 1"]
    assert totals(found)["peak"] == 2


def test_what_left_for_the_host_is_told_until_its_page_is_taken_again(cache, tmp_path):
    seq = start(cache, [1, 2])
    cache.offload(seq)
    other = cache.add()
    advance(cache, {other: [7]})
    cache.free(other)
    cache.restore(seq)
    advance(cache, {seq: [1, 2, 3]})
    found = history(tmp_path / "a.trace")
    kinds = [[at(found, page, step)[:2] for step in range(3)] for page in range(2)]
    assert (OFFLOADED, seq) in [kind[1] for kind in kinds]
    assert all(kind[2][0] != OFFLOADED for kind in kinds)
    assert [step.host for step in found.steps[:2]] == [0, 1]


def test_what_a_policy_took_is_told_as_evicted(tmp_path):
    config = one_group(retention="fifo", budget=8, page_size=1, max_sequence_length=64)
    cache = PagedKVCache(config, device="cpu", trace=tmp_path / "a.trace")
    with_policy = start(cache, [1] * 8)
    for n in range(9, 90):
        if n < 64:
            advance(cache, {with_policy: [1] * n})
    found = history(tmp_path / "a.trace")
    assert cache.stats().evicted > 0
    assert (found.runs[:, 3] == EVICTED).sum() > 0


def test_a_timeline_has_a_span_for_each_step_and_each_sequence(cache, tmp_path):
    seq = start(cache, [1, 2])
    fork = cache.fork(seq)[0]
    cache.free(seq)
    cache.offload(fork)
    events = json.loads(chrome(history(tmp_path / "a.trace")))["traceEvents"]
    spans = [event["name"] for event in events if event["ph"] == "X"]
    assert spans == ["step 0", "sequence 0", "sequence 1"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    counts = next(event["args"] for event in events if event["ph"] == "C")
    assert counts == {"live": 1, "shared": 0, "cached": 0}
    assert "offload" in [event["name"] for event in events if event["ph"] == "i"]
    named = [event for event in events if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert names == {(1, 1): "steps", (2, 1): "sequence 0", (2, 2): "sequence 1"}


def test_a_trace_without_a_step_makes_a_page(tmp_path):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "</script>.trace"[2:])
    cache.add([1, 2])
    text = page(history(tmp_path / "</script>.trace"[2:]))
    assert text.count("</script>") == 1
    assert "http" not in text
