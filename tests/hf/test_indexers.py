"""Models that choose the tokens which a query reads: what is theirs alone.

The tests of modes run one beside the other families with recurrent states (`tests/hybrids.py`).
"""

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

from pagedkv import BatchGenerator
from pagedkv.attention import api
from pagedkv.batch.graphs import DecodeGraphs
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.effort import few
from tests.hf.modes import SIZES, made, own, paged
from tests.hf.tiny import assert_close, generate, named, padded, prompts
from tests.hf.zoo import OWN, built

BUDGET, BLOCK = 8, 4
# The types of each kind: by blocks, by tokens, by an indexer that layers share, with sinks.
SHARED = {
    "num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2,
    "mlp_layer_types": ["dense"] * 4, "layer_types": ["indexed_attention"] * 4,
}  # fmt: skip
# Latents with and without a rotated key, which later layers attend to again, with an index or not.
AGAIN = {
    "num_hidden_layers": 6, "no_rope_layers": [1, 0] * 3, "kv_source_layers": [0, 1, 0, 1, 4, 1],
    "indexer_types": ["full", "shared", "full", "full", "shared", "full"],
    "mlp_layer_types": ["dense"] * 6, "layer_types": ["indexed_attention"] * 6,
}  # fmt: skip
KINDS = {
    "qwen4_exp": {}, "deepseek_v32": {}, "glm_moe_dsa": SHARED, "hy_v4": {},
    "mistral_large4": {"text_config": OWN["mistral_large4"]["text_config"] | AGAIN},
}  # fmt: skip


@cache
def model_of(kind):
    if kind == "qwen4_exp":
        return made(kind)
    model = built(kind, **KINDS[kind])
    for name, values in model.named_parameters():  # as they begin they are all alike
        if name.endswith(".sinks"):
            torch.nn.init.normal_(values, 1.0, 2.0)
        elif "softmax_scaling" in name or name.endswith("rotary_emb.alpha"):
            torch.nn.init.normal_(values, 1.0, 0.2)
    return model


@pytest.fixture
def model(request):
    return model_of(getattr(request, "param", "qwen4_exp"))


kinds = pytest.mark.parametrize(
    "model", few(KINDS, "deepseek_v32", "mistral_large4", "qwen4_exp"), indirect=True
)
chosen_one_by_one = pytest.mark.parametrize(
    "model", few([*KINDS][1:], "glm_moe_dsa", "mistral_large4"), indirect=True
)


@pytest.fixture
def reads(monkeypatch):
    """How many tokens each query reads, call by call."""
    counts, choose = [], api.chosen_of

    def noted(call, indices):
        found = choose(call, indices)
        counts.append(found.counts.tolist())
        return found

    monkeypatch.setattr(api, "chosen_of", noted)
    return counts


@kinds
@pytest.mark.parametrize("length", few(range(1, 34), 1, 8, 9, 33))
def test_a_text_of_any_length_is_as_over_the_models_own_cache(model, length):
    """Borders of pages, of blocks and of the budget, and one beyond each."""
    batch = padded(prompts(length))
    assert torch.equal(paged(model, batch, max_new_tokens=5), own(model, batch, max_new_tokens=5))


@kinds
def test_rows_of_all_lengths_are_packed_as_each_is_alone(model):
    rows = prompts(*range(1, 34, 3))
    with BatchGenerator(model, max_tokens=1024, page_size=4, step_tokens=7) as batched:
        found = batched.generate([row.tolist() for row in rows], max_new_tokens=5, do_sample=False)
        batched.cache.check()
    for row, result in zip(rows, found, strict=True):
        expected = own(model, padded([row]), max_new_tokens=5)
        assert result.tokens == expected[0, len(row) :].tolist()


@chosen_one_by_one
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "beams", "chunks", "drafts"],
)
def test_padded_rows_choose_as_over_the_models_own_cache(model, options):
    lengths = (14,) if "prompt_lookup_num_tokens" in options else (14, 9, 12)
    batch = padded(prompts(*lengths))
    plain = {} if len(lengths) == 1 else options
    assert torch.equal(paged(model, batch, **options), own(model, batch, **plain))


@chosen_one_by_one
@torch.no_grad()
def test_rows_of_one_forward_take_the_positions_that_a_model_makes_for_all(model):
    """`generate` gives positions of each row; without them rotations have no axis of rows."""
    rows = torch.stack(prompts(14, 14))
    expected = torch.cat([model(row[None]).logits for row in rows])
    with PagedCache(model, **SIZES) as cache:
        assert_close(model(rows, **named(cache)).logits, expected)


@chosen_one_by_one
def test_forks_and_second_turns_choose_among_what_they_share(model):
    prefix, more, *tails = prompts(21, 4, 5, 5, 5)
    rows = padded([torch.cat([prefix, tail]) for tail in tails])
    with PagedCache.prefill(model, prefix, **SIZES) as held:
        for _ in range(2):
            assert torch.equal(paged(model, rows, held.fork(3)), own(model, rows))
    held = PagedCache(model, **SIZES)
    answer = generate(model, padded([prefix]), held).sequences[0]
    turn = padded([torch.cat([answer, more])])
    assert torch.equal(paged(model, turn, held), own(model, turn))


@chosen_one_by_one
def test_calls_without_pages_choose_as_before_while_a_cache_of_the_model_lives(model):
    """Under another name than its own such a model leaves what was chosen to attention."""
    batch = padded(prompts(26))
    expected = own(model, batch)
    for name in ("sdpa", "eager") if model.config.model_type != "hy_v4" else ("eager",):
        model.set_attn_implementation(name)
        with PagedCache(model, **SIZES):
            assert torch.equal(own(model, batch), expected)


@kinds
def test_no_query_reads_more_than_the_budget_and_a_block_that_is_not_full(model, reads):
    paged(model, padded(prompts(33, 20)), max_new_tokens=6)
    every = [n for counts in reads for n in counts]
    by_block = model.config.get_text_config().model_type.startswith("qwen4")
    assert max(every) == BUDGET + (BLOCK - 1) * by_block
    assert min(every) == 1


def test_what_is_chosen_must_reach_attention_as_it_is(model):
    batch = padded(prompts(9))
    with PagedCache(model, **SIZES) as cache:  # whose own hooks come first
        indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer")]
        hooks = [m.register_forward_hook(lambda _, __, out: ~out) for m in indexers]
        try:
            with pytest.raises(UnsupportedModelError, match="computes with the tokens that its"):
                paged(model, batch, cache)
        finally:
            for hook in hooks:
                hook.remove()
    assert torch.equal(paged(model, batch), own(model, batch))


def test_what_would_lose_tokens_or_their_digits_is_refused_by_name(model):
    for fields, message in (
        ({"retention": "fifo", "budget": 64}, "retention: expected None, since this model itself"),
        ({"read_tokens": 64}, "read_tokens"),
        ({"kv_format": "int8", "page_size": 16}, "kv_format"),
    ):
        with pytest.raises((ValueError, UnsupportedModelError), match=message):
            PagedCache(model, **{**SIZES, **fields})


def test_steps_run_without_graphs(model):
    """A graph would hold what was chosen for other rows."""
    with BatchGenerator(model, **SIZES) as batched:
        assert DecodeGraphs(batched._packed).refused
    with BatchGenerator(made("qwen3_next"), **SIZES) as batched:
        assert not DecodeGraphs(batched._packed).refused


def test_another_attention_is_refused_by_name(model):
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        model.set_attn_implementation("sdpa")
        try:
            with pytest.raises(UnsupportedModelError, match="index keys are in pages, where paged"):
                model(**padded(prompts(5)), **named(cache))
        finally:
            model.set_attn_implementation("pagedkv")
        assert cache.rows == []
        cache.kv.check()


def test_index_keys_take_the_bytes_that_the_configuration_says(model):
    with PagedCache(model, **SIZES) as cache:
        config = cache.kv.config
        text = model.config.get_text_config(decoder=True)
        layers = sum(kind != "linear_attention" for kind in text.layer_types)
        kv = 2 * text.num_key_value_heads * text.head_dim
        assert config.bytes_per_token == 4 * layers * (kv + text.indexer_head_dim + text.head_dim)
        assert len(config.groups) == 2
