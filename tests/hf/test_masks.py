"""Padding wherever it stands: what is masked never enters a page, what is real sees all of its row.

The truth is each row computed alone, without padding and without a cache.
"""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.hf.tiny import (
    assert_close,
    named,
    padded,
    prompts,
    tiny,
)

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(params=["llama", "mistral", "gemma3", "gpt2", "opt", "gpt_oss", "gemma4"])
def model(request):
    return tiny(request.param)


def paged(model, **fields) -> PagedCache:
    return PagedCache(model, **{"page_size": 4, "max_tokens": 2048, **fields})


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def forward(model, ids: Tensor, mask: Tensor, cache: PagedCache) -> Tensor:
    """One forward with the positions `generate` would pass: logits of the new tokens."""
    places = {"position_ids": positions(mask)[:, -ids.shape[1] :]}
    return model(ids, attention_mask=mask, **named(cache), **places).logits


def assert_rows_are(alone: list[Tensor], logits: Tensor, mask: Tensor, done: list[int]) -> None:
    """The real tokens of a chunk got the logits their rows have alone, after `done` tokens."""
    for row, expected in enumerate(alone):
        real = logits[row][mask[row].bool()]
        if len(real):
            assert_close(real, expected[done[row] : done[row] + len(real)])
        done[row] += len(real)


def alone(model, rows: list[Tensor]) -> list[Tensor]:
    return [model(row[None], use_cache=False).logits[0] for row in rows]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prefill_and_more_tokens(model, side):
    rows = prompts(13, 5, 19)
    expected, done = alone(model, rows), [0, 0, 0]
    batch = padded([row[:n] for row, n in zip(rows, (10, 2, 16))], side)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with paged(model) as cache:
        assert_rows_are(expected, forward(model, ids, mask, cache), mask, done)
        assert [cache.kv.length(row) for row in cache.rows] == [10, 2, 16]
        for _ in range(3):
            new = torch.stack([row[n] for row, n in zip(rows, done)])[:, None]
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            assert_rows_are(expected, forward(model, new, mask, cache), mask[:, -1:], done)
        assert cache.get_seq_length() == mask.shape[1]
        cache.kv.check()


def test_chunks_in_which_some_rows_are_all_padding(model):
    # Columns: a chunk of 4 is empty in row 0, another in row 1, and one in every row.
    mask = torch.tensor(
        [
            [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1],
            [1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
            [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        ]
    )
    rows = prompts(*mask.sum(1).tolist())
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.cat(rows)
    expected, done = alone(model, rows), [0, 0, 0]
    with paged(model) as cache:
        for start in range(0, 16, 4):
            seen = mask[:, : start + 4]
            logits = forward(model, ids[:, start : start + 4], seen, cache)
            assert logits.isfinite().all(), "padding must not turn into NaN"
            assert_rows_are(expected, logits, seen[:, -4:], done)
        assert done == mask.sum(1).tolist()
        assert [cache.kv.length(row) for row in cache.rows] == done
        cache.kv.check()


@contextmanager
def last_tokens_alone(model, keep: int):
    """Within it layers without K and V compute the last tokens of each row alone.

    Newer releases of transformers do so by themselves where no more logits are wanted.
    """

    def cut(layer, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        mask = kwargs["attention_mask"]
        return tuple(x[:, -keep:] for x in args), {
            **kwargs,
            "position_embeddings": (cos[:, -keep:], sin[:, -keep:]),
            "attention_mask": None if mask is None else mask[:, :, -keep:],
        }

    layers = [layer for layer in model.model.layers if layer.self_attn.is_kv_shared_layer]
    hooks = [layer.register_forward_pre_hook(cut, with_kwargs=True) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_layers_that_attend_again_may_have_queries_for_the_last_tokens_alone(keep):
    model = tiny("gemma4")
    # Of the last 3 columns some are padding, in one row all, and one row has no token at all.
    chunks = torch.tensor(
        [
            [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
            [[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]],
            [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]],
            [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0]],
        ]
    )
    mask = chunks.flatten(1)
    ids = torch.randint(2, 99, mask.shape)
    expected = alone(model, [row[real.bool()] for row, real in zip(ids, mask)])
    done = [0, 0, 0, 0]
    with paged(model) as cache, last_tokens_alone(model, keep):
        for at in (0, 5):
            new, seen = slice(at, at + 5), mask[:, : at + 5]
            places = {"position_ids": positions(seen)[:, new]}
            logits = model(ids[:, new], attention_mask=seen, **named(cache), **places).logits
            assert logits.shape[1] == keep
            last = seen[:, -keep:].bool()
            done = seen.sum(1).tolist()
            for row, n in enumerate(last.sum(1).tolist()):
                if n:
                    assert_close(logits[row][last[row]], expected[row][done[row] - n : done[row]])
        cache.kv.check()
        assert [cache.kv.length(row) for row in cache.rows] == done


def test_row_without_a_single_token(model):
    (row,) = prompts(9)
    ids = torch.stack([torch.zeros_like(row), row])
    mask = torch.stack([torch.zeros_like(row), torch.ones_like(row)])
    (expected,) = alone(model, [row])
    with paged(model) as cache:
        logits = forward(model, ids, mask, cache)
        assert logits.isfinite().all()
        assert_close(logits[1], expected)
        assert [cache.kv.length(i) for i in cache.rows] == [0, 9]
        assert cache.stats().live == 3 * len(cache.kv.config.groups)


# ------------------------------------------------------------------ masks that cannot be right


@pytest.fixture
def filled():
    """A cache with a left-padded batch in it, and what a next forward is given."""
    model = tiny()
    batch = padded(prompts(9, 5))
    cache = paged(model)
    model(**batch, **named(cache))
    with cache:
        yield model, batch["attention_mask"], cache


def refused(cache: PagedCache, forward, error, match: str) -> None:
    """The forward raises, and nothing was written."""
    before = [cache.kv.gather(row, 1) for row in cache.rows]
    seen, stats = cache.get_seq_length(), cache.stats()
    with pytest.raises(error, match=match):
        forward()
    cache.abort_step()
    assert cache.get_seq_length() == seen
    assert cache.stats() == stats
    after = [cache.kv.gather(row, 1) for row in cache.rows]
    assert all(torch.equal(a, b) for x, y in zip(before, after) for a, b in zip(x, y))


@pytest.mark.parametrize("change", ["token masked out", "padding masked in", "no mask at all"])
def test_mask_that_differs_for_stored_tokens_is_refused(filled, change):
    model, mask, cache = filled
    new = torch.full((2, 1), 7)
    right = torch.cat([mask, torch.ones_like(new)], dim=1)
    wrong = right.clone()
    wrong[0, 3], wrong[1, 0] = change != "token masked out", change == "padding masked in"
    given = None if change == "no mask at all" else wrong
    refused(
        cache,
        lambda: model(new, attention_mask=given, **named(cache)),
        UnsupportedModelError,
        "tokens, which are cached, has changed",
    )
    assert forward(model, new, right, cache).isfinite().all()


@pytest.mark.parametrize("columns", [1, 9, 11])
def test_mask_of_another_width_is_refused(filled, columns):
    model, _, cache = filled
    refused(
        cache,
        lambda: model(
            torch.full((2, 1), 7),
            attention_mask=torch.ones(2, columns, dtype=torch.long),
            **named(cache),
        ),
        ValueError,
        r"attention_mask: expected \[2, 10\]",
    )


def test_batch_of_another_size_is_refused(filled):
    model, mask, cache = filled
    new = torch.full((3, 1), 7)
    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)[[0, 1, 1]]
    refused(
        cache,
        lambda: model(new, attention_mask=mask, **named(cache)),
        ValueError,
        "expected 2 rows as before, got 3",
    )


def test_mask_may_be_bool_int_or_float(filled):
    model, mask, cache = filled
    new = torch.full((2, 1), 7)
    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    logits = []
    for dtype in (torch.bool, torch.int32, torch.float32):
        logits.append(model(new, attention_mask=mask.to(dtype), **named(cache)).logits)
        cache.crop(-1)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_padding_is_never_attended_because_the_mask_function_is_missing(monkeypatch):
    # transformers hands a name without a mask function no mask at all, and says nothing.
    model = tiny()
    batch = padded(prompts(9, 5))
    with paged(model) as cache:
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, "pagedkv")
        with pytest.raises(UnsupportedModelError, match="mask function of 'pagedkv'"):
            model(**batch, **named(cache))
        assert cache.stats().live == 0
        monkeypatch.undo()
        expected = alone(model, [batch["input_ids"][1, 4:]])
        assert_close(model(**batch, **named(cache)).logits[1, 4:], expected[0])
