"""The arithmetic of memory and of passes."""

import pytest
import torch

from pagedkv import plan_memory
from pagedkv.planner.costs import most_parts
from tests.planner.models import (
    GEMMA_27B,
    GIB,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    llama,
    read_model,
)


def test_70b_with_grouped_queries_keeps_8_mib_a_layer_at_2048_tokens():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", kv_dtype="fp16", max_tokens=2048)
    assert plan.device_bytes["KV pages"] == 640 << 20
    assert plan.device_bytes["KV pages"] // 80 == 8 << 20
    assert plan.bytes_per_token == 320 << 10


def test_7b_without_grouped_queries_takes_17_gb_at_4096_tokens():
    plan = plan_memory(LLAMA_7B, device_memory="24GiB", length=4096, max_tokens=4096)
    assert not plan.streams
    assert plan.bytes_per_token == 512 << 10
    assert plan.device_bytes["KV pages"] == 2 * GIB
    weights = plan.device_bytes["glue"] + plan.device_bytes["resident layers"]
    assert weights == pytest.approx(13.5e9, rel=0.01)
    assert weights + 2 * GIB + 1e9 == pytest.approx(17e9, rel=0.03)


def test_a_layer_of_70b_weighs_1_71_gb_and_of_8b_0_436_gb():
    for config, layer, stack in [(LLAMA_70B, 1.711e9, 136.9e9), (LLAMA_8B, 0.4362e9, 13.96e9)]:
        shape = read_model(config)
        assert shape.layers[0] == pytest.approx(layer, rel=1e-3)
        assert sum(shape.layers) == pytest.approx(stack, rel=1e-3)
    assert sum(read_model(LLAMA_70B, "int4").layers) == pytest.approx(38.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "weights", "link", "expected"),
    [
        (LLAMA_8B, None, 55, (3.9, 31.5, 252)),
        (LLAMA_8B, "int4", 25, (6.4, 51, 407)),
        (LLAMA_70B, None, 25, (0.18, 1.5, 11.7)),
        (LLAMA_70B, "int4", 7, (0.18, 1.45, 11.6)),
    ],
)
def test_predictions_follow_the_law_of_the_slowest_link(config, weights, link, expected):
    plan = plan_memory(config, device_memory="5GiB", weight_dtype=weights, length=128)
    stack = sum(plan.shape.layers)
    for batch, tokens in zip((1, 8, 64), expected):
        found = plan.predict(link, batch=batch, compute_tflops=500)
        assert found * plan.streamed_bytes / stack == pytest.approx(tokens, rel=0.03)


def test_disk_limits_what_host_memory_does_not_hold():
    slow = plan_memory(LLAMA_70B, device_memory="8GiB")
    tiered = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="64GiB")
    assert slow.disk_bytes == slow.streamed_bytes
    assert 0 < tiered.disk_bytes < tiered.streamed_bytes
    assert slow.predict(25, disk_gbps=7) == pytest.approx(7e9 / slow.streamed_bytes)
    assert tiered.predict(25, disk_gbps=3.5) == pytest.approx(3.5e9 / tiered.disk_bytes)
    assert tiered.predict(25) == tiered.predict(25, disk_gbps=25)
    assert slow.predict(25, accepted=4) == pytest.approx(4 * slow.predict(25))


@pytest.mark.parametrize(("kv_format", "gain"), [("int8", 1.9), ("int4", 3.0), ("fp8", 1.99)])
def test_pages_in_fewer_bits_hold_more_tokens_in_the_same_memory(kv_format, gain):
    asked = {"device_memory": "40GiB", "batch": 4, "length": 2048}
    model = llama(4096, 14336, 32, 32, 8, 128_256, longest=1 << 20)
    dense, coded = (plan_memory(model, **asked, kv_format=f) for f in ("dense", kv_format))
    assert coded.max_tokens >= gain * dense.max_tokens
    assert coded.device_bytes["KV pages"] == coded.cache.nbytes
    assert coded.cache.formats[0].kv_format == kv_format


def test_pages_are_counted_whole():
    for page in (1, 7, 16, 100):
        plan = plan_memory(LLAMA_8B, device_memory="4GiB", length=1000, page_size=page)
        config = plan.cache
        assert plan.max_tokens % page == 0
        assert plan.max_tokens >= 1000
        assert plan.device_bytes["KV pages"] == config.nbytes
        assert config.nbytes == plan.max_tokens * plan.bytes_per_token


def test_sliding_layers_keep_their_window():
    all_full = GEMMA_27B | {"layer_types": ["full_attention"] * 46}
    length = {"length": 8192, "max_tokens": 65536, "batch": 8}
    half = plan_memory(GEMMA_27B, device_memory="80GiB", **length)
    full = plan_memory(all_full, device_memory="120GiB", **length)
    pages = 9 * (4096 // 16 + 2) + -(-half.step_tokens // 16)
    assert half.cache.num_pages(1) == pages
    assert half.cache.groups[1].window == 4096
    assert half.cache.groups[1].layers == tuple(range(0, 46, 2))
    layer = full.device_bytes["KV pages"] // 46
    assert half.device_bytes["KV pages"] == 23 * layer + 23 * layer * pages // 4096


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 16])
def test_attention_of_a_card_has_room_for_as_many_parts_as_its_kernels_make(kv_heads):
    pytest.importorskip("triton")
    from pagedkv.kernels.triton import decode
    from pagedkv.kernels.triton.geometry import NOT_THERE, Geometry, Target

    sizes = 2 * kv_heads, kv_heads, 128, 16
    geometry = Geometry(*sizes, *[NOT_THERE] * 3, torch.bfloat16, 128)
    cut = decode.tuning(Target(0, 90, 227 << 10, 132), geometry, 16).cut(geometry, 1)
    for length in (1, 127, 128, 129, 2000, 16 << 10, 60_000, 1 << 20):
        assert most_parts(length, kv_heads) == cut.parts(length)
