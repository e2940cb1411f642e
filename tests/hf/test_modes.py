"""Models whose layers keep unlike things: every mode gives the tokens of their own cache.

Some layers have recurrent states, some have K and V of another shape, some attend to the K and V of
other layers.
"""

import itertools

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.contents import Boom
from tests.effort import each_value, few
from tests.hf.modes import SIZES, UNEVEN, made, own, paged, visible
from tests.hf.tiny import NEW, generate, named, padded, prompts
from tests.hybrids import HYBRIDS, STEPWISE

SERVED = sorted({*HYBRIDS, *UNEVEN})
CHUNKED = sorted(set(SERVED) - STEPWISE)
SOME = ("qwen3_next", "lfm2", "falcon_h1", "nemotron_h", "gemma3n", "gemma4", "deepseek_v3")

served = pytest.mark.parametrize("family", few(SERVED, *SOME))
chunked = pytest.mark.parametrize("family", few(CHUNKED, *SOME))
uneven = pytest.mark.parametrize("family", few(UNEVEN, "gemma4"))
OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.fixture
def model_of():
    return made


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize(("family", "way"), each_value(SERVED, OPTIONS))
def test_generate_gives_the_tokens_of_the_models_own_cache(model_of, family, way):
    model, batch = model_of(family), padded(prompts(9, 5, 7))
    options = {"do_sample": False, "max_new_tokens": NEW, **OPTIONS[way]}
    assert torch.equal(paged(model, batch, **options), own(model, batch, **options))


@chunked
def test_a_prefix_is_computed_once_and_forked_twice(model_of, family):
    model, (prefix,) = model_of(family), prompts(11)
    rows = [torch.cat([prefix, tail]) for tail in prompts(5, 5, 5)]
    expected = own(model, padded(rows), max_new_tokens=NEW)
    with PagedCache.prefill(model, prefix, **SIZES) as cache:
        slots = cache.kv.stats().states
        first, second = cache.fork(3), cache.fork(3)
        assert cache.kv.stats().states == slots == bool(cache.kv.config.states)
        for forked in (first, second):
            found = paged(model, padded(rows), forked, max_new_tokens=NEW)
            assert torch.equal(found, expected)


@chunked
def test_a_second_turn_goes_on_from_the_first(model_of, family):
    model, (question, more) = model_of(family), prompts(9, 6)
    with PagedCache(model, **SIZES) as cache:
        answer = generate(model, padded([question]), **named(cache)).sequences[0]
        turn = padded([torch.cat([answer, more])])
        found = generate(model, turn, **named(cache)).sequences
    assert torch.equal(found, own(model, turn))


@chunked
def test_a_prompt_in_chunks_behind_padding_gives_the_same_tokens(model_of, family):
    model, batch = model_of(family), padded(prompts(9, 3, 7))
    expected = own(model, batch, prefill_chunk_size=4)
    assert torch.equal(paged(model, batch, prefill_chunk_size=4), expected)


@uneven
def test_draft_tokens_that_are_rejected_are_taken_back(model_of, family):
    model, batch = model_of(family), padded([prompts(5)[0].repeat(4)])
    options = {"max_new_tokens": 24, "prompt_lookup_num_tokens": 5}
    assert torch.equal(paged(model, batch, **options), own(model, batch, max_new_tokens=24))


LEFT = list(itertools.product([*UNEVEN, "qwen4_exp"], ["host memory", "files"]))


@pytest.mark.parametrize("left", few(LEFT, ("gemma4", "files"), ("qwen4_exp", "host memory")))
def test_rows_that_left_go_on_as_if_they_had_stayed(model_of, left, tmp_path):
    family, through = left
    model, batch, (more,) = model_of(family), padded(prompts(9, 5)), prompts(3)
    sizes = {**SIZES, "host_tokens": 512}
    cache = PagedCache(model, **sizes)
    answers = generate(model, batch, cache).sequences
    turn = {
        "input_ids": torch.cat([answers, more.expand(2, -1)], 1),
        "attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, 13, dtype=int)], 1),
    }
    expected = own(model, turn)
    if through == "files":
        for i, seq in enumerate(cache.rows):
            cache.kv.save(seq, tmp_path / str(i))
        cache.close()
        kv = PagedCache(model, **{**sizes, "max_tokens": 600}).kv
        cache = PagedCache.of(model, kv, [kv.load(tmp_path / str(i)) for i in range(2)])
    else:
        cache.kv.offload(cache.rows)
        cache.kv.restore(cache.rows)
    assert torch.equal(paged(model, turn, cache), expected)


# ------------------------------------------------------------------ a forward that fails


@pytest.mark.parametrize("family", few(CHUNKED, "qwen3_next", "gemma4"))
def test_a_forward_that_dies_anywhere_leaves_pages_and_states_as_they_were(model_of, family):
    model, batch = model_of(family), padded(prompts(9, 5))
    token = torch.tensor([[7], [8]])
    whole = torch.cat([batch["attention_mask"], torch.ones_like(token)], 1)
    step = {"input_ids": token, "attention_mask": whole, "use_cache": True}
    with torch.no_grad(), PagedCache(model, **SIZES) as cache:
        model(**batch, **named(cache), use_cache=True)
        lengths, before = visible(cache)
        for name, module in list(model.named_modules()):
            if list(module.children()):
                continue
            hook = module.register_forward_hook(lambda *_: (_ for _ in ()).throw(Boom()))
            try:
                model(**step, **named(cache))
            except Boom:
                now = visible(cache)
                assert now[0] == lengths, name
                assert all(map(torch.equal, now[1], before)), name
                cache.kv.check()
            else:  # the module has no part in this forward
                cache.kv.check()
                cache.reset()
                hook.remove()
                model(**batch, **named(cache), use_cache=True)
            hook.remove()
        again = model(**step, **named(cache)).logits
        cache.reset()
        model(**batch, **named(cache), use_cache=True)
        assert torch.equal(model(**step, **named(cache)).logits, again)


def test_layers_that_are_given_copies_of_the_keys_of_others_are_refused(model_of):
    model, batch = model_of("gemma4"), padded(prompts(9, 5))

    def copy(_, args, kwargs):
        pairs = kwargs["shared_kv_states"]
        for kind, (k, v) in [*pairs.items()]:
            pairs[kind] = k.clone(), v

    hook = model.model.layers[-1].register_forward_pre_hook(copy, with_kwargs=True)
    try:
        with torch.no_grad(), PagedCache(model, **SIZES) as cache:
            with pytest.raises(UnsupportedModelError, match="changes them after the cache"):
                model(**batch, **named(cache))
            assert cache.rows == []
            cache.kv.check()
            generator = BatchGenerator(model, cache=cache.kv)
            with pytest.raises(UnsupportedModelError, match="changes them after the cache"):
                generator.generate([[5, 6, 7]], max_new_tokens=2)
            generator.close()
    finally:
        hook.remove()
    assert torch.equal(paged(model, batch), own(model, batch))
