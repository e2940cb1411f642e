"""Plans of models with recurrent states: what a sequence takes beside its pages."""

import json

import pytest

from pagedkv import BudgetExceeded, plan_memory
from pagedkv.models.names import layer_names
from tests.planner.models import GIB, LLAMA_8B, read_model

# As published: 30 layers of the gated delta rule and 10 of attention, in an image-text class.
QWEN36_35B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}


def test_a_row_of_qwen36_takes_62_mib_and_a_token_20_kib():
    plan = plan_memory(QWEN36_35B, device_memory="96GiB", batch=4, length=8192)
    assert plan.bytes_per_token == 20 * 1024
    assert plan.bytes_per_state == 30 * (2 * 2**20 + 64 * 1024)  # 61.9 MiB
    assert plan.bytes_per_state / plan.bytes_per_token == 3168
    assert (plan.states, plan.cache.max_states, plan.cache.num_layers) == (5, 5, 10)
    assert plan.device_bytes["states"] == (5 + 2 * 4) * plan.bytes_per_state  # copies of a pass
    assert sum(read_model(QWEN36_35B).layers) == pytest.approx(67.3e9, rel=0.02)
    assert "5 x 61.9 MiB, one a sequence and one for a prefix" in str(plan)
    found = json.loads(plan.to_json())
    assert (found["states"], found["bytes_per_state"]) == (5, plan.bytes_per_state)
    assert sum(plan.device_bytes.values()) + plan.unused == 96 * GIB


def test_states_are_kept_in_what_the_model_computes_in_whatever_pages_are_kept_in():
    plan = plan_memory(QWEN36_35B, device_memory="96GiB", kv_dtype="float32", kv_format="int8")
    dtypes = [dtype for _, dtype in plan.cache.states[0].tensors]
    assert dtypes == ["bfloat16", "float32"]


def test_no_more_sequences_fit_than_have_a_slot():
    plan = plan_memory(QWEN36_35B, device_memory="96GiB", batch=8, length=4096)
    assert plan.max_batch(16) == 8
    assert plan.max_length(8) >= 4096
    assert plan.max_length(9) == 0
    assert plan_memory(LLAMA_8B, device_memory="96GiB", batch=8).max_batch(16) > 8


def test_a_batch_whose_states_do_not_fit_is_told_a_smaller_one():
    with pytest.raises(BudgetExceeded, match="the largest item is states") as refused:
        plan_memory(QWEN36_35B, device_memory="24GiB", batch=512, length=16, step_tokens=512)
    assert refused.value.largest == "states"
    advice = refused.value.advice
    plan = plan_memory(QWEN36_35B, device_memory="24GiB", length=16, step_tokens=512, **advice)
    assert plan.batch == advice["batch"] < 512


def test_no_drafts_are_planned_for_which_a_state_could_not_be_taken_back():
    options = {"device_memory": "24GiB", "batch": 8, "length": 4096}
    plan = plan_memory(QWEN36_35B, **options)
    assert plan.streams
    assert plan.verify_width == 1
    assert "logits of 8 x 1\n" in str(plan)
    assert plan_memory(LLAMA_8B, **{**options, "device_memory": "14GiB"}).verify_width > 1


def test_a_state_comes_back_with_the_pages_of_a_preempted_sequence():
    plan = plan_memory(QWEN36_35B, device_memory="96GiB")
    assert plan._kept(16) == plan.bytes_per_state + 16 * plan.bytes_per_token


def test_attention_alone_plans_no_states():
    plan = plan_memory(LLAMA_8B, device_memory="32GiB")
    assert (plan.states, plan.bytes_per_state) == (0, 0)
    assert "states" not in plan.device_bytes
    assert "state" not in str(plan)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, None),
        ({"model_type": "bamba", "attn_layer_indices": [1], "num_hidden_layers": 3}, "lfl"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"}, ["l", "moe", "f", "mlp"]),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "lllf"),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2},
            "lflf",
        ),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, ["hybrid"] * 2),
        (
            {"model_type": "lfm2", "num_hidden_layers": 3, "full_attn_idxs": [2]},
            ["conv"] * 2 + ["f"],
        ),
        (
            {
                "model_type": "jamba",
                "num_hidden_layers": 4,
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
            },
            "llfl",
        ),
        ({"layers_block_type": ["mamba", "attention", "hybrid"]}, ["l", "f", "hybrid"]),
    ],
)
def test_layers_are_known_where_the_file_does_not_list_them(fields, names):
    long = {"l": "linear_attention", "f": "full_attention"}
    expected = None if names is None else [long.get(name, name) for name in names]
    assert layer_names(fields) == expected
