"""Latent attention (MLA): one form of it is the other, and what neither can be is refused."""

import itertools

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import DynamicCache

from pagedkv import BatchGenerator, CacheConfig
from pagedkv.errors import GradModeError, UnsupportedModelError
from pagedkv.hf import PagedCache, latent
from tests.effort import each_value
from tests.hf.modes import SIZES, made, own, paged
from tests.hf.tiny import LATENT, named, padded, prompts, tiny

R, ROTATED = 16, 4


@pytest.fixture
def model():
    return made("deepseek_v3")


@pytest.fixture
def calls(monkeypatch):
    """How many rows' tokens were attended in each form, in order."""
    found = []
    for form in ("_meeting", "expanded"):
        plain = getattr(latent._LatentCall, form)

        def noted(self, *args, form=form, plain=plain):
            found.append(form)
            return plain(self, *args)

        monkeypatch.setattr(latent._LatentCall, form, noted)
    return found


# ------------------------------------------------------------------ two forms


def logits_over(model, cache, ids):
    with torch.no_grad():
        return model(ids, **named(cache), use_cache=True).logits


@pytest.mark.parametrize(("family", "block"), each_value(LATENT, [1, 1 << 12, 1 << 26]))
def test_both_forms_give_the_logits_of_the_models_own_cache(family, block, monkeypatch):
    model, (first, second) = made(family), (prompts(n)[0][None] for n in (37, 11))
    own_cache = DynamicCache(config=model.config)
    expected = [logits_over(model, own_cache, ids) for ids in (first, second)]
    monkeypatch.setattr(latent, "EXPANDED_BYTES", block)
    for most in (0, 100):  # all expanded, all absorbed
        monkeypatch.setattr(latent, "MOST_ABSORBED", most)
        with PagedCache(model, **SIZES) as cache:
            for ids, logits in zip((first, second), expected):
                actual = logits_over(model, cache, ids)
                torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)


def test_prompts_are_expanded_and_few_queries_absorbed(model, calls):
    paged(model, padded(prompts(9, 12)), max_new_tokens=3)
    layers = model.config.num_hidden_layers
    assert calls == ["expanded"] * 2 * layers + ["_meeting"] * 2 * layers


def test_rows_that_decode_are_absorbed_while_prompts_beside_them_are_expanded(model, calls):
    rows = prompts(5, 40)
    expected = [own(model, padded([row]))[0, len(row) :].tolist() for row in rows]
    with BatchGenerator(model, step_tokens=16, max_tokens=256, page_size=4) as batched:
        found = batched.generate(rows, max_new_tokens=len(expected[0]), do_sample=False)
    assert [result.tokens for result in found] == expected
    assert {"_meeting", "expanded"} == {*calls}
    switches = sum(a != b for a, b in itertools.pairwise(calls))
    assert switches > 3, "some steps have both"


def test_watched_queries_meet_the_pages(model, calls):
    with PagedCache(model, **SIZES, retention="importance") as cache:
        paged(model, padded(prompts(30)), cache)
    assert {*calls} == {"_meeting"}


@pytest.mark.parametrize("how", ["adapted", "hooked", "replaced", "of its class"])
def test_weights_that_are_not_plain_are_asked_through_their_module(how, calls, monkeypatch):
    torch.manual_seed(0)
    model, batch = tiny("deepseek_v3"), padded(prompts(9, 5))

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    def shifted(linear, x):
        return 1.02 * torch.nn.functional.linear(x, linear.weight)

    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        if how == "adapted":
            parametrize.register_parametrization(linear, "weight", Doubled())
        elif how == "hooked":
            linear.register_forward_hook(lambda module, args, out: 2 * out)
        elif how == "of its class":
            monkeypatch.setattr(torch.nn.Linear, "forward", shifted)
        else:
            linear.forward = lambda x, linear=linear: (
                2 * torch.nn.functional.linear(x, linear.weight)
            )
    assert torch.equal(paged(model, batch), own(model, batch))
    assert {*calls} == {"expanded"}


def test_weights_that_change_count_from_then_on():
    torch.manual_seed(0)
    model, batch = tiny("minicpm3"), padded(prompts(9, 5))
    before = paged(model, batch)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-2)
    assert torch.equal(paged(model, batch), own(model, batch))
    assert not torch.equal(paged(model, batch), before)


@pytest.mark.parametrize("new", [5, 20], ids=["absorbed", "expanded"])
def test_gradients_of_what_expands_latents_are_refused(new):
    model, ids = tiny("deepseek_v3").requires_grad_(False), prompts(new)[0][None]
    model.model.layers[-1].self_attn.kv_b_proj.weight.requires_grad_(True)
    with PagedCache(model, **SIZES) as cache:
        with pytest.raises(GradModeError, match=r"k: requires gradients, .* torch.no_grad"):
            model(ids, **named(cache))
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(
            logits_over(model, cache, ids), logits_over(model, DynamicCache(), ids)
        )


def test_another_attention_gets_all_latents(model):
    (first, second) = (prompts(n)[0][None] for n in (9, 4))
    own_cache = DynamicCache(config=model.config)
    expected = [logits_over(model, own_cache, ids) for ids in (first, second)]
    with PagedCache(model, **SIZES) as cache:
        torch.testing.assert_close(logits_over(model, cache, first), expected[0])
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            torch.testing.assert_close(logits_over(model, cache, second), expected[1])
        finally:
            model.set_attn_implementation(before)
        cache.kv.check()


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("family", LATENT)
def test_pages_keep_one_latent_and_one_rotated_key_a_token(family):
    model = made(family)
    with PagedCache(model, **SIZES) as cache:
        config, stats = cache.kv.config, cache.kv.stats()
        assert config.shapes == ((1, R + ROTATED, R, True),)
        assert config.bytes_per_token == config.num_layers * (R + ROTATED) * 4
        assert stats.bytes == config.nbytes == 512 * config.bytes_per_token


# ------------------------------------------------------------------ refused


def expanding_otherwise():
    """A model whose K and V are not the products of its latents and weights."""
    torch.manual_seed(0)
    model = tiny("youtu")
    for layer in model.model.layers:
        plain = layer.self_attn.expand_kv
        layer.self_attn.expand_kv = lambda *x, plain=plain: [1.5 * y for y in plain(*x)]
    return model


def test_an_expansion_that_is_no_plain_product_is_refused_at_the_first_forward():
    model, batch = expanding_otherwise(), padded(prompts(5))
    with pytest.raises(UnsupportedModelError, match="YoutuAttention: its `expand_kv` is not"):
        paged(model, batch)
    for layer in model.model.layers:
        del layer.self_attn.expand_kv
    assert torch.equal(paged(model, batch), own(model, batch))


def test_latents_of_zeros_do_not_tell_what_an_expansion_is():
    model, batch = expanding_otherwise(), padded(prompts(5))
    with torch.no_grad(), PagedCache(model, **SIZES) as cache:
        zeros = torch.zeros(1, 3, model.config.hidden_size)
        model(inputs_embeds=zeros, **named(cache))
    with pytest.raises(UnsupportedModelError, match="YoutuAttention: its `expand_kv` is not"):
        paged(model, batch)


@pytest.mark.parametrize("new", [5, 20], ids=["absorbed", "expanded"])
def test_what_autocast_makes_of_latents_is_refused(model, new):
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(UnsupportedModelError, match=r"expected float32, .* leave `torch.autoc"),
        ):
            model(prompts(new)[0][None], **named(cache))
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_format": "int8"}, "kv_format: latents, .* are kept dense, got int8"),
        ({"kv_format": ("dense", "int4"), "page_size": 16}, "kept dense, got int4"),
        ({"read_tokens": 64}, "read_tokens: latents, .* are read whole"),
        ({"retention": "semantic", "budget": 64}, "merges values, which latents have none of"),
    ],
)
def test_what_was_not_measured_for_latents_is_refused_by_name(model, fields, reason):
    with pytest.raises(ValueError, match=reason):
        PagedCache(model, **{**SIZES, **fields})
    with pytest.raises(ValueError, match=reason):
        CacheConfig.from_model(model.config, max_tokens=512, **{"page_size": 4, **fields})


def test_pages_of_a_model_of_the_same_depth_and_other_shapes_are_refused(model):
    wrong = "expected K and V of 1 x 20, of which V is 16 in layer 0 .* got 1 x 12, of which V is 8"
    with (
        PagedCache(tiny("deepseek_v3", kv_lora_rank=8), **SIZES) as cache,
        pytest.raises(ValueError, match=wrong),
    ):
        PagedCache(made("glm4_moe_lite"), cache=cache.kv)
