"""A plan's table: answers first, then what they assume, and nothing that is not there."""

import re

import pytest

from pagedkv import BudgetExceeded, plan_memory
from pagedkv.planner.gpus import GPUS, find_gpu, gpu_table
from tests.planner.models import LLAMA_8B, LLAMA_70B, MODELS, QWEN_14B, SMOL, save

PLANS = {
    "streams": (LLAMA_70B, {"device_memory": "8GiB"}),
    "streams, host": (LLAMA_70B, {"device_memory": "8GiB", "host_memory": "64GiB"}),
    "fits": (SMOL, {"device_memory": "8GiB"}),
    "fits, card": (LLAMA_8B, {"gpu": "4090", "batch": 3}),
    "cpu": (SMOL, {"device_memory": "300MB", "length": 256, "device": "cpu"}),
    "int4 pages": (QWEN_14B, {"device_memory": "16GiB", "kv_format": "int4"}),
    "packed": (QWEN_14B, {"device_memory": "8GiB", "weight_dtype": "int4"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_answers_stand_before_the_table_and_no_row_is_zero(name):
    config, options = PLANS[name]
    plan = plan_memory(config, **options)
    said, answers, device = str(plan).split("\n\n")[:3]
    assert said.splitlines()[1].startswith("it fits")
    names = [line[:17].strip() for line in answers.splitlines() if line[:17].strip()]
    assert names == ["longest context", "largest batch", "tokens a second", "assumed"]
    assert device.startswith("device")
    items = {item for item, nbytes in plan.device_bytes.items() if nbytes}
    assert {line[2:17].strip() for line in device.splitlines()[1:]} - {"unused", "budget"} == items
    assert max(map(len, str(plan).splitlines())) <= 80


def test_the_speed_names_the_machine_that_it_is_of():
    ordinary = str(plan_memory(LLAMA_70B, device_memory="8GiB"))
    words = " ".join(ordinary.split())
    assert "an ordinary card: 400 GB/s of memory, 100 TFLOPS, PCIe 4 x16 at 25 GB/s" in words
    assert "--gpu NAME for another" in ordinary
    known = plan_memory(LLAMA_70B, gpu="RTX 5090")
    assert "RTX 5090: 1792 GB/s of memory, 209.5 TFLOPS, PCIe 5 x16 at 50 GB/s" in " ".join(
        str(known).split()
    )
    linked = plan_memory(LLAMA_70B, gpu="RTX 5090", link_gbps=12)
    assert "a link at 12 GB/s" in str(linked)
    assert linked.predict() < known.predict()


def test_a_plan_for_a_cpu_speaks_of_no_card():
    config, options = PLANS["cpu"]
    printed = str(plan_memory(config, **options))
    assert "a CPU: 20 GB/s of memory, 0.1 TFLOPS, files read at 5 GB/s" in printed
    assert not re.search("PCIe|CUDA|gpu|card", printed)


def test_a_path_is_named_by_its_last_part_and_the_hubs_cache_by_the_id(tmp_path):
    for folder, name in (
        ("long/way/to/my-model", "my-model"),
        ("hub/models--some--model-8B/snapshots/0123abcd", "some/model-8B"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        save(tmp_path / folder, SMOL, "F32")
        for path in (tmp_path / folder, f"{tmp_path / folder}/"):
            assert str(plan_memory(path, device_memory="8GiB")).startswith(f"{name}: ")


def test_a_model_that_streams_is_told_how_fast_it_were_in_4_bits_and_how_it_comes_by_them():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB")
    fewer = plan_memory(LLAMA_70B, device_memory="8GiB", weight_dtype="int4")
    assert plan.rate_in_4_bits == fewer.predict() > 3 * plan.predict()
    assert f"{fewer.predict():.3g} in 4 bits, from a checkpoint such as" in str(plan)
    assert "assumed: weights in int4, from a checkpoint such as" in str(fewer)
    assert plan_memory(SMOL, device_memory="8GiB").rate_in_4_bits is None


def test_weights_in_fewer_bits_than_a_checkpoint_has_are_not_called_exact(tmp_path):
    save(tmp_path, SMOL, "F32")
    plan = plan_memory(tmp_path, device_memory="8GiB", weight_dtype="int4")
    assert not plan.shape.exact
    assert sum(plan.shape.layers) * 4 < sum(
        plan_memory(tmp_path, device_memory="8GiB").shape.layers
    )


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SMOL, {"device_memory": "8GiB"}),
        (LLAMA_70B, {"device_memory": "8GiB"}),
        (LLAMA_8B, {"device_memory": "24GiB", "kv_format": "int4", "length": 5000}),
        (LLAMA_8B, {"device_memory": "8GiB", "max_tokens": 2500, "length": 1000}),
        (MODELS["gemma-27b"], {"device_memory": "70GiB", "length": 4096}),
        (LLAMA_8B, {"device_memory": "24GiB", "step_tokens": 5, "length": 64}),
    ],
)
def test_the_largest_batch_fits_and_one_sequence_more_does_not(config, options):
    plan = plan_memory(config, **options)
    most = plan.largest_batch
    assert plan.max_batch() >= 1
    assert f"{most:,} x {plan.length:,} tokens" in str(plan)
    assert plan_memory(config, batch=most, **options).max_length() >= plan.length
    try:
        more = plan_memory(config, batch=most + 1, **options)
    except (BudgetExceeded, ValueError):
        return
    assert more.max_length() < plan.length


def test_cards_are_found_however_they_are_spelt():
    for said in ("RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090"):
        assert find_gpu(said) == "RTX 4090"
    for name in GPUS:
        assert find_gpu(name) == find_gpu(name.lower()) == name
        assert name in gpu_table()
    for near, meant in (("RTX 4091", "RTX 4090"), ("A100", "A100 40GB"), ("l40", "L40S")):
        with pytest.raises(
            ValueError, match=f"gpu: '{near}' is not known; did you mean one of {meant}"
        ):
            find_gpu(near)


def test_a_card_gives_its_memory_and_speeds_where_none_are_said():
    plan = plan_memory(LLAMA_8B, gpu="T4")
    assert plan.device_memory == int(0.9 * 16 * 2**30)
    assert (plan.link_gbps, plan.memory_gbps, plan.compute_tflops) == (12.5, 320, 65)
    said = plan_memory(LLAMA_8B, gpu="T4", device_memory="8GiB", link_gbps=3, compute_tflops=2)
    assert (said.device_memory, said.link_gbps, said.compute_tflops) == (8 << 30, 3, 2)
    assert plan_memory(LLAMA_8B, gpu="4060").link_gbps == 12.5  # eight lanes of PCIe 4


@pytest.mark.parametrize(
    ("quantised", "device", "said"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "cuda", "that fp8 packed:"),
        ({"quant_method": "mxfp4"}, "cuda", "that mxfp4 packed on this device"),
        ({"quant_method": "mxfp4"}, "cpu", ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "cpu", "that fp8 packed:"),
        ({"quant_method": "bitnet"}, "cuda", ""),
        (None, "cuda", ""),
    ],
)
def test_a_plan_says_that_a_checkpoint_does_not_stream_as_it_is_packed(quantised, device, said):
    config = {**LLAMA_8B, "num_hidden_layers": 80}
    if quantised is not None:
        config["quantization_config"] = quantised
    plan = plan_memory(config, device=device, device_memory="6GiB", host_memory="200GiB")
    assert plan.streams
    assert ("LayerStreamer reads no weights" in str(plan)) == bool(said)
    assert said in str(plan)
