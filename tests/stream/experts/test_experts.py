"""Experts that are read when they are routed to: bits as in memory, and what is read."""

import mmap

import pytest
import torch

from pagedkv.errors import GradModeError, UnsupportedModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.skeleton import experts_in, find_layers
from pagedkv.planner import plan_memory
from pagedkv.stream.experts.modules import size_read_alone
from pagedkv.stream.experts.residency import MOST_ALONE
from pagedkv.stream.skeleton import build
from pagedkv.stream.weights import WeightStore
from tests.effort import each_value, slow
from tests.hf import zoo
from tests.planner.models import read_model
from tests.stream.models import assert_bits, decode, in_memory, make, save, stream

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen2_moe"]
FOUR = {"mixtral": {"num_local_experts": 4}, "gpt_oss": {"num_local_experts": 4}}
E, K = 4, 2  # experts of a layer, and those of a token


@pytest.mark.parametrize(
    ("how", "slots", "family"),
    each_value([(0, 1.0), (2, 1.0), (0, -1.0), (0, MOST_ALONE)], [K, 3, E], FAMILIES),
)
def test_logits_and_tokens_are_those_in_memory_to_the_last_bit(family, slots, how, tmp_path):
    """By experts alone, through the ring of all of them, and in turns."""
    folder = save(make(family, **FOUR.get(family, {})), tmp_path)
    expected, (resident, most) = in_memory(folder), how
    with stream(folder, resident_layers=resident, expert_slots=slots) as streamer:
        streamer._passes._most_alone = most
        assert_bits(streamer.model, expected)
        assert fingerprint_of(streamer.model) == fingerprint_of(expected) != b""
        found = streamer.stats()
        assert found.expert_misses > 0 or most < 1
        assert found.wide_passes > 0 or most > 0


# Types whose experts are called with their routing, by transformers' decorator.
DECORATED = str.split(
    "afmoe axk1 axk2 cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe "
    "exaone_moe flex_olmo gemma4_text glm4_moe glm4_moe_lite glm_moe_dsa granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling_text jamba kimi_linear "
    "laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text nemotron_h olmoe "
    "phimoe qwen3_5_moe_text qwen4_exp_text solar_open zaya"
)
FIELDS = {  # of those whose defaults have no experts
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
}
WITH_IMAGES = ["ernie4_5_vl_moe", "glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe"]
UNDECORATED = ["aria_text", "longcat_flash"]  # Aria's are decorated from transformers 5.18 on


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECORATED)
def test_every_type_with_such_experts_computes_the_bits_of_the_model_in_memory(kind, tmp_path):
    folder = save(zoo.built(kind, **FIELDS.get(kind, {})), tmp_path)
    expected = in_memory(folder)
    torch.manual_seed(0)
    with stream(folder, expert_slots=2) as streamer, torch.no_grad():
        for rows, new in ((1, 1), (2, 12), (1, 1)):
            ids = torch.randint(1, 150, (rows, new))
            mine, theirs = (m(ids, use_cache=False).logits for m in (streamer.model, expected))
            assert torch.equal(mine, theirs)
        assert streamer.stats().expert_misses > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DECORATED, *FAMILIES, *WITH_IMAGES, *UNDECORATED])
def test_a_plan_knows_which_experts_can_be_read_alone_and_what_they_weigh(kind, tmp_path):
    try:
        folder = save(zoo.built(kind, **FIELDS.get(kind, {})), tmp_path)
        planned = read_model(folder).experts
    except UnsupportedModelError as error:
        pytest.skip(f"no pages: {error}")
    checkpoint = Checkpoint.open(folder)
    built = build(checkpoint, "auto", False)
    model = built.model
    layers = find_layers(model)[1]
    store = WeightStore.open(checkpoint, built)
    can = size_read_alone(model, layers, store)
    store.close()
    weigh = [
        sum(p.nbytes for m in experts_in(layer) for p in m.parameters(recurse=False))
        for layer in layers
    ]
    # A plan, which needs no transformers, has them come with their layers.
    assert (planned is not None) is (bool(can) and kind not in UNDECORATED)
    assert planned is None or planned.layers == tuple(weigh)


def test_experts_that_cannot_be_read_alone_stream_with_their_layers_and_say_so(tmp_path):
    folder = save(zoo.built("qwen3_vl_moe", sees=True), tmp_path)
    sizes = {"length": 16, "max_tokens": 64, "link_gbps": 5.0, "images": True}
    whole = plan_memory(folder, device_memory="1GiB", device="cpu", **sizes)
    budget = sum(whole.device_bytes.values()) - (16 << 10)
    with pytest.warns(UserWarning, match="expert_slots: experts of .* cannot be read alone"):
        stream(folder, device_memory=budget, **sizes).close()


def test_a_token_reads_only_the_experts_it_is_routed_to(wide):
    with stream(wide, expert_slots=4) as streamer, stream(wide) as whole:
        read = [(decode(s.model, range(1, 9)), s.stats())[1] for s in (streamer, whole)]
    layers = 3
    assert read[0].expert_hits + read[0].expert_misses == 8 * layers * 4
    assert read[0].wide_passes == 0
    assert read[0].expert_bytes < 0.14 * read[1].bytes_read  # 4 of 32, and some were there
    assert read[0].bytes_read - read[0].expert_bytes < 0.2 * read[1].bytes_read  # what is dense


def test_an_expert_that_stays_is_not_read_again(wide):
    with stream(wide, expert_slots=4) as streamer:
        first = decode(streamer.model, [5])
        before = streamer.stats()
        again = decode(streamer.model, [5])
        after = streamer.stats()
    assert torch.equal(first[0], again[0])
    assert after.expert_bytes == before.expert_bytes
    assert after.expert_hits - before.expert_hits == 3 * 4


@pytest.mark.parametrize("most", [1.0, 0.3])
def test_a_wide_pass_evicts_nothing_that_decoding_uses(most, wide):
    with stream(wide, expert_slots=4) as streamer:
        streamer._passes._most_alone = most
        decode(streamer.model, [5])
        with torch.no_grad():
            streamer.model(torch.arange(1, 60)[None], use_cache=False)
        between = streamer.stats()
        assert between.wide_passes == 3
        assert (streamer._passes._all_experts is not None) is (most < 1)
        decode(streamer.model, [5])
        assert streamer.stats().expert_misses == between.expert_misses
        assert streamer._passes._all_experts is None  # its memory is given back


def experts_of(streamer):
    return [experts for _, experts in streamer._passes._places.experts]


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="experts of the model are whole pages of 4 KiB")
def test_memory_of_experts_that_do_not_stay_is_given_back(tmp_path):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "num_experts": 16}
    folder = save(make("qwen3_moe", **sizes, num_experts_per_tok=2), tmp_path)
    with stream(folder, expert_slots=2) as streamer:
        for token in range(1, 9):
            decode(streamer.model, [token])
        with torch.no_grad():
            streamer.model(torch.arange(1, 40)[None], use_cache=False)
        for experts in experts_of(streamer):
            held = sorted(experts._held)
            for begin, width in ((p.offset, p.row_bytes) for p in experts._places):
                assert width % 4096 == 0
                for expert in range(16):
                    at = begin + expert * width
                    is_there = any(experts._memory.bytes[at : at + width])
                    assert is_there is (expert in held)


@pytest.mark.parametrize("most", [-1.0, 1.0])
def test_an_error_of_the_forward_leaves_a_streamer_that_goes_on(most, wide, monkeypatch):
    with stream(wide, expert_slots=4) as streamer:
        module, experts = streamer._passes._places.experts[0]
        streamer._passes._most_alone = most
        monkeypatch.setattr(type(module), "_apply_gate", lambda self, x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(streamer.model, [3])
        monkeypatch.undo()
        assert len(experts._held) <= 4
        assert torch.equal(decode(streamer.model, [3])[0], decode(in_memory(wide), [3])[0])


def test_gradients_are_refused(wide):
    with stream(wide, expert_slots=4, resident_layers=3) as streamer:
        module, _ = streamer._passes._places.experts[0]
        index, weights = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4)
        with pytest.raises(GradModeError, match="experts of layer 0: gradients"):
            module(torch.zeros(1, 32), index, weights)


@pytest.mark.parametrize(
    ("slots", "expected"), [(3, "4, .* to 32, .* got 3"), ("4", "None or a count of experts")]
)
def test_slots_that_cannot_be_are_refused_with_what_can(slots, expected, wide):
    with pytest.raises(ValueError, match=f"expert_slots: expected {expected}"):
        stream(wide, expert_slots=slots)


def test_a_model_without_such_experts_is_refused(tmp_path):
    folder = save(make("llama"), tmp_path)
    with pytest.raises(
        UnsupportedModelError, match="expert_slots: LlamaForCausalLM has no experts"
    ):
        stream(folder, expert_slots=2)
    stream(folder, expert_slots=0).close()


@pytest.mark.parametrize("most", [1.0, -1.0])
def test_experts_that_are_stored_in_another_dtype_are_cast_as_they_come(most, wide):
    with stream(wide, expert_slots=4, dtype=torch.bfloat16) as streamer:
        streamer._passes._most_alone = most
        assert_bits(streamer.model, in_memory(wide, dtype=torch.bfloat16))


def test_slots_beside_a_plan_are_refused(wide):
    with pytest.raises(ValueError, match="expert_slots: expected none beside plan"):
        stream(wide, expert_slots=4, plan=plan_memory(wide, device_memory="1GiB", device="cpu"))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Folder of a model whose experts are whole pages, and most of what it weighs."""
    sizes = {
        "hidden_size": 128,
        "moe_intermediate_size": 16,
        "num_experts": 128,
        "vocab_size": 4096,
    }
    model = make("qwen3_moe", **sizes, num_experts_per_tok=8, num_hidden_layers=8)
    for layer in model.model.layers:
        routes = torch.randn_like(layer.mlp.gate.weight)  # of one length: each is as likely
        layer.mlp.gate.weight.data = routes / routes.norm(dim=1, keepdim=True)
        for small in (layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj):
            small.data.mul_(0.01)  # so that each layer is routed by the token
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return save(model, tmp_path_factory.mktemp("experts"))


def plan_of(folder, slots, rows=1, **fields):
    fields = {"device_memory": "1GiB", "device": "cpu", "length": 64, **fields}
    return plan_memory(folder, expert_slots=slots, batch=rows, **fields)


@pytest.mark.parametrize(("slots", "rows"), [(32, 4), *slow((8, 1), (64, 16), (8, 16), (64, 1))])
def test_a_plan_says_what_passes_read_to_a_twentieth(slots, rows, planned):
    plan = plan_of(planned, slots, rows, expert_gbps=4.9)  # nearly the link's: most come alone
    generator = torch.Generator().manual_seed(slots)
    with stream(planned, plan=plan) as streamer, torch.no_grad():
        read = []
        for _ in range(40):
            ids = torch.randint(1, 4000, (rows, 1), generator=generator)
            before = streamer.stats().expert_bytes
            streamer.model(ids, use_cache=False)
            read.append(streamer.stats().expert_bytes - before)
    seen = sum(read[8:]) / len(read[8:])
    assert seen == pytest.approx(plan.expert_bytes(rows), rel=0.05)


def test_the_row_of_a_plan_is_the_memory_that_experts_take(planned):
    plan = plan_of(planned, 16)
    with stream(planned, plan=plan) as streamer:
        decode(streamer.model, range(1, 12))
        held = sum(
            len(experts._held) * sum(place.row_bytes for place in experts._places)
            for experts in experts_of(streamer)
        )
    assert held == plan.device_bytes["expert slots"]
    assert plan.device_bytes["widest layer"] == 2 * 128 * 3 * 128 * 16 * 4


@pytest.mark.slow
def test_a_budget_takes_as_many_experts_as_decode_soonest(planned):
    pages = {"length": 64, "step_tokens": 128, "max_tokens": 256}
    pages |= {"link_gbps": 5.0, "expert_gbps": 2.5}
    whole = plan_memory(planned, device_memory="1GiB", device="cpu", **pages)
    budget = sum(whole.device_bytes.values()) - (8 << 20)
    with stream(planned, device_memory=budget, **pages) as streamer:
        plan = streamer.plan
        assert 8 <= plan.expert_slots < 128
        assert plan.unused >= 0
        assert_bits(streamer.model, in_memory(planned))
        assert streamer.stats().expert_misses > 0
        assert f"{plan.expert_slots} of 128 in 8 layers" in str(plan)
    with stream(planned, device_memory=budget, expert_slots=0, **pages) as streamer:
        assert streamer.plan.expert_slots == 0
