"""Forwards within forwards, and forwards that do not pass each layer of their cache once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagedkv.errors import OpenStepError, UnsupportedModelError
from pagedkv.hf import PagedCache, attach, detach
from tests.hf.forwards import IDS, SIZES, by_hand, dying, stored, visible, within
from tests.hf.tiny import assert_same_tokens, dense, generate, named, padded, prompts, tiny

pytestmark = pytest.mark.usefixtures("without_gradients")


# Before a step is open, in the middle of it, and once all layers have written.
@pytest.mark.parametrize(
    ("where", "other"),
    [
        *(("layers.1", other) for other in ("own pages", "decoder", "dense", "none")),
        *((where, "another model") for where in ("embed_tokens", "layers.1", "norm")),
        *((where, "own pages") for where in ("embed_tokens", "norm")),
    ],
)
def test_forward_within_a_forward_is_one_of_its_own(where, other):
    model, second = tiny(), tiny()
    with (
        PagedCache(model, **SIZES) as cache,
        PagedCache(model, **SIZES) as reference,
        PagedCache(model, page_size=8, max_tokens=64) as own,
        PagedCache(second, **SIZES) as others,
    ):
        calls = {
            "own pages": lambda: model(IDS, **named(own)),
            "decoder": lambda: model.model(IDS, **named(own)),
            "dense": lambda: model(IDS, **named(dense(model))),
            "none": lambda: model(IDS, use_cache=False),
            "another model": lambda: second(IDS, **named(others)),
        }
        for seen in (3, 6):
            expected = model(IDS, **named(reference)).logits
            with within(model.model.get_submodule(where), calls[other]):
                logits = model(IDS, **named(cache)).logits
            assert torch.equal(logits, expected)
            assert cache.seen == seen
            assert own.seen == (seen if other in ("own pages", "decoder") else 0)
            assert others.seen == (seen if other == "another model" else 0)
        for one in (cache, own, others):
            assert one.kv.open_step is None
            one.kv.check()


@pytest.mark.parametrize("errors", [(KeyboardInterrupt, ZeroDivisionError), (KeyboardInterrupt,)])
@pytest.mark.parametrize("who", ["itself", "another"])
def test_forward_within_a_forward_that_dies_leaves_the_other_one(who, errors):
    """No hook sees an interrupt: behind one that is caught, the outer forward is to commit."""
    model = tiny()
    inner = model if who == "itself" else tiny()
    with (
        PagedCache(model, **SIZES) as cache,
        PagedCache(inner, page_size=8, max_tokens=64) as own,
    ):

        def action():
            for error in errors:
                with dying(inner.model.norm, error, True), pytest.raises(error):
                    inner(IDS, **named(own))

        expected = model(IDS, use_cache=False).logits
        with within(model.model.layers[1], action):
            logits = model(IDS, **named(cache)).logits
        torch.testing.assert_close(logits, expected)
        assert (cache.seen, own.seen) == (3, 0)
        assert own.stats().live == 0


@pytest.mark.parametrize("where", ["layers.1", "norm"])
@pytest.mark.parametrize("caught", [True, False])
def test_pages_of_a_forward_under_way_cannot_be_changed(where, caught):
    model = tiny()
    with PagedCache(model, **SIZES) as cache, PagedCache(model, **SIZES) as other:
        expected = model(IDS, **named(other)).logits
        model(IDS, **named(cache))
        before, bytes_before = visible(cache), stored(cache)
        changes = [
            lambda: model(IDS, **named(other)),
            lambda: model(IDS, **named(cache)),
            cache.fork,
            other.fork,
            cache.reset,
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
        ]

        def action():
            for change in changes:
                with pytest.raises(OpenStepError, match="a forward is under way"):
                    change()
            PagedCache(model, **SIZES).close()
            if not caught:
                cache.fork()

        with within(model.model.get_submodule(where), action):
            if caught:
                model(IDS, **named(cache))
            else:
                with pytest.raises(OpenStepError):
                    model(IDS, **named(cache))
                assert visible(cache) == before
                assert all(torch.equal(a, b) for a, b in zip(stored(cache), bytes_before))
                model(IDS, **named(cache))
        assert cache.seen == 6
        cache.reset()
        assert torch.equal(model(IDS, **named(cache)).logits, expected)
        cache.kv.check()


def test_forwards_of_two_threads_are_two_transactions():
    models, met = [tiny(), tiny(num_hidden_layers=3)], threading.Barrier(2)
    with PagedCache(models[0], **SIZES) as one, PagedCache(models[1], **SIZES) as two:

        def run(model, cache, turns=3):
            with torch.no_grad(), within(model.model.layers[1], lambda: met.wait(600)):
                for _ in range(turns):
                    model(IDS, **named(cache))

        with ThreadPoolExecutor() as pool:
            for job in [pool.submit(run, *pair) for pair in zip(models, (one, two))]:
                job.result()
        assert one.seen == two.seen == 9
        assert one.kv.length(one.rows[0]) == two.kv.length(two.rows[0]) == 9


def test_processor_may_run_the_same_model_with_another_cache():
    model = tiny()
    batch = padded(prompts(9, 5))
    expected = generate(model, batch)
    with PagedCache(model, **SIZES) as cache, PagedCache(model, **SIZES) as other:

        def processor(ids, scores):
            model(ids[:, -1:], **named(other))
            return scores

        assert_same_tokens(generate(model, batch, cache, logits_processor=[processor]), expected)
        assert other.seen == 10


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("layers", [2, 3], ids=["equal", "deeper"])
def test_cache_of_another_model_changes_by_no_forward(layers):
    mine, other = tiny(), tiny(num_hidden_layers=layers)
    attach(mine)
    with PagedCache(other, **SIZES) as cache:
        other(IDS, **named(cache))
        before, bytes_before = visible(cache), stored(cache)
        for call in (mine, mine.model, mine.forward):
            with pytest.raises(ValueError, match="expected a cache of this model"):
                call(IDS, **named(cache))
            cache.abort_step()
            assert visible(cache) == before
        assert all(torch.equal(a, b) for a, b in zip(stored(cache), bytes_before))
    detach(mine)


def test_forward_that_passes_fewer_layers_than_its_cache_has_is_refused():
    model = tiny(num_hidden_layers=3)
    with PagedCache(model, **SIZES) as cache:
        last = model.model.layers.pop(2)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="passed 2 of 3 layers"):
                model(IDS, **named(cache))
            assert cache.seen == cache.stats().live == 0
        model.model.layers.append(last)
        model(IDS, **named(cache))
        assert cache.seen == 3


def test_forward_that_passes_its_layers_twice_is_refused():
    model = tiny()
    with PagedCache(model, **SIZES) as cache:
        with (
            within(model.lm_head, lambda: by_hand(model, IDS, cache)),
            pytest.raises(UnsupportedModelError, match="layers of its cache twice"),
        ):
            model(IDS, **named(cache))
        assert cache.seen == cache.stats().live == 0


def test_hooks_of_a_user_run_before_the_commit_and_stay():
    model, order = tiny(), []
    with PagedCache(model, **SIZES) as cache:
        hook = model.register_forward_hook(lambda *_: order.append(cache.seen))
        model(IDS, **named(cache))
        assert (order, cache.seen) == ([0], 3)
    model(IDS)
    assert order == [0, 3]
    hook.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
