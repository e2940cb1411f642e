"""Plans: the arithmetic of memory, what is chosen when it is short, and advice that works."""

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedkv import BudgetExceeded, CacheConfig, MemoryPlan, plan_memory
from pagedkv.errors import CheckpointError, UnsupportedModelError
from pagedkv.planner.checkpoint import Checkpoint
from pagedkv.planner.costs import size_in_bytes, spread
from pagedkv.planner.shapes import read_model

GIB = 1 << 30


def llama(hidden, feed, layers, heads, kv_heads, vocab, longest=8192, **fields):
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **fields,
    }


LLAMA_70B = llama(8192, 28672, 80, 64, 8, 128256)
LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_7B = llama(4096, 11008, 32, 32, 32, 32000, 4096, dtype="float16")
QWEN_14B = llama(5120, 13824, 48, 40, 8, 152064, 32768, model_type="qwen2")
SMOL = llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True, dtype="float32")
MIXTRAL = llama(
    4096, 14336, 32, 32, 8, 32000, 32768,
    model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
GEMMA_27B = llama(
    4608, 36864, 46, 32, 16, 256000,
    model_type="gemma2", head_dim=128, sliding_window=4096, tie_word_embeddings=None,
)  # fmt: skip
MODELS = {
    "llama-70b": LLAMA_70B, "llama-8b": LLAMA_8B, "llama-7b": LLAMA_7B, "qwen-14b": QWEN_14B,
    "smol": SMOL, "mixtral": MIXTRAL, "gemma-27b": GEMMA_27B,
}  # fmt: skip


def total(plan):
    return sum(plan.device_bytes.values())


# ------------------------------------------------------------------ arithmetic


def test_70b_with_grouped_queries_keeps_8_mib_a_layer_at_2048_tokens():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", kv_dtype="fp16", max_tokens=2048)
    assert plan.device_bytes["KV pages"] == 640 << 20
    assert plan.device_bytes["KV pages"] // 80 == 8 << 20
    assert plan.bytes_per_token == 320 << 10


def test_7b_without_grouped_queries_takes_17_gb_at_4096_tokens():
    plan = plan_memory(LLAMA_7B, device_memory="24GiB", length=4096, max_tokens=4096)
    assert not plan.streams
    assert plan.bytes_per_token == 512 << 10
    assert plan.device_bytes["KV pages"] == 2 * GIB
    weights = plan.device_bytes["glue"] + plan.device_bytes["resident layers"]
    assert weights == pytest.approx(13.5e9, rel=0.01)
    assert weights + 2 * GIB + 1e9 == pytest.approx(17e9, rel=0.03)


def test_qwen_14b_keeps_192_kib_a_token():
    assert plan_memory(QWEN_14B, device_memory="48GiB").bytes_per_token == 192 << 10


def test_a_layer_of_70b_weighs_1_71_gb_and_of_8b_0_436_gb():
    for config, layer, stack in [(LLAMA_70B, 1.711e9, 136.9e9), (LLAMA_8B, 0.4362e9, 13.96e9)]:
        shape = read_model(config)
        assert shape.layers[0] == pytest.approx(layer, rel=1e-3)
        assert sum(shape.layers) == pytest.approx(stack, rel=1e-3)
    assert sum(read_model(LLAMA_70B, "int4").layers) == pytest.approx(38.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "weights", "link", "expected"),
    [
        (LLAMA_8B, None, 55, (3.9, 31.5, 252)),
        (LLAMA_8B, "int4", 25, (6.4, 51, 407)),
        (LLAMA_70B, None, 25, (0.18, 1.5, 11.7)),
        (LLAMA_70B, "int4", 7, (0.18, 1.45, 11.6)),
    ],
)
def test_predictions_follow_the_law_of_the_slowest_link(config, weights, link, expected):
    plan = plan_memory(config, device_memory="5GiB", weight_dtype=weights, length=128)
    stack = sum(plan.shape.layers)
    for batch, tokens in zip((1, 8, 64), expected):
        found = plan.predict(link, batch=batch, compute_tflops=500)
        assert found * plan.streamed_bytes / stack == pytest.approx(tokens, rel=0.03)


def test_disk_limits_what_host_memory_does_not_hold():
    slow = plan_memory(LLAMA_70B, device_memory="8GiB")
    tiered = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="64GiB")
    assert slow.disk_bytes == slow.streamed_bytes
    assert 0 < tiered.disk_bytes < tiered.streamed_bytes
    assert slow.predict(25, disk_gbps=7) == pytest.approx(7e9 / slow.streamed_bytes)
    assert tiered.predict(25, disk_gbps=3.5) == pytest.approx(3.5e9 / tiered.disk_bytes)
    assert tiered.predict(25) == tiered.predict(25, disk_gbps=25)
    assert slow.predict(25, accepted=4) == pytest.approx(4 * slow.predict(25))


@pytest.mark.parametrize(("kv_format", "gain"), [("int8", 1.9), ("int4", 3.0), ("fp8", 1.99)])
def test_pages_in_fewer_bits_hold_more_tokens_in_the_same_memory(kv_format, gain):
    asked = {"device_memory": "40GiB", "batch": 4, "length": 2048}
    model = llama(4096, 14336, 32, 32, 8, 128_256, longest=1 << 20)
    dense, coded = (plan_memory(model, **asked, kv_format=f) for f in ("dense", kv_format))
    assert coded.max_tokens >= gain * dense.max_tokens
    assert coded.device_bytes["KV pages"] == coded.cache.nbytes
    assert coded.cache.formats[0].startswith(kv_format)


def test_pages_are_counted_whole():
    for page in (1, 7, 16, 100):
        plan = plan_memory(LLAMA_8B, device_memory="4GiB", length=1000, page_size=page)
        config = plan.cache
        assert plan.max_tokens % page == 0
        assert plan.max_tokens >= 1000
        assert plan.device_bytes["KV pages"] == config.nbytes
        assert config.nbytes == plan.max_tokens * plan.bytes_per_token


def test_sliding_layers_keep_their_window():
    all_full = GEMMA_27B | {"layer_types": ["full_attention"] * 46}
    length = {"length": 8192, "max_tokens": 65536, "batch": 8}
    half = plan_memory(GEMMA_27B, device_memory="80GiB", **length)
    full = plan_memory(all_full, device_memory="120GiB", **length)
    pages = 9 * (4096 // 16 + 2) + -(-half.step_tokens // 16)
    assert half.cache.num_pages(1) == pages
    assert half.cache.groups[1].window == 4096
    assert half.cache.groups[1].layers == tuple(range(0, 46, 2))
    layer = full.device_bytes["KV pages"] // 46
    assert half.device_bytes["KV pages"] == 23 * layer + 23 * layer * pages // 4096


# ------------------------------------------------------------------ what is chosen


def test_70b_fits_8_gib_with_streamed_embedding_and_head():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB")
    assert plan.streams
    assert plan.max_tokens >= 2048
    assert plan.max_length() >= 2048
    assert not plan.head_resident
    assert not plan.embedding_resident
    assert plan.ring_depth == 2
    assert plan.ring_slot == max(plan.shape.layers)
    assert 0 < plan.head_rows * 8192 * 2 <= plan.ring_slot
    assert list(plan.device_bytes) == [
        *("device context", "glue", "resident layers", "ring", "KV pages"),
        *("activations", "workspace"),
    ]
    assert total(plan) + plan.unused == plan.device_memory == 8 * GIB
    assert plan.unused < 80 << 20


def test_nothing_streams_where_everything_fits():
    plan = plan_memory(LLAMA_8B, device_memory="24GiB", batch=4)
    assert not plan.streams
    assert plan.resident_layers == tuple(range(32))
    assert plan.ring_depth == plan.ring_slot == plan.head_rows == plan.streamed_bytes == 0
    assert plan.max_length(4) == plan.max_length() >= 2048
    assert plan.verify_width == 1


def test_spare_memory_goes_to_resident_layers_spread_over_the_stack():
    streamed = []
    for gib in (8, 16, 24, 48, 80, 120):
        plan = plan_memory(LLAMA_70B, device_memory=f"{gib}GiB")
        streamed.append(plan.streamed_bytes)
        kept = plan.resident_layers
        assert total(plan) <= gib * GIB
        if kept:
            gaps = [b - a for a, b in pairwise(kept)]
            assert max(gaps, default=1) - min(gaps, default=1) <= 1
        # One more layer would not have fitted.
        assert plan.unused + (plan.max_tokens - 2048) * plan.bytes_per_token < plan.ring_slot + GIB
    assert streamed == sorted(streamed, reverse=True)


def test_the_head_stays_where_that_spares_more_than_layers():
    # The head weighs as much as sixteen layers.
    config = llama(512, 1024, 24, 8, 8, 128256)
    head, layer = read_model(config).head, read_model(config).layers[0]
    sizes = range(680 << 20, 1000 << 20, 10 << 20)
    for memory in sizes:
        plan = plan_memory(config, device_memory=memory)
        others = sum(plan.shape.layers) + head - plan.streamed_bytes
        assert others == len(plan.resident_layers) * layer + plan.head_resident * head
    assert {plan_memory(config, device_memory=m).head_resident for m in sizes} == {False, True}


def test_a_tied_head_and_the_embedding_stay_together():
    for memory in range(600 << 20, 1200 << 20, 17 << 20):
        plan = plan_memory(SMOL, device_memory=memory, length=256)
        assert plan.shape.head == 0
        assert plan.embedding_resident == plan.head_resident


def test_short_memory_narrows_a_pass_before_it_fails():
    roomy = plan_memory(LLAMA_8B, device_memory="8GiB")
    assert roomy.step_tokens == 2048
    assert roomy.verify_width == 16
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(LLAMA_8B, device_memory="1GiB", length=2048)
    narrow = plan_memory(LLAMA_8B, device_memory=refused.value.needed, length=2048)
    assert (narrow.step_tokens, narrow.verify_width) == (128, 1)
    tight = plan_memory(LLAMA_8B, device_memory=refused.value.needed + (60 << 20), length=2048)
    assert 128 < tight.step_tokens < 1024


def test_widths_follow_the_link():
    slow = plan_memory(LLAMA_8B, device_memory="12GiB", length=8192, link_gbps=12)
    fast = plan_memory(LLAMA_8B, device_memory="12GiB", length=8192, link_gbps=200)
    assert slow.step_tokens > fast.step_tokens == 256
    many = plan_memory(*(LLAMA_8B,), device_memory="12GiB", batch=100, length=128, link_gbps=200)
    assert many.verify_width == 4  # 436 tokens take as long as the layers
    assert plan_memory(LLAMA_8B, device_memory="8GiB", step_tokens=300).step_tokens == 300


def test_host_memory_holds_a_fixed_set_spread_over_the_streamed_layers():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="48GiB")
    assert plan.head_in_host
    assert set(plan.host_layers) < set(plan.streamed_layers)
    assert sum(plan.host_bytes.values()) <= 48 * GIB
    assert plan.host_bytes["staging"] == 2 * plan.ring_slot
    gaps = [b - a for a, b in pairwise(plan.host_layers)]
    assert max(gaps) <= min(gaps) + 2
    whole = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="140GiB")
    assert whole.host_layers == whole.streamed_layers
    assert whole.host_bytes["staging"] == whole.disk_bytes == 0


def test_a_cpu_has_no_context_and_reads_straight_into_the_ring():
    plan = plan_memory(SMOL, device_memory="400MiB", length=512, device="cpu")
    assert plan.streams
    assert plan.device_bytes["device context"] == 0
    assert plan.host_bytes["staging"] == 0


def test_a_preempted_sequence_is_copied_or_computed_whichever_is_sooner():
    plan = plan_memory(LLAMA_8B, device_memory="6GiB")
    # 128 KiB a token over the link, or the whole model once more.
    assert plan.recompute_or_restore(2000) == "restore"
    resident = plan_memory(SMOL | {"dtype": "bfloat16"}, device_memory="2GiB")
    # 22.5 KiB a token at 1 GB/s take 23 us, 2 x 135e6 operations 3 us.
    assert resident.recompute_or_restore(4000, link_gbps=1) == "recompute"
    assert resident.recompute_or_restore(4000, link_gbps=50) == "restore"


def test_lengths_and_batches_share_the_pages():
    plan = plan_memory(LLAMA_8B, device_memory="8GiB", batch=4, length=2048, max_tokens=8192)
    assert [plan.max_length(n) for n in (1, 4, 8, 10**6)] == [8192, 2048, 1024, 0]
    assert [plan.max_batch(n) for n in (8192, 2048, 1000, 8193)] == [1, 4, 8, 0]


# ------------------------------------------------------------------ exactly what fits

PAIRS = [
    *((LLAMA_70B, f"{gib}GiB", {}) for gib in (8, 10, 12, 16, 24)),
    *((LLAMA_8B, f"{gib}GiB", {"batch": 16, "length": 200}) for gib in (3, 4, 6, 8, 12)),
    *((LLAMA_7B, f"{gib}GiB", {"batch": 8}) for gib in (16, 20, 24, 28)),
    *((QWEN_14B, f"{gib}GiB", {"weight_dtype": "int4"}) for gib in (6, 8, 12, 15)),
    *((GEMMA_27B, f"{gib}GiB", {"batch": 32, "length": 1024}) for gib in (24, 70)),
    *((MIXTRAL, f"{gib}GiB", {"batch": 2}) for gib in (11, 24)),
    *((SMOL, f"{mib}MiB", {"batch": 64, "length": 99, "page_size": 7}) for mib in (1200, 1500)),
    (SMOL, "600MiB", {"device": "cpu", "batch": 4, "length": 512}),
]


@pytest.mark.parametrize(("config", "memory", "options"), PAIRS)
def test_max_tokens_fits_and_one_page_more_does_not(config, memory, options):
    plan = plan_memory(config, device_memory=memory, **options)
    page = plan.cache.page_size
    again = plan_memory(config, device_memory=memory, max_tokens=plan.max_tokens, **options)
    assert again == plan
    assert total(plan) <= plan.device_memory
    with pytest.raises(BudgetExceeded, match=r"device_memory: .* needs at least") as refused:
        plan_memory(config, device_memory=memory, max_tokens=plan.max_tokens + page, **options)
    assert refused.value.advice == {"max_tokens": plan.max_tokens}
    assert refused.value.needed > refused.value.available == plan.device_memory


def random_request(rng):
    config = dict(rng.choice(list(MODELS.values())))
    memory = int(rng.choice([0.3, 1, 2, 4, 8, 16, 24]) * rng.uniform(0.5, 1.5) * GIB)
    options = {"device_memory": memory, "batch": rng.choice([1, 1, 2, 8, 40, 300])}
    if rng.random() < 0.5:
        options["length"] = rng.randint(1, 4096)
    if rng.random() < 0.3:
        options["max_tokens"] = rng.randint(1, 100_000)
    if rng.random() < 0.3:
        options["step_tokens"] = rng.randint(300, 50_000)
    if rng.random() < 0.5:
        options["host_memory"] = int(2 ** rng.uniform(18, 37))
    if rng.random() < 0.3:
        options["kv_dtype"] = "fp32"
    options["page_size"] = rng.choice([1, 16, 16, 33])
    options["device"] = rng.choice(["cuda", "cuda", "cpu"])
    return config, options


def test_advice_fits_for_any_model_and_budget():
    rng = random.Random(5)
    refusals, keys = 0, set()
    for _ in range(400):
        config, options = random_request(rng)
        try:
            plan = plan_memory(config, **options)
        except BudgetExceeded as error:
            refused = error
            plan = None
        if plan is None:
            refusals += 1
            ((name, value),) = refused.advice.items()
            keys.add(name)
            assert f"{name}={value} would fit" in str(refused)
            assert refused.needed > refused.available
            assert refused.largest in str(refused)
            plan = plan_memory(config, **options | refused.advice)
        assert total(plan) <= plan.device_memory
        assert plan.host_memory is None or sum(plan.host_bytes.values()) <= plan.host_memory
        assert plan.device_bytes["KV pages"] == plan.cache.nbytes
        assert plan.step_tokens >= plan.batch * plan.verify_width
    assert refusals > 100
    assert keys >= {"max_tokens", "length", "batch", "device_memory", "host_memory", "step_tokens"}


# ------------------------------------------------------------------ where a model comes from


def save(folder, config, dtype="BF16", extra=None):
    """A checkpoint of zeros with the tensors of a llama; sparse, so of any size."""
    h, feed, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj.weight": [h, h],
        "self_attn.k_proj.weight": [kv, h],
        "self_attn.v_proj.weight": [kv, h],
        "self_attn.o_proj.weight": [h, h],
        "mlp.gate_proj.weight": [feed, h],
        "mlp.up_proj.weight": [feed, h],
        "mlp.down_proj.weight": [h, feed],
        "input_layernorm.weight": [h],
        "post_attention_layernorm.weight": [h],
    }
    shapes = {"model.embed_tokens.weight": [vocab, h], "model.norm.weight": [h]}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [vocab, h]
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= extra or {}
    width, header, at = {"BF16": 2, "F32": 4, "U8": 1}[dtype], {}, 0
    for name, shape in shapes.items():
        size = width
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))


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


def test_a_folder_with_a_configuration_alone_is_estimated(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    assert not plan_memory(str(tmp_path), device_memory="2GiB").shape.exact


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


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("500MiB", 500 << 20), ("1.5 GiB", 3 << 29),
        ("64kB", None), ("7", 7), (12, 12), ("12B", 12), ("2TB", 2 * 10**12), ("8gib", None),
        ("-8GiB", None), (0, None), ("0GiB", None), ("", None), ("GiB", None), (-1, None),
        (True, None), (8.5, None), ("8GiB8", None), ("1e9", None), (None, None), ("8PiB", None),
        pytest.param("9" * 5000, None, id="5000 digits"),
        pytest.param("9" * 400 + ".5GiB", None, id="400 digits and a half"),
        pytest.param(10**5000, None, id="10**5000"),
        pytest.param(-(10**5000), None, id="-10**5000"),
    ],
)  # fmt: skip
def test_sizes_are_read_or_refused_by_name(value, expected):
    if expected is None:
        with pytest.raises(ValueError, match=r"memory: expected bytes .*got"):
            size_in_bytes("memory", value)
    else:
        assert size_in_bytes("memory", value) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_memory": "8 gigs"}, "device_memory: expected bytes .*'8 gigs'"),
        ({"host_memory": -1}, "host_memory: expected bytes .*-1"),
        ({"batch": 0}, "batch: expected a positive int, got 0"),
        ({"batch": True}, "batch: expected"),
        ({"length": 2.0}, r"length: expected a positive int, got 2\.0"),
        ({"length": 9000}, "length: llama takes at most 8192 tokens, got 9000"),
        ({"page_size": 0}, "page_size: expected"),
        ({"max_tokens": -16}, "max_tokens: expected"),
        ({"step_tokens": 0}, "step_tokens: expected"),
        ({"step_tokens": 3, "batch": 4}, "step_tokens: expected at least one for each of 4"),
        ({"kv_dtype": "int3"}, "kv_dtype: expected one of .*'int3'"),
        ({"weight_dtype": "q4_k"}, "weight_dtype: expected one of .*'q4_k'"),
        ({"link_gbps": 0}, "link_gbps: expected a positive number, got 0"),
        ({"compute_tflops": float("nan")}, "compute_tflops: expected"),
        ({"device": "tpu"}, "device: expected 'cuda' or 'cpu', got 'tpu'"),
    ],
)
def test_mistakes_name_the_argument_what_was_expected_and_what_came(options, words):
    with pytest.raises(ValueError, match=words):
        plan_memory(LLAMA_8B, **{"device_memory": "8GiB", **options})


def test_a_configuration_without_what_counts_is_refused():
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        for value in (None, 0, "many", 2.0, True):
            with pytest.raises(ValueError, match=f"model: expected {name} in its config"):
                plan_memory(LLAMA_8B | {name: value}, device_memory="8GiB")
    with pytest.raises(TypeError, match=r"model: expected a config .* got int"):
        plan_memory(7, device_memory="8GiB")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"deepseek_v3 .*latent attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 .*encoder-decoder"),
        ({"model_type": "gemma3n", "num_kv_shared_layers": 10}, "gemma3n .*share"),
        ({"model_type": "bloom"}, "bloom .*attention interface"),
        ({"model_type": "gemma3n_text", "intermediate_size": [48, 48]}, "several values of inter"),
        ({"model_type": "whisper", "num_hidden_layers": None}, "whisper .*encoder-decoder"),
        ({"model_type": "nemotron_h", "num_hidden_layers": None}, "nemotron_h .*recurrent state"),
        ({"layers_block_type": ["mamba", "attention"]}, "kind mamba"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "differ in the shape"),
        ({"model_type": "gemma4_text"}, "gemma4_text .*differ in the shape"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "not causal"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "mamba", "num_attention_heads": None}, "mamba has no attention heads"),
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, "linear_attention keep no"),
    ],
)
def test_models_that_pages_cannot_serve_are_refused_by_name(fields, words):
    with pytest.raises(UnsupportedModelError, match=words):
        plan_memory(LLAMA_8B | fields, device_memory="80GiB")


def test_a_folder_must_have_what_a_checkpoint_has(tmp_path):
    with pytest.raises(CheckpointError, match="expected a folder"):
        plan_memory(tmp_path / "nowhere", device_memory="8GiB")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_memory(tmp_path, device_memory="8GiB")
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header claims"):
        plan_memory(tmp_path, device_memory="8GiB")
    save(tmp_path, SMOL | {"num_hidden_layers": 12}, "F32")
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    with pytest.raises(CheckpointError, match=r"expected tensors of layers 0\.\.29"):
        plan_memory(tmp_path, device_memory="8GiB")
    with pytest.raises(CheckpointError, match="GGUF"):
        plan_memory("model.gguf", device_memory="8GiB")


# ------------------------------------------------------------------ the answer


def test_a_plan_prints_every_item_and_adds_up():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="16GiB")
    printed = str(plan)
    for words in (*plan.device_bytes, *plan.host_bytes, "unused", "budget", "2 of 80", "PCIe"):
        assert words in printed
    device = printed.split("\n\n")[1].splitlines()[1:]
    shown = [float(line[17:26]) for line in device]
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.04)
    assert shown[-1] == 8
    assert max(map(len, printed.splitlines())) <= 100


def test_json_has_what_the_table_has():
    plan = plan_memory(LLAMA_70B, device_memory="8GiB", host_memory="16GiB")
    found = json.loads(plan.to_json())
    assert found["device_bytes"] == plan.device_bytes
    assert found["max_tokens"] == plan.max_tokens
    assert found["resident_layers"] == list(plan.resident_layers)
    assert found["weights"] == "from the config"


def test_spread_is_even():
    for of in range(1, 40):
        for chosen in range(of + 1):
            found = spread(chosen, of)
            assert len(found) == chosen
            gaps = [b - a for a, b in pairwise(found)]
            assert max(gaps, default=1) - min(gaps, default=1) <= 1


def test_the_cache_of_a_plan_is_what_from_model_makes():
    plan = plan_memory(LLAMA_8B, device_memory="8GiB")
    assert isinstance(plan, MemoryPlan)
    assert isinstance(plan.cache, CacheConfig)
    assert plan.cache.max_step_tokens == plan.step_tokens
    assert plan.cache.max_sequence_length == min(8192, plan.max_tokens)


def test_planning_imports_no_torch(fresh_python):
    code = f"""
import sys
import pagedkv
plan = pagedkv.plan_memory({LLAMA_70B!r}, device_memory="8GiB")
str(plan), plan.to_json()
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    assert fresh_python("-c", code) == "[]"


def test_the_documentation_shows_a_plan_as_it_is_printed():
    page = (Path(__file__).resolve().parents[1] / "docs" / "streaming.md").read_text()
    model = LLAMA_70B | {"_name_or_path": "Llama-3-70B"}
    assert str(plan_memory(model, device_memory="8GiB", host_memory="64GiB")) in page
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(model, device_memory="8GiB", batch=8)
    assert str(refused.value) in " ".join(page.split())
