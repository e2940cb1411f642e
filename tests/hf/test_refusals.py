"""What would be silently wrong is refused by name, and the model is left as it was."""

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, PreTrainedModel

from pagedkv import BatchGenerator, CacheConfig
from pagedkv.errors import (
    GradModeError,
    UnsupportedModelError,
)
from pagedkv.hf import PagedCache, attach, register
from tests.hf.tiny import (
    assert_close,
    assert_same_tokens,
    attention_of,
    build,
    dense,
    generate,
    padded,
    prompts,
    tiny,
)
from tests.hf.zoo import built

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
INTERFACE = "does not go through transformers' attention interface"
STATE = "linear_attention|recurrent state beside K and V"

# model: its fields, and the reason it is refused for
UNSUPPORTED = {
    "T5ForConditionalGeneration": (
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "encoder-decoder",
    ),
    "BartForConditionalGeneration": (
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "encoder-decoder",
    ),
    "MptForCausalLM": ({"vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 2}, INTERFACE),
    "BloomForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        INTERFACE,
    ),
    "FalconForCausalLM": ({**SMALL, "alibi": True, "new_decoder_architecture": False}, INTERFACE),
    "GPTJForCausalLM": (
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
        INTERFACE,
    ),
    "DeepseekV3ForCausalLM": (
        {**WIDE, **LATENT, **ROUTED, **EXPERTS, "num_key_value_heads": 4},
        "MLA",
    ),
    "HYV4ForCausalLM": (
        {**WIDE, **LATENT, **EXPERTS, "n_routed_experts": 2, "pad_token_id": 0},
        "MLA",
    ),
    "MiMoV2FlashForCausalLM": (
        {**WIDE, **EXPERTS, "n_routed_experts": 2, "head_dim": 8, "v_head_dim": 8},
        "sinks are served for gpt_oss,",
    ),
    "DeepseekV4ForCausalLM": (
        {**SMALL, **EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8}
        | {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 2}
        | {"index_n_heads": 2, "index_head_dim": 8},
        "compressed",
    ),
    "Llama4ForCausalLM": (
        {**WIDE, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "chunked_attention",
    ),
    "MambaForCausalLM": (
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "attention",
    ),
    "JambaForCausalLM": (
        {**WIDE, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        STATE,
    ),
    "BambaForCausalLM": ({**WIDE, **MAMBA, "attn_layer_indices": [1]}, STATE),
    "Qwen3NextForCausalLM": (
        {**WIDE, **EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 16}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16},
        STATE,
    ),
    "GraniteMoeHybridForCausalLM": (
        {**WIDE, **MAMBA, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["mamba", "attention"]},
        STATE,
    ),
    "Lfm2ForCausalLM": ({**WIDE, "layer_types": ["conv", "full_attention"]}, "conv"),
    "Gemma3nForCausalLM": (
        {**WIDE, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
        | {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        | {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        "share the K and V",
    ),
    "Gemma4ForCausalLM": (
        {**WIDE, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
        | {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
        "head_dim",
    ),
    "RecurrentGemmaForCausalLM": (
        {**SMALL, "num_hidden_layers": 3, "intermediate_size": 48, "lru_width": 32}
        | {"attention_window_size": 16},
        "recurrent|kind",
    ),
}
CONFIGS = {"Llama4": "Llama4Text", "Gemma3n": "Gemma3nText", "Gemma4": "Gemma4Text"}


def unsupported(name: str) -> PreTrainedModel:
    kind = name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    config = getattr(transformers, CONFIGS.get(kind, kind) + "Config")
    return getattr(transformers, name)(config(**UNSUPPORTED[name][0])).eval()


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


def test_moshi_is_refused_for_its_window_is_none():
    assert_refused_at_both_doors(built("moshi"), "window")


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
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
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


def test_model_spread_over_devices_is_refused_and_told_of_the_streamer():
    model = tiny()
    for layer, place in zip(model.model.layers, ("cpu", "meta")):
        add_hook_to_module(layer, AlignDevicesHook(execution_device=place))
    assert_refused_at_both_doors(model, r"several devices \(cpu, meta\).* `LayerStreamer`")


def test_model_without_its_weights_is_refused_and_told_of_the_streamer():
    assert_refused_at_both_doors(tiny().to("meta"), "meta device.* `LayerStreamer`")


def test_what_is_no_model_is_refused():
    for wrong in (None, tiny().config, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="expected a transformers model"):
            PagedCache(wrong)


# ------------------------------------------------------------------ what is asked of a forward

BOTH = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
STRANGE = {
    "4D mask": ({"attention_mask": BOTH}, r"attention_mask: .*\[2, 1, 6, 6\]"),
    "4D float mask": ({"attention_mask": BOTH.float().log()}, "attention_mask"),
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "attention sinks": ({"s_aux": torch.zeros(4)}, "s_aux"),
    "position bias": ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias"),
    "masked heads": ({"head_mask": torch.ones(4)}, "head_mask"),
    "unheard of": ({"temperature_tuning": 0.5}, "temperature_tuning"),
    "not causal": ({"is_causal": False}, "causal"),
    "packed texts": ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "cu_seq_lens_q"),
    "another window": ({"sliding_window": 3}, "sliding_window: .* uses 3"),
}


@pytest.mark.parametrize("case", STRANGE)
@torch.no_grad()
def test_what_paged_attention_does_not_do_is_refused_and_the_cache_goes_on(case):
    options, reason = STRANGE[case]
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        with pytest.raises(UnsupportedModelError, match=reason):
            model(**{**batch, **options}, past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert cache.stats().live == 0
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


def test_attention_weights_asked_of_generate_are_refused():
    model = tiny()
    with (
        PagedCache(model, max_tokens=256) as cache,
        pytest.raises(UnsupportedModelError, match="output_attentions"),
    ):
        generate(model, padded(prompts(6)), cache, output_attentions=True)


@torch.no_grad()
def test_hidden_states_are_not_refused():
    model = tiny()
    (text,) = prompts(6)
    expected = model(text[None], output_hidden_states=True, use_cache=False).hidden_states
    with PagedCache(model, max_tokens=256) as cache:
        actual = model(text[None], past_key_values=cache, output_hidden_states=True).hidden_states
    for a, e in zip(actual, expected):
        assert_close(a, e)


@torch.no_grad()
def test_dropout_is_refused_in_training_mode_only():
    model = tiny(attention_dropout=0.1)
    ids = torch.tensor([[5, 6, 7]])
    with PagedCache(model, max_tokens=256) as cache:
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"dropout: .* model.eval\(\)"):
            model(ids, past_key_values=cache)
        model.eval()
        model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 3


@pytest.mark.parametrize("name", ["pagedkv", "sdpa"])
def test_gradients_are_refused_and_the_cache_goes_on(name):
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        model.set_attn_implementation(name)
        with pytest.raises(GradModeError, match="no_grad"):
            model(**batch, past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


@pytest.mark.parametrize("name", ["DiffLlama", "Doge", "JetMoe"])
@torch.no_grad()
def test_model_that_attends_in_its_own_way_is_stopped_by_name(name):
    own = {"kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    fields = {**WIDE, **own} if name == "JetMoe" else WIDE
    model = build(name, **fields)
    # Not all tell by their configuration; then the first forward does.
    with pytest.raises(UnsupportedModelError), PagedCache(model, max_tokens=256) as cache:
        model(**padded(prompts(9, 5)), past_key_values=cache)
    assert attention_of(model) == "sdpa"


def test_forward_that_dies_outside_attention_leaves_no_step_open(monkeypatch):
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        generator = BatchGenerator(model, cache=cache.kv)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[0].mlp, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generate(model, batch, cache)
        generator.generate(batch["input_ids"].tolist(), max_new_tokens=2)
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


def test_model_that_changes_k_after_the_cache_is_refused_by_name_every_time():
    model, sizes = build("DiffLlama", **WIDE), {"page_size": 4, "max_tokens": 256}
    cache, generator = PagedCache(model, **sizes), BatchGenerator(model, **sizes)
    assert cache.kv is generator.cache
    for _ in range(2):
        for call in (
            lambda: generate(model, padded(prompts(9, 5)), cache),
            lambda: generator.generate([[5, 6, 7]], max_new_tokens=2),
        ):
            with pytest.raises(UnsupportedModelError, match="changes them after the cache"):
                call()
            cache.kv.check()
            assert cache.stats().sequences == len(cache.rows)
    cache.close()


class OwnAttention(torch.nn.Module):
    """Attends by itself to what the cache returns."""

    def __init__(self, plain):
        super().__init__()
        self.plain, self.layer_idx = plain, plain.layer_idx

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.plain.head_dim)
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (getattr(self.plain, n)(hidden_states).view(shape).transpose(1, 2) for n in names)
        k, v = past_key_values.update(k, v, self.layer_idx)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True
        )
        return self.plain.o_proj(out.transpose(1, 2).flatten(2)), None


def test_a_cache_of_another_model_is_refused_with_that_reason():
    mine, other, batch = tiny(), tiny(), padded(prompts(9, 5))
    with PagedCache(mine, max_tokens=256) as cache:
        with pytest.raises(UnsupportedModelError, match="made for another model"):
            generate(other, batch, cache)
        assert_same_tokens(generate(mine, batch, cache), generate(mine, batch))


@pytest.mark.parametrize("layers", [1, 3])
def test_last_layer_that_attends_by_itself_is_not_silently_wrong(layers):
    model = tiny(num_hidden_layers=layers)
    model.model.layers[-1].self_attn = OwnAttention(model.model.layers[-1].self_attn)
    reason = f"layer {layers - 1} did not reach paged attention"
    with PagedCache(model, max_tokens=256) as cache:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=reason):
                generate(model, padded(prompts(9, 5)), cache, max_new_tokens=1)
        assert cache.get_seq_length() == 0
        with pytest.raises(UnsupportedModelError, match=reason):
            BatchGenerator(model, cache=cache.kv).generate([[5, 6, 7]], max_new_tokens=1)
        cache.kv.check()


@torch.no_grad()
def test_autocast_is_refused_in_words_and_the_cache_goes_on():
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, max_tokens=256) as cache:
        generator = BatchGenerator(model, cache=cache.kv)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UnsupportedModelError, match=r"expected float32, .* autocast"):
                model(**batch, past_key_values=cache)
            with pytest.raises(UnsupportedModelError, match=r"expected float32, .* autocast"):
                generator.generate([[5, 6, 7]], max_new_tokens=2)
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


def test_model_wrapped_by_a_compiler_is_refused_with_the_way_that_works():
    with pytest.raises(TypeError, match=r"got OptimizedModule; `model.compile\(\)`"):
        PagedCache(torch.compile(tiny(), backend="eager"))


@pytest.mark.parametrize("way", ["model.compile", "model.forward"])
def test_model_compiled_in_place_gives_the_same_tokens(way):
    model = tiny()
    batch = padded(prompts(9, 5))
    expected = generate(model, batch)
    if way == "model.compile":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with PagedCache(model, max_tokens=256) as cache:
        assert_same_tokens(generate(model, batch, cache), expected)
        generator = BatchGenerator(model, cache=cache.kv)
        (result,) = generator.generate([batch["input_ids"][0].tolist()], max_new_tokens=10)
        assert result.tokens == expected.sequences[0, 9:].tolist()
    torch.compiler.reset()


def test_hooks_go_with_the_last_cache():
    model = tiny()
    with PagedCache(model, max_tokens=64), PagedCache(model, max_tokens=64):
        assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks_always_called


@torch.no_grad()
def test_sinks_of_models_nobody_has_looked_at_are_refused_without_a_cache_too():
    model = unsupported("MiMoV2FlashForCausalLM")
    register()
    model.set_attn_implementation("pagedkv")
    with pytest.raises(UnsupportedModelError, match=r"s_aux: .* not for mimo_v2_flash"):
        model(torch.tensor([[5, 6, 7]]), use_cache=False)


@torch.no_grad()
def test_packed_positions_mean_with_a_cache_what_they_mean_to_transformers():
    # With a cache transformers takes a row for one text, whatever its positions.
    model = tiny()
    ids, positions = torch.cat(prompts(4, 3))[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    expected = model(ids, position_ids=positions, past_key_values=dense(model)).logits
    with PagedCache(model, max_tokens=256) as cache:
        assert_close(model(ids, position_ids=positions, past_key_values=cache).logits, expected)
