"""Models that choose the tokens which a query reads: what is theirs alone.

The tests of modes run one beside the other families with recurrent states (`tests/hybrids.py`).
"""

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

from pagedkv import BatchGenerator, LayerStreamer, plan_memory
from pagedkv.attention import api
from pagedkv.batch.graphs import DecodeGraphs
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.batch.scores.expected_scores import assert_exact, continuations
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
    "qwen4_exp": {}, "deepseek_v32": {}, "glm_moe_dsa": SHARED, "hy_v4": {}, "hy_v4_vl": {},
    "dots3_note_text": {},  # beside latents of another width, with windows
    "mistral_large4": {"text_config": OWN["mistral_large4"]["text_config"] | AGAIN},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2}
    | {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4},
    # Two layers by one indexer, without a causal mask, before and behind recurrent states.
    "glm5_next": {
        "text_config": OWN["glm5_next"]["text_config"]
        | {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4}
        | {"layer_types": ["indexed_attention"] * 2 + ["linear_attention", "indexed_attention"]}
        | {"indexer_types": ["full", "shared", "shared", "full"]}
    },
}  # fmt: skip


@cache
def model_of(kind):
    if kind == "qwen4_exp":
        return made(kind)
    model = built(kind, **KINDS[kind])
    for name, values in model.named_parameters():  # as they begin they are all alike
        if name.endswith(".sinks"):
            torch.nn.init.normal_(values, 1.0, 2.0)
        elif "index_kpool_compress" in name:
            torch.nn.init.normal_(values, 0.0, 0.5)
        elif "softmax_scaling" in name or name.endswith("rotary_emb.alpha"):
            torch.nn.init.normal_(values, 1.0, 0.2)
    return model


@pytest.fixture
def model(request):
    return model_of(getattr(request, "param", "qwen4_exp"))


kinds = pytest.mark.parametrize(
    "model", few(KINDS, "mistral_large4", "minimax_m3_vl_text", "qwen4_exp"), indirect=True
)
chosen_one_by_one = pytest.mark.parametrize(
    "model", few([*KINDS][1:], "mistral_large4", "minimax_m3_vl_text"), indirect=True
)


def truth(model, batch, **options):
    """The tokens over the model's own cache, of rows alone where padding would shift blocks."""
    if model.config.model_type != "minimax_m3_vl_text" or batch["attention_mask"].all():
        return own(model, batch, **options)
    rows = [ids[seen.bool()] for ids, seen in zip(batch["input_ids"], batch["attention_mask"])]
    found = [own(model, padded([row]), **options) for row in rows]
    return padded([tokens[0] for tokens in found])["input_ids"]


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
    rows = prompts(3, 14, 21, 32)  # every place in a block
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
    if "prompt_lookup_num_tokens" in options and model._is_stateful:
        return  # transformers itself refuses drafts
    lengths = (14,) if "prompt_lookup_num_tokens" in options else (14, 9, 12)
    batch = padded(prompts(*lengths))
    plain = {} if len(lengths) == 1 else options
    assert torch.equal(paged(model, batch, **options), truth(model, batch, **plain))


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


@pytest.mark.parametrize("through", few(["host memory", "files"], "files"))
@chosen_one_by_one
def test_rows_that_left_choose_as_if_they_had_stayed(model, through, tmp_path):
    (row, more), sizes = prompts(13, 4), {**SIZES, "host_tokens": 512}
    cache = PagedCache(model, **sizes)
    answer = generate(model, padded([row]), cache).sequences[0]
    if through == "files":
        cache.kv.save(cache.rows[0], tmp_path / "row")
        cache.close()
        if model.config.model_type == "hy_v4_vl":
            pytest.skip("no file says where the positions behind its images are")
        kv = PagedCache(model, **{**sizes, "max_tokens": 600}).kv
        cache = PagedCache.of(model, kv, [kv.load(tmp_path / "row")])
    else:
        cache.kv.offload(cache.rows)
        cache.kv.restore(cache.rows)
    turn = padded([torch.cat([answer, more])])
    assert torch.equal(paged(model, turn, cache), own(model, turn))


@chosen_one_by_one
def test_scores_samples_and_streamed_weights_choose_alike(model, tmp_path):
    contexts, each = [row.tolist() for row in prompts(17, 6)], [continuations(5, 9)] * 2
    batch = padded(prompts(11))
    drawn = {"do_sample": True, "num_return_sequences": 2, "top_p": 0.9}
    assert torch.equal(paged(model, batch, **drawn), own(model, batch, **drawn))
    options = {"num_return_sequences": 2, "do_sample": True, "seed": 3, "max_new_tokens": 5}
    with BatchGenerator(model, **SIZES) as batched:
        assert_exact(model, contexts, each, batched.score(contexts, each))
        expected = [row.tokens for row in batched.generate(contexts, **options)]
    model.save_pretrained(tmp_path)
    streamer = LayerStreamer.from_pretrained(tmp_path, device="cpu")
    with streamer, BatchGenerator(streamer.model, **SIZES) as batched:
        assert [row.tokens for row in batched.generate(contexts, **options)] == expected
        batched.cache.check()


@chosen_one_by_one
def test_calls_without_pages_choose_as_before_while_a_cache_of_the_model_lives(model):
    """Under another name than its own such a model leaves what was chosen to attention."""
    batch = padded(prompts(26))
    expected = own(model, batch)
    for name in ("sdpa", "eager") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(name)
        with PagedCache(model, **SIZES):
            assert torch.equal(own(model, batch), expected)


@kinds
def test_no_query_reads_more_than_the_budget_and_a_block_that_is_not_full(model, reads):
    paged(model, padded(prompts(33, 20)), max_new_tokens=6)
    every = [n for counts in reads for n in counts]
    kind = model.config.model_type
    budgets = {"qwen4_exp_text": BUDGET + BLOCK - 1, "minimax_m3_vl_text": 3 * BLOCK}
    budgets["glm5_next"] = BUDGET + BLOCK - 1
    assert max(every) == budgets.get(kind, BUDGET)
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


# Numbers of a token: of K and V or latents, and of index keys (with rotations in qwen4_exp).
BYTES = {
    "qwen4_exp_text": lambda c: 2 * (2 * c.num_key_value_heads * c.head_dim + 8 + c.head_dim),
    "minimax_m3_vl_text": lambda c: 4 * 2 * 2 * c.head_dim + 2 * c.index_head_dim,
    "glm5_next": lambda c: 3 * c.kv_lora_rank + 2 * 2 * c.index_head_dim,
    "mistral_large4": lambda c: 3 * c.kv_lora_rank + 2 * c.qk_rope_head_dim + 4 * c.index_head_dim,
}


@pytest.mark.parametrize(
    "model", ["qwen4_exp", "minimax_m3_vl_text", "mistral_large4", "glm5_next"], indirect=True
)
def test_index_keys_take_the_bytes_that_the_configuration_says(model):
    text = model.config.get_text_config(decoder=True)
    expected = 4 * BYTES[model.config.model_type](text)
    with PagedCache(model, **SIZES) as cache:
        generate(model, padded(prompts(4)), cache, max_new_tokens=1)
        assert cache.kv.config.bytes_per_token == expected
        assert cache.stats().live_bytes == 4 * expected  # of a whole page
    plan = plan_memory(model.config, device_memory="1GiB", device="cpu", kv_format="dense")
    assert plan.bytes_per_token == expected
