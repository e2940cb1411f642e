"""Mistakes of own loops: layers that do not write, ids against a prompt, sizes beyond all."""

import copy
import pickle
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from pagedkv import PagedKVCache, paged_attention, write_kv
from pagedkv.errors import ClosedStepError, LayerWritesError, SequenceTooLongError
from tests.cases import one_group
from tests.contents import advance, assert_contents, start, write_step

TEXT = [5, 6, 7, 8, 9, 10, 11]


def make(**fields):
    return PagedKVCache(one_group(num_layers=4, **fields), device="cpu", debug=True)


def state(cache):
    tables = cache._tables
    arrays = tables.tables, tables.lengths, tables.num_pages, tables.ids_known, tables.pool.refcount
    return cache.stats(), [array.tolist() for array in arrays], dict(tables.pending)


def attend(step, layer, tokens=7):
    q, k, v = torch.randn(3, tokens, 2, 4)
    paged_attention(q, k, v, step, layer)


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("through", ["commit", "with"])
@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], "layers 0..3 wrote nothing;"),
        ([0, 1, 3], "layer 2 wrote nothing;"),
        ([1], "layers 0, 2..3 wrote nothing;"),
        ([0, 0, 0, 0], "layers 1..3 wrote nothing, layer 0 wrote more than once; is `layer`"),
        ([0, 1, 2, 3, 3], "layer 3 wrote more than once; if that is meant"),
        ([3, 1, 2, 0, 1, 0], "layers 0..1 wrote more than once; if that is meant"),
    ],
)
def test_layers_that_wrote_nothing_or_twice_are_named_and_nothing_is_committed(
    layers, said, through
):
    cache = make()
    seq = cache.add(TEXT)
    before = state(cache)
    if through == "with":

        def loop():
            with cache.step([seq]) as step:
                for layer in layers:
                    attend(step, layer)

        with pytest.raises(LayerWritesError) as caught:
            loop()
    else:
        step = cache.prepare([seq])
        for layer in layers:
            attend(step, layer)
        with pytest.raises(LayerWritesError) as caught:
            cache.commit(step)
        assert step.state == "open"
        cache.abort(step)
    assert said in str(caught.value)
    assert state(cache) == before
    cache.check()
    assert cache.length(cache.add(TEXT)) == 0, "it was found"


def test_a_step_with_a_missing_layer_is_committed_once_that_layer_wrote():
    cache = make()
    seq = cache.add(TEXT)
    step = cache.prepare([seq])
    write_step(cache, step, [TEXT], layers=[3, 0, 2])
    with pytest.raises(LayerWritesError, match="layer 1 wrote nothing"):
        cache.commit(step)
    write_step(cache, step, [TEXT], layers=[1])
    cache.commit(step)
    assert_contents(cache, seq, TEXT)


def test_what_was_refused_before_it_was_written_does_not_count():
    cache = make()
    step = cache.prepare([cache.add(TEXT)])
    with pytest.raises(TypeError, match="dtype"):
        write_kv(*torch.zeros(2, 7, 2, 4, dtype=torch.float64), step, 0)
    write_step(cache, step, [TEXT])
    cache.commit(step)


def test_layers_that_are_named_may_write_alone_and_again():
    cache = make()
    seq = cache.add(TEXT)
    with cache.step([seq], layers=range(2)) as step:
        for layer in (0, 1, 0):
            attend(step, layer)
    step = cache.prepare([seq], [[1]])
    for layer in (0, 1, 2, 3, 3):
        attend(step, layer, 1)
    cache.commit(step, layers=[3, 2, 1, 0])
    assert cache.length(seq) == 8


def test_what_some_layers_did_not_write_is_no_prefix_of_anybody():
    cache = make()
    seq = start(cache, TEXT[:4])
    draft = cache.fork(seq)[0]
    with cache.step([draft], [TEXT[4:]], layers=range(2)) as step:
        write_step(cache, step, [TEXT], layers=range(2))
    cache.free(draft)
    assert cache.length(cache.add([*TEXT, 1])) == 4
    advance(cache, {seq: TEXT})
    assert cache.length(cache.add([*TEXT, 1])) == 7


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ([0], "layers 1..3 wrote and stand not in `layers`"),
        ([], "layers 0..3 wrote"),
        ([0, 1, 2, 3, 4], "layers: expected some of 0..3, got .4"),
    ],
)
def test_layers_that_are_named_and_those_that_wrote_are_the_same(named, said):
    cache = make()
    step = cache.prepare([cache.add(TEXT)])
    write_step(cache, step, [TEXT])
    with pytest.raises((LayerWritesError, ValueError), match=said):
        cache.commit(step, layers=named)
    cache.commit(step)


@pytest.mark.parametrize(
    ("named", "error"),
    [
        (2, TypeError),
        ([[0]], TypeError),
        ([0, "1"], TypeError),
        ([0, None], TypeError),
        ([0.0, 1.0, 2.0, 3.0], TypeError),
        ([True, False, True, True], TypeError),
        (torch.tensor([0.0, 1.0]), TypeError),
        ([0, -1], ValueError),
        (torch.tensor([0, 4]), ValueError),
    ],
)
def test_what_names_no_layers_is_refused_before_a_step_opens_and_before_one_closes(named, error):
    cache = make()
    seq = cache.add(TEXT)
    before = state(cache)
    with (
        pytest.raises(error, match=r"^layers: expected some of 0..3, got"),
        cache.step([seq], layers=named),
    ):
        pytest.fail("a step was opened")
    assert state(cache) == before
    step = cache.prepare([seq])
    for kept in (None, [0]):
        with pytest.raises(error, match=r"^layers: expected some of 0..3, got"):
            cache.commit(step, accepted=kept, layers=named)
    assert step.state == "open"
    write_step(cache, step, [TEXT])
    cache.commit(step)


@pytest.mark.parametrize("named", [torch.arange(4), np.arange(4), iter(range(4)), {3, 1, 0, 2}])
def test_layers_may_be_named_by_integers_of_any_kind(named):
    cache = make()
    with cache.step([cache.add(TEXT)], layers=named) as step:
        write_step(cache, step, [TEXT])
    assert cache.length(cache.add([*TEXT, 1])) == 7


def test_a_step_of_which_nothing_is_kept_needs_no_layer():
    cache = make()
    seq = cache.add(TEXT)
    step = cache.prepare([seq])
    attend(step, 0)
    cache.commit(step, accepted=[0])
    assert cache.length(seq) == 0
    assert cache.uncached(seq).tolist() == TEXT


def test_layers_that_attend_to_what_is_stored_already_count_as_writing():
    cache = make()
    start(cache, TEXT)
    with cache.step([cache.add(TEXT)]) as step:
        assert step.slots().tolist() == [-1]
        for layer in range(4):
            attend(step, layer, 1)
    step = cache.prepare([cache.add(TEXT)])
    with pytest.raises(LayerWritesError, match=r"layers 0..3 wrote nothing"):
        cache.commit(step)


def test_layers_may_be_numpy_integers():
    cache = make()
    with cache.step([cache.add(TEXT)]) as step:
        for layer in np.arange(4):
            attend(step, layer)


def test_layers_of_a_compiled_region_are_seen():
    cache = make()

    def first_layers(q, k, v, step):
        for layer in range(3):
            q = paged_attention(q, k, v, step, layer)
        return q

    compiled = torch.compile(first_layers, fullgraph=True, backend="aot_eager")
    for missing in (False, True):
        step = cache.prepare([cache.add(TEXT)])
        compiled(*torch.randn(3, 7, 2, 4), step)
        if missing:
            with pytest.raises(LayerWritesError, match="layer 3 wrote nothing"):
                cache.commit(step)
        else:
            attend(step, 3)
            cache.commit(step)
            cache.clear_prefixes()


def test_the_operator_stays_out_of_graphs_that_a_compiler_captures():
    assert torch.Tag.cudagraph_unsafe in torch.ops.pagedkv.paged_attention.default.tags


def test_of_threads_that_close_the_same_step_one_does():
    cache, seen = make(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(100):
            step = cache.prepare([cache.add(TEXT)])
            write_step(cache, step, [TEXT])
            ready = threading.Barrier(2)

            def close(how, step=step, ready=ready):
                ready.wait()
                try:
                    how(step)
                    seen.append("closed")
                except ClosedStepError:
                    seen.append("late")

            ways = (cache.commit, cache.commit if turn % 2 else cache.abort)
            threads = [threading.Thread(target=close, args=(way,)) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            cache.check()
            cache.free(step.seqs)
            cache.clear_prefixes()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(seen) == ["closed"] * 100 + ["late"] * 100


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    ("fed", "said"),
    [
        ([9], "expected 5 at 0, got 9"),
        ([5, 6, 9], "expected 7 at 2, got 9"),
        ([*TEXT[:6], 3, 4, 4], "expected 11 at 6, got 3"),
        ([6], "expected 5 at 0, got 6"),
    ],
)
def test_ids_that_contradict_a_prompt_are_refused_and_the_prompt_stays(fed, said):
    cache = make()
    other, seq = start(cache, [1, 2]), cache.add(TEXT)
    before = state(cache)
    for call in ([[3], fed], [np.array([3]), np.array(fed)]):
        with pytest.raises(ValueError, match=f"sequence {seq} must finish its prompt.*{said}"):
            cache.prepare([other, seq], call)
    assert state(cache) == before
    assert cache.uncached(seq).tolist() == TEXT


@pytest.mark.parametrize("by", [1, 3, 7, 9])
def test_a_prompt_is_fed_by_its_ids_in_chunks_of_any_size_and_goes_on(by):
    cache, text = make(), [*TEXT, 20, 21]
    other, seq = start(cache, [1, 2]), cache.add(TEXT)
    fork = cache.fork(seq)[0]
    for end in range(by, 10, by):
        advance(cache, {seq: text[:end], other: [1, 2, *range(end)]})
    assert_contents(cache, seq, text[: 9 // by * by])
    assert cache.uncached(fork).tolist() == TEXT
    with pytest.raises(ValueError, match=f"sequence {fork} must finish its prompt"):
        cache.prepare([seq, fork], [1, 1])


# ------------------------------------------------------------------ sizes and kinds


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("count", [3 * 10**8, 10**9, 10**18, 2**63 - 1])
def test_a_step_beyond_all_measure_is_refused_before_anything_is_allocated(count, rows):
    cache = make()
    with_prompt, seq = cache.add(TEXT), cache.add()
    start(cache, [1])
    counts = [7, count] if rows == 2 else [count]
    before = state(cache)
    tracemalloc.start()
    with pytest.raises(SequenceTooLongError, match="this can never fit"):
        cache.prepare([with_prompt, seq][-rows:], num_new=counts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert state(cache) == before


@pytest.mark.parametrize("count", [3e8, 1.0, "7", True, None, -1, 0, [1, -5], [1, 2**63], 10**30])
def test_a_count_that_is_no_count_is_refused(count):
    cache = make()
    seqs = [cache.add(), cache.add()]
    with pytest.raises((TypeError, ValueError), match=r"num_new: expected|tokens: sequence"):
        cache.prepare(seqs, num_new=count)
    cache.check()


@pytest.mark.parametrize(
    "tokens", [[True], [1.5], ["1"], [-1], [2**31], [2**63], [2**70], [[None]]]
)
def test_ids_that_are_no_ids_are_refused(tokens):
    cache = make()
    seq = cache.add()
    for call in (lambda: cache.prepare([seq], [tokens]), lambda: cache.add(tokens)):
        with pytest.raises((TypeError, ValueError), match="tokens: expected"):
            call()
    assert cache.length(seq) == 0


def test_sequences_come_in_an_order():
    cache = make()
    seqs = [cache.add(), cache.add()]
    for many in (set(seqs), frozenset(seqs)):
        with pytest.raises(TypeError, match="seqs: expected a list, whose order"):
            cache.prepare(many, [1, 2])
    for ordered in (tuple(seqs), np.array(seqs), dict.fromkeys(seqs), [np.int64(s) for s in seqs]):
        step = cache.prepare(ordered, [1, 2])
        assert step.seqs.tolist() == seqs
        cache.abort(step)


def test_ids_at_commit_that_contradict_those_of_a_prompt_are_refused():
    cache = make()
    seq, other = cache.add(TEXT), cache.add()
    step = cache.prepare([seq, other], num_new=[7, 2])
    write_step(cache, step, [TEXT, [1, 2]])
    with pytest.raises(ValueError, match="tokens: expected the ids given at prepare"):
        cache.commit(step, tokens=[[*TEXT[:6], 1], [1, 2]])
    cache.commit(step, tokens=[TEXT, [1, 2]])
    assert_contents(cache, seq, TEXT)


# ------------------------------------------------------------------ copies


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied_and_says_what_is_meant_instead(how):
    cache = make()
    start(cache, TEXT)
    with pytest.raises(
        TypeError, match=r"PagedKVCache cannot be copied.*fork.*save.*PagedKVCache\("
    ):
        how(cache)
    with pytest.raises(TypeError, match="PagedKVCache cannot be copied"):
        how({"inside": [cache]}) if how is not copy.copy else how(cache)
    cache.check()
