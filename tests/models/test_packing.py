"""Weights of quantised checkpoints: bits by method and group, exceptions, and what is not known."""

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as THEIRS

from pagedkv import plan_memory
from pagedkv.models.packing import METHODS, WITH_GROUPS
from tests.planner.models import LLAMA_8B, LLAMA_70B, MIXTRAL, llama, read_model, save

QWEN3_8B = llama(4096, 12288, 36, 32, 8, 151936, 40960, model_type="qwen3", head_dim=128)
OSS_120B = llama(
    2880, 2880, 36, 64, 8, 201088, 131072, model_type="gpt_oss", head_dim=64, sliding_window=128,
    num_local_experts=128, num_experts_per_tok=4,
)  # fmt: skip
# Packed otherwise in each matrix, or of which transformers' configuration says no bits.
UNTOLD = {"gguf", "quark", "spqr", "vptq", "gemma"}
FLOAT8 = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}, "_version": 1}
FLOAT8["_data"] = {"activation_dtype": {"_data": "float8_e4m3fn", "_type": "torch.dtype"}}


def group(bits, size=128, targets=("Linear",), **fields):
    weights = {"num_bits": bits, "type": "int", "group_size": size, "symmetric": True, **fields}
    return {"targets": list(targets), "weights": weights}


def compressed(*groups, ignore=("lm_head",)):
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore)}


LEFT = "layers.*.self_attn", "layers.*.mlp.router", "embed_tokens", "lm_head"
# Bytes of the weights as published, or by arithmetic where a sum is given.
ENDS_8B = 2 * 2 * 4096 * 151936
LAYERS_8B = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
PUBLISHED = {
    "torchao float8": (
        QWEN3_8B, {"quant_method": "torchao", "quant_type": {"default": FLOAT8}}, 9.4
    ),
    "torchao int4": (
        QWEN3_8B,
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        (ENDS_8B + LAYERS_8B * (4 + 32 / 128) / 8) / 1e9,
    ),
    "torchao by name": (
        QWEN3_8B,
        {"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int4_weight"}
        | {"quant_type_kwargs": {"group_size": 32}},
        (ENDS_8B + LAYERS_8B * (4 + 32 / 32) / 8) / 1e9,
    ),
    "quanto int4": (QWEN3_8B, {"quant_method": "quanto", "weights": "int4"}, 6.2),
    "quanto int2": (QWEN3_8B, {"quant_method": "quanto", "weights": "int2"}, 4.4),
    "hqq": (
        QWEN3_8B,
        {"quant_method": "hqq"}
        | {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        6.3,
    ),
    "bitnet": (QWEN3_8B, {"quant_method": "bitnet"}, 4.2),
    "aqlm": (
        QWEN3_8B,
        {"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16}
        | {"in_group_size": 8, "out_group_size": 1},
        4.3,
    ),
    "modelopt": (QWEN3_8B, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 6.4),
    "awq": (LLAMA_70B, {"quant_method": "awq", "bits": 4, "group_size": 128}, 39.8),
    "w4a16": (LLAMA_70B, compressed(group(4)), 39.8),
    "gptq 3": (LLAMA_70B, {"quant_method": "gptq", "bits": 3, "group_size": 128}, 31.3),
    "gptq 8": (
        LLAMA_8B, {"quant_method": "gptq", "bits": 8, "group_size": 128}, 9.25
    ),
    "nf4, scales in 8 bits": (
        LLAMA_70B,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        39.5,
    ),
    "mxfp4": (
        OSS_120B,
        {"quant_method": "mxfp4", "modules_to_not_convert": [f"model.{name}" for name in LEFT]},
        65.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_quantised_configuration_weighs_what_its_files_do(case):
    config, quantised, gigabytes = PUBLISHED[case]
    shape = read_model(config | {"quantization_config": quantised})
    assert shape.weights / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert shape.packed
    assert not shape.exact


def test_every_group_counts_for_the_modules_that_it_has():
    attention, feed = "re:.*self_attn.*", "re:.*mlp.*"
    mixed = compressed(group(8, -1, [attention]), group(4, 128, [feed]))
    shape = read_model(LLAMA_8B | {"quantization_config": mixed})
    heads, wide = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336
    expected = heads + wide * (4 + 16 / 128) / 8
    assert shape.layers[0] == pytest.approx(expected, rel=0.001)
    other = compressed(group(4, 128, [feed]))
    shape = read_model(LLAMA_8B | {"quantization_config": other})
    assert shape.layers[0] == pytest.approx(2 * heads + wide * (4 + 16 / 128) / 8, rel=0.001)


def test_modules_that_are_left_stay_as_they_are_and_experts_go_by_their_names_in_files():
    left = compressed(group(4, 128), ignore=["lm_head", "re:.*self_attn.*"])
    shape = read_model(LLAMA_8B | {"quantization_config": left})
    assert shape.layers[0] > 2 * 2 * 4096 * 4096
    experts = compressed(group(4, 128, [r"re:.*experts\.\d+\.(gate|up|down|w1|w2|w3)_proj.*"]))
    shape = read_model(MIXTRAL | {"quantization_config": experts})
    matrices = 8 * 3 * 4096 * 14336
    attention = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096)
    assert shape.layers[0] == pytest.approx(attention + matrices * (4 + 1 / 8) / 8, rel=0.001)


def test_every_method_of_transformers_is_known_or_told_to_be_unknown():
    theirs = {name.replace("bitsandbytes_4bit", "bitsandbytes") for name in THEIRS}
    theirs -= {"bitsandbytes_8bit"}
    assert theirs - METHODS.keys() - WITH_GROUPS == UNTOLD & theirs


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "vptq"}, {"quant_method": "mine", "bits": 4}, {"bits": 4},
        {"quant_method": "gptq"}, {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "torchao", "quant_type": {"default": {}}},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
        compressed(group(4)) | {"ignore": -1}, compressed(group(4), ignore=["re:("]),
        compressed(group(4, targets=["re:("])), compressed(group(10**400)), compressed(group(-4)),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_asked_for(quantised, tmp_path):
    packed = LLAMA_8B | {"quantization_config": quantised}
    with pytest.raises(ValueError, match=r"weight_dtype: cannot tell how many bits"):
        plan_memory(packed, device_memory="24GiB")
    plan = plan_memory(packed, device_memory="24GiB", weight_dtype="int4")
    assert plan.shape.layers == read_model(LLAMA_8B, "int4").layers
    save(tmp_path, packed, "U8")  # whose headers tell
    assert read_model(tmp_path).exact


def test_a_checkpoint_whose_quantisation_is_no_object_is_refused(tmp_path):
    save(tmp_path, LLAMA_8B | {"quantization_config": 2}, "U8")
    with pytest.raises(ValueError, match="quantization_config: expected an object of fields"):
        read_model(tmp_path)


def test_one_pattern_of_modules_that_stay_is_as_a_list_of_one():
    one, listed = (
        read_model(LLAMA_8B | {"quantization_config": compressed(group(4)) | {"ignore": said}})
        for said in ("mlp", ["mlp"])
    )
    assert one.layers == listed.layers


def test_a_checkpoint_in_four_bits_is_not_told_to_take_fewer():
    packed = LLAMA_70B | {"quantization_config": compressed(group(4))}
    assert "in fewer bits" not in str(plan_memory(packed, device_memory="16GiB"))
    told = plan_memory(LLAMA_70B, device_memory="16GiB", weight_dtype="int4")
    assert "assumed: weights in int4, from a checkpoint such as" in str(told)
    assert "in fewer bits" not in str(told)
