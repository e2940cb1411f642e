"""Layers on several devices: every page is as on one, and tensors of two never meet."""

import random
from dataclasses import replace

import pytest
import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, attend_again, paged_attention, write_kv
from pagedkv.errors import BudgetExceeded, ClosedStepError, OutOfPagesError
from pagedkv.models import StateLayer
from pagedkv.storage import Placement, dense, memory
from tests.cases import (
    CASES,
    VARIED,
    in_few_bits,
    latent,
    one_group,
    random_op,
    two_groups,
    two_shapes,
)
from tests.contents import advance, assert_contents, start, write_step
from tests.devices import HOST, A, B, C, Devices, MixedDevicesError, let_grow
from tests.effort import examples, few, sampled
from tests.world import World

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PLACES = A, B, A  # of the layers; a group may be on both, and come back to the first


@pytest.fixture
def devices(monkeypatch):
    with Devices() as devices:
        let_grow(devices, monkeypatch)
        yield devices


def placed(config: CacheConfig):
    return PLACES[: config.num_layers]


def divided(config: CacheConfig, **options) -> PagedKVCache:
    # Not C, which takes addresses: nobody would see whose they are.
    options = {"debug": True, "backend": "torch", **options}
    return PagedKVCache(config, device=placed(config), **options)


# ------------------------------------------------------------------ as on one device


# With sums by page, means of keys, and values that are merged into others.
EVICTING = {
    policy: one_group(max_tokens=256, num_layers=3, retention=policy, budget=72)
    for policy in ("importance", "keydiff", "semantic", "lru")
}
SERVED = {
    "one group": one_group(),
    "a window": two_groups(),
    "two shapes": two_shapes(),
    "latents": latent(),
    "layers by turns": one_group(num_layers=3, groups=(LayerGroup((2,), 6), LayerGroup((0, 1)))),
    "int8": in_few_bits("int8", max_tokens=256),
    "fp8": in_few_bits("fp8", max_tokens=256),
    "int4": in_few_bits("int4", max_tokens=256),
    "growing": one_group(growth_step=8),
    "choosing pages": one_group(max_tokens=256, read_tokens=16),
    **EVICTING,
}


def run(config: CacheConfig, device, steps: int) -> list[torch.Tensor]:
    """Returns every layer's attention in a few steps, and the bytes stored behind them."""
    source = torch.Generator().manual_seed(1)
    cache = PagedKVCache(config, device=device, debug=True, backend="torch")
    # Steps fill its second page of 16 tokens: a page that one step fills has no staging page.
    prompt, other = cache.add((TEXT * 3)[:28]), cache.add()
    found = []
    for turn in range(steps):
        step = cache.prepare([prompt, other], num_new=[1, 2]) if turn else cache.prepare([prompt])
        for layer, place in enumerate(cache.placement.layers):
            heads, *dims, v_is_k = config.shapes[config.group_of[layer]]
            sizes = [(2 * heads, dims[0]), *((heads, dim) for dim in dims)]
            q, k, v = (torch.randn(step.num_tokens, *size, generator=source) for size in sizes)
            q, k, v = q.to(place), k.to(place), v.to(place)
            out = paged_attention(q, k, k[..., : dims[1]] if v_is_k else v, step, layer)
            assert out.device == place
            found += [out.cpu(), attend_again(q, step, layer).cpu()]
        cache.commit(step)
        cache.check()
        if turn == 3:  # the next step writes to a copy of the last page
            cache.free(cache.fork(other, 2)[1])
    layers = range(config.num_layers)
    stored = [cache.gather(seq, layer) for seq in (prompt, other) for layer in layers]
    return found + [x.cpu() for both in stored for x in both]


FAST = "a window", "latents", "int4"


@pytest.mark.parametrize("kind", few(SERVED, *FAST))
def test_layers_on_two_devices_attend_as_on_one(kind, devices):
    config = SERVED[kind]
    steps = 40 if kind in EVICTING else 6
    expected = run(config, A, steps)
    assert not devices.crossed
    for found, wanted in zip(run(config, placed(config), steps), expected, strict=True):
        assert torch.equal(found, wanted)


WALKED = [case for case in CASES if case.name in VARIED]
# Those that write bytes in a way of their own: growing, by a host tier, in codes, V as a part of K.
CHOSEN = {"grow-two-P4", "host-two-P4", "int4-P16", "grow-host-latent-P3"}


@sampled
@pytest.mark.parametrize(
    "case", few(WALKED, *(case for case in WALKED if case.name in CHOSEN)), ids=lambda c: c.name
)
def test_a_walk_over_two_devices_agrees_with_a_model_of_lists(case, devices):
    source = random.Random(f"devices {case.name}")
    world = World(case, everything=False, device=placed(case.config))
    for _ in range(examples(200, 30)):
        world.apply(random_op(source, case.config))
    world.verify(all_of_them=True)
    assert world.computed > 0


def test_pages_have_the_same_numbers_on_every_device(devices):
    one, two = PagedKVCache(two_groups(), device=A), divided(two_groups())
    for cache in (one, two):
        seq = start(cache, TEXT)
        child = cache.fork(seq)[0]
        advance(cache, {seq: [*TEXT, 8], child: [*TEXT, 9]})
        cache.free(seq)
        start(cache, [*TEXT[:8], 7])
    assert one.stats() == two.stats()
    assert (one._tables.tables == two._tables.tables).all()


def test_a_step_sends_as_much_to_each_device_and_asks_none_for_anything(devices, monkeypatch):
    cache = divided(one_group(), debug=False)
    seq = start(cache, TEXT)
    step = cache.prepare([seq], num_new=1)
    here, there = (tables.bytes_sent for tables, _ in cache._devices.each)
    assert here == there > 0
    assert devices.crossed == {}
    for layer, place in enumerate(placed(cache.config)):
        here = step.at(layer)
        for tensor in (here.positions, here.slots(), here.page_table(), here.kv_lens()):
            assert tensor.device == place
        assert here.positions.tolist() == [len(TEXT)]
    assert step.at(0) is step
    assert step.positions.device == cache.device == A
    cache.abort(step)
    with pytest.raises(ClosedStepError):
        step.at(1).page_table_host()


def test_devices_have_the_bytes_of_their_layers_alone(devices):
    config = one_group(num_layers=3)
    cache = divided(config)
    sizes = {place: part.nbytes for place, part in cache._storage.parts.items()}
    assert sizes == {A: config.nbytes * 2 // 3, B: config.nbytes // 3}
    assert cache._storage.nbytes == config.nbytes


# ------------------------------------------------------------------ files, host memory, states


@pytest.mark.parametrize("kind", few(["dense", "fp8", "int4"], "fp8"))
def test_files_do_not_know_on_how_many_devices_layers_lie(kind, devices, tmp_path):
    config = in_few_bits(kind, num_layers=3, max_tokens=256, fingerprint=b"m")
    text = TEXT * 4
    one, two = PagedKVCache(config, device=A), divided(config)
    for source, target in ((one, two), (two, one)):
        seq = start(source, text)
        source.save(seq, tmp_path / "x")
        loaded = target.load(tmp_path / "x")
        for layer in range(config.num_layers):
            for x, y in zip(source.gather(seq, layer), target.gather(loaded, layer)):
                assert torch.equal(x.cpu(), y.cpu())
        source.clear_prefixes()
        target.free(loaded)
        target.clear_prefixes()


@pytest.mark.parametrize("make", [one_group, two_groups, latent])
def test_sequences_come_back_from_host_memory_to_all_devices(make, devices):
    cache = divided(make(host_tokens=64))
    seq = start(cache, TEXT)
    cache.offload(seq)
    others = start(cache, [7] * 20)
    cache.free(others)
    cache.restore(seq)
    assert_contents(cache, seq, TEXT)
    cache.check()


def test_a_pool_grows_on_all_devices_or_on_none(devices, monkeypatch):
    cache = divided(one_group(growth_step=8, head_dim=256))
    seq = start(cache, TEXT[:6])
    parts = cache._storage.parts
    room = {A: 1 << 40, B: 0}
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_memory", lambda device: room[device])
        with pytest.raises(OutOfPagesError, match=r"growth_step: .* on cpu:2"):
            advance(cache, {seq: TEXT})
    assert [part.memory.pages for part in parts.values()] == [[2], [2]]
    advance(cache, {seq: TEXT})
    assert [part.memory.pages for part in parts.values()] == [[4], [4]]
    assert_contents(cache, seq, TEXT)
    cache.free(seq)
    cache.clear_prefixes()
    assert cache.shrink() > 0
    cache.check()


def test_a_prefix_store_knows_no_devices_either(devices, tmp_path):
    config, text = one_group(num_layers=3, max_tokens=512, fingerprint=b"m"), TEXT * 24
    for device, other in ((A, PLACES), (PLACES, A)):
        folder = tmp_path / str(device == A)
        source = PagedKVCache(config, device=device, prefix_store=folder)
        assert source.store(start(source, text)) > 0
        target = PagedKVCache(config, device=other, prefix_store=folder)
        seq = target.add(text)
        assert target.length(seq) == 256
        assert_contents(target, seq, text[:256])


def test_steps_may_begin_where_no_layer_is(devices):
    cache = PagedKVCache(EVICTING["importance"], device=Placement(C, (A, B, A)), debug=True)
    assert cache.device == C
    assert cache._storage.parts.keys() == {A, B}
    seq = start(cache, TEXT)
    step = cache.prepare([seq], [4])
    assert step.positions.device == step.tokens.device == C
    assert [step.at(layer).positions.device for layer in range(3)] == [A, B, A]
    cache.abort(step)
    advance(cache, {seq: [*TEXT, 8]})
    assert_contents(cache, seq, [*TEXT, 8])
    cache.check()


STATES = tuple(StateLayer((((2, 3), "float32"),)) for _ in range(3))


def test_states_lie_where_their_layers_do(devices):
    config = one_group(num_layers=1, states=STATES, host_tokens=64)
    cache = PagedKVCache(config, device=[B, A, B, C], debug=True)
    assert cache.placement.states == (A, B, C)
    assert cache.device == B
    seq = cache.add(TEXT)
    for turn in range(2):
        step = cache.prepare([seq], [0] if turn else None)
        write_step(cache, step, [[*TEXT, 0][: len(TEXT) + turn]])
        with pytest.raises(ValueError, match="expected device cpu:3, got cpu:2"):
            step.write_state(2, [torch.zeros(1, 2, 3, device=B)])
        for layer, place in enumerate(cache.placement.states):
            (before,) = step.read_state(layer)
            assert before.device == place
            assert before.unique().tolist() == [turn * (layer + 1)]
            step.write_state(layer, [before + layer + 1], donate=bool(turn))
        cache.commit(step)
    cache.offload(seq)
    cache.restore(seq)
    cache.check()
    found = [cache.read_state(seq, layer)[0] for layer in range(3)]
    assert [x.device for x in found] == [A, B, C]
    assert [x.unique().tolist() for x in found] == [[2], [4], [6]]


# ------------------------------------------------------------------ bad input


def test_devices_are_those_of_all_layers_and_of_one_kind():
    config = one_group()
    with pytest.raises(ValueError, match=r"device: expected one device, or .* 2 layers, got 3"):
        PagedKVCache(config, device=["cpu"] * 3)
    with pytest.raises(ValueError, match="behind them of 3 state layers, got 2"):
        PagedKVCache(replace(config, states=STATES), device=["cpu"] * 2)
    with pytest.raises(ValueError, match="device: expected devices of one kind, got cpu and meta"):
        PagedKVCache(config, device=["cpu", "meta"])
    with pytest.raises(ValueError, match="device: expected auto, cpu"):
        PagedKVCache(config, device=["cpu", "nowhere"])
    with pytest.raises(TypeError, match="device: expected"):
        PagedKVCache(config, device=[None, "cpu"])
    with pytest.raises(TypeError, match="device: expected"):
        PagedKVCache(config, device=3.5)
    shifted = Placement(HOST, (HOST,), (HOST, HOST))
    with pytest.raises(ValueError, match=r"device: expected those of 2 layers, got 1"):
        PagedKVCache(replace(config, states=STATES[:1]), device=shifted)


def test_a_placement_names_devices_as_tensors_do(devices):
    named = Placement.of(Placement("cpu:2", ("cpu:2", "cpu:1")), one_group())
    assert named == Placement(B, (B, A))


def test_tensors_of_another_device_than_the_layers_are_refused(devices):
    cache = divided(one_group())
    seq = cache.add(TEXT)
    step = cache.prepare([seq])
    q, k, v = torch.zeros(3, len(TEXT), 2, 4, device=A)
    paged_attention(q, k, v, step, 0)
    with pytest.raises(ValueError, match=r"q: expected device cpu:2, got cpu:1"):
        paged_attention(q, k, v, step, 1)
    with pytest.raises(ValueError, match=r"k: expected device cpu:2, got cpu:1"):
        write_kv(k, v, step, 1)
    q, k, v = torch.zeros(3, len(TEXT), 2, 4, device=B)
    with pytest.raises(ValueError, match=r"step: expected what `prepare` returned, .* on cpu:2"):
        paged_attention(q, k, v, step.at(1), 1)
    with pytest.raises(ValueError, match=r"layer: expected 0\.\.1, got 7"):
        paged_attention(q, k, v, step, 7)
    paged_attention(q, k, v, step, 1)
    cache.commit(step)


def test_pages_that_do_not_fit_on_one_device_are_refused_with_what_would_fit(devices, monkeypatch):
    config = one_group(num_layers=3, max_tokens=64)
    room = {A: 1 << 30, B: config.nbytes // 6}
    for module in (memory, dense):
        monkeypatch.setattr(module, "available_memory", lambda at: room.get(at, 1 << 40))
    with pytest.raises(BudgetExceeded, match=r"64 tokens .* on cpu:2.*max_tokens=32 would fit"):
        divided(config)
    divided(replace(config, max_tokens=32))


def test_sizes_nobody_said_fit_on_every_device(monkeypatch):
    config = one_group(num_layers=3)
    placement = Placement(A, (A, B, A))
    room = {A: 4 * config.nbytes, B: config.nbytes // 3}
    monkeypatch.setattr(memory, "available_memory", lambda device: 4 * room[device])
    sized = lambda tokens: replace(config, max_tokens=tokens, max_sequence_length=0)  # noqa: E731
    assert memory.tokens_that_fit(sized, placement) == config.max_tokens
    room[A] = config.nbytes // 3
    assert memory.tokens_that_fit(sized, placement) == config.max_tokens // 2


def test_a_layer_that_meets_the_tables_of_another_device_would_be_seen(devices, monkeypatch):
    cache = divided(one_group())
    step = cache.prepare([cache.add(TEXT)])
    here, there = step, step.at(1)
    there.query_start_loc, there._memo = here.query_start_loc, here._memo
    here.slots(), here.page_table()
    q, k, v = torch.zeros(3, len(TEXT), 2, 4, device=B)
    with pytest.raises(MixedDevicesError):
        paged_attention(q, k, v, step, 1)


def test_host_tensors_are_not_taken_for_those_of_a_device(devices):
    cache = divided(one_group())
    step = cache.prepare([cache.add(TEXT)])
    q, k, v = torch.zeros(3, len(TEXT), 2, 4)
    assert q.device == HOST
    with pytest.raises(ValueError, match="q: expected device cpu:1, got cpu"):
        paged_attention(q, k, v, step, 0)
