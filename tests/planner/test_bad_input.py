"""Arguments and models of which no plan can be made are refused by name."""

import json

import pytest

from pagedkv import plan_memory
from pagedkv.errors import CheckpointError, UnsupportedModelError
from pagedkv.planner.byte_sizes import readable, rounded_up, size_in_bytes
from tests.planner.models import LLAMA_8B, SMOL, save


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("500MiB", 500 << 20), ("1.5 GiB", 3 << 29),
        ("64kB", 64_000), ("12B", 12), ("2TB", 2 * 10**12), ("8gib", 8 << 30), ("8 GiB", 8 << 30),
        ("8G", 8 * 10**9), ("8gb", 8 * 10**9), ("8Gi", 8 << 30), ("8g", 8 * 10**9), ("8i", None),
        ("150MB", 150 * 10**6), (" 8GB ", 8 * 10**9), ("8589934592", 8 << 30), (1 << 20, 1 << 20),
        ("-8GiB", None), (0, None), ("0GiB", None), ("", None), ("GiB", None), (-1, None),
        (True, None), (8.5, None), ("8GiB8", None), ("1e9", None), (None, None), ("8PiB", None),
        pytest.param("9" * 5000, None, id="5000 digits"),
        pytest.param("9" * 400 + ".5GiB", None, id="400 digits and a half"),
        pytest.param(10**5000, None, id="10**5000"),
        pytest.param(-(10**5000), None, id="-10**5000"),
    ],
)  # fmt: skip
def test_sizes_are_read_or_refused_by_name(value, expected):
    if expected is None:
        with pytest.raises(ValueError, match=r"memory: expected bytes .*got"):
            size_in_bytes("memory", value)
    else:
        assert size_in_bytes("memory", value) == expected


@pytest.mark.parametrize(
    ("value", "meant"),
    [(8, "8GiB"), ("8", "8GiB"), ("8.0", "8GiB"), (1000, "1000GiB"), (9000, "9000MiB")],
)
def test_a_number_without_a_unit_that_is_no_memory_is_asked_back(value, meant):
    with pytest.raises(
        ValueError, match=f"memory: .* are bytes.*; did you mean '{meant}'"
    ) as asked:
        size_in_bytes("memory", value)
    assert size_in_bytes("memory", str(asked.value).split("'")[1]) >= 1 << 30


@pytest.mark.parametrize("nbytes", [1, 10**6, 1 << 20, 10**8, (1 << 30) - 1, 10**10, 10**13])
def test_a_size_that_is_printed_can_be_given_back(nbytes):
    assert 0 <= size_in_bytes("memory", rounded_up(nbytes)) - nbytes < 1 << 20
    if nbytes >= 1 << 20:
        assert size_in_bytes("memory", readable(nbytes)) == pytest.approx(nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_memory": None}, "device_memory: expected text like '8GiB', or a gpu, got none"),
        ({"gpu": "rtx 409"}, "gpu: 'rtx 409' is not known; did you mean one of RTX 4090"),
        ({"gpu": "quantum"}, "gpu: 'quantum' is not known; known are RTX 3060, .*B200"),
        ({"gpu": 4090}, "gpu: 4090 is not known"),
        ({"gpu": "T4", "device": "cpu"}, "gpu: expected none with device='cpu', got 'T4'"),
        ({"device_memory": "8 gigs"}, "device_memory: expected bytes .*'8 gigs'"),
        ({"host_memory": -1}, "host_memory: expected bytes .*-1"),
        ({"batch": 0}, "batch: expected a positive int, got 0"),
        ({"batch": True}, "batch: expected"),
        ({"length": 2.0}, r"length: expected a positive int, got 2\.0"),
        ({"length": 9000}, "length: llama takes at most 8192 tokens, got 9000"),
        ({"page_size": 0}, "page_size: expected"),
        ({"max_tokens": -16}, "max_tokens: expected"),
        ({"step_tokens": 0}, "step_tokens: expected"),
        ({"step_tokens": 3, "batch": 4}, "step_tokens: expected at least one for each of 4"),
        ({"kv_dtype": "int3"}, "kv_dtype: expected one of .*'int3'"),
        ({"weight_dtype": "q4_k"}, "weight_dtype: expected one of .*'q4_k'"),
        ({"link_gbps": 0}, "link_gbps: expected a positive number, got 0"),
        ({"compute_tflops": float("nan")}, "compute_tflops: expected"),
        ({"pack_weights": True}, "pack_weights: expected none with device='cuda', got True"),
        ({"pack_weights": "int4"}, "pack_weights: expected True, False or 'int8', got 'int4'"),
        ({"pack_weights": "int8", "device": "cpu"}, "'int8' expects float32, got weights in bf"),
        ({"device": "tpu"}, "device: expected 'cuda' or 'cpu', got 'tpu'"),
    ],
)
def test_mistakes_name_the_argument_what_was_expected_and_what_came(options, words):
    with pytest.raises(ValueError, match=words):
        plan_memory(LLAMA_8B, **{"device_memory": "8GiB", **options})


def test_a_configuration_without_what_counts_is_refused():
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        for value in (None, 0, "many", 2.0, True):
            with pytest.raises(ValueError, match=f"model: expected {name} in its config"):
                plan_memory(LLAMA_8B | {name: value}, device_memory="8GiB")
    with pytest.raises(TypeError, match=r"model: expected a config .* got int"):
        plan_memory(7, device_memory="8GiB")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "glm5_next", "kv_lora_rank": 512}, r"glm5_next .*latent attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 .*encoder-decoder"),
        ({"model_type": "cpmant"}, "cpmant .*attention interface"),
        ({"model_type": "openai-gpt"}, "openai-gpt .*takes no cache"),
        ({"num_key_value_heads": [8, 4]}, "several values of num_key_value_heads"),
        ({"model_type": "whisper", "num_hidden_layers": None}, "whisper .*encoder-decoder"),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": None},
            "nemotron_h .*does not list its layers",
        ),
        ({"layers_block_type": ["mamba", "attention"]}, "kind linear_attention keep"),
        ({"per_layer_config": {"1": {"hidden_size": 64}}}, "differ in their width"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "not causal"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "mamba", "num_attention_heads": None}, "mamba has no attention heads"),
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, "linear_attention keep no"),
        ({"layer_types": ["linear_attention"] * 32, "model_type": "qwen3_next"}, "has K and V"),
    ],
)
def test_models_that_pages_cannot_serve_are_refused_by_name(fields, words):
    with pytest.raises(UnsupportedModelError, match=words):
        plan_memory(LLAMA_8B | fields, device_memory="80GiB")


def test_a_folder_must_have_what_a_checkpoint_has(tmp_path):
    with pytest.raises(CheckpointError, match="expected a folder"):
        plan_memory(tmp_path / "nowhere", device_memory="8GiB")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_memory(tmp_path, device_memory="8GiB")
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header claims"):
        plan_memory(tmp_path, device_memory="8GiB")
    save(tmp_path, SMOL | {"num_hidden_layers": 12}, "F32")
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    with pytest.raises(CheckpointError, match=r"expected tensors of layers 0\.\.29"):
        plan_memory(tmp_path, device_memory="8GiB")
    with pytest.raises(CheckpointError, match="GGUF"):
        plan_memory("model.gguf", device_memory="8GiB")
