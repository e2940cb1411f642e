"""Models whose layers are on several devices: tokens as on one, pages where layers compute."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from pagedkv import BatchGenerator, CacheConfig, PagedCache, PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.model import device_of
from pagedkv.hf.placement import is_plain, placement_of
from tests.devices import HOST, A, B, C, Devices, let_grow
from tests.effort import few, slow
from tests.hf.images import pictured, seeing_model
from tests.hf.spread import spread
from tests.hf.tiny import VARIED, named, padded, prompts, tiny
from tests.hybrids import HYBRIDS, SHARING_BLOCKS, STEPWISE, tiny_hybrid

SIZES = {"max_tokens": 512, "page_size": 4}
GREEDY = {"max_new_tokens": 4, "do_sample": False}  # of which each row begins a page


@pytest.fixture
def devices():
    with Devices() as devices:
        yield devices


def batch():
    torch.manual_seed(5)
    return padded(prompts(9, 5, 12))


def unpadded(batch):
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist())
    return [[x for x, real in zip(*row) if real] for row in rows]


def answers(model, device, **fields):
    """Answers a batch by `generate` and by a `BatchGenerator`; returns tokens on the host."""
    given = {name: value.to(device) for name, value in batch().items()}
    with PagedCache(model, **SIZES, **fields) as cache:
        whole = model.generate(**given, **named(cache), **GREEDY)
        assert whole.device == device
        cache.kv.check()
    if model.config.model_type in STEPWISE:  # whose rows cannot be packed
        return whole.cpu().tolist()
    generator = BatchGenerator(model, **SIZES, **fields)
    results = generator.generate(unpadded(batch()), max_new_tokens=4)
    generator.close()
    return whole.cpu().tolist(), [result.tokens for result in results]


def split(model, at=None):
    """Layers up to a middle on A, the others on B."""
    layers = model.config.get_text_config().num_hidden_layers
    at = (layers + 1) // 2 if at is None else at
    return spread(model, [A] * at + [B] * (layers - at))


# ------------------------------------------------------------------ as on one device

FAST = ("gemma3",)  # the tests below have llama, and deepseek_v3
# Their last layers attend to the K and V of the third, and of the second.
SHARING = {"gemma3n": 1, "gemma4": 1}


@pytest.mark.parametrize("family", few([*VARIED, "deepseek_v3"], *FAST))
def test_tokens_are_those_of_one_device(family):
    torch.manual_seed(0)
    model = tiny(family)
    expected = answers(model, torch.device("cpu"))
    with Devices() as devices:
        split(model, SHARING.get(family))
        assert answers(model, A) == expected
        assert devices.crossed.keys() == {(A, B), (B, A)}


def test_a_block_of_several_layers_is_on_one_device():
    torch.manual_seed(0)
    model = tiny("longcat_flash")
    expected = answers(model, torch.device("cpu"))
    with Devices():
        spread(model, [A, B])
        assert placement_of(model, A).layers == (A, A, B, B)
        assert answers(model, A) == expected


def test_latents_are_absorbed_beside_hooks_that_only_move():
    torch.manual_seed(0)
    model, watching = tiny("deepseek_v3"), {"retention": "importance", "budget": 72}
    expected = answers(model, torch.device("cpu"), **watching)
    with Devices():
        assert answers(split(model), A, **watching) == expected
        linear = model.model.layers[0].self_attn.kv_b_proj
        assert is_plain(linear)
        moved = linear.forward
        linear.forward = lambda x: 2 * moved(x)
        assert not is_plain(linear)
        linear.forward = moved
        linear._hf_hook.offload = True
        assert not is_plain(linear)


DIVISIBLE = [family for family in HYBRIDS if family not in SHARING_BLOCKS]


@pytest.mark.parametrize("family", few(DIVISIBLE, "lfm2"))
def test_tokens_of_a_hybrid_are_those_of_one_device(family):
    torch.manual_seed(0)
    model = tiny_hybrid(family)
    expected = answers(model, torch.device("cpu"))
    with Devices():
        split(model, 2)
        assert answers(model, A) == expected


OPTIONS = {
    "int8": {"kv_format": "int8"},
    "keydiff": {"retention": "keydiff", "budget": 72},
    "importance": {"retention": "importance", "budget": 72},
    "host tier": {"host_tokens": 512},
    "growing": {"growth_step": 512},
}


@pytest.mark.parametrize("option", few(OPTIONS, "int8"))
def test_pages_of_any_kind_give_the_tokens_of_one_device(option, monkeypatch):
    torch.manual_seed(0)
    model = tiny("llama", head_dim=16)
    expected = answers(model, torch.device("cpu"), **OPTIONS[option])
    with Devices() as devices:
        let_grow(devices, monkeypatch)
        assert answers(split(model), A, **OPTIONS[option]) == expected


@pytest.mark.parametrize("options", [{"seed": 3, "do_sample": True}, *slow({"verify_width": 4})])
def test_sampling_and_drafts_are_those_of_one_device(options):
    torch.manual_seed(0)
    model = tiny()
    ids = [x * 2 for x in unpadded(batch())]
    width = {"verify_width": options.pop("verify_width")} if "verify_width" in options else {}

    def run():
        generator = BatchGenerator(model, **SIZES, **width)
        results = generator.generate(ids, max_new_tokens=12, num_return_sequences=1, **options)
        generator.close()
        return [result.tokens for result in results]

    expected = run()
    with Devices():
        split(model)
        assert run() == expected


def test_layers_that_come_back_to_a_device_and_a_third_one(devices):
    torch.manual_seed(0)
    model = tiny("gemma2")
    with PagedCache(spread(model, [B, A, C, A]), **SIZES) as cache:
        assert cache.kv.placement.layers == (B, A, C, A)
        assert cache.kv.device == device_of(model) == B
        found = model.generate(**{k: v.to(B) for k, v in batch().items()}, **named(cache), **GREEDY)
    stock = model.generate(**{k: v.to(B) for k, v in batch().items()}, **GREEDY)
    assert found.tolist() == stock.tolist()


def test_a_head_may_be_on_another_device_than_all_layers():
    torch.manual_seed(0)
    model = tiny()
    expected = answers(model, torch.device("cpu"))
    with Devices():
        spread(model, [A, A], behind=B)
        assert not placement_of(model, A).is_divided
        assert answers(model, A) == expected


@pytest.mark.parametrize("kind", few(["llava", "qwen3_vl"], "llava"))
def test_images_are_looked_at_on_another_device_than_the_text(kind):
    model = seeing_model(kind)
    torch.manual_seed(6)
    rows = [pictured(model, *prompts(4)), [5, 6, 7], pictured(model, *prompts(3), seed=1)]

    def run():
        generator = BatchGenerator(model, **SIZES)
        results = generator.generate(rows, max_new_tokens=5)
        generator.close()
        return [(result.tokens, result.error) for result in results]

    expected = run()
    assert not any(error for _, error in expected)
    with Devices():
        names = [name for name, _ in model.model.named_children()]
        sees = {f"model.{name}": str(A) for name in names if name in ("vision_tower", "visual")}
        rest = {f"model.{name}": str(B) for name in names if f"model.{name}" not in sees}
        kept = model._skip_keys_device_placement
        dispatch_model(
            model, {**sees, **rest, "lm_head": str(B)}, main_device=str(A), skip_keys=kept
        )
        assert run() == expected


def test_a_prefix_is_computed_once_for_all_devices(devices):
    model = split(tiny())
    prefix = torch.arange(2, 14)
    with PagedCache.prefill(model, prefix, **SIZES) as cache:
        row = torch.cat([prefix, torch.tensor([40, 41])])[None].to(A)
        found = model.generate(row, **named(cache.fork(1)), **GREEDY)
        assert found.tolist() == model.generate(row, **GREEDY).tolist()


# ------------------------------------------------------------------ where layers compute


def test_pages_that_a_caller_made_have_to_lie_where_the_layers_compute(devices):
    model = split(tiny())
    config = CacheConfig.from_model(model.config, **SIZES)
    for wrong, said in (
        (A, r"cache: expected layer 1 on cpu:2, got cpu:1"),
        ([B, A], r"cache: expected pages on cpu:1, got cpu:2"),
    ):
        with pytest.raises(ValueError, match=said):
            PagedCache(model, cache=PagedKVCache(config, device=wrong))
    with PagedCache(model, cache=PagedKVCache(config, device=[A, B])) as cache:
        given = {name: value.to(A) for name, value in batch().items()}
        found = model.generate(**given, **named(cache), **GREEDY)
    assert found.tolist() == model.generate(**given, **GREEDY).tolist()


def test_weights_in_host_memory_compute_on_one_device(devices):
    model = tiny()
    given = {name: value.to(A) for name, value in batch().items()}
    expected = spread(tiny_copy(model), [A, A]).generate(**given, **GREEDY)
    cpu_offload(model, execution_device=A)
    assert placement_of(model, device_of(model)).devices == (A,)
    with PagedCache(model, **SIZES) as cache:
        assert cache.kv.device == A
        assert not cache.kv.placement.is_divided
        found = model.generate(**given, **named(cache), **GREEDY)
    assert found.tolist() == expected.tolist()


def tiny_copy(model):
    copied = type(model)(model.config).eval()
    copied.generation_config = model.generation_config
    copied.load_state_dict(model.state_dict())
    return copied


def test_weights_in_host_memory_beside_two_devices_compute_on_the_first(devices):
    model = tiny("gemma3")
    given = {name: value.to(A) for name, value in batch().items()}
    expected = spread(tiny_copy(model), [A] * 4).generate(**given, **GREEDY)
    spread(model, [A, B, HOST, B])
    assert model.model.layers[2].mlp.up_proj.weight.is_meta
    with PagedCache(model, **SIZES) as cache:
        assert cache.kv.placement.layers == (A, B, A, B)
        found = model.generate(**given, **named(cache), **GREEDY)
    assert found.tolist() == expected.tolist()


# ------------------------------------------------------------------ what is refused


def assert_refused(model, said):
    for door in (PagedCache, BatchGenerator):
        with pytest.raises(UnsupportedModelError, match=said):
            door(model, **SIZES)


def test_a_layer_that_computes_on_two_devices_is_refused_by_its_number(devices):
    model = split(tiny())
    for module in model.model.layers[1].self_attn.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device=A))
    model.model.layers[1].mlp.layer_idx = 1
    ways = "`torchrun` shares a model out among cards, `LayerStreamer` runs"
    assert_refused(model, rf"its layer 1 computes on several devices \(cpu:1, cpu:2\); {ways}")


@pytest.mark.parametrize("family", few(["gemma3n", "gemma4"], "gemma4"))
def test_layers_that_share_k_and_v_across_devices_are_refused_by_name(family, devices):
    model = split(tiny(family))
    assert_refused(
        model, r"layer 3 attends to the K and V of layer 2, .* another device; `torchrun`"
    )


@pytest.mark.parametrize("family", few(sorted(SHARING_BLOCKS), "zamba"))
def test_layers_that_share_a_block_are_refused(family, devices):
    model = split(tiny_hybrid(family), 2)
    assert_refused(model, r"its layers share a block, which is on one device; `torchrun`")


def test_a_draft_model_is_on_one_device(devices):
    model = split(tiny())
    with pytest.raises(
        ValueError, match=r"draft: expected a model on one device, got cpu:1, cpu:2"
    ):
        BatchGenerator(model, draft=split(tiny()), **SIZES)
    ids, draft = unpadded(batch()), tiny().to(A)
    generator = BatchGenerator(model, **SIZES)
    expected = [result.tokens for result in generator.generate(ids, max_new_tokens=8)]
    drafted = BatchGenerator(model, draft=draft, **SIZES)
    assert [result.tokens for result in drafted.generate(ids, max_new_tokens=8)] == expected
