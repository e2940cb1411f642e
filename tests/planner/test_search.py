"""The search's choice when memory is short, and advice that works."""

import random
from itertools import pairwise

import pytest

from pagedkv import BudgetExceeded, plan_memory
from tests.effort import examples, sampled
from tests.planner.models import (
    GEMMA_27B,
    GIB,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    MODELS,
    QWEN_14B,
    SMOL,
    llama,
    read_model,
)


def total(plan):
    return sum(plan.device_bytes.values())


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
            assert kept[-1] == 79
        # One more layer would not have fitted.
        assert plan.unused + (plan.max_tokens - 2048) * plan.bytes_per_token < plan.ring_slot + GIB
    assert streamed == sorted(streamed, reverse=True)


def test_the_head_stays_where_that_spares_more_than_layers():
    # The head weighs as much as sixteen layers.
    config = llama(512, 1024, 24, 8, 8, 128256)
    head, layer = read_model(config).head, read_model(config).layers[0]
    sizes = range(680 << 20, 1000 << 20, 20 << 20)
    for memory in sizes:
        plan = plan_memory(config, device_memory=memory)
        others = sum(plan.shape.layers) + head - plan.streamed_bytes
        assert others == len(plan.resident_layers) * layer + plan.head_resident * head
    assert {plan_memory(config, device_memory=m).head_resident for m in sizes} == {False, True}


def test_a_tied_head_and_the_embedding_stay_together():
    for memory in range(600 << 20, 1200 << 20, 43 << 20):
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


def test_with_all_weights_in_memory_a_card_computes_wider_passes_than_a_processor():
    sizes = {"device_memory": "80GiB", "batch": 64, "length": 2048}
    card, processor = (plan_memory(LLAMA_8B, device=device, **sizes) for device in ("cuda", "cpu"))
    assert (card.step_tokens, processor.step_tokens) == (8192, 1024)
    assert card.cache.max_step_tokens == 8192
    small = plan_memory(LLAMA_8B, device_memory="17GiB", batch=4, length=2048)
    assert not small.streams
    assert small.step_tokens < 8192, "passes leave memory to pages"


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


@pytest.mark.parametrize(("config", "memory"), [(LLAMA_8B, "10GiB"), (LLAMA_70B, "8GiB")])
def test_host_memory_holds_the_embedding_where_all_else_has_room(config, memory):
    roomy = plan_memory(config, device_memory=memory, host_memory="200GiB")
    assert roomy.embedding_in_host
    assert roomy.host_bytes["held embedding"] == roomy.shape.embedding
    needed = sum(roomy.host_bytes.values())
    for spare in (0, -1, -roomy.shape.embedding, -roomy.shape.embedding - 1):
        plan = plan_memory(config, device_memory=memory, host_memory=needed + spare)
        assert plan.embedding_in_host == (spare == 0)
        whole = (plan.host_layers, plan.head_in_host) == (roomy.host_layers, True)
        assert whole == (spare >= -roomy.shape.embedding)


def test_host_memory_holds_a_tied_embedding_with_the_head_and_none_that_is_on_the_device():
    seen = set()
    for host in (80 << 20, 200 << 20, GIB):
        for device in (600 << 20, 640 << 20, 800 << 20):
            plan = plan_memory(SMOL, device_memory=device, host_memory=host, length=64)
            seen.add((plan.embedding_resident, plan.embedding_in_host))
            assert plan.embedding_in_host == plan.head_in_host
            assert plan.host_bytes["held embedding"] == 0
    assert seen == {(True, False), (False, True), (False, False)}
    untied = plan_memory(LLAMA_8B, device_memory="15GiB", host_memory="64GiB")
    assert untied.embedding_resident != untied.embedding_in_host


def test_a_cpu_has_no_context_and_reads_straight_into_the_ring():
    plan = plan_memory(SMOL, device_memory="400MiB", length=512, device="cpu")
    assert plan.streams
    assert plan.device_bytes["device context"] == 0
    assert plan.host_bytes["staging"] == 0


def test_packed_weights_take_their_room_and_nothing_streams_beside_them():
    plain = plan_memory(LLAMA_8B, device_memory="48GiB", device="cpu")
    packed = plan_memory(LLAMA_8B, device_memory="48GiB", device="cpu", pack_weights=True)
    assert packed.device_bytes["packed weights"] == 2 * packed.shape.active
    assert 0.9 < packed.device_bytes["packed weights"] / packed.shape.weights <= 1
    assert not packed.streams
    assert packed.max_tokens < plain.max_tokens or packed.unused < plain.unused
    assert "packed weights" in str(packed)
    assert "packed weights" not in str(plain)
    with pytest.raises(BudgetExceeded, match=r"pack_weights=False or device_memory=") as refused:
        plan_memory(LLAMA_8B, device_memory="24GiB", device="cpu", pack_weights=True)
    assert refused.value.advice == {"pack_weights": False}
    assert plan_memory(LLAMA_8B, device_memory="24GiB", device="cpu")
    assert plan_memory(LLAMA_8B, device_memory="24GiB", device="cpu").streams is False


def test_weights_packed_in_8_bits_take_34_bytes_for_32_but_for_the_head():
    options = {"device_memory": "80GiB", "device": "cpu", "weight_dtype": "float32"}
    plan = plan_memory(LLAMA_8B, pack_weights="int8", **options)
    head = 128256 * 4096
    assert plan.device_bytes["packed weights"] == 4 * head + (plan.shape.active - head) * 34 // 32


def test_a_checkpoint_in_fewer_bits_is_not_packed_again():
    options = {"device_memory": "24GiB", "device": "cpu", "weight_dtype": "int4"}
    packed, plain = (plan_memory(LLAMA_8B, pack_weights=is_so, **options) for is_so in (1, 0))
    assert packed.device_bytes == plain.device_bytes


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


def without_pages(plan):
    return total(plan) - plan.device_bytes["KV pages"]


@pytest.mark.parametrize(("config", "memory", "options"), PAIRS)
def test_more_tokens_than_are_left_take_the_place_of_weights(config, memory, options):
    plan = plan_memory(config, device_memory=memory, **options)
    page = plan.cache.page_size
    again = plan_memory(config, device_memory=memory, max_tokens=plan.max_tokens, **options)
    assert again == plan
    assert total(plan) <= plan.device_memory
    larger = options | {"device_memory": memory, "max_tokens": plan.max_tokens + page}
    try:
        more = plan_memory(config, **larger)
    except BudgetExceeded as error:
        more = plan_memory(config, **larger | error.advice)
        assert plan.max_tokens <= more.max_tokens <= plan.max_tokens + page
    else:
        assert more.max_tokens == plan.max_tokens + page
    assert total(more) <= plan.device_memory
    assert without_pages(more) <= without_pages(plan)


def test_what_a_pool_needs_at_least_is_what_suffices_for_it():
    asked = {"batch": 1, "length": 2048, "max_tokens": 100_000}
    with pytest.raises(BudgetExceeded, match="100,000 tokens needs at least") as refused:
        plan_memory(QWEN_14B, device_memory="8GiB", **asked)
    needed = refused.value.needed
    plan = plan_memory(QWEN_14B, device_memory=needed, **asked)
    assert plan.streams
    assert plan.max_tokens == 100_000
    with pytest.raises(BudgetExceeded):
        plan_memory(QWEN_14B, device_memory=needed - 1, **asked)


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


@sampled
def test_advice_fits_for_any_model_and_budget():
    rng = random.Random(9)
    refusals, keys = 0, set()
    requests = examples(400, 40)
    for _ in range(requests):
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
            assert f"{name}={value!r}" in str(refused)
            assert str(refused).endswith(" would fit")
            assert refused.needed > refused.available
            assert refused.largest in str(refused)
            plan = plan_memory(config, **options | refused.advice)
        assert total(plan) <= plan.device_memory
        assert plan.host_memory is None or sum(plan.host_bytes.values()) <= plan.host_memory
        assert plan.device_bytes["KV pages"] == plan.cache.nbytes
        assert plan.step_tokens >= plan.batch * plan.verify_width
    assert refusals > requests // 4
    assert keys >= {"max_tokens", "length", "batch", "device_memory", "host_memory", "step_tokens"}
