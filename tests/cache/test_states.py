"""Recurrent states in slots: found, shared, kept, taken back, and never of another text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import CacheConfig, OutOfPagesError, PagedKVCache
from pagedkv.config import StateLayer
from pagedkv.errors import (
    CorruptCacheError,
    LayerWritesError,
    OpenStepError,
    UnknownSequenceError,
)
from pagedkv.step import states as step_states
from pagedkv.storage import states as storage_states
from tests.cases import one_group
from tests.contents import write_step
from tests.states import assert_state, begin, grow, state_of, with_states, write_all

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make(max_states: int = 0, **fields) -> PagedKVCache:
    return PagedKVCache(with_states(one_group(**fields), max_states), device="cpu", debug=True)


def slots(cache) -> int:
    return cache.stats().states


# ------------------------------------------------------------------ found


@settings(max_examples=60, derandomize=True, database=None)
@given(
    page_size=st.sampled_from((1, 3, 4, 16)),
    texts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 14)),
        min_size=1,
        max_size=5,
    ),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=15),
)
def test_a_prompt_is_found_up_to_the_longest_prefix_with_pages_and_a_checkpoint(
    page_size, texts, prompt
):
    cache = make(64, max_tokens=1024, page_size=page_size)
    kept = set()
    for text, cut in texts:
        cut = min(cut, len(text))
        seq = cache.add(text)
        for end in sorted({max(cut, cache.length(seq)), len(text)}):
            if end > cache.length(seq):
                grow(cache, {seq: text[:end]})
            if end == cut:
                cache.checkpoint(seq)
                kept.add(tuple(text[:cut]))
    found = cache.add(prompt)
    expected = [n for n in range(1, len(prompt)) if tuple(prompt[:n]) in kept]
    assert cache.length(found) == max(expected, default=0)
    assert_state(cache, found, prompt[: cache.length(found)])


def test_pages_without_a_state_are_not_found_nor_a_state_without_pages():
    cache = make(8)
    seq = begin(cache, TEXT)
    assert cache.length(cache.add(TEXT)) == 0
    cache.checkpoint(seq)
    assert cache.length(cache.add(TEXT)) == 0  # its last token is computed, and with it the state
    assert cache.length(cache.add([*TEXT, 1])) == len(TEXT)
    cache.free([seq, *cache._tables.seqs[cache._tables.live_rows()].tolist()[1:]])
    other = begin(cache, [7] * 64)  # takes the pages of the text
    assert cache.length(cache.add([*TEXT, 1])) == 0
    cache.check()
    assert_state(cache, other, [7] * 64)


# ------------------------------------------------------------------ shared


def test_256_forks_of_a_long_prefix_take_no_slot_until_their_first_token():
    cache = make(257, max_tokens=8192, max_sequences=257, page_size=16)
    text = [i % 5 for i in range(500)]
    seq = begin(cache, text)
    before, nbytes = cache.stats(), cache._states.nbytes
    forks = cache.fork(seq, 256)
    assert (slots(cache), cache.stats().live, cache._states.nbytes) == (1, before.live, nbytes)
    grow(cache, {fork: [*text, i % 5] for i, fork in enumerate(forks)})
    assert slots(cache) == 257
    cache.check()
    assert_state(cache, seq, text)
    assert_state(cache, forks[3], [*text, 3])


def test_a_sole_owner_writes_where_its_state_is():
    cache = make(1)
    seq = begin(cache, TEXT[:3])
    for n in range(4, len(TEXT)):
        grow(cache, {seq: TEXT[:n]})
    assert (slots(cache), cache._tables.states.pool.last_used().tolist()) == (1, [1])


# ------------------------------------------------------------------ kept and taken back


def test_truncate_goes_to_checkpoints_and_says_which_there_are():
    cache = make(8)
    seq = begin(cache, TEXT[:3])
    for n in (3, 5, 9):
        if n > 3:
            grow(cache, {seq: TEXT[:n]})
        cache.checkpoint(seq)
    grow(cache, {seq: TEXT})
    assert cache.checkpoints(seq) == [3, 5, 9]
    with pytest.raises(ValueError, match=r"n: expected 0, 11 or a length .* \(3, 5, 9\), got 4"):
        cache.truncate(seq, 4)
    assert_state(cache, seq, TEXT)
    fork = cache.fork(seq)[0]
    for n in (11, 9, 5):
        cache.truncate(seq, n)
        assert_state(cache, seq, TEXT[:n])
    assert cache.checkpoints(seq) == [3, 5]
    assert cache.checkpoints(fork) == [3, 5, 9]
    grow(cache, {seq: [*TEXT[:5], 7]})
    cache.truncate(fork, 5)
    assert_state(cache, fork, TEXT[:5])
    cache.truncate(seq, 0)
    assert cache.checkpoints(seq) == []
    grow(cache, {seq: TEXT})
    with pytest.raises(ValueError, match="there is none"):
        cache.truncate(seq, 1)
    cache.check()


def test_the_least_recently_used_checkpoint_goes_where_a_row_needs_its_slot():
    cache = make(3)
    seq = begin(cache, TEXT[:3])
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT[:5]})
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT[:8]})
    assert cache.checkpoints(seq) == [3, 5]
    used = cache.add(TEXT[:4])
    assert cache.length(used) == 3  # so the longer one goes first
    cache.free(used)
    begin(cache, [7, 7])
    assert cache.checkpoints(seq) == [3]
    begin(cache, [6, 6])
    assert cache.checkpoints(seq) == []
    with pytest.raises(OutOfPagesError, match="prepare needs 1 state slots, 0 of 3 can be had"):
        begin(cache, [5, 5])


def test_a_row_gives_up_its_own_checkpoint_before_it_runs_out():
    cache = make(1)
    seq = begin(cache, TEXT[:4])
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT[:6]})
    assert cache.checkpoints(seq) == []
    assert_state(cache, seq, TEXT[:6])


def test_truncate_leaves_the_slot_that_another_sequence_is_promised():
    cache = make(3, max_sequences=8)
    seq = begin(cache, TEXT[:3])
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT[:5]})
    fork = cache.fork(seq)[0]
    begin(cache, [7])
    promised = cache.add([5], max_tokens=4)
    with pytest.raises(OutOfPagesError, match="truncate needs 1 state slots, 0 of 3"):
        cache.truncate(seq, 3)
    assert (cache.checkpoints(seq), cache.length(seq)) == ([3], 5)
    assert_state(cache, seq, TEXT[:5])
    cache.free(fork)
    cache.truncate(seq, 3)
    assert_state(cache, seq, TEXT[:3])
    grow(cache, {promised: [5, 6]})
    cache.check()


def test_checkpoints_of_unknown_ids_go_with_the_last_that_can_go_back_to_them():
    cache = make(8)
    seq = cache.add()
    with cache.step([seq], num_new=4) as step:
        write_all(cache, step, [TEXT[:4]], [b""])
    cache.checkpoint(seq)
    fork = cache.fork(seq)[0]
    cache.checkpoint(fork)
    assert cache.stats().checkpoints == 1
    cache.free(seq)
    grow(cache, {fork: TEXT[:5]})
    assert (cache.checkpoints(fork), slots(cache)) == ([4], 2)
    cache.free(fork)
    assert (slots(cache), cache.stats().checkpoints) == (0, 0)


# ------------------------------------------------------------------ steps


def test_a_row_that_keeps_no_token_keeps_its_state():
    cache = make(8)
    first, second = begin(cache, TEXT[:5]), begin(cache, [8, 8])
    step = cache.prepare([first, second], [[1, 2], [3]])
    write_all(cache, step, [[*TEXT[:5], 1, 2], [8, 8, 3]], [b"", b""])
    with pytest.raises(ValueError, match=r"accepted: expected 0 or all of \[2, 1\]"):
        cache.commit(step, [1, 1])
    cache.commit(step, [0, 1])
    assert_state(cache, first, TEXT[:5])
    assert_state(cache, second, [8, 8, 3])


def test_a_donated_state_is_what_the_next_step_of_the_same_rows_reads_and_nobody_else():
    cache = make(8)
    rows = [begin(cache, TEXT[:3]), begin(cache, [8, 8])]

    def step(order, tokens):
        step = cache.prepare([rows[i] for i in order], [[token] for token in tokens])
        texts = [[*text[i], token] for i, token in zip(order, tokens)]
        write_step(cache, step, texts)
        before = step.read_state(0)
        for i, row in enumerate(order):
            for x, y in zip(before, state_of(text[row], 0), strict=True):
                assert torch.equal(x[i], y)
        given = [[torch.stack(x) for x in zip(*(state_of(t, n) for t in texts))] for n in (0, 1)]
        step.write_state(0, given[0], donate=True)
        step.write_state(1, given[1])
        return step, before, given[0], texts

    text = [TEXT[:3], [8, 8]]
    done, _, given, texts = step([0, 1], [1, 2])
    cache.commit(done)
    text = texts
    aborted, before, _, _ = step([0, 1], [3, 4])
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in given]
    for x in before:
        x.fill_(float("nan"))
    cache.abort(aborted)  # what it wrote into was its own
    for row, own in zip(rows, text):
        assert_state(cache, row, own)
    done, _, given, _ = step([0, 1], [5, 6])
    cache.commit(done)
    text = [[*text[0], 5], [*text[1], 6]]
    turned, before, _, _ = step([1, 0], [7, 7])
    assert not {x.data_ptr() for x in before} & {x.data_ptr() for x in given}
    cache.abort(turned)
    assert cache.read_state(rows, 0)[0].data_ptr() != cache.read_state(rows, 0)[0].data_ptr()
    cache.free(rows)
    assert not cache._states._donated


def test_a_commit_without_memory_for_states_changes_nothing_and_can_be_tried_again(monkeypatch):
    cache = make(8)
    first, second = begin(cache, TEXT[:5]), begin(cache, [8, 8])
    step = cache.prepare([first, second], [[1, 2], [3]])
    write_all(cache, step, [[*TEXT[:5], 1, 2], [8, 8, 3]], [b"", b""])

    def fail(*args, **kwargs):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fail)
        with pytest.raises(MemoryError):
            cache.commit(step, [2, 0])
    assert (cache.length(first), cache.length(second), step.state) == (5, 2, "open")
    assert_state(cache, first, TEXT[:5])
    cache.commit(step, [2, 0])
    assert_state(cache, first, [*TEXT[:5], 1, 2])
    assert_state(cache, second, [8, 8])
    cache.check()


def test_running_out_of_slots_or_of_pages_changes_nothing():
    cache = make(2, max_tokens=20)
    seq = begin(cache, TEXT[:5])
    cache.checkpoint(seq)
    grow(cache, {seq: TEXT[:8]})
    cache.checkpoint(seq)
    forks = cache.fork(seq, 3)
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="state slots") as short:
        cache.prepare([seq, *forks], [[1]] * 4)
    assert (short.value.pages_needed, short.value.pages_free) == (4, 1)
    assert (cache.stats(), cache.checkpoints(seq)) == (before, [5, 8])
    promised = cache.add([7], max_tokens=4)
    with pytest.raises(OutOfPagesError, match="state slots"):
        cache.add([7], max_tokens=4)
    cache.free([promised, *forks])
    other = begin(cache, [6] * 8)  # in the slot of the first checkpoint
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="prepare needs 2 more pages"):
        cache.prepare([seq, other], [[1] * 4, [1] * 4])
    assert cache.stats() == before
    assert cache.checkpoints(seq) == [8], "a checkpoint went for a step that did not come"
    cache.check()


def test_reserved_sequences_have_a_slot_whatever_others_take():
    cache = make(3, max_sequences=8)
    held = cache.add(TEXT[:4], max_tokens=8)
    fork = cache.fork(begin(cache, [7]), 1)[0]
    begin(cache, [6])
    with pytest.raises(OutOfPagesError, match="1 sequences have one promised"):
        grow(cache, {fork: [7, 7]})
    with pytest.raises(OutOfPagesError, match="add needs 1 state slots"):
        cache.add([5], max_tokens=4)
    grow(cache, {held: TEXT[:4]})
    with pytest.raises(OutOfPagesError, match="fork of a reserved sequence"):
        cache.fork(held)
    grow(cache, {held: TEXT[:8]})
    cache.check()


def test_a_prompt_leaves_a_checkpoint_whose_slot_is_promised_to_another_sequence():
    cache = make(2)
    first = begin(cache, TEXT[:4])
    cache.checkpoint(first)
    cache.free(first)
    held = [cache.add([7 + i] * 4, max_tokens=4) for i in range(2)]
    assert cache.length(cache.add(TEXT[:6])) == 0
    cache.check()
    grow(cache, {seq: [7 + i] * 4 for i, seq in enumerate(held)})


def test_a_checkpoint_made_behind_a_change_of_weights_is_none_of_an_older_row():
    cache = make(4)
    old = begin(cache, TEXT[:5])
    cache.checkpoint(old)
    grow(cache, {old: TEXT[:7]})
    cache.clear_prefixes()
    cache.checkpoint(begin(cache, TEXT[:5]))
    with pytest.raises(ValueError, match="length"):
        cache.truncate(old, 5)
    assert_state(cache, old, TEXT[:7])


def test_layers_that_hand_in_no_state_or_two_are_named():
    cache = make(4)
    seq = begin(cache, TEXT[:2])
    step = cache.prepare([seq], [[5]])
    write_step(cache, step, [[*TEXT[:2], 5]])
    step.write_state(1, [x[None] for x in state_of([1], 1)])
    with pytest.raises(LayerWritesError, match="state layers 0 wrote nothing"):
        cache.commit(step)
    with pytest.raises(LayerWritesError, match="state layer 1 wrote more than once"):
        step.write_state(1, [x[None] for x in state_of([1], 1)])
    with pytest.raises(ValueError, match="tensors: expected 2, got 1"):
        step.write_state(0, [torch.zeros(1, 3, 2)])
    with pytest.raises(ValueError, match=r"expected \[1, 3, 2\] in state layer 0, got \[2, 3, 2\]"):
        step.write_state(0, [torch.zeros(2, 3, 2), torch.zeros(1, 2, 2, 2)])
    whole = torch.zeros(1, 3, 2)
    for wrong, name in ((whole.to_sparse(), "sparse"), (whole.numpy(), "ndarray"), (None, "None")):
        with pytest.raises(TypeError, match=f"dense tensors in state layer 0, got .*{name}"):
            step.write_state(0, [wrong, torch.zeros(1, 2, 2, 2)])
    for layer in (2, -1, True, "0"):
        with pytest.raises(ValueError, match=r"expected a state layer 0\.\.1"):
            step.read_state(layer)
    cache.commit(step, [0])  # of which nothing is kept
    assert_state(cache, seq, TEXT[:2])
    step = cache.prepare([seq], [[5]])
    cache.abort(step)
    with pytest.raises(Exception, match="aborted"):
        step.read_state(0)


def test_training_leaves_no_graph_in_the_slots():
    cache = make(4)
    seq = cache.add([1])
    with cache.step([seq]) as step:
        write_step(cache, step, [[1]])
        for layer in range(2):
            step.write_state(layer, [x[None].requires_grad_() for x in state_of([1], layer)])
    assert not any(x.requires_grad for x in cache.read_state(seq, 0))


# ------------------------------------------------------------------ bad input, and none at all


def test_bad_calls_are_named():
    cache, plain = make(4), PagedKVCache(one_group(), device="cpu")
    seq = cache.add(TEXT)
    with pytest.raises(ValueError, match="has no tokens, so it has no state"):
        cache.checkpoint(seq)
    for call in (lambda: plain.checkpoint(plain.add()), lambda: plain.read_state(plain.add(), 0)):
        with pytest.raises(ValueError, match=r"no states|with states"):
            call()
    assert plain.checkpoints(plain.add()) == []
    for bad in (10**9, "x", None, 1.5):
        for call in (cache.checkpoint, cache.checkpoints, lambda bad: cache.read_state(bad, 0)):
            with pytest.raises((ValueError, TypeError, UnknownSequenceError)):
                call(bad)
    step = cache.prepare([seq])
    with pytest.raises(OpenStepError):
        cache.checkpoint(seq)
    cache.abort(step)
    plain_seq = plain.add([1])
    with plain.step([plain_seq]) as step:
        write_step(plain, step, [[1]])
        with pytest.raises(ValueError, match="states"):
            step.read_state(0)


@pytest.mark.parametrize(
    ("states", "error"),
    [
        ((1,), TypeError),
        ((StateLayer(()),), TypeError),
        ((StateLayer((((2,), "int8"),)),), ValueError),
        ((StateLayer((((0,), "float32"),)),), ValueError),
    ],
)
def test_states_that_cannot_be_are_refused(states, error):
    with pytest.raises(error, match="states"):
        one_group(states=states)


def test_slots_default_to_the_sequences_and_memory_comes_as_they_are_used():
    config = with_states(one_group(max_sequences=100))
    assert (config.max_states, one_group().max_states) == (100, 0)
    assert config.bytes_per_state == 6 * 2 + 8 * 4 + 5 * 2
    cache = PagedKVCache(config, device="cpu")
    assert cache._states.nbytes == 0
    begin(cache, [1])
    assert cache._states.nbytes == 8 * config.bytes_per_state


def test_check_names_what_is_wrong_with_slots():
    def broken(change):
        cache = make(4)
        seq = begin(cache, TEXT[:5])
        cache.checkpoint(seq)
        change(cache._tables.states)
        with pytest.raises(CorruptCacheError) as found:
            cache.check()
        return str(found.value)

    assert "references differ" in broken(lambda s: s.pool.refcount.__setitem__(0, 5))
    assert "checkpoints differ" in broken(lambda s: s.checkpoints._tails.clear())

    cache = make(4)
    seq = begin(cache, TEXT[:5])
    cache.checkpoint(seq)
    step = cache.prepare([seq], [[1]])
    slot = step.states.target
    values = [x[None] for x in state_of([1], 0)]
    cache._states.write(0, slot, torch.from_numpy(slot), values, False)
    with pytest.raises(CorruptCacheError, match="written too early"):
        cache.check()


def test_a_commit_that_cannot_tell_the_device_its_slots_changes_nothing(monkeypatch):
    cache = make(4)
    seq = begin(cache, TEXT[:5])
    step = cache.prepare([seq], [[TEXT[5]]])
    write_all(cache, step, [TEXT[:6]], [b""])

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        for module in (step_states, storage_states):
            patch.setattr(module, "sent", fail, raising=False)
        with pytest.raises(MemoryError):
            cache.commit(step)
    cache.check()
    assert (step.state, cache.length(seq)) == ("open", 5)
    cache.commit(step)
    assert_state(cache, seq, TEXT[:6])


def test_a_cache_of_attention_alone_has_nothing_of_it():
    cache = PagedKVCache(one_group(), device="cpu")
    assert cache._states is None
    assert cache._tables.states is None
    assert isinstance(cache.config, CacheConfig)
    assert "states" not in str(cache.stats())
