"""Pages in 4 bits need staging pages: a plan counts them, and says where int8 would take less."""

import pytest

from pagedkv import CacheConfig, PagedKVCache, plan_memory
from tests.effort import each_value
from tests.planner.models import QWEN_14B, SMOL, llama


def filled(config, length, batch):
    """A cache with so many sequences of so many tokens, of which no step is too long."""
    cache = PagedKVCache(config, device="cpu")
    for seq in [cache.add() for _ in range(batch)]:
        while left := length - cache.length(seq):
            with cache.step([seq], num_new=min(left, config.max_step_tokens), layers=()):
                pass
    return cache


FORMATS = ["int4", "int8", "dense", ("int4", "int8")]


@pytest.mark.parametrize(
    ("kv_format", "rows"), each_value(FORMATS, [(1, 512), (1, 500), (2, 96), (5, 65), (3, 33)])
)
def test_as_much_fits_the_pages_as_the_plan_says(kv_format, rows):
    batch, length = rows
    config = llama(64, 128, 2, 2, 1, 100, head_dim=32, longest=512)
    asked = {"device": "cpu", "device_memory": "256MiB", "kv_format": kv_format}
    plan = plan_memory(config, batch=batch, length=length, max_tokens=batch * 512, **asked)
    longest = plan.max_length()
    assert longest >= length
    filled(plan.cache, longest, batch).check()


@pytest.mark.parametrize("length", [2048, 32768])
def test_a_plan_that_fits_holds_what_it_was_made_for(length):
    config = {**QWEN_14B, "max_position_embeddings": 32768}
    for memory in ("12GiB", "16GiB", "24GiB", "40GiB"):
        plan = plan_memory(config, device_memory=memory, kv_format="int4", length=length)
        assert plan.max_length() >= length
        assert plan.max_batch() >= 1
        assert plan.largest_batch >= 1


SMALL = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32"}


def test_int4_that_takes_more_than_int8_says_what_takes_less():
    config = CacheConfig(**SMALL, max_tokens=2048, kv_format="int4")
    int8 = CacheConfig(**SMALL, max_tokens=2048, kv_format="int8")
    assert config.nbytes > int8.nbytes
    said = config.larger_than_int8
    assert (
        f"int4 takes {config.nbytes / 2**20:.1f} MiB here, int8 {int8.nbytes / 2**20:.1f}" in said
    )
    fewer = int(said.split("max_sequences=")[1].split(",")[0])
    helped = CacheConfig(**SMALL, max_tokens=2048, kv_format="int4", max_sequences=fewer)
    assert helped.nbytes < int8.nbytes
    assert not helped.larger_than_int8


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_format": "int8"},
        {"kv_format": "dense"},
        {"kv_format": "int4", "max_tokens": 100_000, "max_sequences": 8},
        {"kv_format": "int4", "num_layers": 1, "max_tokens": 64},
    ],
)
def test_nothing_is_said_where_int8_is_no_smaller_or_the_difference_is_small(fields):
    assert not CacheConfig(**{**SMALL, "max_tokens": 2048, **fields}).larger_than_int8


def test_a_cache_whose_pages_take_more_than_in_int8_warns_by_name():
    config = CacheConfig(**SMALL, max_tokens=2048, kv_format="int4")
    with pytest.warns(UserWarning, match="kv_format: int4 takes .*max_sequences="):
        PagedKVCache(config, device="cpu")


def test_the_plan_says_it_as_well():
    config = {**SMOL, "max_position_embeddings": 512}
    asked = {"device_memory": "4GiB", "kv_format": "int4", "length": 64, "batch": 8}
    plan = plan_memory(config, max_tokens=512, **asked)
    sizes = plan.cache.larger_than_int8.split(":")[0]
    assert f"KV pages: {sizes}, because of staging pages (--kv-format int8)." in str(plan)
    assert "int8" not in str(plan_memory(config, **{**asked, "kv_format": "int8"})).split("KV")[0]


@pytest.mark.parametrize(("kv_format", "longest"), each_value(FORMATS, [2**20, 10 * 2**20]))
def test_a_text_of_millions_of_tokens_limits_no_batch(kv_format, longest):
    long = QWEN_14B | {"max_position_embeddings": longest, "num_hidden_layers": 2}
    options = {"device_memory": "200GiB", "length": 128, "kv_format": kv_format}
    for batch in (204, 256, 2048):
        plan = plan_memory(long, batch=batch, **options)
        assert plan.max_length() >= 128
        assert plan.largest_batch > 8000
