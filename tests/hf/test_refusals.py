"""Models that would be silently wrong are refused by name, and left as they were."""

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig

from pagedkv import BatchGenerator, CacheConfig
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache, attach
from tests.hf.tiny import assert_same_tokens, attention_of, generate, named, padded, prompts, tiny
from tests.hf.unsupported import UNSUPPORTED, WIDE, unsupported
from tests.hf.zoo import built


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_model_is_refused_with_the_reason_and_left_as_it_was(name):
    model = unsupported(name)
    before = attention_of(model)
    for use in (PagedCache, attach, lambda model: PagedCache.prefill(model, [1, 2, 3])):
        with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name][1]) as refusal:
            use(model)
        assert name in str(refusal.value)
    assert attention_of(model) == before


@pytest.mark.parametrize("field", ["is_causal", "use_bidirectional_attention"])
def test_model_that_attends_to_the_future_is_refused(field):
    config = GemmaConfig(**WIDE, head_dim=8, **{field: field != "is_causal"})
    model = transformers.GemmaForCausalLM(config).eval()
    assert_refused_at_both_doors(model, "not causal")


def test_paligemma_is_refused_for_it_reads_its_prompt_both_ways():
    assert_refused_at_both_doors(built("paligemma"), "not causal")


def assert_refused_at_both_doors(model, reason):
    before = attention_of(model)
    for door in (PagedCache, BatchGenerator):
        with pytest.raises(UnsupportedModelError, match=reason):
            door(model, max_tokens=64)
    assert attention_of(model) == before


@torch.no_grad()
def test_module_that_is_not_causal_is_stopped_where_its_configuration_does_not_tell():
    model = tiny()
    with PagedCache(model, max_tokens=64) as cache:
        generator = BatchGenerator(model, cache=cache.kv)
        model.model.layers[1].self_attn.is_causal = False  # after both were made
        with pytest.raises(UnsupportedModelError, match="is_causal: expected causal"):
            model(torch.tensor([[5, 6, 7]]), **named(cache))
        with pytest.raises(UnsupportedModelError, match="is_causal: expected causal"):
            generator.generate([[5, 6, 7]], max_new_tokens=2)


class ByLayer(LlamaConfig):
    """A configuration whose field differs from layer to layer, as newer releases tell it."""

    hidden: str | None = None

    def __getattribute__(self, name):
        if name == type(self).hidden:
            raise RuntimeError(f"'{name}' is a per-layer attribute and may vary across layers")
        return super().__getattribute__(name)


SHAPE_FIELDS = ["num_key_value_heads", "num_attention_heads", "head_dim", "sliding_window"]
SHAPE_FIELDS += ["layer_types", "max_position_embeddings"]


@pytest.mark.parametrize(
    "field", [*SHAPE_FIELDS, "kv_lora_rank", "num_kv_shared_layers", "is_causal"]
)
def test_field_that_differs_from_layer_to_layer_is_a_refusal_that_names_it(field, monkeypatch):
    model = transformers.LlamaForCausalLM(ByLayer(**WIDE)).eval()
    monkeypatch.setattr(ByLayer, "hidden", field)
    assert_refused_at_both_doors(model, f"{field} differs from layer to layer")
    if field in SHAPE_FIELDS:
        with pytest.raises(UnsupportedModelError, match=f"{field} differs"):
            CacheConfig.from_model(model.config, max_tokens=64)


def test_positions_that_differ_from_layer_to_layer_cannot_be_packed(monkeypatch):
    model = transformers.LlamaForCausalLM(ByLayer(**WIDE)).eval()
    monkeypatch.setattr(ByLayer, "hidden", "rope_parameters")
    with pytest.raises(UnsupportedModelError, match="rope_parameters differs"):
        BatchGenerator(model, max_tokens=64)


@pytest.fixture
def saved(tmp_path):
    """A model that decodes, and where it is saved."""
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


OFFLOADED = {
    "on disk": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=folder / "offload"
    ),
    "in part": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder,
        device_map={"model": "cpu", "lm_head": "disk"},
        offload_folder=folder / "offload",
    ),
    "in host memory": lambda folder: accelerate.cpu_offload(
        AutoModelForCausalLM.from_pretrained(folder), execution_device="cpu"
    ),
    "nowhere": lambda folder: AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"),
}


# Of a model whose weights are elsewhere `generate` cannot tell where it computes.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`")
@pytest.mark.parametrize("where", OFFLOADED)
def test_model_whose_weights_are_offloaded_computes_where_its_hooks_take_them(where, saved):
    model, folder = saved
    batch = padded(prompts(9, 5))
    expected = generate(model, batch)
    offloaded = OFFLOADED[where](folder)
    offloaded.generation_config = model.generation_config
    with PagedCache(offloaded, max_tokens=256) as cache:
        assert cache.kv.device == torch.device("cpu")
        assert_same_tokens(generate(offloaded, batch, cache), expected)
    with PagedCache.prefill(offloaded, batch["input_ids"][0], max_tokens=256):
        pass
    generator = BatchGenerator(offloaded, max_tokens=256)
    for options in ({}, {"do_sample": True, "seed": 1}):
        results = generator.generate([batch["input_ids"][0].tolist()], max_new_tokens=10, **options)
        assert options or results[0].tokens == expected.sequences[0, 9:].tolist()


def test_model_on_devices_of_several_kinds_is_refused_and_told_of_other_ways():
    model = tiny()
    for layer, place in zip(model.model.layers, ("cpu", "meta")):
        add_hook_to_module(layer, AlignDevicesHook(execution_device=place))
    reason = r"several kinds \(cpu, meta\); `torchrun` .* `LayerStreamer`"
    assert_refused_at_both_doors(model, reason)


def test_model_without_its_weights_is_refused_and_told_of_the_streamer():
    assert_refused_at_both_doors(tiny().to("meta"), "meta device.* `LayerStreamer`")


def test_what_is_no_model_is_refused():
    for wrong in (None, tiny().config, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="expected a transformers model"):
            PagedCache(wrong)
