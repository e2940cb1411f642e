"""`pack_weights="int8"`: answers near the model's, and K and V that are found by nobody else."""

import copy

import pytest
import torch
from transformers import AutoTokenizer

from pagedkv import BatchGenerator, PagedKVCache, PrefixStore
from pagedkv.errors import UnsupportedModelError, WrongModelError
from pagedkv.hf import PagedCache
from pagedkv.hf import blocked_weights as module
from pagedkv.hf.blocked_weights import packed_weights
from pagedkv.hf.model import cache_config
from pagedkv.kernels.c import eight_bits
from tests.hf.own import own_model
from tests.hf.test_blocked_weights import SHORT, SIZES, assert_as_before, tokens_of
from tests.hf.tiny import prompts, tiny

MISSING = eight_bits.why_not(torch.float32)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is the instruction")
WAYS = {"int8": False, False: "int8"}  # and the other


def wide():
    """A model whose layers all have inputs in groups of 32."""
    return tiny(intermediate_size=64)


def rounding(model, pack_weights="int8", **fields):
    return BatchGenerator(model, pack_weights=pack_weights, **{**SIZES, **fields})


def cached(batched, rows):
    return [result.cached_tokens for result in batched.generate(rows, **SHORT)]


def test_all_but_embeddings_and_the_head_have_8_bits_until_the_generator_is_closed():
    model = wide()
    before = copy.deepcopy(model.state_dict())
    with rounding(model) as batched:
        batched.generate(prompts(9, 13), **SHORT)
        kept = packed_weights(model, 8)._forwards
        eight = {layer for layer, own in kept.items() if isinstance(own.packed, eight_bits.Eight)}
        assert eight == {*kept} - {model.lm_head} != set()
        assert batched.packed_bytes == sum(one.packed.nbytes for one in kept.values())
    del kept, eight
    assert_as_before(model)
    assert not module._kept(model)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())


def test_the_embedding_is_whole_where_the_head_is_tied_to_it():
    model = tiny("gemma2")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with rounding(model):
        packed = packed_weights(model, 8)._forwards[model.lm_head].packed
        assert not isinstance(packed, eight_bits.Eight)


def test_a_row_gets_the_tokens_that_it_gets_alone():
    model, rows = wide(), prompts(9, 13, 5, 21)
    with rounding(model) as batched:
        together = tokens_of(batched, rows)
        batched.cache.clear_prefixes()
        assert together == [tokens_of(batched, [row])[0] for row in rows]


def test_a_draft_has_8_bits_as_well_and_costs_no_token():
    model, draft, rows = wide(), wide(), prompts(9, 13)
    with rounding(model) as batched:
        expected = tokens_of(batched, rows)
    with rounding(model, draft=draft) as batched:
        assert tokens_of(batched, rows) == expected
        assert packed_weights(draft, 8).nbytes > 0


def test_a_model_that_no_list_knows_is_tried_with_its_own_weights():
    """With rounded ones packed rows would be others than rows alone."""
    with pytest.warns(UserWarning, match="no list knows"):
        rounding(own_model(""), unknown="check").close()


# ------------------------------------------------------------------ K and V of its own


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("shared", [True, False])
def test_neither_finds_the_pages_of_the_other(first, shared):
    """In pages of the model, and in pages that somebody gave both."""
    model, rows = wide(), prompts(20)
    cache = PagedKVCache(cache_config(model, **SIZES)) if shared else None
    sizes = {"cache": cache, **dict.fromkeys(SIZES)} if shared else {}
    sizes = {name: value for name, value in sizes.items() if value or name == "cache"}
    with (
        BatchGenerator(model, pack_weights=first, **(sizes or SIZES)) as one,
        BatchGenerator(model, pack_weights=WAYS[first], **(sizes or SIZES)) as other,
    ):
        assert cached(one, rows) == [0]
        assert cached(one, rows) == [19]
        assert cached(other, rows) == [0]


@pytest.mark.parametrize("first", WAYS)
def test_a_store_and_files_tell_them_apart(first, tmp_path):
    model, rows = wide(), prompts(140)
    sizes = {"max_tokens": 1024, "page_size": 4}
    found, caches = {}, []
    for way in (first, WAYS[first], first):
        store = PrefixStore(tmp_path / "store")
        with BatchGenerator(model, pack_weights=way, prefix_store=store, **sizes) as batched:
            found.setdefault(way, []).append(cached(batched, rows)[0])
            caches.append(batched.cache)
    assert found == {first: [0, 128], WAYS[first]: [0]}
    one, other, _ = caches
    one.save(one.add(rows[0].tolist()), tmp_path / "text")
    with pytest.raises(WrongModelError):
        other.load(tmp_path / "text")
    one.load(tmp_path / "text")


def test_a_paged_cache_has_the_models_own_k_and_v():
    model, rows = wide(), prompts(20)
    with rounding(model) as batched:
        cached(batched, rows)
        cache = PagedCache(model, **SIZES)
        assert cache.kv is not batched.cache
        found = cache.kv.add(rows[0].tolist())
        assert cache.kv.length(found) == 0


# ------------------------------------------------------------------ one kind at a time


def test_one_model_has_one_kind_of_packed_weights_at_a_time():
    model = wide()
    with rounding(model):
        with pytest.raises(ValueError, match="expected 'int8', as an open generator"):
            rounding(model, True)
        with rounding(model, "auto") as plain:
            assert plain.packed_bytes == 0
    with (
        rounding(model, True),
        pytest.raises(ValueError, match="expected True, as an open generator"),
    ):
        rounding(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.bfloat16(), "expected float32, got bfloat16"),
        (lambda model: tiny("gpt2"), "no plain linear"),
    ],
)
def test_what_cannot_have_8_bits_is_refused(change, reason):
    model = change(tiny())
    if reason.startswith("no"):
        model.lm_head.forward = model.lm_head.forward
    with pytest.raises(UnsupportedModelError, match=f"cannot have 'int8': .*{reason}"):
        rounding(model)


def test_without_the_instruction_it_is_refused(monkeypatch):
    monkeypatch.setattr(eight_bits, "why_not", lambda dtype: "no AVX512-VNNI")
    with pytest.raises(UnsupportedModelError, match="cannot have 'int8': no AVX512-VNNI"):
        rounding(tiny())


# ------------------------------------------------------------------ a real model


@pytest.mark.slow
def test_a_real_model_is_near_its_own_distribution(smollm2_path):
    """The bound is for scales and roundings, which tiny models do not tell from good ones."""
    from transformers import AutoModelForCausalLM

    from tests.hf.test_smollm2 import DOCUMENTS, ROOT

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    ids = tokenizer((ROOT / DOCUMENTS[1]).read_text(), return_tensors="pt").input_ids[:, :500]
    with torch.inference_mode():
        exact = model(ids).logits[0].log_softmax(-1)
        with packed_weights(model, 8).acting():
            rounded = model(ids).logits[0].log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 1e-4 < divergence < 0.005
    with BatchGenerator(model, tokenizer, pack_weights="int8", max_tokens=1024) as batched:
        results = batched.generate(["The capital of France is", "1, 2, 3, 4,"], max_new_tokens=8)
    assert all(result.error is None and len(result.tokens) == 8 for result in results)
