"""Types that formulas did not describe, types that nobody knows, and what a plan says of these."""

import json

import pytest
import transformers

from pagedkv import plan_memory
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import skeleton
from pagedkv.models.skeleton import empty_model
from tests.planner.models import LLAMA_8B, SMOL, llama, read_model, save

DBRX = {
    "model_type": "dbrx", "d_model": 512, "n_heads": 8, "n_layers": 4, "vocab_size": 1000,
    "max_seq_len": 2048, "dtype": "bfloat16", "tie_word_embeddings": False,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 768, "moe_num_experts": 4, "moe_top_k": 2}
    | {"hidden_size": 512},
}  # fmt: skip
# Heads and widths of each layer stand in `block_configs`.
NAS = llama(8192, None, 80, 64, None, 128256, model_type="nemotron-nas")


def test_sizes_in_parts_of_a_configuration_are_read():
    plan = plan_memory(DBRX, device_memory="8GiB")
    attention, experts = 512 * 512 * 2 + 2 * 512 * 128, 4 * 3 * 512 * 768
    assert plan.shape.layers[0] == pytest.approx(2 * (attention + experts), rel=0.01)
    assert plan.bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert plan.shape.settings.experts_per_token == 2


def test_a_type_that_nobody_knows_is_planned_as_a_llama_and_the_plan_says_so():
    plan = plan_memory(LLAMA_8B | {"model_type": "foo"}, device_memory="24GiB")
    assert plan.device_bytes == plan_memory(LLAMA_8B, device_memory="24GiB").device_bytes
    assert "assumed: foo is none of transformers: it is planned as a llama" in str(plan)
    nested = {"model_type": "some_vl", "dtype": "bfloat16", "text_config": LLAMA_8B}
    said = str(plan_memory(nested, device_memory="24GiB"))
    assert "assumed: some_vl is none of transformers: planned is its decoder alone, llama" in said
    assert "assumed:" not in str(plan_memory(LLAMA_8B, device_memory="24GiB"))


def test_a_checkpoint_of_a_type_that_nobody_knows_says_so(tmp_path):
    save(tmp_path, SMOL | {"model_type": "foo"}, "F32")
    assert "assumed: foo is none of transformers: its K and V are read as" in str(
        plan_memory(tmp_path, device_memory="4GiB")
    )


def test_a_type_that_nobody_knows_is_refused_where_its_sizes_would_be_guessed():
    with pytest.raises(UnsupportedModelError, match=r"nemotron-nas .* num_key_value_heads, inter"):
        plan_memory(NAS, device_memory="200GiB")


def test_what_transformers_cannot_build_is_refused_with_its_reason():
    with pytest.raises(UnsupportedModelError, match=r"transformers .* cannot build its HunYuan"):
        plan_memory(LLAMA_8B | {"model_type": "hunyuan_v1_dense", "head_dim": None}, gpu="H100")


@pytest.mark.parametrize("kind", ["t5", "t5gemma", "mt5", "bart", "whisper", "umt5"])
def test_an_encoder_decoder_is_refused_also_where_its_file_does_not_say_it_is_one(kind):
    with pytest.raises(UnsupportedModelError, match=rf"{kind} cannot use pages: encoder-decoder"):
        plan_memory(LLAMA_8B | {"model_type": kind}, device_memory="24GiB")


def test_a_dtype_that_is_none_of_ours_is_asked_for():
    with pytest.raises(ValueError, match=r"weight_dtype: cannot tell .* 'float8_e4m3fn'"):
        plan_memory(LLAMA_8B | {"dtype": "float8_e4m3fn"}, device_memory="24GiB")
    told = plan_memory(
        LLAMA_8B | {"dtype": "float8_e4m3fn"}, device_memory="24GiB", weight_dtype="float8"
    )
    assert told.shape.dtype == "bfloat16"


def test_a_configuration_without_a_dtype_says_what_is_assumed(tmp_path):
    config = {name: value for name, value in LLAMA_8B.items() if name != "dtype"}
    assert "assumed: its configuration names no dtype: planned in float32" in str(
        plan_memory(config, device_memory="48GiB")
    )
    half = {name: value for name, value in SMOL.items() if name != "dtype"}
    save(tmp_path, half, "BF16")
    (tmp_path / "config.json").write_text(json.dumps(half))
    assert read_model(tmp_path).dtype == "bfloat16"
    assert not read_model(tmp_path).assumed


def test_a_configuration_of_somebodys_own_class_is_read_by_the_class_of_its_type():
    class Mine(transformers.LlamaConfig):
        pass

    fields = {name: value for name, value in LLAMA_8B.items() if name != "model_type"}
    assert read_model(Mine(**fields)).layers == read_model(LLAMA_8B).layers


def test_where_what_surrounds_a_decoder_cannot_be_built_the_decoder_is_planned(monkeypatch):
    def without_timm(config, images=False):
        if config.model_type == "llava":
            raise UnsupportedModelError("model: its class needs timm")
        return empty_model(config, images)

    monkeypatch.setattr(skeleton, "empty_model", without_timm)
    config = {"model_type": "llava", "text_config": LLAMA_8B, "dtype": "bfloat16"}
    config["image_token_index"] = 77
    plan = plan_memory(config, device_memory="24GiB")
    assert plan.shape.weights == read_model(LLAMA_8B).weights
    assert "assumed: its class needs timm: planned is its decoder alone" in str(plan)
