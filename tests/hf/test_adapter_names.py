"""Rows with adapters of their own (`adapter_names` of PEFT) over prefixes and later turns."""

from contextlib import contextmanager

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.errors import ModelChangedError
from pagedkv.hf.adapters import state_of
from tests.batch.generating import generator
from tests.hf.adapted import adapted, add
from tests.hf.tiny import named, prompts, tiny

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
SIZES = {"max_tokens": 512, "page_size": 4}
MIXED = ["one", "two", "__base__"]


@pytest.fixture
def model():
    made = adapted(tiny())
    add(made, "two")
    return made


@pytest.fixture
def prefix():
    return prompts(13)[0]


@contextmanager
def refused(model, kind=ModelChangedError):
    """PEFT leaves the adapters of rows in its layers where a call raises."""
    match = r"^model: its adapters \(.*`adapter_names`\) have"
    with pytest.raises(kind, match=match if kind is ModelChangedError else None):
        yield
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer._forward_pre_hooks.clear()


def behind(prefix, rows):
    return torch.stack([torch.cat([prefix, row]) for row in prompts(*[5] * rows)])


def test_rows_under_other_adapters_than_their_prefix_are_refused_by_name(model, prefix):
    rows = behind(prefix, 3)
    with PagedCache.prefill(model, prefix, **SIZES) as held, held.fork(3) as fork:
        with refused(model):
            model.generate(rows, **named(fork), adapter_names=MIXED, **GREEDY)
        with refused(model), torch.no_grad():
            model(rows[:, 13:], **named(fork), adapter_names=MIXED)
        assert fork.seen == held.seen == 13
        got = model.generate(rows, **named(fork), **GREEDY)  # under the prefix's own again
    assert got.equal(model.generate(rows, **GREEDY))


@pytest.mark.parametrize("name", ["one", "two", "__base__"])
def test_a_prefix_is_right_where_all_rows_have_the_adapter_it_was_computed_with(
    model, prefix, name
):
    rows = behind(prefix, 2)
    with PagedCache(model, **SIZES) as held:
        with torch.no_grad():
            model(prefix[None], **named(held), adapter_names=[name])
        with held.fork(2) as fork:
            got = model.generate(rows, **named(fork), adapter_names=[name] * 2, **GREEDY)
    assert got.equal(model.generate(rows, adapter_names=[name] * 2, **GREEDY))
    others = [model.generate(rows, adapter_names=[other] * 2, **GREEDY) for other in MIXED]
    assert sum(got.equal(other) for other in others) == 1


def test_a_batch_of_several_adapters_is_right_without_a_prefix_and_in_a_later_turn(model, prefix):
    rows = behind(prefix, 3)
    with PagedCache(model, **SIZES) as cache:
        for _ in range(2):
            got = model.generate(rows, **named(cache), adapter_names=MIXED, **GREEDY)
            assert got.equal(model.generate(rows, adapter_names=MIXED, **GREEDY))
            rows = torch.cat([got, rows[:, :3]], 1)
        with refused(model):
            model.generate(rows, **named(cache), adapter_names=MIXED[::-1], **GREEDY)
        with refused(model):
            model.generate(rows, **named(cache), **GREEDY)


def test_a_later_turn_that_fails_leaves_rows_of_one_text_the_values_of_their_own_adapters(
    model, prefix
):
    rows = prefix[None].expand(3, -1)
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            model(rows, **named(cache), adapter_names=MIXED)
        before = [cache.kv.gather(row, 0)[1] for row in cache.rows]
        broken = model.get_base_model().lm_head.register_forward_hook(lambda *_: 1 / 0)
        with refused(model, ZeroDivisionError):
            other = torch.cat([rows[:, :5], rows[:, :9].flip(1)], 1)
            model.generate(other, **named(cache), adapter_names=MIXED, **GREEDY)
        broken.remove()
        for row, values in zip(cache.rows, before):
            assert cache.kv.gather(row, 0)[1].equal(values)
        longer = torch.cat([rows, rows[:, :2]], 1)
        got = model.generate(longer, **named(cache), adapter_names=MIXED, **GREEDY)
    assert got.equal(model.generate(longer, adapter_names=MIXED, **GREEDY))


def test_adapters_of_rows_are_a_state_of_their_own_unless_all_rows_have_the_same(model, prefix):
    base, seen = model.get_base_model(), []
    base.register_forward_pre_hook(lambda *_: seen.append(state_of(base)))
    for names in (["one"] * 2, ["two"] * 2, ["one", "two"], ["two", "one"], ["__base__"] * 2):
        with torch.no_grad():
            model(prefix[None].expand(2, -1), adapter_names=names)
    plain = [state_of(base)]
    model.set_adapter("two")
    plain.append(state_of(base))
    assert seen[:2] == plain
    assert seen[4] == b""
    assert len({*seen}) == 5


def test_a_generator_says_where_adapters_of_rows_belong(model):
    refused = pytest.raises(TypeError, match=r"^adapter_names: .*call model\.set_adapter")
    with generator(model) as batched, refused:
        batched.stream(prompts(5, 5), adapter_names=["one", "two"])
