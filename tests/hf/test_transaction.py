"""A forward is committed as a whole when it has returned, whoever was called; else it never was."""

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.hf import PagedCache
from tests.effort import ALL, each_value
from tests.hf.adapted import adapted
from tests.hf.forwards import IDS, SIZES, by_hand, dying, stored, visible
from tests.hf.images import seeing
from tests.hf.tiny import assert_same_tokens, generate, named, padded, prompts, tiny
from tests.hf.zoo import built

pytestmark = pytest.mark.usefixtures("without_gradients")


def text(model):
    """Ragged rows, and what follows them."""
    batch = padded(prompts(9, 5))
    ones = torch.ones(2, 3, dtype=torch.long)
    mask = torch.cat([batch["attention_mask"], ones], dim=1)
    return batch, {"input_ids": torch.stack(prompts(3, 3)), "attention_mask": mask}


def image(model):
    batch = seeing(model, *prompts(5, 5))
    return batch, {"input_ids": torch.stack(prompts(3, 3))}


MODELS = {
    "llama": (tiny, text),
    "gemma3": (tiny, text),
    "mixtral": (tiny, text),
    "gpt2": (tiny, text),
    "qwen2_vl": (built, image),
}


def called(model, batch, cache):
    """The modules that a forward calls behind what a cache holds, in this order."""
    found = {}
    hooks = [
        part.register_forward_pre_hook(lambda part, _: found.setdefault(part))
        for part in model.modules()
    ]
    with cache.fork() as twin:
        model(**batch, **named(twin))
    for hook in hooks:
        hook.remove()
    return list(found)


@pytest.mark.parametrize(
    ("name", "error"), each_value(MODELS, [ZeroDivisionError, KeyboardInterrupt])
)
def test_forward_that_dies_at_any_module_never_was(name, error):
    make, inputs = MODELS[name]
    model = make(name)
    first, more = inputs(model)
    with PagedCache(model, **SIZES) as cache, PagedCache(model, **SIZES) as reference:
        expected = [model(**batch, **named(reference)).logits for batch in (first, more)]
        for batch, logits in zip((first, more), expected):
            modules = called(model, batch, cache)
            assert len(modules) > 15
            places = [(part, after) for part in modules for after in (False, True)]
            for place in places[:: 1 if ALL else 3]:
                before, bytes_before = visible(cache), stored(cache)
                with dying(place[0], error, place[1]), pytest.raises(error):
                    model(**batch, **named(cache))
                assert visible(cache) == before
                assert all(torch.equal(a, b) for a, b in zip(stored(cache), bytes_before))
                cache.kv.check()
            assert torch.equal(model(**batch, **named(cache)).logits, logits)
        assert all(torch.equal(a, b) for a, b in zip(stored(cache), stored(reference)))
        assert cache.kv.open_step is None


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_forward_under_another_attention_that_dies_never_was(name):
    model = tiny()
    with PagedCache(model, **SIZES) as cache:
        model.set_attn_implementation(name)
        model(IDS, **named(cache))
        modules = called(model, {"input_ids": IDS}, cache)
        before, bytes_before = visible(cache), stored(cache)
        for part in modules:
            with dying(part, ZeroDivisionError, after=True), pytest.raises(ZeroDivisionError):
                model(IDS, **named(cache))
            assert visible(cache) == before
        assert all(torch.equal(a, b) for a, b in zip(stored(cache), bytes_before))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compile", "forward"])
def test_forward_of_a_compiled_model_that_dies_in_its_head_never_was(way, monkeypatch):
    model = tiny()
    if way == "compile":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with PagedCache(model, **SIZES) as cache:
        for seen in (3, 6):
            model(IDS, **named(cache))
            assert cache.seen == seen
            before = visible(cache)
            with monkeypatch.context() as patch:
                patch.setattr(model.lm_head, "forward", lambda x: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(IDS, **named(cache))
            assert visible(cache) == before
    torch.compiler.reset()


@pytest.mark.parametrize("door", ["fork", "crop", "reorder", "generate", "batch"])
def test_what_an_interrupt_left_is_gone_before_the_next_call(door):
    model = tiny()
    batch, more = text(model)
    expected = generate(model, batch)
    with PagedCache(model, **SIZES) as cache:
        generator = BatchGenerator(model, cache=cache.kv)
        model(**batch, **named(cache))
        rows = cache.kv.stats().sequences
        with dying(model.lm_head, KeyboardInterrupt, False), pytest.raises(KeyboardInterrupt):
            model(**more, **named(cache))
        assert cache.seen == 9
        if door == "fork":
            assert cache.fork().seen == 9
        elif door == "crop":
            cache.crop(-2)
            assert [cache.kv.length(row) for row in cache.rows] == [7, 3]
        elif door == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif door == "generate":
            cache.reset()
            assert_same_tokens(generate(model, batch, cache), expected)
        else:
            (result,) = generator.generate([batch["input_ids"][0].tolist()], max_new_tokens=10)
            assert result.tokens == expected.sequences[0, 9:].tolist()
        assert cache.stats().sequences == rows
        cache.kv.check()


# ------------------------------------------------------------------ who is called


WAYS = {
    "the model": lambda model, ids, cache: model(ids, None, None, cache).logits,
    "its decoder": lambda model, ids, cache: model.lm_head(model.model(ids, **named(cache))[0]),
    "its forward": lambda model, ids, cache: model.forward(ids, **named(cache)).logits,
    "its decoder's forward": lambda model, ids, cache: model.lm_head(
        model.model.forward(ids, **named(cache))[0]
    ),
    "its layers": lambda model, ids, cache: model.lm_head(by_hand(model, ids, cache)),
}


@pytest.mark.parametrize(
    ("family", "way"),
    [*(("llama", way) for way in WAYS), *(("gemma4", way) for way in WAYS if way != "its layers")],
)
def test_whoever_is_called_commits_once(family, way):
    model = tiny(family)
    ids = torch.stack(prompts(9))
    expected = model(ids, use_cache=False).logits
    with PagedCache(model, **SIZES) as cache:
        parts = []
        for piece in ids.split(3, dim=1):
            parts.append(WAYS[way](model, piece, cache))
            assert cache.seen == cache.kv.length(cache.rows[0]) == 3 * len(parts)
            assert cache.kv.open_step is None
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
        cache.kv.check()


def test_every_model_on_the_way_to_the_decoder_of_an_image_text_class_commits():
    model = built("qwen2_vl")
    embeds = model.get_input_embeddings()(IDS)
    expected = model(IDS, use_cache=False).logits
    for part in (model, model.model, model.model.language_model):
        with PagedCache(model, **SIZES) as cache:
            out = part(inputs_embeds=embeds, **named(cache))[0]
            assert cache.seen == 3
            logits = out if part is model else model.lm_head(out)
            torch.testing.assert_close(logits, expected)
            with dying(part, ZeroDivisionError, True), pytest.raises(ZeroDivisionError):
                part(inputs_embeds=embeds, **named(cache))
            assert cache.seen == cache.kv.length(cache.rows[0]) == 3
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_model_that_makes_its_cache_itself_commits():
    class Maker(type(tiny())):
        def forward(self, input_ids, **kwargs):
            self.made = PagedCache(self, cache=keeper.kv)
            return super().forward(input_ids, **named(self.made))

    model = Maker(tiny().config).eval()
    with PagedCache(model, **SIZES) as keeper:
        model(IDS)
        assert model.made.seen == 3
        with dying(model, ZeroDivisionError, True), pytest.raises(ZeroDivisionError):
            model(IDS)
        assert model.made.seen == keeper.stats().live == 0
        model.made.close()


def test_forward_of_a_peft_model_is_one_transaction():
    base = tiny()
    model = adapted(base)
    with PagedCache(base, **SIZES) as plain:
        model(input_ids=IDS, **named(plain))
        assert plain.seen == 3
        with PagedCache(model, **SIZES) as cache:
            expected = model(input_ids=IDS, **named(cache)).logits
            cache.crop(-3)
            for part in (base.lm_head, model):
                with dying(part, ZeroDivisionError, True), pytest.raises(ZeroDivisionError):
                    model(input_ids=IDS, **named(cache))
                assert cache.seen == cache.kv.length(cache.rows[0]) == 0
            assert torch.equal(model(input_ids=IDS, **named(cache)).logits, expected)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def interrupt(*args):
    raise KeyboardInterrupt


def test_decoder_called_by_itself_commits_after_its_model_was_interrupted():
    model = tiny()
    with PagedCache(model, **SIZES) as cache:
        early = model.model.register_forward_pre_hook(interrupt, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model(IDS, **named(cache))
        early.remove()
        for seen in (3, 6):
            model.model(IDS, **named(cache))
            assert cache.seen == seen
