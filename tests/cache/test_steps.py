"""A step from prepare to commit or abort: what it says, takes and leaves."""

import numpy as np
import pytest
import torch

from pagedkv import LayerGroup
from pagedkv.errors import OpenStepError
from tests.cache.small import P, ids, make, snapshot, table_of
from tests.cases import one_group, two_groups
from tests.contents import assert_contents, start, write_step


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("config", [one_group(), two_groups(5, rollback=1)], ids=["full", "both"])
def test_abort_restores_lengths_tables_refcounts_and_bytes(config, debug):
    cache, text = make(config, debug), ids(10)
    a = start(cache, text)
    b = cache.fork(a)[0]
    c = start(cache, ids(7, 1))
    seqs = [a, b, c]

    def tables():
        step = cache.prepare(seqs, num_new=1)
        # Of c all pages, of a and b the full ones: their last is a copy made for this step.
        rows = [
            [table_of(step, row, 2, g) for row in range(len(seqs))]
            for g in range(len(config.groups))
        ]
        cache.abort(step)
        return rows

    before = snapshot(cache, seqs)
    first = tables()
    assert snapshot(cache, seqs) == before
    for _ in range(3):
        step = cache.prepare([b, c, a], tokens=[ids(9, 2), ids(2, 3), ids(5, 4)])
        write_step(cache, step, [text + ids(9, 2), ids(7, 1) + ids(2, 3), text + ids(5, 4)])
        for seq, expected in ((a, text), (b, text), (c, ids(7, 1))):
            assert_contents(cache, seq, expected)
        cache.abort(step)
        after = snapshot(cache, seqs)
        assert after == before
    assert tables() == first


def test_leaving_a_step_after_an_explicit_commit_or_abort_does_nothing():
    cache = make()
    a = cache.add(ids(6))
    with cache.step([a]) as step:
        write_step(cache, step, [ids(6)])
        cache.abort(step)
    assert cache.length(a) == 0
    with cache.step([a], num_new=4) as step:
        write_step(cache, step, [ids(4)])
        cache.commit(step, [3])
        b = cache.add([7])
        cache.prepare([b])  # a new step, opened before the old block is left
    assert cache.length(a) == 3
    with pytest.raises(OpenStepError):
        cache.prepare([a], num_new=1)


def test_a_step_describes_itself():
    cache = make()
    a, b, c = start(cache, ids(6)), start(cache, ids(3, 1)), cache.add(ids(5, 2))
    step = cache.prepare([b, c, a], tokens=[ids(2, 3), ids(5, 2), [4]])
    assert list(step.seqs) == [b, c, a]
    assert isinstance(step.num_new, np.ndarray)
    assert step.num_new.tolist() == [2, 5, 1]
    expected = {
        "tokens": (torch.int64, [*ids(2, 3), *ids(5, 2), 4]),
        "positions": (torch.int64, [3, 4, 0, 1, 2, 3, 4, 6]),
        "last_rows": (torch.int64, [1, 6, 7]),
        "query_start_loc": (torch.int32, [0, 2, 7, 8]),
    }
    for name, (dtype, values) in expected.items():
        tensor = getattr(step, name)
        assert (tensor.dtype, tensor.tolist()) == (dtype, values), name
    assert (step.kv_lens().dtype, step.kv_lens().tolist()) == (torch.int32, [5, 5, 7])
    table, slots = step.page_table(), step.slots()
    assert (table.dtype, slots.dtype) == (torch.int32, torch.int64)
    rows = [0, 0, 1, 1, 1, 1, 1, 2]
    at = step.positions
    assert slots.tolist() == (table[rows, at // P].long() * P + at % P).tolist()
    indptr, indices, last = step.csr()
    assert [x.dtype for x in (indptr, indices, last)] == [torch.int32] * 3
    assert indptr.tolist() == [0, 2, 4, 6]
    assert last.tolist() == [1, 1, 3]
    assert indices.tolist() == table[:, :2].flatten().tolist()
    cache.abort(step)


def test_addresses_of_step_tensors_are_stable_while_lengths_change():
    cache = make()
    a = start(cache, ids(3))
    addresses = set()
    for n in range(4, 9):
        step = cache.prepare([a], tokens=[n])
        addresses.add((step.positions.data_ptr(), step.page_table().data_ptr()))
        write_step(cache, step, [[*ids(3), *range(4, n + 1)]])
        cache.commit(step)
    assert len(addresses) <= 2, "double buffered at most"


def test_tensors_of_every_group_begin_where_kernels_can_read_them():
    groups = LayerGroup((0,)), LayerGroup((1,))
    odd = {"max_sequences": 7, "max_sequence_length": 100, "max_step_tokens": 33}
    cache = make(one_group(groups=groups, max_tokens=200, retention="lru", budget=68, **odd))
    step = cache.prepare([cache.add()], num_new=9)
    for tensor in (step.page_table(1), step.slots(1), step.kv_lens(1)):
        assert tensor.data_ptr() % 16 == 0
    cache.abort(step)


def test_pages_that_a_step_fills_are_sent_once_for_all_groups():
    size = 16
    cache = make(two_groups(20, head_dim=32, page_size=size, max_tokens=112, kv_format="int4"))
    a, b = cache.add(), cache.add()
    step = cache.prepare([a, b], num_new=[3 * size + 5, 2 * size])
    sent = [step.direct(group) for group in range(2)]
    for group, (first, pages) in enumerate(sent):
        table = step.page_table(group)
        assert first.tolist() == [size, 2 * size, 4 * size + 5]
        assert pages.tolist() == [*table[0, 1:3].tolist(), table[1, 1].item()]
        assert first.is_contiguous()
        assert pages.is_contiguous()
        assert not (first.data_ptr() | pages.data_ptr()) % 16, "kernels could not read them"
    assert len({x.untyped_storage().data_ptr() for both in sent for x in both}) == 1
    (slots, tokens), (others, same) = (step.written(group) for group in range(2))
    assert tokens is same
    assert tokens.tolist() == [*range(size), *range(3 * size, 4 * size + 5)]
    assert slots.tolist() == step.slots(0)[tokens].tolist()
    assert others.tolist() == step.slots(1)[tokens].tolist()
    cache.abort(step)


@pytest.mark.parametrize(
    "form",
    [
        [3, 4],
        [[3], [4]],
        np.asarray([3, 4]),
        np.asarray([[3], [4]], dtype=np.int16),
        [np.asarray([3], dtype=np.uint8), [4]],
        torch.tensor([3, 4]),
        torch.tensor([[3], [4]], dtype=torch.int32),
        (np.int64(3), 4),
    ],
    ids=str,
)
def test_ids_come_in_many_forms(form):
    cache = make()
    a, b = start(cache, ids(3)), start(cache, ids(3, 1))
    with cache.step([a, b], tokens=form) as step:
        assert step.tokens.tolist() == [3, 4]
        write_step(cache, step, [[*ids(3), 3], [*ids(3, 1), 4]])
    assert_contents(cache, a, [*ids(3), 3])
    assert_contents(cache, b, [*ids(3, 1), 4])


def test_packed_ids_are_passed_on_when_fed_by_count():
    cache = make()
    a, b = start(cache, ids(3)), start(cache, ids(3, 1))
    seqs = np.asarray([b, a])
    step = cache.prepare(seqs, tokens=torch.tensor([7, 8, 9]), num_new=[2, 1])
    assert step.tokens.tolist() == [7, 8, 9]
    write_step(cache, step, [[*ids(3, 1), 7, 8], [*ids(3), 9]])
    cache.commit(step, np.asarray([1, 1]))
    assert_contents(cache, a, [*ids(3), 9])
    assert_contents(cache, b, [*ids(3, 1), 7])
    cache.free(seqs)
    assert cache.stats().live == 0


@pytest.mark.parametrize(
    "kind", [list, tuple, np.asarray, torch.tensor], ids=lambda kind: kind.__name__
)
def test_prompts_come_in_many_forms(kind):
    cache = make()
    a = cache.add(kind(ids(5)))
    assert cache.uncached(a).tolist() == ids(5)
