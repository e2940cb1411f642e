"""What a `CacheConfig` is made of, and what it says of what it cannot be made of."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pagedkv import CacheConfig
from tests.support import one_group


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_dtype_of_torch_is_taken_for_its_name(dtype):
    name = str(dtype).removeprefix("torch.")
    assert one_group(dtype=dtype).dtype == name
    assert one_group(dtype=dtype) == one_group(dtype=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, "half", 32])
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
