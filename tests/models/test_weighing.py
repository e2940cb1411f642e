"""The bytes of a model's weights are those that transformers has in memory."""

import json

import pytest
from transformers import AutoModelForCausalLM

from pagedkv import LayerStreamer, plan_memory
from pagedkv.errors import UnsupportedModelError
from tests.stream.models import make
from tests.stream.packed import save_fp8, save_mxfp4

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
CPU = {"device_memory": "1GiB", "device": "cpu"}


def in_memory(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    return sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(
    ("family", "fields", "method", "block"),
    [
        ("llama", WIDE, "fp8", [32, 32]),
        ("llama", WIDE, "fp8", None),
        ("llama", WIDE, "mxfp8", [1, 32]),
        ("qwen3_moe", EXPERTS, "fp8", [32, 32]),
        ("gpt_oss", {}, "mxfp4", None),
    ],
)
def test_weights_that_a_cpu_unpacks_are_planned_unpacked(
    family, fields, method, block, dtype, tmp_path
):
    if method == "mxfp4":
        save_mxfp4(tmp_path)
    else:
        save_fp8(tmp_path, make(family, **fields), method, block)
    known = in_memory(tmp_path, dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    for model in (tmp_path, config):
        shape = plan_memory(model, weight_dtype=dtype, **CPU).shape
        assert shape.weights == pytest.approx(known, rel=0.02)  # tensors are aligned
        assert (shape.unpacked, shape.packed) == (True, False)
    packed = plan_memory(tmp_path, weight_dtype=dtype, device_memory="1GiB", device="cuda").shape
    assert packed.packed
    assert packed.weights < 0.8 * known
    config["quantization_config"]["dequantize"] = True
    wide = plan_memory(config, weight_dtype=dtype, device_memory="1GiB", device="cuda").shape
    assert wide.weights == shape.weights


def test_weights_that_are_unpacked_but_do_not_stream_are_planned_and_refused_so(tmp_path):
    folder = save_fp8(tmp_path, make("qwen3_moe", **EXPERTS), "fp8", [32, 32])
    sizes = {"max_tokens": 64, "step_tokens": 32, "device": "cpu"}
    whole = sum(plan_memory(folder, device_memory="1GiB", **sizes).device_bytes.values())
    plan = plan_memory(folder, device_memory=whole - 64_000, **sizes)
    assert plan.streams
    assert plan.shape.experts is None
    assert "LayerStreamer reads no weights that fp8 packed" in str(plan)
    with pytest.raises(UnsupportedModelError, match="weights packed by fp8 do not stream here"):
        LayerStreamer.from_pretrained(folder, plan=plan)
