"""`PagedCache` over models that keep recurrent states beside K and V, against their own cache."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pagedkv.errors import LayerWritesError, OutOfPagesError, UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.model import STEPWISE
from tests.effort import few
from tests.hf.tiny import generate, padded, prompts
from tests.hybrids import HYBRIDS, hybrid

REFUSED = {"kimi_linear"}
SERVED = sorted(set(HYBRIDS) - REFUSED)
CHUNKED = sorted(set(SERVED) - STEPWISE)
SOME = ("qwen3_next", "lfm2", "falcon_h1", "nemotron_h")
SIZES = {"max_tokens": 512, "page_size": 4}

served = pytest.mark.parametrize("family", few(SERVED, *SOME))
chunked = pytest.mark.parametrize("family", few(CHUNKED, *SOME))


@pytest.fixture(scope="module")
def model_of():
    made = {}

    def get(family):
        if family not in made:
            torch.manual_seed(0)
            made[family] = hybrid(family)
        return made[family]

    return get


def paged(model, batch, cache=None, **options):
    """What `generate` returns over a cache, which is whole afterwards."""
    torch.manual_seed(5)
    with cache or PagedCache(model, **SIZES) as cache:
        found = generate(model, batch, past_key_values=cache, **options).sequences
        cache.kv.check()
    return found


def own(model, batch, **options):
    torch.manual_seed(5)
    return generate(model, batch, **options).sequences


# ------------------------------------------------------------------ the same tokens


@served
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_p": 0.9}, {"num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling", "samples"],
)
def test_generate_gives_the_tokens_of_the_models_own_cache(model_of, family, options):
    model, batch = model_of(family), padded(prompts(9, 5, 7))
    options = {"do_sample": "num_return_sequences" in options, **options}
    assert torch.equal(paged(model, batch, **options), own(model, batch, **options))


@chunked
def test_a_prefix_is_computed_once_and_forked_twice(model_of, family):
    model, (prefix,) = model_of(family), prompts(11)
    rows = [torch.cat([prefix, tail]) for tail in prompts(5, 5, 5)]
    expected = own(model, padded(rows))
    with PagedCache.prefill(model, prefix, **SIZES) as cache:
        slots = cache.kv.stats().states
        first, second = cache.fork(3), cache.fork(3)
        assert cache.kv.stats().states == slots == 1
        for forked in (first, second):
            assert torch.equal(paged(model, padded(rows), forked), expected)


@chunked
def test_a_second_turn_goes_on_from_the_first(model_of, family):
    model, (question, more) = model_of(family), prompts(9, 6)
    with PagedCache(model, **SIZES) as cache:
        answer = generate(model, padded([question]), past_key_values=cache).sequences[0]
        turn = padded([torch.cat([answer, more])])
        found = generate(model, turn, past_key_values=cache).sequences
    assert torch.equal(found, own(model, turn))


@chunked
def test_a_prompt_in_chunks_behind_padding_gives_the_same_tokens(model_of, family):
    model, batch = model_of(family), padded(prompts(9, 3, 7))
    expected = own(model, batch, prefill_chunk_size=4)
    assert torch.equal(paged(model, batch, prefill_chunk_size=4), expected)


# ------------------------------------------------------------------ a forward that fails


class Boom(Exception):
    pass


def visible(cache):
    """All bytes that a row can see."""
    found = [cache.kv.length(row) for row in cache.rows]
    tensors = []
    for row in cache.rows:
        for layer in range(cache.kv.config.num_layers):
            tensors += cache.kv.gather(row, layer)
        for layer in range(len(cache.kv.config.states)):
            tensors += cache.kv.read_state([row], layer)
    return found, [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("family", few(CHUNKED, "qwen3_next"))
def test_a_forward_that_dies_anywhere_leaves_pages_and_states_as_they_were(model_of, family):
    model, batch = model_of(family), padded(prompts(9, 5))
    token = torch.tensor([[7], [8]])
    whole = torch.cat([batch["attention_mask"], torch.ones_like(token)], 1)
    step = {"input_ids": token, "attention_mask": whole, "use_cache": True}
    with torch.no_grad(), PagedCache(model, **SIZES) as cache:
        model(**batch, past_key_values=cache, use_cache=True)
        lengths, before = visible(cache)
        for name, module in list(model.named_modules()):
            if list(module.children()):
                continue
            hook = module.register_forward_hook(lambda *_: (_ for _ in ()).throw(Boom()))
            try:
                model(**step, past_key_values=cache)
            except Boom:
                now = visible(cache)
                assert now[0] == lengths, name
                assert all(map(torch.equal, now[1], before)), name
                cache.kv.check()
            else:  # the module has no part in this forward
                cache.kv.check()
                cache.reset()
                hook.remove()
                model(**batch, past_key_values=cache, use_cache=True)
            hook.remove()
        again = model(**step, past_key_values=cache).logits
        cache.reset()
        model(**batch, past_key_values=cache, use_cache=True)
        assert torch.equal(model(**step, past_key_values=cache).logits, again)


def test_a_state_layer_that_was_not_entered_is_named(model_of):
    model = model_of("qwen3_next")
    mixer = model.model.layers[1].linear_attn
    forward, mixer.forward = mixer.forward, lambda hidden_states, **_: hidden_states
    try:
        with PagedCache(model, **SIZES) as cache, torch.no_grad():
            with pytest.raises(LayerWritesError, match="state layers 1 wrote nothing"):
                model(prompts(5)[0][None], past_key_values=cache, use_cache=True)
            assert cache.rows == []
            cache.kv.check()
    finally:
        mixer.forward = forward


def test_too_few_slots_are_an_error_before_anything_changed(model_of):
    model = model_of("lfm2")
    with PagedCache(model, max_states=2, **SIZES) as cache, torch.no_grad():
        model(prompts(6)[0][None], past_key_values=cache, use_cache=True)
        forked = cache.fork(3)
        before = visible(forked)
        with pytest.raises(OutOfPagesError, match=r"3 state slots.*max_states"):
            model(torch.tensor([[3]] * 3), past_key_values=forked, use_cache=True)
        now = visible(forked)
        assert now[0] == before[0]
        assert all(map(torch.equal, now[1], before[1]))
        forked.close()
        cache.kv.check()


# ------------------------------------------------------------------ shorter texts


@chunked
def test_a_text_goes_back_to_a_checkpoint_and_nowhere_else(model_of, family):
    model, (text,) = model_of(family), prompts(12)
    with torch.no_grad(), PagedCache(model, rollback=8, **SIZES) as cache:
        model(text[None, :8], past_key_values=cache, use_cache=True)
        cache.checkpoint()
        expected = model(text[None, 8:], past_key_values=cache, use_cache=True).logits
        with pytest.raises(ValueError, match=r"a length of .* with a checkpoint .8., got 10"):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        cache.crop(8)
        assert torch.equal(
            model(text[None, 8:], past_key_values=cache, use_cache=True).logits, expected
        )
        cache.reset()
        assert cache.kv.stats().states == 0  # nobody else can find the checkpoint


# ------------------------------------------------------------------ refused


@chunked
def test_padding_behind_a_rows_tokens_is_refused(model_of, family):
    model, (prefix,) = model_of(family), prompts(8)
    tails = padded(prompts(5, 3))
    mask = torch.cat([torch.ones(2, 8, dtype=torch.long), tails["attention_mask"]], 1)
    with PagedCache.prefill(model, prefix, **SIZES) as cache, cache.fork(2) as forked:
        before = visible(forked)
        with (
            torch.no_grad(),
            pytest.raises(UnsupportedModelError, match="padding behind a row's tokens"),
        ):
            model(tails["input_ids"], attention_mask=mask, past_key_values=forked)
        assert all(map(torch.equal, visible(forked)[1], before[1]))


@pytest.mark.parametrize("family", sorted(STEPWISE))
def test_several_tokens_behind_a_state_that_a_scan_would_lose_are_refused(model_of, family):
    model, (text,) = model_of(family), prompts(8)
    with torch.no_grad(), PagedCache(model, **SIZES) as cache:
        model(text[None, :5], past_key_values=cache, use_cache=True)
        with pytest.raises(UnsupportedModelError, match="lose it in this model's scan"):
            model(text[None, 5:], past_key_values=cache, use_cache=True)
        model(text[None, 5:6], past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 6


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_is_not_served_is_refused_by_name(model_of, family):
    with pytest.raises(UnsupportedModelError, match=family):
        PagedCache(model_of(family), **SIZES)


@pytest.mark.parametrize("family", few(CHUNKED, "lfm2"))
def test_assisted_decoding_is_refused_before_it_drafts(model_of, family):
    model, batch = model_of(family), padded([torch.tensor([7, 8, 9] * 4)])
    with PagedCache(model, **SIZES) as cache:
        with pytest.raises((UnsupportedModelError, ValueError), match="assisted"):
            generate(model, batch, past_key_values=cache, prompt_lookup_num_tokens=3)
        cache.reset()
        assert torch.equal(paged(model, batch), own(model, batch))


def test_layers_that_are_called_one_by_one_are_refused(model_of):
    model = model_of("qwen3_next")
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        hidden = torch.randn(1, 3, model.config.hidden_size)
        with pytest.raises(UnsupportedModelError, match="cannot be called one by one"):
            model.model.layers[0].linear_attn(hidden, cache_params=cache)


def test_states_are_counted_by_formula(model_of):
    for family in ("qwen3_next", "lfm2"):
        model = model_of(family)
        with PagedCache(model, **SIZES) as cache, torch.no_grad():
            model(prompts(5)[0][None], past_key_values=cache, use_cache=True)
            stored = cache.kv._states
            assert stored.nbytes == stored._capacity * cache.kv.config.bytes_per_state
            assert np.flatnonzero(cache.kv._tables.states.refcount).size == 1
