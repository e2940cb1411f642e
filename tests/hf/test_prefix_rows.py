"""Whole prompts behind a prefix that is computed already: each row shares what it has in common."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pagedkv.errors import TooManySequencesError, UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.release import CACHE
from tests.effort import each_value, few
from tests.hf.modes import made, own, paged
from tests.hf.tiny import VARIED, generate, named, padded, prompts, tiny
from tests.hybrids import HYBRIDS

SIZES = {"max_tokens": 2048, "page_size": 4}
PREFIX = 11
# Without gemma2: transformers' sdpa leaves out its softcap, which pages apply.
FAMILIES = [family for family in VARIED if family != "gemma2"]
families = pytest.mark.parametrize(
    "family", few([*FAMILIES, "opt", "deepseek_v3"], "llama", "gemma3")
)


def behind(prefix: Tensor) -> list[Tensor]:
    """Prompts behind a prefix; of the last four, each leaves it in a way of its own."""
    whole = [torch.cat([prefix, tail]) for tail in prompts(5, 2, 9, 1)]
    apart = whole[1].clone()
    apart[6] = 2 + (apart[6] - 1) % 90
    last = whole[0].clone()
    last[PREFIX - 1] = 2 + (last[PREFIX - 1] - 1) % 90
    return [*whole, apart, last, prefix[:4].clone(), prefix.clone()]


SHARED = [11, 11, 11, 11, 6, 10, 3, 10]  # tokens of `behind` that need no computing


@contextmanager
def forked(model, prefix, n: int, **sizes) -> Iterator[tuple[PagedCache, list[int]]]:
    """A fork of a prefix, and how many tokens each step over it computes."""
    computed: list[int] = []
    with PagedCache.prefill(model, prefix, **{**SIZES, **sizes}) as shared:
        prepare = shared.kv.prepare

        def counted(seqs, num_new):
            computed.append(int(sum(num_new)))
            return prepare(seqs, num_new=num_new)

        shared.kv.prepare = counted
        with shared.fork(n) as cache:
            yield cache, computed
        shared.kv.check()


def case(family: str = "llama"):
    model = made(family)
    (prefix,) = prompts(PREFIX)
    rows = behind(prefix)
    left = sum(len(row) for row in rows) - sum(SHARED)
    return model, prefix, rows, left


# ------------------------------------------------------------------ modes


@families
@pytest.mark.parametrize(
    ("copies", "options"),
    [
        (1, {}),
        (3, {"num_beams": 3}),
        (2, {"do_sample": True, "num_return_sequences": 2}),
        (1, {"repetition_penalty": 1.3}),
    ],
    ids=["greedy", "beams", "samples", "processed"],
)
def test_a_batch_padded_on_the_left_computes_only_what_follows_the_prefix(family, copies, options):
    model, prefix, rows, left = case(family)
    expected = own(model, padded(rows), **options)
    with forked(model, prefix, len(rows) * copies) as (cache, computed):
        assert torch.equal(paged(model, padded(rows), cache, **options), expected)
    assert computed[0] == left * copies


@pytest.mark.parametrize("family", few(HYBRIDS, "lfm2"))
def test_rows_with_recurrent_states_of_different_lengths_are_computed_anew(family):
    model, prefix, rows, _ = case(family)
    with forked(model, prefix, len(rows)) as (cache, computed):
        assert torch.equal(paged(model, padded(rows), cache), own(model, padded(rows)))
    assert computed[0] == sum(len(row) for row in rows)


@pytest.mark.parametrize(("family", "chunk"), each_value(["llama", "mistral", "gpt2"], [3, 8, 40]))
def test_a_prompt_in_chunks_is_right(family, chunk):
    model, prefix, rows, _ = case(family)
    expected = own(model, padded(rows))
    with forked(model, prefix, len(rows)) as (cache, _):
        assert torch.equal(paged(model, padded(rows), cache, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("row", few(range(len(SHARED)), 0, 4, 7))
def test_drafts_behind_a_prefix(row):
    model, prefix, rows, _ = case()
    batch = padded([rows[row].repeat(2)])
    options = {"max_new_tokens": 16, "prompt_lookup_num_tokens": 4}
    with forked(model, prefix, 1) as (cache, computed):
        found = paged(model, batch, cache, **options)
    assert torch.equal(found, own(model, batch, max_new_tokens=16))
    drafts = 4
    assert computed[0] <= 2 * len(rows[row]) + drafts - SHARED[row]


# Without those whose layers embed ids themselves, and one whose queries transformers scales by
# columns, those of padding counted.
EMBEDDED = [family for family in FAMILIES if family not in ("gemma3n", "gemma4", "llama4")]


@pytest.mark.parametrize("family", few([*EMBEDDED, "opt", "deepseek_v3"], "llama", "gemma3"))
def test_embeddings_are_compared_with_those_of_the_prefix(family):
    model, prefix, rows, left = case(family)
    batch = padded(rows)
    given = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach()}
    given["attention_mask"] = batch["attention_mask"]
    with forked(model, prefix, len(rows)) as (cache, computed):
        found = paged(model, given, cache)
    assert torch.equal(found, own(model, given))
    assert computed[0] == left


def test_prompts_of_one_length_need_no_mask():
    model, (prefix, *tails) = made("llama"), prompts(PREFIX, 5, 5)
    ids = torch.stack([torch.cat([prefix, tail]) for tail in tails])
    ids[1, 3] = 2 + (ids[1, 3] - 1) % 90
    batch = {"input_ids": ids}
    with forked(model, prefix, 2) as (cache, computed):
        assert torch.equal(paged(model, batch, cache), own(model, batch))
    assert computed[0] == 5 + 13


@pytest.mark.parametrize("masked", [True, False])
def test_a_model_that_counts_columns_shares_what_stands_in_those_of_the_prefix(masked):
    model, (prefix, *tails) = made("llama"), prompts(PREFIX, 5, 5, 4 if masked else 5)
    rows = [torch.cat([prefix, tail]) for tail in tails]
    rows[0][3] = 2 + (rows[0][3] - 1) % 90

    def without_positions(module, args, given):
        if given[CACHE].get_seq_length() <= PREFIX:
            del given["position_ids"]
            if not masked:  # newer releases drop one of ones
                given.pop("attention_mask", None)
        return args, given

    def found(run, *args):
        how = {"with_kwargs": True, "prepend": True}
        hook = model.register_forward_pre_hook(without_positions, **how)
        ids = run(model, padded(rows), *args, max_new_tokens=1)
        hook.remove()
        return ids

    with forked(model, prefix, 3) as (cache, computed):
        actual = found(paged, cache)
    assert torch.equal(actual, found(own))
    assert computed[0] == 13 + 5 + (15 if masked else 5)


def test_padding_behind_the_prefix_is_taken_as_well():
    model, (prefix, *tails) = made("llama"), prompts(PREFIX, 5, 2, 9)
    tail = padded(tails)
    ones = torch.ones(3, PREFIX, dtype=torch.long)
    ids = torch.cat([prefix.expand(3, -1), tail["input_ids"]], dim=1)
    mask = torch.cat([ones, tail["attention_mask"]], dim=1)
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = own(model, padded([torch.cat([prefix, tail]) for tail in tails]))
    for given in (batch, {**batch, "input_ids": tail["input_ids"]}):  # whole rows, or the rest
        with forked(model, prefix, 3) as (cache, computed):
            assert torch.equal(paged(model, given, cache)[:, -10:], expected[:, -10:])
        assert computed[0] == 5 + 2 + 9


def test_positions_of_a_callers_own_are_no_part_of_the_prefix():
    model, (prefix, tail) = made("llama"), prompts(PREFIX, 5)
    batch = padded([torch.cat([prefix, tail])])
    batch["position_ids"] = torch.arange(3, 3 + PREFIX + 5)[None]
    with forked(model, prefix, 1) as (cache, computed):
        assert torch.equal(paged(model, batch, cache), own(model, batch))
    assert computed[0] == PREFIX + 5


@pytest.mark.parametrize("kind", [0, 7])
def test_tokens_with_types_of_their_own_are_no_part_of_the_prefix(kind):
    model, prefix, rows, _ = case("gpt2")
    batch = padded(rows)
    batch["token_type_ids"] = torch.full_like(batch["input_ids"], kind)
    with forked(model, prefix, len(rows)) as (cache, computed):
        assert torch.equal(paged(model, batch, cache), own(model, batch))
    assert computed[0] == sum(len(row) for row in rows)


def test_a_mask_may_have_any_dtype():
    model, prefix, rows, left = case()
    batch = padded(rows)
    given = {**batch, "attention_mask": batch["attention_mask"].bfloat16()}
    with forked(model, prefix, len(rows)) as (cache, computed):
        assert torch.equal(paged(model, given, cache), own(model, batch))
    assert computed[0] == left


@pytest.mark.parametrize(
    "fields",
    [{"kv_format": "int8"}, {"kv_format": "int4"}, {"growth_step": 64}, {"retention": "keydiff"}],
    ids=str,
)
def test_pages_of_any_kind_are_shared(fields):
    _, prefix, rows, left = case()
    model = tiny("qwen3", head_dim=32)
    with forked(model, prefix, len(rows), page_size=16, max_sequences=16, **fields) as (
        cache,
        computed,
    ):
        found = paged(model, padded(rows), cache)
    assert computed[0] == left
    if "kv_format" not in fields:  # these have lost nothing
        assert torch.equal(found, own(model, padded(rows)))


# ------------------------------------------------------------------ the cache before and after


def test_the_prefix_itself_and_a_copy_of_it_take_a_whole_prompt():
    model, prefix, rows, _ = case()
    for row in rows[3:]:
        batch = padded([row])
        expected = own(model, batch)
        with PagedCache.prefill(model, prefix, **SIZES) as shared:
            for cache in (copy.deepcopy(shared), shared):
                assert torch.equal(paged(model, batch, cache), expected)


def test_a_second_turn_goes_on_from_what_the_first_has_stored():
    model, prefix, rows, left = case()
    batch = padded(rows)
    with forked(model, prefix, len(rows)) as (cache, computed):
        first = generate(model, batch, cache).sequences
        mask = (first != 0).long()
        mask[:, batch["input_ids"].shape[1] :] = 1
        turn = {"input_ids": first, "attention_mask": mask}
        steps = len(computed)
        assert torch.equal(paged(model, turn, cache), own(model, turn))
    assert computed[0] == left
    assert computed[steps] == len(rows)


def test_a_fork_that_was_cropped_shares_what_it_still_holds():
    model, prefix, rows, _ = case()
    with forked(model, prefix, len(rows)) as (cache, computed):
        cache.crop(-3)
        assert torch.equal(paged(model, padded(rows), cache), own(model, padded(rows)))
    assert computed[0] == sum(len(row) - min(PREFIX - 3, n) for row, n in zip(rows, SHARED))


def test_length_is_that_of_the_prefix_until_generate_asks():
    model, prefix, rows, _ = case()
    with forked(model, prefix, len(rows)) as (cache, _):
        assert cache.get_seq_length() == PREFIX
        generate(model, padded(rows), cache, max_new_tokens=1)
        assert cache.get_seq_length() == padded(rows)["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("who", "where"), each_value(["all", "some", "none"], ["embed_tokens", "layers.1", "norm"])
)
def test_a_forward_that_raises_leaves_the_fork_as_it_was(who, where):
    model, prefix, rows, _ = case()
    rows = {"all": rows, "some": rows[1:6], "none": rows[4:6]}[who]
    batch, expected = padded(rows), own(model, padded(rows))

    def broken(*args):
        raise RuntimeError("broken")

    with forked(model, prefix, len(rows)) as (cache, _):
        before = cache.stats()
        hook = model.model.get_submodule(where).register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, batch, cache)
        hook.remove()
        assert [cache.kv.length(row) for row in cache.rows] == [PREFIX] * cache.batch_size
        assert cache.kept is None
        assert cache.stats().sequences == before.sequences
        cache.kv.check()
        assert torch.equal(paged(model, batch, cache), expected)


def test_rows_that_all_leave_need_one_sequence_more_until_they_have():
    model, prefix, rows, _ = case()
    batch = padded(rows[4:6])
    for most in (3, 4):
        with forked(model, prefix, 2, max_sequences=most) as (cache, _):
            if most == 3:
                with pytest.raises(TooManySequencesError):
                    generate(model, batch, cache)
                assert [cache.kv.length(row) for row in cache.rows] == [PREFIX] * 2
            else:
                assert torch.equal(paged(model, batch, cache), own(model, batch))


def test_another_number_of_rows_is_refused_and_changes_nothing():
    model, prefix, rows, _ = case()
    with forked(model, prefix, 3) as (cache, _):
        with pytest.raises(ValueError, match=r"expected 3 rows .* got 8;.*`\.fork\(n\)`"):
            generate(model, padded(rows), cache)
        assert torch.equal(paged(model, padded(rows[:3]), cache), own(model, padded(rows[:3])))


def test_a_cache_of_unknown_text_says_where_padding_goes():
    model, prefix, rows, _ = case()
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(prefix[None]), **named(cache))
        with (
            cache.fork(len(rows)) as rest,
            pytest.raises(UnsupportedModelError, match=r"torch\.cat"),
        ):
            generate(model, padded(rows), rest)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (padded(prompts(9, 5)), ValueError, "without padding"),
        ([], ValueError, "at least one token"),
        ({"input_ids": [[]], "attention_mask": [[]]}, ValueError, "at least one token"),
        ("a text", TypeError, "token ids"),
    ],
)
def test_a_prefix_that_is_none_is_refused_by_name(given, error, says):
    with pytest.raises(error, match=f"^ids: expected.*{says}"):
        PagedCache.prefill(tiny("llama"), given, **SIZES)
