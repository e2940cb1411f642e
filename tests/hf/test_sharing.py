"""Forks, copies and cuts of a cache: pages are shared, and nobody sees another's tokens."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from pagedkv.errors import TooManySequencesError
from pagedkv.hf import PagedCache
from tests.effort import each_pair, each_value
from tests.hf.tiny import (
    assert_close,
    assert_same_tokens,
    dense,
    generate,
    named,
    padded,
    prompts,
    tiny,
)

PAGE = 4
pytestmark = pytest.mark.usefixtures("without_gradients")


MODELS = ["llama", "gemma3", "gpt2", "gpt_oss"]


@pytest.fixture(params=MODELS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def llama():
    return tiny()


def sizes(**fields):
    return {"page_size": PAGE, "max_tokens": 2048, **fields}


def contents(cache: PagedCache) -> list[Tensor]:
    layers = range(cache.kv.config.num_layers)
    return [x for row in cache.rows for layer in layers for x in cache.kv.gather(row, layer)]


def assert_bitwise(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


def holed(prefix: Tensor, suffixes: list[Tensor]) -> dict[str, Tensor]:
    """[prefix | left-padded suffix] of each row, with the hole in the mask."""
    tail = padded(suffixes)
    ids = torch.cat([prefix.expand(len(suffixes), -1), tail["input_ids"]], dim=1)
    mask = torch.cat([torch.ones_like(ids[:, : len(prefix)]), tail["attention_mask"]], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


# ------------------------------------------------------------------ one prefix, many rows


@pytest.mark.parametrize(("model", "length"), each_value(MODELS, [15, 16, 17]), indirect=["model"])
def test_forks_of_one_prefix_generate_what_full_prompts_do(model, length):
    (prefix,) = prompts(length)
    suffixes = prompts(5, 2, 9, 5)
    with PagedCache.prefill(model, prefix, **sizes()) as shared, shared.fork(4) as rows:
        prefix_pages = -(-length // PAGE)
        actual = generate(model, holed(prefix, suffixes), rows)
        rows.kv.check()
        if len(rows.kv.config.groups) == 1:  # windows drop pages of the prefix behind them
            own = sum(-(-rows.kv.length(i) // PAGE) - length // PAGE for i in rows.rows)
            assert rows.stats().live <= prefix_pages + own
    actual.sequences = actual.sequences[:, -10:]
    for row, suffix in enumerate(suffixes):
        expected = generate(model, {"input_ids": torch.cat([prefix, suffix])[None]})
        expected.sequences = expected.sequences[:, -10:]
        assert_same_tokens(type(actual)(sequences=actual.sequences[row, None]), expected)


def test_prefill_takes_ids_of_one_row_in_any_form(llama):
    (ids,) = prompts(6)
    encoded = BatchEncoding({"input_ids": ids.tolist(), "attention_mask": [1] * 6})
    for form in (ids, ids[None], ids.tolist(), encoded, {"input_ids": ids[None]}):
        with PagedCache.prefill(llama, form, **sizes()) as cache:
            assert (cache.batch_size, cache.get_seq_length()) == (1, 6)


@pytest.mark.parametrize("given", ["The sea", [{"role": "user", "content": "Hi"}], {"text": "Hi"}])
def test_prefill_of_what_no_tokenizer_has_read_is_refused_by_name(llama, given):
    with pytest.raises(TypeError, match=r"ids: expected .* token ids, or what a tokenizer"):
        PagedCache.prefill(llama, given, **sizes())
    assert llama.config._attn_implementation != "pagedkv"


@pytest.mark.parametrize("copied", [PagedCache.fork, copy.copy, copy.deepcopy])
def test_writing_a_fork_never_changes_its_sibling(model, copied):
    batch = padded(prompts(10, 6))
    with PagedCache(model, **sizes()) as cache:
        model(**batch, **named(cache))
        with copied(cache) as twin, copied(twin) as third:
            before, live = contents(cache), cache.stats().live
            assert_bitwise(contents(third), before)
            mask = torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
            for one in (twin, third):
                ids = torch.stack(prompts(3, 3))
                model(ids, attention_mask=mask, **named(one))
            assert_bitwise(contents(cache), before)
            assert twin.stats().live > live
            assert not torch.equal(contents(twin)[0][-3:], contents(third)[0][-3:])
            cache.kv.check()
        assert cache.stats().live == live
        assert_bitwise(contents(cache), before)


def test_more_forks_than_sequences_are_refused_and_nothing_stays(llama):
    with PagedCache.prefill(llama, prompts(9)[0], **sizes(max_sequences=4)) as cache:
        with pytest.raises(TooManySequencesError):
            cache.fork(4)
        assert cache.stats().sequences == 1
        with pytest.raises(TooManySequencesError):
            cache.batch_repeat_interleave(5)
        assert (cache.batch_size, cache.stats().sequences) == (1, 1)
        with cache.fork(3) as rows:
            assert rows.stats().sequences == 4


# ------------------------------------------------------------------ rows of a batch


def step(model, cache, mask: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return model(ids, attention_mask=mask, **named(cache)).logits, mask


CHANGES = {
    "repeat": (lambda c: c.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "negative": (lambda c: c.batch_select_indices(torch.tensor([-1, -3])), [2, 0]),
    "bools": (lambda c: c.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "duplicates": (lambda c: c.batch_select_indices(torch.tensor([1, 1, 0, 1])), [1, 1, 0, 1]),
    "permute": (lambda c: c.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "collapse": (lambda c: c.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
}


@pytest.mark.parametrize(("model", "how"), each_value(MODELS, CHANGES), indirect=["model"])
def test_rows_chosen_and_repeated_as_transformers_own_cache_does(model, how):
    change, rows = CHANGES[how]
    batch = padded(prompts(10, 3, 6))
    ids = torch.randint(2, 90, (len(rows), 2))
    reference = dense(model)
    model(**batch, **named(reference))
    change(reference)
    mask = batch["attention_mask"][rows]
    expected, _ = step(model, reference, mask, ids)
    with PagedCache(model, **sizes()) as cache:
        model(**batch, **named(cache))
        live = cache.stats().live
        change(cache)
        assert cache.stats().live <= live, "no page was copied"
        assert cache.batch_size == len(rows)
        actual, _ = step(model, cache, mask, ids)
        assert_close(actual, expected)
        cache.kv.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.batch_select_indices(torch.tensor([0])),
        lambda c: c.reorder_cache(torch.tensor([0])),
        lambda c: c.crop(0),
        lambda c: c.reset(),
        copy.deepcopy,
    ],
    ids=["repeat", "select", "reorder", "crop", "reset", "deepcopy"],
)
def test_empty_cache_takes_every_change_as_transformers_own_does(llama, change):
    change(dense(llama))
    batch = padded(prompts(7, 4))
    expected = generate(llama, batch)
    with PagedCache(llama, **sizes()) as cache:
        change(cache)
        assert_same_tokens(generate(llama, batch, cache), expected)


EMPTIED = {"reset": lambda c: c.reset(), "cropped": lambda c: c.crop(-c.seen)}


@pytest.mark.parametrize(("model", "how"), each_value(MODELS, EMPTIED), indirect=["model"])
def test_an_emptied_cache_gives_its_pages_back_and_takes_another_batch(model, how):
    with PagedCache(model, **sizes()) as cache:
        for lengths in ((10, 3, 6), (5,), (4, 14)):
            batch = padded(prompts(*lengths))
            expected = generate(model, batch)
            assert_same_tokens(generate(model, batch, cache), expected)
            EMPTIED[how](cache)
            assert cache.get_seq_length() == cache.stats().live == 0
            assert how == "cropped" or (cache.batch_size, cache.stats().sequences) == (-1, 0)
            cache.kv.check()


# ------------------------------------------------------------------ crop


@pytest.mark.parametrize(
    ("family", "lengths", "removed", "kind"),
    each_pair(
        ["llama", "mistral", "gpt2"], [(18, 18), (18, 8)], [0, 1, 2, 3, 6, 7], [int, torch.tensor]
    ),
)
def test_crop_then_other_tokens(family, lengths, removed, kind):
    # Page borders lie before tokens 16, 12 and 8 of the long row, 8, 4 and 0 of the short one.
    model = tiny(family)
    batch = padded(prompts(*lengths))
    kept = {name: x[:, : 18 - removed] for name, x in batch.items()}
    ids = torch.randint(2, 90, (2, 3))
    reference = dense(model)
    model(**kept, **named(reference))
    expected, _ = step(model, reference, kept["attention_mask"], ids)
    with PagedCache(model, **sizes(rollback=8)) as cache:
        model(**batch, **named(cache))
        cache.crop(kind(-removed))
        assert cache.get_seq_length() == 18 - removed
        assert type(cache.get_seq_length()) is int
        actual, _ = step(model, cache, kept["attention_mask"], ids)
        assert_close(actual, expected)
        cache.kv.check()


@pytest.mark.parametrize(
    ("asked", "left"), [(12, 12), (17, 17), (18, 18), (99, 18), (-18, 0), (-99, 0), (0, 18)]
)
def test_crop_to_a_length_or_to_nothing(llama, asked, left):
    batch = padded(prompts(18, 8))
    with PagedCache(llama, **sizes()) as cache:
        llama(**batch, **named(cache))
        cache.crop(torch.tensor(asked))
        assert cache.get_seq_length() == left
        kept = batch["attention_mask"][:, :left].sum(1).tolist()
        assert [cache.kv.length(row) for row in cache.rows] == kept
        cache.kv.check()


def test_crop_that_one_row_cannot_follow_changes_no_row():
    # The window has dropped what the long row would need again; the short row could be cut.
    model = tiny("mistral")
    batch = padded(prompts(3, 30))
    with PagedCache(model, **sizes()) as cache:
        model(**batch, **named(cache))
        before = contents(cache)
        with pytest.raises(ValueError, match="rollback"):
            cache.crop(-7)
        assert [cache.kv.length(row) for row in cache.rows] == [3, 30]
        assert cache.get_seq_length() == 30
        assert_bitwise(contents(cache), before)


def test_cropping_a_fork_leaves_its_sibling_alone(model):
    with PagedCache.prefill(model, prompts(14)[0], **sizes(rollback=8)) as cache:
        before = contents(cache)
        with cache.fork() as twin:
            twin.crop(-5)
            model(torch.randint(2, 90, (1, 5)), **named(twin))
            assert_bitwise(contents(cache), before)
            cache.kv.check()


@pytest.mark.parametrize("forks", [1, 3])
def test_samples_in_a_cache_of_fewer_rows_are_told_of_rows(forks):
    """Not of tokens that are fed again, which rows of a wrong number look like."""
    model = tiny("llama")
    (prompt,) = prompts(9)
    mask = torch.ones(1, 9, dtype=torch.long)
    samples = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 2}
    with (
        PagedCache.prefill(model, prompt[:6]) as prefix,
        prefix.fork(forks) as cache,
        pytest.raises(ValueError, match=f"expected {forks} rows as before, got 4; each sample"),
    ):
        model.generate(prompt[None], attention_mask=mask, **samples, **named(cache))
