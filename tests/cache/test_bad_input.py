"""A caller's mistake is named and changes nothing."""

import numpy as np
import pytest
import torch

from pagedkv import PagedKVError, paged_attention, write_kv
from pagedkv.errors import (
    ClosedStepError,
    GradModeError,
    OpenStepError,
    SequenceTooLongError,
    TooManySequencesError,
    UnknownSequenceError,
    WrongCacheError,
)
from tests.cache.small import ids, make, snapshot
from tests.contents import advance, assert_contents, kv_of, start, write_step

BAD_CALLS = [
    ("length of an unknown sequence", lambda c, a, f: c.length(999), UnknownSequenceError, "999"),
    ("length of a freed one", lambda c, a, f: c.length(f), UnknownSequenceError, "live"),
    ("gather from a freed one", lambda c, a, f: c.gather(f, 0), UnknownSequenceError, "live"),
    ("fork a freed one", lambda c, a, f: c.fork(f), UnknownSequenceError, "live"),
    ("truncate a freed one", lambda c, a, f: c.truncate(f, 0), UnknownSequenceError, "live"),
    ("free twice", lambda c, a, f: c.free(f), UnknownSequenceError, "live"),
    ("free one good one bad", lambda c, a, f: c.free([a, f]), UnknownSequenceError, "live"),
    ("free the same twice", lambda c, a, f: c.free([a, a]), (ValueError, KeyError), r"\d"),
    ("uncached of a negative id", lambda c, a, f: c.uncached(-1), UnknownSequenceError, "-1"),
    (
        "step a freed one",
        lambda c, a, f: c.prepare([a, f], num_new=1),
        UnknownSequenceError,
        "live",
    ),
    ("the same twice", lambda c, a, f: c.prepare([a, a], num_new=1), ValueError, "seqs"),
    ("a sequence without a list", lambda c, a, f: c.prepare(a), TypeError, "seqs: expected a list"),
    ("no sequences", lambda c, a, f: c.prepare([], tokens=[]), ValueError, "seqs"),
    ("None for all", lambda c, a, f: c.prepare(None), TypeError, "^seqs: expected a list"),
    ("one id", lambda c, a, f: c.prepare([a], tokens=5), TypeError, "^tokens: expected a list"),
    ("a layer that is an array", lambda c, a, f: c.gather(a, np.ones(2)), TypeError, "^layer: "),
    ("a layer that is False", lambda c, a, f: c.positions(a, False), TypeError, "^layer: "),
    (
        "several reservations",
        lambda c, a, f: c.add([1], max_tokens=np.ones(2, int)),
        TypeError,
        "^max_tokens: expected an int",
    ),
    ("save into an open file", lambda c, a, f: c.save(a, 1), TypeError, "^path: expected a path"),
    ("load an open file", lambda c, a, f: c.load(0), TypeError, "^path: expected a path, got 0"),
    ("load nothing", lambda c, a, f: c.load(""), TypeError, "^path: expected a path"),
    ("no new tokens", lambda c, a, f: c.prepare([a], tokens=[[]]), ValueError, "tokens"),
    ("counts for others", lambda c, a, f: c.prepare([a], num_new=[1, 1]), ValueError, "num_new"),
    ("nothing uncached", lambda c, a, f: c.prepare([a]), ValueError, "tokens"),
    ("ids for others", lambda c, a, f: c.prepare([a], tokens=[[1], [2]]), ValueError, "tokens"),
    (
        "ids and a count",
        lambda c, a, f: c.prepare([a], tokens=[[1]], num_new=1),
        ValueError,
        "num_new",
    ),
    ("an empty prompt", lambda c, a, f: c.add([]), ValueError, "tokens"),
    ("a prompt of bools", lambda c, a, f: c.add(np.asarray([True])), TypeError, "tokens"),
    ("a prompt that is text", lambda c, a, f: c.add("the"), TypeError, "tokens: .*got str"),
    ("a prompt of bytes", lambda c, a, f: c.add(b"the"), TypeError, "tokens: .*got bytes"),
    ("a prompt of two axes", lambda c, a, f: c.add([[1, 2]]), ValueError, "tokens"),
    ("a salt of text", lambda c, a, f: c.add([1], salt="me"), TypeError, "salt"),
    ("no salt", lambda c, a, f: c.add([1], salt=None), TypeError, "salt"),
    ("a prompt over length", lambda c, a, f: c.add(ids(41)), SequenceTooLongError, "41"),
    ("reserve over length", lambda c, a, f: c.add([1], max_tokens=41), SequenceTooLongError, "41"),
    ("reserve too little", lambda c, a, f: c.add([1, 2], max_tokens=1), ValueError, "max_tokens"),
    ("growth over length", lambda c, a, f: c.prepare([a], num_new=35), SequenceTooLongError, "41"),
    ("truncate below 0", lambda c, a, f: c.truncate(a, -1), ValueError, "-1"),
    ("truncate beyond", lambda c, a, f: c.truncate(a, 7), ValueError, "sequence 0 has 6 computed"),
    ("fork into none", lambda c, a, f: c.fork(a, 0), ValueError, "n"),
    ("fork into too many", lambda c, a, f: c.fork(a, 8), TooManySequencesError, "8"),
    ("fork into a part", lambda c, a, f: c.fork(a, 1.5), TypeError, "n"),
    ("truncate to a part", lambda c, a, f: c.truncate(a, 2.5), TypeError, "n"),
    ("reserve a part", lambda c, a, f: c.add([1], max_tokens=2.5), TypeError, "max_tokens"),
    ("reserve nothing", lambda c, a, f: c.add(max_tokens=0), ValueError, "max_tokens"),
    ("a sequence by name", lambda c, a, f: c.length("a"), (TypeError, UnknownSequenceError), "a"),
    ("step by name", lambda c, a, f: c.prepare(["a"], num_new=1), (TypeError, KeyError), "seqs"),
    ("gather from no layer", lambda c, a, f: c.gather(a, 2), (ValueError, IndexError), "layer"),
    ("gather below 0", lambda c, a, f: c.gather(a, -1), (ValueError, IndexError), "layer"),
]


@pytest.mark.parametrize(
    ("call", "error", "match"), [row[1:] for row in BAD_CALLS], ids=[row[0] for row in BAD_CALLS]
)
def test_bad_input_is_named_and_changes_nothing(call, error, match):
    cache = make(max_tokens=64, max_sequence_length=40)
    a, b, freed = start(cache, ids(6)), cache.add(ids(5, 1)), start(cache, ids(3, 2))
    cache.free(freed)
    before = snapshot(cache, [a, b])
    with pytest.raises(error, match=match) as caught:
        call(cache, a, freed)
    if not isinstance(caught.value, PagedKVError):
        assert str(caught.value), "an error says what is wrong"
    assert snapshot(cache, [a, b]) == before
    advance(cache, {a: ids(7), b: ids(5, 1)})  # nothing is left open


def test_one_sequence_more_than_the_configuration_allows_is_refused():
    cache = make(max_sequences=3)
    a, b, c = start(cache, ids(4)), cache.add(), cache.add(ids(3))
    before = snapshot(cache, [a, b, c])
    for call in (lambda: cache.add(ids(2)), lambda: cache.add(), lambda: cache.fork(a)):
        with pytest.raises(TooManySequencesError, match="3"):
            call()
    assert snapshot(cache, [a, b, c]) == before
    cache.free(b)
    assert cache.fork(a)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_ends_once_also_while_another_is_open(end):
    cache = make()
    a, b = cache.add(ids(6)), start(cache, ids(6, 1))
    step = cache.prepare([a])
    write_step(cache, step, [ids(6)])
    getattr(cache, end)(step)
    before = snapshot(cache, [a, b])
    x = torch.zeros(6, 2, 4)
    for turn in range(2):
        other = cache.prepare([b], num_new=1) if turn else None
        for call in (
            lambda: cache.commit(step),
            lambda: cache.commit(step, [3]),
            lambda: cache.abort(step),
            lambda: write_kv(x, x, step, 0),
            lambda: paged_attention(x, x, x, step, 0),
        ):
            with pytest.raises(ClosedStepError):
                call()
    write_step(cache, other, [[*ids(6, 1), 3]])
    cache.abort(other)
    assert snapshot(cache, [a, b]) == before


@pytest.mark.parametrize(
    ("accepted", "error"),
    [([3], ValueError), ([-1], ValueError), ([1, 1], ValueError), ([], (TypeError, ValueError)),
     ([1.5], TypeError), ("2", (TypeError, ValueError)), (1, TypeError)],
)  # fmt: skip
def test_a_wrong_accepted_leaves_the_step_open(accepted, error):
    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], tokens=[[6, 7]])
    write_step(cache, step, [ids(8)])
    with pytest.raises(error, match="accepted"):
        cache.commit(step, accepted)
    cache.check()
    assert_contents(cache, a, ids(6))
    cache.commit(step, [1])
    assert_contents(cache, a, ids(7))


def test_a_text_for_a_flag_is_refused_by_name():
    cache = make()
    step = cache.prepare([cache.add()], tokens=[[6]])
    write_step(cache, step, [[6]])
    with pytest.raises(TypeError, match=r"^revocable: expected True or False, got str"):
        cache.commit(step, revocable="no")
    cache.commit(step)
    with pytest.raises(TypeError, match=r"^debug: expected True or False, got str"):
        make(debug="no")


@pytest.mark.parametrize(
    "tokens", [[[6]], [[6, 7], [8]], [[6, -7]], [[6.5, 7.5]], [[6, 2**31]], []], ids=str
)
def test_wrong_ids_at_commit_leave_the_step_open(tokens):
    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], num_new=2)
    write_step(cache, step, [ids(8)])
    with pytest.raises((ValueError, TypeError), match="tokens"):
        cache.commit(step, tokens=tokens)
    cache.check()
    assert_contents(cache, a, ids(6))
    cache.commit(step, tokens=[[6, 7]])
    assert_contents(cache, a, ids(8))
    assert cache.length(cache.add(ids(9))) == 8


def test_calls_that_a_step_forbids_change_nothing():
    cache = make()
    a, b = start(cache, ids(6)), start(cache, ids(6, 1))
    step = cache.prepare([a], tokens=[[6]])
    before = snapshot(cache, [a, b])
    for call in (
        lambda: cache.prepare([b], num_new=1),
        lambda: cache.fork(a),
        lambda: cache.truncate(a, 2),
        lambda: cache.free(a),
        lambda: cache.free([b, a]),
        lambda: cache.clear_prefixes(),
    ):
        with pytest.raises(OpenStepError):
            call()
        assert snapshot(cache, [a, b]) == before
    write_step(cache, step, [ids(7)])
    cache.commit(step)
    assert_contents(cache, a, ids(7))


def test_a_step_of_another_cache_is_refused():
    one, two = make(), make()
    a, b = start(one, ids(6)), start(two, ids(5, 1))
    step = one.prepare([a], tokens=[[6]])
    before = snapshot(two, [b])
    for call in (lambda: two.commit(step), lambda: two.abort(step)):
        with pytest.raises(WrongCacheError):
            call()
    other = two.prepare([b], num_new=1)
    with pytest.raises(WrongCacheError):
        two.commit(step)
    two.abort(other)
    assert snapshot(two, [b]) == before
    write_step(one, step, [ids(7)])
    one.commit(step)
    assert_contents(one, a, ids(7))


def bad_tensors():
    good = {"q": (3, 4, 4), "k": (3, 2, 4), "v": (3, 2, 4)}
    rows = []
    for name, shape in good.items():
        tokens, heads, dim = shape
        for what, wrong in (
            ("one token more", (tokens + 1, heads, dim)),
            ("one token less", (tokens - 1, heads, dim)),
            ("another head_dim", (tokens, heads, dim + 1)),
            ("an axis too few", (tokens, heads * dim)),
            ("a batch axis", (1, tokens, heads, dim)),
            ("no multiple of the heads" if name == "q" else "another head count", (3, 3, 4)),
        ):
            rows.append((f"{name}: {what}", name, torch.zeros(wrong), ValueError))
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            rows.append((f"{name}: {dtype}", name, torch.zeros(shape, dtype=dtype), TypeError))
        rows.append((f"{name}: meta device", name, torch.zeros(shape, device="meta"), ValueError))
        rows.append((f"{name}: numpy", name, np.zeros(shape, np.float32), TypeError))
    return rows


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [row[1:] for row in bad_tensors()],
    ids=[row[0] for row in bad_tensors()],
)
def test_wrong_queries_keys_and_values_are_named_and_nothing_is_written(name, tensor, error):
    cache = make()
    a = start(cache, ids(6))
    before = snapshot(cache, [a])
    step = cache.prepare([a], tokens=[[6, 7, 8]])
    k, v = (x[6:] for x in kv_of(ids(9), 0, cache.config))
    write_step(cache, step, [ids(9)])
    good = {"q": torch.zeros(3, 4, 4), "k": k, "v": v}
    with pytest.raises(error, match=rf"\b{name}\b"):
        paged_attention(**{**good, name: tensor}, step=step, layer=0)
    if name != "q":
        with pytest.raises(error, match=rf"\b{name}\b"):
            write_kv(**{**{"k": k, "v": v}, name: tensor}, step=step, layer=0)
    cache.abort(step)
    assert snapshot(cache, [a]) == before


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_a_layer_that_is_not_there_is_refused(layer):
    cache = make()
    a = start(cache, ids(6))
    x = torch.zeros(1, 2, 4)
    step = cache.prepare([a], num_new=1)
    for call in (
        lambda: write_kv(x, x, step, layer),
        lambda: paged_attention(x, x, x, step, layer),
    ):
        with pytest.raises((ValueError, IndexError), match="layer"):
            call()
    cache.abort(step)
    assert_contents(cache, a, ids(6))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_require_gradients_are_refused_in_grad_mode(name):
    cache = make()
    a = start(cache, ids(6))
    good = {x: torch.zeros(1, 2, 4) for x in "qkv"}
    bad = {**good, name: torch.zeros(1, 2, 4, requires_grad=True)}
    step = cache.prepare([a], num_new=1)
    with torch.enable_grad():
        with pytest.raises(GradModeError):
            paged_attention(**bad, step=step, layer=0)
        paged_attention(**good, step=step, layer=0)
        if name != "q":
            with pytest.raises(GradModeError):
                write_kv(bad["k"], bad["v"], step, 0)
    with torch.no_grad():
        out = paged_attention(**bad, step=step, layer=0)
    assert not out.requires_grad
    cache.abort(step)
