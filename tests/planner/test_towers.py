"""Towers for images in a plan: told apart from the decoder, counted where they are loaded."""

import pytest

from pagedkv import plan_memory
from pagedkv.errors import UnsupportedModelError
from tests.planner.models import LLAMA_8B, QWEN_14B, SMOL, read_model, save

VISION = {"hidden_size": 64, "depth": 40, "intermediate_size": 128, "patch_size": 14}
HYBRID = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
HYBRID |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
QWEN3_5 = {
    "model_type": "qwen3_5", "vision_config": VISION, "dtype": "float32",
    "text_config": {**SMOL, **HYBRID, "model_type": "qwen3_5_text", "num_hidden_layers": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", ["visual.blocks", "model.vision_tower.encoder.layers"])
def test_a_tower_with_more_and_larger_layers_is_not_taken_for_the_decoder(tmp_path, name):
    extra = {f"{name}.{i}.mlp.weight": [4096, 1024] for i in range(40)}
    extra["model.visual.deepstack_merger_list.39.proj.weight"] = [64, 64]
    save(tmp_path, SMOL, "F32", extra)
    shape, text = read_model(tmp_path), read_model(SMOL)
    assert shape.layers == text.layers
    assert (shape.embedding, shape.head) == (text.embedding, text.head)
    assert shape.tower == 4 * (40 * 4096 * 1024 + 64 * 64)
    assert shape.rest == text.rest + shape.tower


def test_what_the_class_for_text_leaves_in_the_file_counts_only_with_images(tmp_path):
    extra = {"model.visual.blocks.0.weight": [64, 64], "mtp.layers.0.mlp.weight": [64, 64]}
    save(tmp_path, {**QWEN3_5["text_config"], **QWEN3_5}, "F32", extra)
    text, sees = (read_model(tmp_path, images=images) for images in (False, True))
    assert text.tower == 0
    assert sees.tower == sees.weights - text.weights == 4 * 64 * 64
    assert read_model(QWEN3_5).tower == 0
    assert read_model(QWEN3_5, images=True).tower > 0


def test_a_tower_of_a_configuration_is_in_the_glue_and_in_the_table():
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 40}
    vision |= {"hidden_size": 64, "num_attention_heads": 4}
    config = {"model_type": "llava", "text_config": QWEN_14B, "vision_config": vision}
    with_tower, without = (
        plan_memory(c, device_memory="64GiB") for c in ({**config, "dtype": "bfloat16"}, QWEN_14B)
    )
    glue = [plan.device_bytes["glue"] for plan in (with_tower, without)]
    assert glue[0] - glue[1] == with_tower.shape.tower > 2 * 40 * 4 * 64 * 64
    assert "tower for images" in str(with_tower)
    assert "tower" not in str(without)
    assert with_tower.to_dict()["tower"] == with_tower.shape.tower


def test_a_tower_that_a_model_does_not_have_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="llama is no model that takes images"):
        plan_memory(LLAMA_8B, device_memory="8GiB", images=True)
