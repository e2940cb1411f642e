"""`CacheConfig` takes what can be a cache, and says why it refuses the rest."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pagedkv import CacheConfig, LayerGroup
from pagedkv.config import StateLayer
from tests.cache.small import P
from tests.cases import one_group, two_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_dtype_of_torch_is_taken_for_its_name(dtype):
    name = str(dtype).removeprefix("torch.")
    assert one_group(dtype=dtype).dtype == name
    assert one_group(dtype=dtype) == one_group(dtype=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, "quarter", 32])
def test_another_dtype_is_refused_with_those_that_are_served(dtype):
    with pytest.raises(ValueError, match="dtype: expected one of float32, float16, bfloat16, got"):
        one_group(dtype=dtype)


def test_a_misspelt_field_is_answered_with_the_one_that_is_meant():
    with pytest.raises(
        TypeError, match="kv_fromat: CacheConfig has no such field; did you mean kv_format"
    ):
        one_group(kv_fromat="int8")
    with pytest.raises(TypeError, match=r"xyz: CacheConfig has no such field$"):
        one_group(xyz=1)


def test_a_config_is_copied_pickled_and_replaced_as_any_dataclass():
    config = one_group(max_tokens=128)
    assert (
        copy.copy(config) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    )
    assert replace(config, max_tokens=256).max_tokens == 256


GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        (GPT2, "num_hidden_layers, num_attention_heads, head_dim .or hidden_size."),
        ({}, "num_hidden_layers, num_attention_heads, head_dim .or hidden_size."),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "head_dim .or hidden_size.;"),
        ({"num_attention_heads": 4, "head_dim": 8}, "num_hidden_layers;"),
    ],
)
def test_a_configuration_with_other_names_is_answered_with_the_call_that_needs_none(
    fields, missing
):
    with pytest.raises(ValueError, match=rf"config: .* has no {missing}.*CacheConfig\(num_layers="):
        CacheConfig.from_model(SimpleNamespace(**fields), max_tokens=64)


def test_what_configurations_may_leave_out_is_worked_out():
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    config = CacheConfig.from_model(SimpleNamespace(**shape), max_tokens=64)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 4, 8)
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": -4}, ValueError, "page_size"),
        ({"page_size": 4.0}, TypeError, "page_size"),
        ({"page_size": True}, TypeError, "page_size"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"head_dim": 0}, ValueError, "head_dim"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": "64"}, TypeError, "max_tokens"),
        ({"max_tokens": 2**40}, ValueError, "max_tokens"),
        ({"max_sequences": 0}, ValueError, "max_sequences"),
        ({"max_sequence_length": -1}, ValueError, "max_sequence_length"),
        ({"num_layers": 2**31}, ValueError, "num_layers: expected at most 65,536"),
        ({"max_step_tokens": -1}, ValueError, "max_step_tokens"),
        ({"rollback": -1}, ValueError, "rollback"),
        ({"dtype": "int7"}, ValueError, "dtype"),
        ({"dtype": "float64"}, ValueError, "dtype"),
        ({"fingerprint": "weights"}, TypeError, "fingerprint"),
        ({"groups": "all"}, TypeError, "groups: expected LayerGroups in a tuple, got 'all'"),
        ({"groups": [1]}, TypeError, "groups: expected LayerGroups in a tuple, got 1"),
        ({"groups": None}, TypeError, "groups"),
        ({"states": 2}, TypeError, "states: expected StateLayers in a tuple, got 2"),
        ({"groups": (LayerGroup((0,)),)}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1)), LayerGroup((1,)))}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1, 2)),)}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1), 0),)}, ValueError, "window"),
        ({"groups": (LayerGroup((0, 1), -3),)}, ValueError, "window"),
        ({"groups": (LayerGroup((0, 1)), LayerGroup(()))}, ValueError, "groups"),
        ({"groups": (LayerGroup((0, 1), v_is_k="no"),)}, TypeError, "v_is_k: expected a bool"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused_by_name(fields, error, match):
    with pytest.raises(error, match=match):
        one_group(**fields)


def test_a_configuration_counts_its_pages_and_bytes():
    config = two_groups(6, max_tokens=64, max_sequences=2, max_step_tokens=8, rollback=1)
    assert config.num_pages(0) == 16
    assert config.num_pages(1) == 2 * (2 + 2) + 2 == 10
    slot = 2 * 2 * 4 * 4  # K and V, heads, head_dim, bytes
    assert (config.bytes_per_page(0), config.bytes_per_page(1)) == (2 * slot * P, slot * P)
    assert config.bytes_per_token == 3 * slot
    assert config.nbytes == 16 * 2 * slot * P + 10 * slot * P
    assert one_group(dtype="bfloat16").nbytes * 2 == one_group().nbytes
    assert one_group(max_tokens=65).num_pages() == 17
    default = CacheConfig(1, 1, 1, "float32", 100)
    assert (default.page_size, default.max_sequences) == (16, 256)
    assert (default.max_sequence_length, default.max_step_tokens) == (100, 100)
    # A step keeps arrays of its length: no more than there are slots.
    assert default.with_(max_step_tokens=2**62).max_step_tokens == 112


def test_limits_that_nobody_gave_follow_anew_and_given_ones_stay():
    small = CacheConfig(2, 4, 64, "bfloat16", 512)
    large = small.with_(max_tokens=65536)
    assert large == CacheConfig(2, 4, 64, "bfloat16", 65536)
    assert (large.max_sequence_length, large.max_step_tokens) == (65536, 65536)
    assert large.with_(max_tokens=512) == small
    coded = CacheConfig(2, 4, 64, "bfloat16", 512, kv_format="int4")
    assert (coded.page_size, coded.max_sequences) == (32, 8)
    assert coded.with_(kv_format="int8") == CacheConfig(2, 4, 64, "bfloat16", 512, kv_format="int8")
    assert coded.with_(num_layers=3).groups == (LayerGroup((0, 1, 2)),)
    told = CacheConfig(2, 4, 64, "bfloat16", 512, page_size=8, max_sequence_length=100)
    assert told.with_(max_tokens=1024).page_size == 8
    assert told.with_(max_tokens=1024).max_sequence_length == 100
    states = CacheConfig(2, 4, 64, "bfloat16", 512, states=(StateLayer((((4,), "float32"),)),))
    assert states.with_(max_sequences=9).max_states == 9
    again = pickle.loads(pickle.dumps(small))
    assert again.with_(max_tokens=65536) == large


def test_a_change_that_is_no_field_is_refused_by_name():
    small = CacheConfig(2, 4, 64, "bfloat16", 512)
    with pytest.raises(TypeError, match=r"max_token: .*did you mean max_tokens"):
        small.with_(max_token=3)
    with pytest.raises(ValueError, match="max_tokens: expected"):
        small.with_(max_tokens=0)
