"""A bias that a model learns for how far a key is: asked for by distance where pages attend."""

import pytest
import torch
from torch import nn

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.hf.modes import SIZES, made
from tests.hf.tiny import assert_close, dense, named, prompts

KERNEL, PAGE, WINDOW = 3, 4, 8  # of the convolutions; SIZES; of layers with one


@pytest.fixture
def model():
    return made("inkling_text")


def logits_of(model, text, cache, cut):
    """Logits of a text that is fed in chunks."""
    with torch.no_grad():
        chunks = [model(c[None], use_cache=True, **named(cache)).logits for c in text.split(cut)]
    return torch.cat(chunks, dim=1)


@pytest.mark.parametrize("family", ["inkling_text", "inkling2_text"])
@pytest.mark.parametrize("cut", [1, 2, KERNEL, PAGE + 1, 99])
def test_logits_are_those_of_the_model_alone_around_every_border(family, cut):
    model, (text,) = made(family), prompts(3 * WINDOW + 1)
    with torch.no_grad():
        expected = model(text[None], use_cache=False).logits
    lengths = [*range(1, KERNEL + 3), WINDOW - 1, WINDOW + 1, len(text) - 2, len(text)]
    for length in lengths if cut > len(text) else lengths[-1:]:
        with PagedCache(model, **SIZES) as cache:
            actual = logits_of(model, text[:length], cache, cut)
        assert_close(actual, expected[:, :length])


def test_calls_without_pages_get_the_bias_of_each_key(model):
    (text,) = prompts(19)
    expected = logits_of(model, text, dense(model), 7)
    with PagedCache(model, **SIZES) as cache:
        logits_of(model, text, cache, 7)
        assert_close(logits_of(model, text, dense(model), 7), expected)


class ByKey(nn.Module):
    """Makes the bias of another module, and does not say how far that reaches."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def forward(self, *args):
        return self.inner[0].forward(*args)


def test_a_bias_that_is_not_known_by_distance_is_refused_with_its_layer(model):
    attention = model.model.layers[2].self_attn
    own, attention.rel_logits_proj = attention.rel_logits_proj, ByKey(attention.rel_logits_proj)
    try:
        with (
            PagedCache(model, **SIZES) as cache,
            pytest.raises(UnsupportedModelError, match="position_bias: layer 2 has a bias of"),
        ):
            logits_of(model, prompts(6)[0], cache, 6)
    finally:
        attention.rel_logits_proj = own


def test_a_policy_that_gives_up_tokens_in_between_is_refused(model):
    with PagedCache(model, retention="lru", budget=68, **SIZES) as cache:
        with pytest.raises(ValueError, match="distance_bias: expected a cache without a policy"):
            logits_of(model, prompts(6)[0], cache, 6)
        cache.kv.check()
