"""Kinds of layers by configuration, against what transformers' own cache holds of them."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from pagedkv import CacheConfig, LayerGroup
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import LayerKind, layer_kinds, state_tensors
from tests.effort import slow
from tests.hf.modes import UNEVEN, made
from tests.hf.tiny import LATENT, named, tiny
from tests.hybrids import HYBRIDS, hybrid, hybrid_config, in_dtype


def states_of(layer) -> tuple:
    """Shapes and dtypes of the states in a layer of transformers' cache, batch left out."""
    numbers = getattr(layer, "conv_states", {})
    held = [x[i] for i in numbers for x in (layer.conv_states, layer.recurrent_states)]
    return tuple(
        (tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for x in held if x is not None
    )


KEPT = {"int64": "float32"}  # ids, which are small enough
ROTATED = 8  # cosines and sines beside an index key


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_those_that_transformers_keeps(family, dtype):
    model = in_dtype(hybrid(family), getattr(torch, dtype))
    text = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    ids = torch.randint(2, 99, (1, 6))
    with torch.inference_mode():
        for chunk in (ids[:, :5], ids[:, 5:]):  # both its ways to compute a state
            model(chunk, **named(cache))
    kinds, tensors = layer_kinds(text), state_tensors(text, dtype)
    assert len(kinds) == len(cache.layers)
    for kind, layer in zip(kinds, cache.layers, strict=True):
        kept = [(shape, KEPT.get(name, name)) for shape, name in states_of(layer)]
        assert tuple(kept) == (() if kind.state is None else tensors[kind.state])
        assert (getattr(layer, "keys", None) is not None) == (kind.attention is not None)
        assert getattr(layer, "sliding_window", None) == kind.window
    assert len(tensors) == sum(kind.state is not None for kind in kinds)


KEYS = sorted({*HYBRIDS, *UNEVEN} - {"kimi_linear", *LATENT})


@pytest.mark.parametrize("family", KEYS)
def test_pages_have_in_every_layer_the_shape_of_keys_and_values(family):
    model = made(family)
    text = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    with torch.inference_mode():
        model(torch.randint(2, 99, (1, 5)), **named(cache))
    stored = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    config = CacheConfig.from_model(model.config, max_tokens=64)
    indexed = sum(kind.indexer is not None for kind in layer_kinds(text))
    assert config.num_layers == len(stored) + indexed
    for i, layer in enumerate(stored[:indexed], len(stored)):
        shape = config.shapes[config.group_of[i]]
        assert layer.indexer_keys.shape[2] == shape.elements - ROTATED
    for i, layer in enumerate(stored):
        shape = config.shapes[config.group_of[i]]
        assert layer.keys.shape[1::2] == (shape.num_kv_heads, shape.head_dim)
        assert layer.values.shape[1::2] == (shape.num_kv_heads, shape.v_head_dim)
        assert getattr(layer, "sliding_window", None) == config.windows[i]
    assert [layer.tensors for layer in config.states] == list(state_tensors(text, "float32"))


def test_indices_count_attention_and_states_apart():
    mixed = layer_kinds(hybrid_config("nemotron_h"))
    assert mixed == [
        LayerKind("state", state=0),
        LayerKind("none"),
        LayerKind("attention", attention=0),
        LayerKind("none"),
        LayerKind("state", state=1),
    ]
    assert layer_kinds(hybrid_config("zaya")) == [
        LayerKind("both", None, 0, 0),
        LayerKind("both", 8, 1, 1),
        LayerKind("both", None, 2, 2),
        LayerKind("both", 8, 3, 3),
    ]
    assert layer_kinds(tiny("gemma2").config)[:2] == [
        LayerKind("attention", 8, 0),
        LayerKind("attention", None, 1),
    ]


def test_windows_of_hybrids_are_groups_of_their_attention_layers():
    config = CacheConfig.from_model(hybrid_config("zaya"), max_tokens=64)
    assert config.groups == (LayerGroup((0, 2)), LayerGroup((1, 3), 8))
    alone = CacheConfig.from_model(hybrid_config("zaya"), max_tokens=64, retention="lru")
    assert alone.groups == (LayerGroup((0,)), LayerGroup((2,)), LayerGroup((1, 3), 8))


def test_unknown_layers_and_states_are_refused_by_name():
    text = SimpleNamespace(**vars(tiny("llama").config), layer_types=["striped_attention"] * 2)
    with pytest.raises(ValueError, match="layers of kind striped_attention keep no pages"):
        layer_kinds(text)
    text.layer_types, text.model_type = ["linear_attention", "full_attention"], "unheard_of"
    with pytest.raises(UnsupportedModelError, match="the recurrent states of unheard_of are not"):
        CacheConfig.from_model(text, max_tokens=64)
    text.layer_types, text.model_type = ["linear_attention"] * 2, "granitemoehybrid"
    with pytest.raises(UnsupportedModelError, match="no layer has K and V"):
        CacheConfig.from_model(text, max_tokens=64)
