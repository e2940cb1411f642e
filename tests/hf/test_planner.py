"""Plans against transformers itself: weights, layers and refusals of its model classes."""

import weakref
from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_CLASSES,
)

from pagedkv import CacheConfig, PagedCache, PagedKVCache, plan_memory
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import facts_of, types_with
from pagedkv.models.facts import FACTS
from pagedkv.models.names import settings_of
from pagedkv.planner.model_shape import aligned
from tests.effort import each_value, few
from tests.hf.table import DOCUMENT, SERVED, parsed, part
from tests.hf.tiny import build, named, tiny
from tests.hf.zoo import built
from tests.hybrids import HYBRIDS, hybrid, hybrid_config, in_dtype
from tests.planner.models import read_model

SERVED_TYPES = [
    kind
    for kind, verdict in parsed(part(DOCUMENT.read_text("utf-8"))).items()
    if verdict.header == SERVED
]
# One of each form: dense, tied, a second embedding, mixtures, latents, states, shared blocks,
# layers that attend twice, layers in two lists, towers, biases, feeds of two matrices.
SOME = [
    "llama", "gpt2", "gemma3n_text", "gpt_oss", "deepseek_v3", "longcat_flash", "ctrl",
    "qwen3_next", "zamba2", "hrm_text", "llava", "qwen3_vl_moe",
]  # fmt: skip
# Whose layers are in several lists, or in fewer than a configuration says.
SEVERAL_LISTS = {"dory", "hrm_text", "idefics"}
NEAR = 0.001
WINDOWED = {
    "gemma2": {}, "gemma3_text": {}, "gpt_oss": {}, "cohere2": {}, "mistral": {"sliding_window": 9},
    "phi3": {"sliding_window": 9}, "starcoder2": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    "gemma3n_text": {}, "gemma4_text": {}, "mimo_v2_flash": {}, "deepseek_v3": {},
    "gemma4_unified_text": {"num_global_key_value_heads": 1}, "kimi_linear": {},
    "qwen3": {}, "llama": {}, "exaone4": {"sliding_window": 9, "sliding_window_pattern": 3},
}  # fmt: skip
# Of a default so narrow that what lies between weights shows.
WIDER = {"bloom": {"hidden_size": 1024}}


def on_meta(config):
    """The model of a configuration, without memory."""
    kind = config.model_type
    classes = CLASSES if kind in CLASSES else IMAGE_CLASSES
    cls = getattr(transformers, classes[kind])
    with torch.device("meta"):
        return cls(config if cls.config_class is type(config) else config.get_text_config())


def layers_of(model) -> list[int]:
    """Elements of every layer that no other layer uses."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder()
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists:
        return []
    found = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    users = Counter(id(p) for layer in found for p in layer.parameters())
    return [sum(p.numel() for p in layer.parameters() if users[id(p)] == 1) for layer in found]


def ends_of(model) -> tuple[int, int]:
    """Elements of embedding and head; no head where they are one."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embedding.numel(), head.numel() if head is not embedding else 0


def assert_near(model, shape) -> None:
    nbytes = 2 * sum(p.numel() for p in model.parameters())
    if facts_of(model.config.model_type).masks:
        nbytes += sum(mask.numel() for mask in model.buffers())
    assert shape.weights == pytest.approx(nbytes, rel=NEAR)
    layers = [] if model.config.model_type in SEVERAL_LISTS else layers_of(model)
    if layers:
        assert shape.layers == pytest.approx([2 * n for n in layers], rel=NEAR)
    try:
        ends = ends_of(model)
    except (AttributeError, NotImplementedError):  # of several embeddings, or of another head
        return
    assert (shape.embedding, shape.head) == pytest.approx([2 * n for n in ends], rel=NEAR)
    if shape.experts and layers:
        decorated = [m for m in model.modules() if hasattr(m, "is_transposed")]
        expected = 2 * sum(p.numel() for m in decorated for p in m.parameters())
        assert shape.experts.total == pytest.approx(expected, rel=NEAR)


@pytest.mark.parametrize("kind", few(sorted({*CLASSES, *IMAGE_CLASSES}), *SOME))
def test_a_plan_weighs_what_the_model_of_transformers_weighs(kind):
    try:
        config = CONFIG_MAPPING[kind](**WIDER.get(kind, {}))
        model = on_meta(config)
    except Exception:  # of any kind: the defaults of some are no model
        assert kind not in SOME
        return
    try:
        shape = read_model(config, "bfloat16", images=kind not in CLASSES)
    except (UnsupportedModelError, ValueError):  # a default that its own class refuses
        assert kind not in SOME
        return
    assert not shape.exact
    assert not shape.assumed
    assert not model.config.is_encoder_decoder
    assert_near(model, shape)


SOME_WIDER = {  # as files on the hub say it
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 6}
    | {"use_double_wide_mlp": True},
    "mimo_v2_flash": {"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}
    | {"hybrid_layer_pattern": [0, 1, 1], "n_routed_experts": 4},
}


@pytest.mark.parametrize("kind", SOME_WIDER)
def test_what_stands_behind_attention_is_as_wide_in_each_layer_as_its_file_says(kind):
    fields = {**SOME_WIDER[kind], "vocab_size": 1000}
    config = CONFIG_MAPPING[kind](**fields)
    model = on_meta(config)
    described = config.to_dict()
    for name in ("layer_types", "mlp_layer_types"):
        described.pop(name, None)
    sizes = layers_of(model)
    assert max(sizes) > 1.3 * min(sizes)
    for planned, actual in zip(
        read_model(described | fields, "bfloat16").layers, sizes, strict=True
    ):
        assert planned == pytest.approx(2 * actual, rel=NEAR)


@pytest.mark.parametrize("family", [name for name in HYBRIDS if name != "kimi_linear"])
def test_states_of_a_plan_are_those_of_the_cache_also_from_a_short_file(family):
    config = hybrid_config(family)
    expected = CacheConfig.from_model(config, max_tokens=64, dtype="bfloat16")
    fields = config.to_dict() | {"vocab_size": 101}
    for left_out in ({}, {"layer_types", "layers_block_type"}):
        if left_out and family not in ("bamba", "falcon_h1", "jamba", "nemotron_h"):
            continue  # there the file says which layers there are
        file = {name: value for name, value in fields.items() if name not in left_out}
        if left_out and family == "nemotron_h":
            file |= {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": None}
        planned = CacheConfig.from_model(settings_of(file), max_tokens=64, dtype="bfloat16")
        assert planned == expected


def test_types_that_open_without_their_tower_are_those_whose_class_ignores_it():
    ignored = {
        kind: getattr(transformers, CLASSES[kind])._keys_to_ignore_on_load_unexpected or ()
        for kind in CLASSES.keys() & IMAGE_CLASSES.keys()
    }
    found = sorted(kind for kind, names in ignored.items() if "visual" in str(names))
    assert found == types_with("text_alone")


@pytest.mark.parametrize("kind", WINDOWED)
def test_layer_groups_are_those_of_the_model_even_if_the_file_does_not_list_them(kind):
    config = CONFIG_MAPPING[kind](**WINDOWED[kind])
    expected = CacheConfig.from_model(config, max_tokens=64, dtype="bfloat16")
    fields = config.to_dict()
    for left_out in ({}, {"layer_types"}, {"layer_types", "head_dim"}):
        if (
            kind.startswith(("qwen3", "gpt_oss", "exaone4", "deepseek", "kimi"))
            and "head_dim" in left_out
        ):
            continue  # no release of their files is without it
        file = {name: value for name, value in fields.items() if name not in left_out}
        assert CacheConfig.from_model(settings_of(file), max_tokens=64, dtype="bfloat16") == (
            expected
        )


class Peak(TorchDispatchMode):
    """Bytes of all tensors alive at once that were made meanwhile."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        for storage in (t.untyped_storage() for t in tensors_of(result)):
            key, nbytes = storage._cdata, storage.nbytes()
            if key in given or key in self.seen:
                continue
            self.seen.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, key, nbytes)
        return result

    def release(self, key, nbytes):
        self.live -= nbytes
        self.seen.discard(key)


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
ACTIVE = {
    "llama": ("Llama", {}),
    "llama, all heads": ("Llama", {"intermediate_size": 256, "num_key_value_heads": 8}),
    "llama, narrow": ("Llama", {"intermediate_size": 64, "num_attention_heads": 2}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 320}),
    "gpt_oss": ("GptOss", {**EXPERTS, "head_dim": 64}),
    "minicpm3": (
        "MiniCPM3",
        {"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
        | {"v_head_dim": 48, "num_key_value_heads": 8},
    ),
    "gemma4": (
        "Gemma4Text",
        {"head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": 1000}
        | {"pad_token_id": 0},
    ),
}


@pytest.mark.parametrize(("case", "dtype"), each_value(ACTIVE, ["float32", "bfloat16"]))
def test_activations_are_those_of_a_pass(case, dtype):
    name, fields = ACTIVE[case]
    shape = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = build(name, **{**shape, **heads, "vocab_size": 1000, **fields})
    model = model.to(getattr(torch, dtype))
    tokens = torch.randint(0, 1000, (1, 512))
    plan = plan_memory(
        *(model.config,), device_memory="4GiB", device="cpu", step_tokens=512, weight_dtype=dtype
    )
    assert not plan.streams
    cache = PagedCache(model, max_tokens=1024)
    with torch.inference_mode(), Peak() as pass_:
        model(tokens, **named(cache), logits_to_keep=1)
    planned = plan.device_bytes["activations"]
    # Attention keeps a mask for each group of gpt_oss until the step is over: that is workspace.
    masks = 2 * 512 * 512 * model.dtype.itemsize if case == "gpt_oss" else 0
    assert pass_.peak <= 1.03 * planned + masks
    assert planned <= 1.35 * pass_.peak
    cache.close()


DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "head_dim": 64}
DELTA |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
WITH_STATES = {
    "qwen3_5": DELTA,
    "bamba": {"mamba_n_heads": 16, "mamba_d_state": 16},
    "lfm2": {},
    "zaya": {"head_dim": 64},
    "jamba": {"mamba_d_state": 16},
    "inkling_text": {"sliding_window_size": 64, "rel_extent": 300, "swa_num_attention_heads": 8},
    "inkling_text, narrow": {"rel_extent": 8, "intermediate_size": 256, "hidden_size": 1024},
    "inkling2_text": {"head_dim": 64, "rel_extent": 8, "conv_kernel_size": 4},
    "inkling2_text, blocks": {"head_dim": 64, "n_layers_per_attn_res_block": 1},
    "inkling2_text, bias": {"head_dim": 64, "rel_extent": 300},
}


@pytest.mark.parametrize(("family", "dtype"), each_value(WITH_STATES, ["float32", "bfloat16"]))
def test_activations_of_layers_with_states_are_those_of_a_pass(family, dtype):
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    shape |= {"vocab_size": 1000, "max_position_embeddings": 2048, **WITH_STATES[family]}
    model = in_dtype(hybrid(family.partition(",")[0], **shape), getattr(torch, dtype))
    plan = plan_memory(
        *(model.config,), device_memory="4GiB", device="cpu", step_tokens=512, weight_dtype=dtype
    )
    cache = PagedCache(model, max_tokens=1024)
    with torch.inference_mode(), Peak() as pass_:
        model(torch.randint(0, 1000, (1, 512)), **named(cache), logits_to_keep=1)
    planned = plan.device_bytes["activations"] + 2 * plan.bytes_per_state  # copies of states
    assert pass_.peak <= 1.03 * planned
    assert planned <= 1.5 * pass_.peak
    cache.close()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma4_large", "deepseek_v3"])
def test_the_pool_of_a_plan_takes_what_the_plan_says(kind):
    config = tiny(kind).config
    plan = plan_memory(config, device_memory="50MiB", device="cpu", batch=3, length=100)
    cache = PagedKVCache(plan.cache, device="cpu")
    assert cache._storage.nbytes == plan.device_bytes["KV pages"]


# Whose files have several tensors in one, or one in several, so that each begins elsewhere.
CUT_OTHERWISE = {
    "ernie4_5_vl_moe", "kimi_k25", "nemotron_h_omni", "olmo_hybrid", "qianfan_ocr", "step3p7",
}  # fmt: skip
# Transformers builds them of no configuration that says its dtype.
NOT_BUILT = {"apertus", "apertus1p5_text"}
# Biases that no gradient reaches, heads and embeddings by other names, blocks that layers share.
WEIGHED = ["llama", "dots1", "gemma4_text", "ctrl", "modernbert-decoder", "zamba2", "gpt_neo"]


@pytest.mark.parametrize("kind", few(sorted({*SERVED_TYPES} - NOT_BUILT), *WEIGHED))
def test_a_saved_checkpoint_weighs_as_its_configuration_and_as_the_model_itself(kind, tmp_path):
    sees = kind in IMAGE_CLASSES and "vision_config" in CONFIG_MAPPING[kind].sub_configs
    model = built(kind, sees)
    model.save_pretrained(tmp_path)
    saved = read_model(tmp_path, images=sees)
    assert saved.exact
    masks = {name for name, _ in model.named_buffers() if facts_of(kind).masks}
    kept = {**model.state_dict(keep_vars=True), **{n: model.get_buffer(n) for n in masks}}
    sizes = {id(t): aligned(t.numel() * (1 if n in masks else 4)) for n, t in kept.items()}
    assert abs(saved.weights - sum(sizes.values())) <= (1024 if kind in CUT_OTHERWISE else 0)
    if kind not in CUT_OTHERWISE:
        told = read_model(model.config, "float32", images=sees)
        assert told.weights == saved.weights
        assert told.head_bytes == saved.head_bytes
        if kind != "granite_speech":  # the list of whose encoder is larger here
            assert (told.layers, told.active) == (saved.layers, saved.active)


def test_every_row_of_facts_is_of_a_type_that_there_is():
    assert not [kind for kind in FACTS if kind not in CONFIG_MAPPING]
