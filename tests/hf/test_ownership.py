"""Pages and the model's attention come back, without the help of the garbage collector."""

import gc
import weakref

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import BudgetExceeded, UnsupportedModelError
from pagedkv.hf import PagedCache, attach, detach
from tests.effort import examples, sampled
from tests.hf.forwards import dying
from tests.hf.tiny import assert_same_tokens, attention_of, generate, named, padded, prompts, tiny

SIZES = {"page_size": 4, "max_tokens": 512}


@pytest.fixture
def model():
    return tiny()


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(str(type(x).__module__).startswith("pagedkv.hf") for x in gc.get_objects())


# ------------------------------------------------------------------ letting go


@sampled
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("kept", [True, False], ids=["pool kept", "pool too"])
def test_hundred_caches_leave_nothing_without_the_collector(model, kept):
    batch = padded(prompts(9, 5))
    options = {"max_new_tokens": 3, "num_beams": 2}
    keeper = PagedCache(model, **SIZES) if kept else None
    generate(model, batch, PagedCache(model, **SIZES), **options)
    before, pools, caches = alive(), weakref.WeakSet(), weakref.WeakSet()
    for _ in range(examples(100, 8)):
        cache = PagedCache(model, **SIZES)
        pools.add(cache.kv)
        caches.add(cache)
        generate(model, batch, cache, **options)
        twin = cache.fork()
        assert cache.stats().sequences == 8
        del cache, twin
        assert not caches
        if keeper:
            assert keeper.stats().sequences == keeper.stats().live == 0
        assert attention_of(model) == ("pagedkv" if kept else "sdpa")
    assert alive() == before
    assert len(pools) == int(kept)
    if keeper:
        keeper.kv.check()
        del keeper, pools
    assert attention_of(model) == "sdpa"


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("where", ["refused", "layer 0", "layer 1", "head", "grad mode", "dense"])
def test_cache_of_a_failed_forward_is_let_go_without_the_collector(model, where):
    gone = weakref.ref(PagedCache(model, **SIZES))
    assert gone() is None
    cache = PagedCache(model, **SIZES)
    fail(model, cache, where)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None
    assert attention_of(model) == ("eager" if where == "dense" else "sdpa")


def fail(model, cache, where: str) -> None:
    """A forward of three tokens that dies, leaving nothing behind but what the cache keeps."""
    ids = torch.tensor([[5, 6, 7]])
    broken = {
        "layer 0": model.model.layers[0].mlp,
        "layer 1": model.model.layers[1].self_attn.q_proj,
        "head": model.lm_head,
        "dense": model.model.layers[0].mlp,
    }

    def die(*args):
        raise ZeroDivisionError

    hook = broken[where].register_forward_pre_hook(die) if where in broken else None
    if where == "dense":
        model.set_attn_implementation("eager")
    options = {"unheard_of": True} if where == "refused" else {}
    failed = False
    try:
        with torch.set_grad_enabled(where == "grad mode"):
            model(ids, **named(cache), **options)
    except (ZeroDivisionError, UnsupportedModelError, RuntimeError):
        failed = True
    assert failed
    if hook:
        hook.remove()


# ------------------------------------------------------------------ exceptions


def test_forward_of_one_cache_that_died_does_not_stop_another(model):
    batch = padded(prompts(9))
    expected = generate(model, batch)
    with PagedCache(model, **SIZES) as cache, PagedCache(model, **SIZES) as other:
        fail(model, cache, "layer 1")
        assert_same_tokens(generate(model, batch, other), expected)
        assert_same_tokens(generate(model, batch, cache), expected)
        fail(model, other, "layer 0")
        with cache.fork() as twin:
            assert twin.get_seq_length() == cache.get_seq_length()
        cache.kv.check()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_cache_that_goes_behind_an_interrupt_within_a_later_turn_leaves_nothing(model, how):
    """Rows that were cut, and are taken back when they are gone: of the model no call worked."""
    batch = padded(prompts(9))
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    with PagedCache(model, **SIZES) as keeper:
        cache = PagedCache(model, **SIZES)
        generate(model, batch, cache)
        try:
            with dying(model.model.layers[1], KeyboardInterrupt, after=False):
                generate(model, other, cache)
        except KeyboardInterrupt as error:
            error.with_traceback(None)  # whose frames hold the cache
        model.model.layers[1]._forward_pre_hooks.clear()
        if how == "closed":
            cache.close()
        del cache
        gc.collect()
        expected = generate(model, batch)
        assert keeper.stats().sequences == 0
        assert_same_tokens(generate(model, batch, keeper), expected)
        keeper.kv.check()


def test_an_interrupt_within_prefill_leaves_pages_that_a_loop_of_ones_own_can_use(model):
    (prompt,) = prompts(9)
    with PagedCache(model, **SIZES) as keeper:
        with dying(model.lm_head, KeyboardInterrupt, False), pytest.raises(KeyboardInterrupt):
            PagedCache.prefill(model, prompt, cache=keeper.kv)
        assert keeper.kv.open_step is None
        assert keeper.stats().sequences == 0


# ------------------------------------------------------------------ several caches


def test_caches_of_other_sizes_and_models_have_pages_of_their_own(model):
    other = tiny("gpt2")
    with (
        PagedCache(model, **SIZES) as one,
        PagedCache(model, page_size=8, max_tokens=512) as two,
        PagedCache(other, **SIZES) as three,
    ):
        assert len({id(cache.kv) for cache in (one, two, three)}) == 3
        for cache in (one, two, three):
            batch = padded(prompts(9))
            generate(cache.model, batch, cache)
            cache.kv.check()


def test_model_in_another_dtype_gets_other_pages(model):
    with PagedCache(model, **SIZES) as one:
        model.to(torch.bfloat16)
        with PagedCache(model, **SIZES) as two:
            assert (one.kv.config.dtype, two.kv.config.dtype) == ("float32", "bfloat16")
            generate(model, padded(prompts(5)), two)


# ------------------------------------------------------------------ the model's attention


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_last_cache_to_go_restores_the_attention(model, before):
    model.set_attn_implementation(before)
    one = PagedCache(model, **SIZES)
    two = one.fork()
    three = PagedCache(model, page_size=8, max_tokens=64)
    assert attention_of(model) == "pagedkv"
    one.close()
    one.close()
    del two
    assert attention_of(model) == "pagedkv"
    three.close()
    assert attention_of(model) == before


def test_leaving_a_block_by_an_exception_restores_the_attention(model):
    with pytest.raises(ZeroDivisionError), PagedCache(model, **SIZES):
        raise ZeroDivisionError
    assert attention_of(model) == "sdpa"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 2**30}, BudgetExceeded),
        ({"max_tokens": 64, "page_size": 0}, ValueError),
        ({"max_tokens": 0}, ValueError),
        ({"max_tokens": 64, "pages": 3}, TypeError),
    ],
)
def test_cache_that_cannot_be_made_restores_the_attention(fields, error):
    # 2**30 tokens of 4 heads of 256 are more than any machine holds.
    model = tiny(num_key_value_heads=4, head_dim=256)
    with pytest.raises(error):
        PagedCache(model, **fields)
    assert attention_of(model) == "sdpa"
    with PagedCache(model, max_tokens=16) as cache:
        generate(model, padded(prompts(3)), cache, max_new_tokens=2)
    assert attention_of(model) == "sdpa"


def test_users_own_switch_in_between_is_respected(model):
    cache = PagedCache(model, **SIZES)
    model.set_attn_implementation("eager")
    cache.close()
    assert attention_of(model) == "eager"
    with PagedCache(model, **SIZES):
        assert attention_of(model) == "pagedkv"
    assert attention_of(model) == "eager"


def test_model_that_was_paged_before_stays_so(model):
    attach(model)
    with PagedCache(model, **SIZES):
        pass
    assert attention_of(model) == "pagedkv"
    detach(model)
    assert attention_of(model) == "sdpa"
    with pytest.raises(ValueError, match="not"):
        detach(model)


def test_attention_of_every_part_of_a_model_is_restored():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = {**tiny("gemma3").config.to_dict(), "vocab_size": 300}
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
    )
    config = Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=299, mm_tokens_per_image=1
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})

    def parts():
        return [c._attn_implementation for c in (config, config.text_config, config.vision_config)]

    before = parts()
    batch = padded(prompts(9, 5))
    expected = generate(model, batch)
    with PagedCache(model, **SIZES) as cache:
        assert attention_of(model) == "pagedkv"
        assert_same_tokens(generate(model, batch, cache), expected)
    assert parts() == before


def test_pool_holds_neither_caches_nor_the_model():
    model = tiny()
    cache = PagedCache(model, **SIZES)
    generate(model, padded(prompts(5)), cache)
    pool, held = cache.kv, weakref.ref(model)
    del cache, model
    gc.collect()
    assert held() is None
    assert pool.stats().sequences == 0


# ------------------------------------------------------------------ models of one configuration


@pytest.mark.parametrize("first", [0, 1])
def test_models_that_share_a_configuration_are_switched_back_by_the_last(first):
    models = [tiny(attn_implementation="eager")]
    models.append(type(models[0])(models[0].config).eval())
    batch, options = padded(prompts(9, 5)), {"max_new_tokens": 4, "pad_token_id": 0}
    truth = [generate(model, batch, **options) for model in models]
    generators = [BatchGenerator(model, **SIZES) for model in models]
    generators[first].close()
    assert attention_of(models[0]) == "pagedkv"
    rows = [row[row > 0] for row in batch["input_ids"]]
    left, right = generators[1 - first], truth[1 - first]
    results = left.generate(rows, **options)
    assert [result.tokens for result in results] == right.sequences[:, -4:].tolist()
    with PagedCache(models[first], **SIZES) as cache:
        assert_same_tokens(generate(models[first], batch, cache, **options), truth[first])
        left.close()
        assert attention_of(models[0]) == "pagedkv"
    assert attention_of(models[0]) == "eager"
    for model, expected in zip(models, truth):
        assert_same_tokens(generate(model, batch, **options), expected)
