"""`LayerStreamer.from_pretrained` takes all that `plan_memory` takes, and nothing else."""

import inspect
import re
import warnings

import pytest
import torch

from pagedkv import BatchGenerator, BudgetExceeded, LayerStreamer, plan_memory
from tests.stream.models import make, save, stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose pages take most: 20 layers, every head its own keys."""
    torch.manual_seed(0)
    fields = {"num_hidden_layers": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    return save(make("llama", **fields, head_dim=16), tmp_path_factory.mktemp("llama"))


TIGHT = {"device_memory": "16MB", "link_gbps": 1.0}


def test_every_size_of_a_plan_can_be_given():
    sizes = set(inspect.signature(plan_memory).parameters) - {
        "model",
        "weight_dtype",
        "gpu",
        "ranks",
        "pack_weights",  # nothing streams with them
    }
    assert sizes <= set(inspect.signature(LayerStreamer.from_pretrained).parameters)


def test_sizes_are_those_of_the_plan(folder):
    sizes = {"batch": 3, "length": 40, "page_size": 8, "kv_format": "int8", "step_tokens": 16}
    sizes |= {"max_tokens": 128, "growth_step": 64, "link_gbps": 2.0, "compute_tflops": 0.5}
    sizes |= {"host_memory": "1GiB", "device_memory": "1GiB"}
    with stream(folder, **sizes) as streamer:
        assert streamer.plan == plan_memory(folder, device="cpu", **sizes)


@pytest.mark.parametrize(
    ("sizes", "advised"),
    [
        ({"length": 2048, "batch": 4}, "length"),
        ({"length": 32, "batch": 512, "page_size": 32}, "batch"),
        ({"length": 32, "max_tokens": 100_000}, "max_tokens"),
        ({"length": 16, "step_tokens": 60_000}, "step_tokens"),
        ({"length": 16, "host_memory": "1kB", "device_memory": "9.7MB"}, "host_memory"),
        ({"length": 16, "device_memory": "1MB"}, "device_memory"),
    ],
)
def test_the_advice_of_a_refusal_is_followed_as_it_is_printed(sizes, advised, folder):
    call = {**TIGHT, **sizes}
    with pytest.raises(BudgetExceeded) as refused:
        stream(folder, **call)
    assert list(refused.value.advice) == [advised]
    (said,) = re.findall(rf"\b({advised}=\S+) ", str(refused.value))
    assert eval(f"dict({said})") == refused.value.advice
    with (
        stream(folder, **{**call, **refused.value.advice}) as streamer,
        BatchGenerator(streamer.model, plan=streamer.plan) as generator,
    ):
        (result,) = generator.generate([[5, 6, 7]], max_new_tokens=2, do_sample=False)
    assert len(result.tokens) == 2


def test_without_a_length_the_longest_that_fits_is_planned_for(folder):
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(folder, batch=4, device="cpu", **TIGHT)
    length = refused.value.advice["length"]
    with (
        pytest.warns(UserWarning, match=f"^length: planned for {length} tokens, the most that fit"),
        stream(folder, batch=4, **TIGHT) as streamer,
    ):
        assert streamer.plan.length == length
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream(folder, batch=4, length=length, **TIGHT).close()
        stream(folder, batch=4, device_memory="1GiB").close()
    with pytest.raises(BudgetExceeded):  # one that was asked for is not changed
        stream(folder, batch=4, length=2 * length, **TIGHT)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("lenght", "length"),
        ("kv_fromat", "kv_format"),
        ("max_token", "max_tokens"),
        ("device_mem", "device_memory"),
        ("resident_layer", "resident_layers"),
        ("attn_implementaton", "attn_implementation"),
        ("weight_dtype", "dtype"),
        ("verify_width", None),
        ("temperature_of_the_room", None),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"device_memory": "1kB"}])
def test_a_misspelt_argument_is_told_the_one_that_was_meant(wrong, meant, sizes, folder):
    with pytest.raises(TypeError) as refused:
        stream(folder, **{wrong: 3}, **sizes)
    assert str(refused.value).startswith(f"{wrong}: expected an argument of LayerStreamer")
    assert str(refused.value).endswith("it is none" + (f"; did you mean {meant}?" if meant else ""))


@pytest.mark.parametrize("dtype", ["int4", "int8", "nf4", "float8"])
def test_bits_that_no_checkpoint_here_has_are_refused_with_where_they_come_from(dtype, folder):
    with pytest.raises(
        ValueError, match=rf"^dtype: .*got '{dtype}'; weights in \S+ come from a ch"
    ):
        stream(folder, dtype=dtype)


@pytest.mark.parametrize("size", [{"batch": 1}, {"length": 40}, {"kv_format": "int8"}])
def test_sizes_without_a_budget_or_beside_a_plan_are_refused(size, folder):
    (name,) = size
    with pytest.raises(ValueError, match=rf"^{name}: expected with device_memory"):
        stream(folder, **size)
    plan = plan_memory(folder, device_memory="1GiB", device="cpu")
    for beside in (size, {"device_memory": "1GiB"}):
        (name,) = beside
        with pytest.raises(ValueError, match=rf"^{name}: expected none beside plan"):
            stream(folder, plan=plan, **beside)


def test_fields_of_the_configuration_and_of_transformers_are_still_theirs(folder):
    with stream(folder, max_position_embeddings=64, attn_implementation="eager") as streamer:
        assert streamer.model.config.max_position_embeddings == 64
        assert streamer.model.config._attn_implementation == "eager"
