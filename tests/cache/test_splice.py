"""Tokens in the place of others: what stays is shared, the rest is computed again, exactly."""

import random

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import OffloadedError, OpenStepError, SequenceTooLongError
from pagedkv.trace import replay
from tests.cache.small import ids, make, snapshot
from tests.cases import CASES, one_group, varied, window_only
from tests.contents import advance, assert_contents, start, write_step
from tests.states import assert_state, grow, with_states, write_all
from tests.trace.recorded import assert_same_pages

# Pages that are coded as they are written do not hold exactly what was written.
EXACT = [case for case in CASES if not {"int8", "fp8"} & set(case.name.split("-"))]


@pytest.mark.parametrize(
    ("at", "stop", "new", "kept"),
    [
        (5, 8, [50, 51, 52, 53], 5),  # longer
        (5, 8, [50], 5),  # shorter
        (5, 8, [], 5),  # dropped
        (5, 5, [50], 5),  # put in
        (0, 14, [50], 0),  # all of it
        (5, 8, [5, 6, 50], 7),  # begins like what it replaces
        (5, 8, [5, 6, 7], 14),  # is what it replaces
        (14, 14, [50, 51], 14),  # at the end
        (9, 14, [], 9),  # the end goes: `truncate`
    ],
)
def test_the_text_is_the_new_one_and_its_beginning_stays(at, stop, new, kept):
    cache, text = make(), ids(14)
    seq = start(cache, text)
    fork = cache.fork(seq)[0]
    cache.splice(seq, at, stop, new)
    changed = [*text[:at], *new, *text[stop:]]
    assert cache.length(seq) == kept
    assert cache.uncached(seq).tolist() == changed[kept:]
    assert cache.stats().shared == -(-kept // 4)
    if changed[kept:]:
        with cache.step([seq]) as step:
            write_step(cache, step, [changed])
    cache.check()
    assert_contents(cache, seq, changed)
    assert_contents(cache, fork, text)
    assert cache.length(cache.add([*changed, 99])) == len(changed), "it is found by its new text"


@pytest.mark.parametrize("case", varied(EXACT), ids=lambda case: case.name)
def test_splices_at_random_are_exact_or_change_nothing(case):
    """Finds a kind of cache (windows, coded pages, a host tier) in which a page is kept wrongly."""
    cache, source = PagedKVCache(case.config, device="cpu", debug=True), random.Random(5)
    text = [source.randrange(3) for _ in range(12)]
    seq, done = start(cache, text), 0
    for _ in range(30):
        at = source.randrange(len(text) + 1)
        stop = source.randrange(at, len(text) + 1)
        new = [source.randrange(3) for _ in range(source.randrange(min(5, 14 - len(text)) + 1))]
        changed = [*text[:at], *new, *text[stop:]] or [0]
        before = snapshot(cache, [seq])
        try:
            cache.splice(seq, at, stop, changed[at : len(changed) - len(text) + stop])
        except ValueError:
            assert any(group.window for group in case.config.groups)
            assert snapshot(cache, [seq]) == before
            continue
        text, done = changed, done + 1
        while (left := cache.uncached(seq)).size:
            count = source.randrange(1, left.size + 1)
            with cache.step([seq], num_new=count) as step:
                write_step(cache, step, [text[: cache.length(seq) + count]])
        cache.check()
        assert_contents(cache, seq, text)
    assert done > 3


def test_a_prompt_that_waits_is_changed_where_it_stands():
    cache = make()
    seq = cache.add(ids(10))
    cache.splice(seq, 2, 4, [50])
    assert cache.length(seq) == 0
    assert cache.uncached(seq).tolist() == [0, 1, 50, *ids(10)[4:]]
    with cache.step([seq], num_new=4) as step:
        write_step(cache, step, [[0, 1, 50, 4]])
    cache.splice(seq, 6, 9, [60])
    assert (cache.length(seq), cache.uncached(seq).tolist()) == (4, [5, 6, 60])


def test_with_states_it_goes_back_to_the_checkpoint_before():
    cache, text = make(with_states(one_group())), ids(14)
    seq = cache.add(text[:6])
    for length in (6, 14):
        grow(cache, {seq: text[:length]})
        cache.checkpoint(seq)
    with pytest.raises(ValueError, match=r"^start: .* with a checkpoint \(6, 14\), got 5"):
        cache.splice(seq, 5, 6, [50])
    cache.splice(seq, 9, 10, [50, 51])
    changed = [*text[:9], 50, 51, *text[10:]]
    assert (cache.length(seq), cache.uncached(seq).tolist()) == (6, changed[6:])
    grow(cache, {seq: changed})
    assert_state(cache, seq, changed)


def test_going_back_over_ids_that_are_not_known_is_refused():
    """The checkpoint lies before tokens fed by count, which nobody could compute again."""
    cache, text = make(with_states(one_group())), ids(14)
    seq = cache.add(text[:4])
    grow(cache, {seq: text[:4]})
    cache.checkpoint(seq)
    with cache.step([seq], num_new=3) as step:
        write_all(cache, step, [text[:7]], [b""])
    grow(cache, {seq: text})
    with pytest.raises(ValueError, match=r"^start: the id of token 4 of sequence"):
        cache.splice(seq, 9, 10, [50])
    assert (cache.length(seq), cache.uncached(seq).tolist()) == (14, [])
    assert_state(cache, seq, text)


def test_what_cannot_go_back_is_refused_by_name_and_nothing_changes():
    cache = make(window_only(6))
    seq = start(cache, ids(24))
    before = snapshot(cache, [seq])
    with pytest.raises(ValueError, match=r"^start: .* its window of 6 has dropped"):
        cache.splice(seq, 5, 6, [50])
    assert snapshot(cache, [seq]) == before
    cache.splice(seq, 24, 24, [50])

    cache = make(one_group(retention="fifo", budget=8, max_sequence_length=64))
    seq = start(cache, ids(24))
    with pytest.raises(ValueError, match=r"^start: .* were evicted"):
        cache.splice(seq, 5, 6, [50])


def test_bad_input_is_refused_by_name():
    cache = make(max_sequence_length=16, host_tokens=16)
    seq, other = start(cache, ids(10)), cache.add()
    for at, stop in ((-1, 2), (3, 2), (2, 11)):
        with pytest.raises(ValueError, match=r"^start, stop: expected 0 <= start <= stop <= 10"):
            cache.splice(seq, at, stop, [1])
    for at, tokens, error, named in (
        (0, [], ValueError, "tokens: expected a text"),
        (9, [0.5], TypeError, "tokens: expected integer ids"),
        (9, ids(8), SequenceTooLongError, "tokens: a sequence can have 16"),
    ):
        with pytest.raises(error, match=named):
            cache.splice(seq, at, 10, tokens)
    with cache.step([other], num_new=3) as step:
        write_step(cache, step, [ids(3, 1)])
        with pytest.raises(OpenStepError):
            cache.splice(other, 0, 0, [1])
    with pytest.raises(ValueError, match="stop: the id of token 1 of sequence"):
        cache.splice(other, 0, 1, [1])
    cache.splice(other, 0, 3, np.array([1, 2]))  # what is unknown goes
    cache.offload(seq)
    with pytest.raises(OffloadedError):
        cache.splice(seq, 5, 6, [1])
    cache.check()


def test_a_trace_tells_of_a_splice(tmp_path):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "t")
    seq = start(cache, ids(14))
    cache.splice(seq, 5, 8, [50])
    with cache.step([seq]) as step:
        write_step(cache, step, [[*ids(5), 50, *ids(14)[8:]]])
    advance(cache, {cache.add([*ids(5), 50, 8, 9, 99]): [*ids(5), 50, 8, 9, 99]})
    assert cache.stats().tokens_reused == 8
    assert_same_pages(replay(tmp_path / "t"), cache)
