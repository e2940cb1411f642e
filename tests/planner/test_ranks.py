"""A plan for several processes says what each of them holds, or by name why it cannot be."""

import pytest

from pagedkv import BudgetExceeded, plan_memory
from pagedkv.errors import UnsupportedModelError
from tests.planner.models import LLAMA_8B, LLAMA_70B, MIXTRAL, SMOL, llama

DEEPSEEK = llama(
    2048, 10944, 4, 16, 16, 102400, model_type="deepseek_v2", kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64,
    moe_intermediate_size=1408, num_experts_per_tok=6, n_shared_experts=2,
)  # fmt: skip
GPT2 = llama(768, 3072, 12, 12, 12, 50257, 1024, model_type="gpt2", tie_word_embeddings=None)
PHI3 = llama(3072, 8192, 32, 32, 32, 32064, 4096, model_type="phi3")


def kept(plan) -> set[int]:
    return {shape.num_kv_heads for shape in plan.cache.shapes}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_matrices_and_kv_heads_are_divided_and_norms_are_not(ranks):
    alone = plan_memory(LLAMA_8B, device_memory="40GiB", max_tokens=4096)
    each = plan_memory(LLAMA_8B, device_memory="40GiB", max_tokens=4096, ranks=ranks)
    assert each.shape.embedding == alone.shape.embedding // ranks
    assert each.shape.head == alone.shape.head // ranks
    norms = 2 * 2 * 4096
    for mine, whole in zip(each.shape.layers, alone.shape.layers, strict=True):
        assert mine == pytest.approx((whole - norms) / ranks + norms, abs=2)
    assert each.device_bytes["KV pages"] == alone.device_bytes["KV pages"] // ranks
    assert kept(each) == {8 // ranks}
    assert each.predict() > alone.predict()


def test_one_rank_is_a_plan_as_ever():
    assert plan_memory(LLAMA_70B, device_memory="8GiB", ranks=1) == plan_memory(
        LLAMA_70B, device_memory="8GiB"
    )


def test_whether_70b_fits_on_two_cards_is_one_line():
    said = str(plan_memory(LLAMA_70B, gpu="A100 80GB", ranks=2)).splitlines()[1]
    assert said == (
        "it fits on 2 devices under torchrun: each holds 65.71 GiB of the weights and 4 of 8 KV "
        "heads"
    )
    with pytest.raises(BudgetExceeded, match=r"on each of 2 ranks.* ranks=4 or device_memory="):
        plan_memory(LLAMA_70B, device_memory="48GB", ranks=2)
    assert plan_memory(LLAMA_70B, device_memory="48GB", ranks=4).ranks == 4


def test_a_tied_embedding_is_divided_as_the_head_that_it_is():
    four = SMOL | {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    alone = plan_memory(four, device_memory="8GiB").shape
    each = plan_memory(four, device_memory="8GiB", ranks=4).shape
    assert (each.embedding, each.head) == (alone.embedding // 4, 0)


def test_experts_are_divided_and_latents_are_kept_by_all():
    alone = plan_memory(MIXTRAL, device_memory="200GiB").shape
    each = plan_memory(MIXTRAL, device_memory="200GiB", ranks=4).shape
    assert sum(each.layers) == pytest.approx(sum(alone.layers) / 4, rel=0.001)
    latent = plan_memory(DEEPSEEK, device_memory="80GiB", ranks=2)
    assert latent.cache.bytes_per_token == (
        plan_memory(DEEPSEEK, device_memory="80GiB").cache.bytes_per_token
    )
    assert "all latents" in str(latent)


def test_a_type_whose_projections_are_gathered_keeps_all_heads():
    assert kept(plan_memory(PHI3, device_memory="80GiB", ranks=2)) == {32}


def test_layers_that_are_not_shared_out_are_planned_whole_and_the_plan_says_so():
    lfm2 = LLAMA_8B | {"model_type": "lfm2"}
    alone, each = (plan_memory(lfm2, device_memory="80GiB", ranks=ranks) for ranks in (1, 5))
    assert each.shape.layers == alone.shape.layers
    assert "transformers shares out no layer of lfm2: each holds all of them" in str(each)
    assert "shares out no layer" not in str(plan_memory(LLAMA_8B, gpu="H100", ranks=2))


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        (LLAMA_8B, {"ranks": 0}, ValueError, "ranks: expected a positive int, got 0"),
        (LLAMA_8B, {"ranks": "2"}, ValueError, "ranks: expected a positive int, got '2'"),
        (LLAMA_8B, {"ranks": True}, ValueError, "ranks: expected a positive int"),
        (LLAMA_8B, {"ranks": 3}, UnsupportedModelError, "llama has 8 KV heads, which 3 processes"),
        (LLAMA_8B, {"ranks": 5}, UnsupportedModelError, "has 8 KV heads"),
        (LLAMA_8B, {"ranks": 16}, UnsupportedModelError, "take a number .* that divides 8"),
        (GPT2, {"ranks": 2}, UnsupportedModelError, "no plan by which processes share out gpt2"),
        (LLAMA_8B, {"ranks": 2, "host_memory": "8GiB"}, ValueError, "host_memory: expected none"),
        (LLAMA_8B, {"ranks": 2, "growth_step": 64}, ValueError, "growth_step: expected none"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(model, options, error, words):
    with pytest.raises(error, match=words):
        plan_memory(model, device_memory="80GiB", **options)


def test_nothing_streams_where_ranks_share_out_a_model():
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(LLAMA_70B, device_memory="16GiB", ranks=8)
    assert refused.value.advice.keys() == {"device_memory"}  # more ranks would cut a head in two
    assert plan_memory(LLAMA_70B, device_memory="16GiB").streams
