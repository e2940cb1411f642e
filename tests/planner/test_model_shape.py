"""Where the shape of a model comes from."""

import json
from types import SimpleNamespace

import pytest

from pagedkv import plan_memory
from pagedkv.models.checkpoint import Checkpoint
from tests.planner.models import MODELS, QWEN_14B, SMOL, read_model, save


def test_headers_say_the_same_as_the_configuration(tmp_path):
    for name in ("llama-8b", "smol"):
        folder = tmp_path / name
        folder.mkdir()
        config = MODELS[name]
        save(folder, config, "F32" if config["dtype"] == "float32" else "BF16")
        by_headers, by_config = (
            plan_memory(m, device_memory="3GiB", length=512) for m in (folder, config)
        )
        assert by_headers.shape.exact
        assert not by_config.shape.exact
        assert by_headers.shape.layers == by_config.shape.layers
        assert by_headers.device_bytes == by_config.device_bytes
        assert by_headers.shape.weights == pytest.approx(Checkpoint.open(folder).nbytes, rel=1e-4)
        assert "exact" in str(by_headers)
        assert "from the config" in str(by_config)


def test_a_packed_checkpoint_counts_packed_and_a_cast_one_cast(tmp_path):
    packed = SMOL | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    save(tmp_path, packed, "U8")
    assert sum(read_model(tmp_path).layers) == pytest.approx(sum(read_model(SMOL).layers) / 4, 1e-3)
    save(tmp_path, SMOL, "F32")
    half = plan_memory(tmp_path, device_memory="1GiB", weight_dtype="bf16")
    assert half.cache.dtype == "bfloat16"
    assert sum(half.shape.layers) == pytest.approx(sum(read_model(SMOL).layers) / 2, rel=1e-3)


def test_layers_past_the_last_and_towers_beside_the_decoder_are_told_apart(tmp_path):
    extra = {"model.layers.30.eh_proj.weight": [576, 1152], "vision.layers.0.w.weight": [64, 64]}
    save(tmp_path, SMOL, "F32", extra)
    assert read_model(tmp_path).layers == read_model(SMOL).layers
    assert read_model(tmp_path).rest == read_model(SMOL).rest + 64 * 64 * 4


def test_a_configuration_may_be_an_object_a_nested_dict_or_old():
    plan = plan_memory(QWEN_14B, device_memory="8GiB")
    nested = {"model_type": "some_vl", "dtype": "bfloat16", "text_config": QWEN_14B}
    for config in (SimpleNamespace(**QWEN_14B), nested):
        assert plan_memory(config, device_memory="8GiB").device_bytes == plan.device_bytes
    gpt2 = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257,
    }  # fmt: skip
    assert read_model(gpt2).weights == pytest.approx(124.4e6 * 4, rel=0.01)


def test_a_hub_model_is_found_in_the_cache_without_a_network(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))  # but no shard
    asked = []

    def cached(model, file):
        asked.append((model, file))
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
    plan = plan_memory("someone/smol", device_memory="2GiB")
    assert asked == [("someone/smol", "config.json")]
    assert plan.model == "someone/smol"
    assert not plan.shape.exact
    monkeypatch.undo()
    with pytest.raises(ValueError, match="model: expected a folder or an id on the hub"):
        plan_memory("someone/nowhere-to-be-found", device_memory="2GiB")
