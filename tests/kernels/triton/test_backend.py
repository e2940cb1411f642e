"""Steps of decoding rows and of chunks together, laws of the whole backend, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch
from pagedkv.kernels.triton.backend import check_pages
from pagedkv.kernels.triton.geometry import Geometry
from tests.effort import ALL, few, sampled
from tests.kernels.steps import DEVICE, LAYOUTS, NOWHERE, Step, pages_of, step_of
from tests.kernels.triton_cases import misaligned, with_half
from tests.kernels.truth import attend, check

MIXED = {
    "a chunk among decoding rows": ([(1, 70), (40, 100), (1, 5), (3, 20)], {}),
    "a chunk first, and one last": ([(17, 17), (1, 130), (16, 50), (20, 90)], {"groups": 1}),
    "empty rows between": (
        [(0, 33), (1, 0), (0, 0), (33, 60), (1, 65), (0, 1), (17, 2), (0, 7)], {"sinks": True}),
    "everything at once": (
        [(1, 200), (50, 110), (5, 31), (0, 9), (17, 80), (1, 1)],
        {"heads": 6, "window": 45, "sinks": True, "softcap": 3.0, "scale": 0.4, "page": 3}),
    "everything on pages of whole tiles": (
        [(1, 200), (50, 110), (5, 31), (17, 80), (1, 1)],
        {"heads": 10, "window": 75, "sinks": True, "softcap": 3.0, "page": 64, "dim": 80}),
    "a shared prefix": ([(1, 75), (20, 90), (1, 70), (2, 64)], {"shared": 4}),
    "K and V side by side": ([(1, 75), (20, 90), (2, 64)], {"layout": LAYOUTS[2], "dim": 96}),
    "slots outermost": ([(1, 75), (20, 90), (2, 64)], {"layout": LAYOUTS[1], "page": 32}),
    "one row": ([(1, 40)], {}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), with_half(MIXED), ids=str)
def test_rows_of_every_kind_go_together(case, dtype):
    rows, options = MIXED[case]
    check(step_of(rows, dtype=dtype, **options))


SHARED = {
    "one query head a KV head, several tiles of rows": ([(1, 130 + n % 9) for n in range(66)],
                                                        {"heads": 1, "groups": 1, "shared": 8}),
    "3, sinks and a softcap": ([(1, 101), (1, 190), (1, 97)],
                               {"heads": 6, "sinks": True, "softcap": 3.0, "shared": 6}),
    "chunks and rows without tokens behind": ([(1, 150), (1, 129), (0, 140), (20, 160)],
                                              {"shared": 8, "sinks": True}),
    "pages that are no tiles": ([(1, 80), (1, 71)], {"page": 3, "shared": 23}),
    "more parts than a row may have of its own": ([(1, 560), (1, 610)],
                                                  {"heads": 1, "groups": 1, "shared": 18}),
    "less than a tile": ([(1, 20), (1, 25)], {"shared": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), with_half(SHARED), ids=str)
def test_a_prefix_that_is_read_once_for_all_its_rows_is_attended_by_each(case, dtype):
    rows, options = SHARED[case]
    step = step_of(rows, dtype=dtype, **options)
    sharing = slice(0, sum(new == 1 for new, _ in rows))
    check(step, attend(step, prefixes=[Prefix(sharing, options["shared"])]))


def test_rows_of_drafts_share_no_prefix():
    table = np.arange(1, 41).reshape(2, 20)
    table[1] = table[0]
    sizes = {"page_size": 16, "token_bytes": 2**22}
    for new, found in (([1, 1], 1), ([1, 17], 0), ([2, 1], 0), ([1, 16], 0)):
        lens = np.array([300, 300])
        assert len(paged.find_prefixes(np.array(new), lens, table, **sizes)) == found


def test_a_room_that_is_filled_anew_keeps_nothing_of_what_was_in_it():
    step = step_of([(1, 300)] * 4)
    room = paged.room_for_prefixes(4, 300, 4, step.k_pages)
    many, few = ([Prefix(slice(0, rows), pages)] for rows, pages in ((4, 16), (2, 4)))
    for prefixes in (many, few):
        room.fill(paged.cut_prefixes(prefixes, [1] * 4, 4, step.k_pages))
    fresh = paged.cut_prefixes(few, [1] * 4, 4, step.k_pages)
    assert room.total.tolist() == fresh.total.tolist() == [len(fresh.items), 0, 0]
    assert room.items[: len(fresh.items)].tolist() == fresh.items.tolist()
    assert room.skips.tolist() == fresh.skips.tolist()


def test_a_step_without_rows_or_without_tokens_has_no_output():
    for rows in ([], [(0, 5), (0, 0)]):
        step = step_of(rows)
        out, lse = attend(step, max_kv=5)
        assert out.shape == (0, 4, 16)
        assert lse.shape == (0, 4)


# ------------------------------------------------------------------ laws

ROWS = [(1, 150), (40, 75), (2, 33), (1, 1), (17, 64)]
# With a window, tiles begin within pages.
WINDOWS = [None, 50]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@sampled
@pytest.mark.parametrize("window", few(WINDOWS, WINDOWS[-1]))
def test_pages_of_any_size_give_the_bits_of_contiguous_memory(window):
    contiguous = step_of(ROWS, page=256, window=window)
    assert (contiguous.table[:, 1:] == NOWHERE).all()
    expected = attend(contiguous)
    check(contiguous, expected)
    for page in (1, 3, 16, 32, 48, 64, 128)[:: 1 if ALL else 2]:
        assert_same(attend(step_of(ROWS, page=page, window=window)), expected)


@pytest.mark.parametrize("window", few(WINDOWS, WINDOWS[-1]))
def test_which_pages_a_row_has_and_how_they_lie_changes_no_bit(window):
    expected = attend(step_of(ROWS, window=window, dtype=torch.bfloat16))
    for order, layout in enumerate(LAYOUTS, 1):
        step = step_of(ROWS, window=window, dtype=torch.bfloat16, order=order, layout=layout)
        assert_same(attend(step), expected)


def test_a_row_is_the_same_in_a_mixed_step_and_alone():
    step = step_of(ROWS, window=50, sinks=True)
    out, lse = attend(step)
    for index, new in enumerate(step.num_new):
        tokens = slice(*step.starts[index : index + 2].tolist())
        # The widest row that decodes says how many queries lie in a tile.
        alone = attend(step.row(index), num_new=[2 if new <= 16 else new])
        assert_same(alone, (out[tokens], lse[tokens]))


def test_it_does_not_matter_how_queries_lie():
    step = step_of(ROWS)
    expected = attend(step)
    tokens, heads, dim = step.q.shape
    nan = torch.full((tokens, 4, dim), torch.nan, device=DEVICE)
    sliced = torch.cat([nan, step.q, nan], 1)[:, 4 : 4 + heads]
    transposed = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    padded = torch.cat([step.q, nan], -1)[..., :dim]
    for q in (sliced, transposed, padded):
        assert q.stride() != step.q.stride()
        assert_same(attend(replace(step, q=q)), expected)


def test_a_table_may_be_the_corner_of_a_wider_one():
    step = step_of(ROWS)
    wide = torch.full((9, 40), NOWHERE, dtype=torch.int32, device=DEVICE)
    corner = wide[2 : 2 + len(ROWS), : step.table.shape[1]]
    corner.copy_(step.table)
    assert_same(attend(replace(step, table=corner)), attend(step))


def test_tokens_behind_the_last_row_change_nothing():
    """A captured graph has room for more tokens than a step may bring."""
    step = step_of(ROWS)
    padded = torch.cat([step.q, torch.full_like(step.q[:9], torch.nan)])
    out, lse = attend(replace(step, q=padded))
    assert_same((out[:-9], lse[:-9]), attend(step))


def test_queries_may_lie_more_than_2_to_the_31_elements_apart():
    for rows in ([(1, 70), (2, 33), (1, 5)], [(18, 70)]):
        step = step_of(rows, dtype=torch.bfloat16)
        tokens, heads, dim = step.q.shape
        stride = (2**31 // (tokens - 1) // 16 + 1) * 16
        memory = torch.empty(stride * tokens, dtype=torch.bfloat16, device=DEVICE)  # hardly touched
        q = memory.as_strided((tokens, heads, dim), (stride, dim, 1)).copy_(step.q)
        assert_same(attend(replace(step, q=q)), attend(step))


def test_one_token_or_one_head_may_have_any_stride():
    step = step_of([(1, 70)], heads=1, groups=1)
    q = step.q.as_strided(step.q.shape, (7, 9, 1))
    assert_same(attend(replace(step, q=q)), attend(step))


def test_a_whole_number_is_a_scale_a_softcap_and_a_window_like_any_other():
    window, terms = Scoring(1, 2**40, 30).arguments()
    assert [type(window), type(terms.scale), type(terms.softcap)] == [int, float, float]
    assert window < 2**31


def test_a_pool_of_more_than_2_to_the_31_elements_is_read_at_its_end():
    step = step_of(ROWS, heads=2, groups=1, layout=LAYOUTS[2], dtype=torch.bfloat16)
    small, count = step.k_pages, 2**31 // (2 * 16 * 16) + 9
    pool = torch.empty(count, 2, 1, 16, 16, dtype=small.dtype, device=DEVICE)  # never touched
    # Half of the pages at the very end, half beyond the reach of 16 bits.
    places = torch.arange(len(small)) + 70_000
    places[::2] += count - len(small) - 70_000
    pool[places, 0], pool[places, 1] = step.k_pages, step.v_pages
    table = torch.full_like(step.table, count)
    known = step.table < NOWHERE
    table[known] = places.to(DEVICE)[step.table[known]].int()
    far = replace(step, k_pages=pool[:, 0], v_pages=pool[:, 1], table=table)
    assert int(table[known].max()) * pool.stride(0) > 2**31
    assert_same(attend(far), attend(step))


# ------------------------------------------------------------------ refusals


def widened(tensor, by=8):
    """Copies a tensor so that each head or slot has a gap behind it."""
    return torch.cat([tensor, tensor[..., :by]], -1)[..., : tensor.shape[-1]]


def with_pages(step: Step, change) -> Step:
    return replace(step, k_pages=change(step.k_pages), v_pages=change(step.v_pages))


def with_sinks(step: Step, sinks) -> Step:
    return replace(step, options={**step.options, "sinks": sinks.to(DEVICE)})


def with_softcap(step: Step, softcap: float) -> Step:
    return replace(step, options={**step.options, "softcap": softcap})


def far_apart(tensor):
    """Heads 2**30 elements apart, in memory that is never touched."""
    *outer, dim = tensor.shape
    strides = (dim, 2**30, 1) if len(outer) == 2 else (outer[2] * dim, 2**30, dim, 1)
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides))
    return torch.empty(size, dtype=tensor.dtype, device=DEVICE).as_strided(tensor.shape, strides)


def wider(tensor, count):
    return tensor.repeat(1, count, 1)


REFUSED = {
    "float64": (
        lambda s: with_pages(replace(s, q=s.q.double()), torch.Tensor.double),
        NotImplementedError, "dtype: .*float64; bfloat16 is the nearest"),
    "130 query heads a KV head": (
        lambda s: replace(s, q=wider(s.q, 65)), NotImplementedError, "at most 128 .*130"),
    "negated queries": (
        lambda s: replace(s, q=torch._neg_view(s.q)), ValueError, "^q: .*of negated values"),
    "heads too far apart": (
        lambda s: replace(s, q=far_apart(s.q)), ValueError, r"^q: .*within 2\*\*31"),
    "pages whose heads are too far apart": (
        lambda s: with_pages(s, far_apart), ValueError, r"^k_pages: .*within 2\*\*31"),
    "a tiny softcap": (
        lambda s: with_softcap(s, 1e-9), NotImplementedError, "^softcap: .*0.001 to 1000"),
    "a huge softcap": (lambda s: with_softcap(s, 1e9), NotImplementedError, "^softcap: "),
    "heads that do not divide": (
        lambda s: replace(s, q=s.q[:, :3].contiguous()), ValueError, "multiple of 2 heads, got 3"),
    "queries of another head dim": (
        lambda s: replace(s, q=torch.cat([s.q, s.q], -1)), ValueError, "^q: .*"),
    "pages of another dtype": (
        lambda s: with_pages(s, torch.Tensor.half), TypeError, "dtype of q, torch.float32"),
    "V pages of another dtype": (
        lambda s: replace(s, v_pages=s.v_pages.half()), TypeError, "dtype of q, torch.float32"),
    "misaligned queries": (
        lambda s: replace(s, q=misaligned(s.q)), ValueError, "^q: .*multiple of 16 bytes"),
    "misaligned K pages": (
        lambda s: replace(s, k_pages=misaligned(s.k_pages)), ValueError, "^k_pages: .*16 bytes"),
    "misaligned V pages": (
        lambda s: replace(s, v_pages=misaligned(s.v_pages)), ValueError, "^v_pages: .*16 bytes"),
    "queries with odd strides": (
        lambda s: replace(s, q=widened(s.q)), ValueError, "^q: .*multiples of 16 elements"),
    "queries with gaps between elements": (
        lambda s: replace(s, q=torch.cat([s.q, s.q], -1)[..., ::2]), ValueError, "^q: .*last"),
    "pages with odd strides": (
        lambda s: with_pages(s, widened), ValueError, "^k_pages: .*multiples of 16 elements"),
    "pages with gaps between elements": (
        lambda s: with_pages(s, lambda x: x[..., :1].expand_as(x)),
        ValueError, "^k_pages: .*contiguous last axis"),
    "V pages in another order": (
        lambda s: replace(s, v_pages=s.v_pages.transpose(1, 2).contiguous().transpose(1, 2)),
        ValueError, "^v_pages: .*strides"),
    "fewer V pages": (
        lambda s: replace(s, v_pages=s.v_pages[:-1]), ValueError, "^v_pages: .*shape"),
    "a table of int64": (
        lambda s: replace(s, table=s.table.long()), TypeError, "^page_table: .*int32"),
    "lengths of int64": (
        lambda s: replace(s, kv_lens=s.kv_lens.long()), TypeError, "^kv_lens: .*int32"),
    "starts of int64": (
        lambda s: replace(s, starts=s.starts.long()), TypeError, "^query_start_loc: .*int32"),
    "a table of other rows": (
        lambda s: replace(s, table=s.table[:-1]), ValueError, "^page_table: "),
    "a table of one axis": (
        lambda s: replace(s, table=s.table[:, 0].contiguous()), ValueError, "^page_table: "),
    "a table of three axes": (
        lambda s: replace(s, table=s.table[None]), ValueError, "^page_table: "),
    "a table with gaps": (
        lambda s: replace(s, table=s.table.repeat(1, 2)[:, ::2]), ValueError, "^page_table: "),
    "starts of other rows": (
        lambda s: replace(s, starts=s.starts[:-1]), ValueError, "^query_start_loc: "),
    "lengths of two axes": (
        lambda s: replace(s, kv_lens=s.kv_lens[None]), ValueError, "^kv_lens: "),
    "sinks of other heads": (
        lambda s: with_sinks(s, torch.zeros(3)), ValueError, r"^sinks: .*\[H\] = \[4\]"),
    "sinks of two axes": (lambda s: with_sinks(s, torch.zeros(4, 1)), ValueError, "^sinks: "),
    "sinks with gaps": (lambda s: with_sinks(s, torch.zeros(8)[::2]), ValueError, "^sinks: "),
    "sinks elsewhere": (
        lambda s: replace(s, options={**s.options, "sinks": torch.zeros(4, device="meta")}),
        ValueError, "^sinks: .*device"),
    **{
        f"{name} elsewhere": (
            lambda s, name=name: replace(s, **{name: getattr(s, name).to("meta")}),
            ValueError, "device")
        for name in ("q", "k_pages", "v_pages", "table", "kv_lens", "starts")
    },
}  # fmt: skip


def plan_of(step) -> paged.Plan:
    return paged.plan(
        *(step.kv_lens, step.starts, step.q, step.k_pages), num_new=step.num_new, max_kv=20
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_kernel_runs(case, monkeypatch):
    change, error, message = REFUSED[case]
    good = step_of([(1, 20), (18, 18)], sinks=True)
    plan, bad = plan_of(good), change(good)
    planned = plan.geometry == Geometry.of(bad.q, bad.k_pages)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    with pytest.raises(error, match=message):
        call(bad, plan if planned else plan_of(bad))


def call(step, plan):
    return paged.paged_attention(
        *(step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts, plan),
        **step.options,
    )


def test_a_plan_of_lengths_that_cannot_be_read_is_refused_before_any_kernel_runs(monkeypatch):
    step = step_of([(1, 20), (18, 18)], window=9)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    lens, starts = step.kv_lens, step.starts
    for bad, error in (
        ((lens.long(), starts), TypeError),
        ((lens, starts.long()), TypeError),
        ((lens[:1], starts), ValueError),
        ((lens.repeat_interleave(2)[::2], starts), ValueError),
    ):
        with pytest.raises(error, match=r"^(kv_lens|query_start_loc): expected"):
            paged.plan(*bad, step.q, step.k_pages, num_new=step.num_new, max_kv=20)
    with pytest.raises(ValueError, match=r"^shared: expected none with a window"):
        paged.plan(
            *(lens, starts, step.q, step.k_pages),
            num_new=step.num_new,
            max_kv=20,
            window=9,
            shared=paged.room_for_prefixes(1, 20, 4, step.k_pages),
        )


def test_a_plan_of_other_heads_is_refused():
    step, other = step_of([(1, 20)]), step_of([(1, 20)], heads=6)
    with pytest.raises(ValueError, match=r"^plan: expected one for .*num_heads=4"):
        call(step, plan_of(other))


@pytest.mark.parametrize(("dim", "nearest"), [(8, 16), (24, 32), (100, 96), (320, 256)])
def test_a_head_dim_without_a_kernel_is_refused_and_the_nearest_is_named(dim, nearest):
    step = step_of([(1, 5)], dim=dim)
    message = rf"got {dim}; {nearest} is the nearest"
    with pytest.raises(NotImplementedError, match=message):
        check_pages(step.k_pages)
    with pytest.raises(NotImplementedError, match=message):
        plan_of(step)


def test_pages_of_every_head_dim_and_dtype_with_a_kernel_are_accepted():
    for dim in range(16, 257, 16):
        check_pages(pages_of(LAYOUTS[0], (1, 2, 16, dim), torch.float16)[0])
    with pytest.raises(NotImplementedError, match="float64; bfloat16"):
        check_pages(pages_of(LAYOUTS[0], (1, 2, 16, 16), torch.float64)[0])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_tokens_that_are_no_numbers_change_no_row_of_another_sequence():
    """docs/kernels.md says which rows of their own they change."""
    outs = []
    for bad in (1.0, np.nan, np.inf):
        step = step_of([(9, 9), (5, 21), (1, 30)])
        for pages in (step.k_pages, step.v_pages):
            pages[step.table[0, 0].long(), :, 4] *= bad
        outs.append(attend(step)[0])
    for other in outs[1:]:
        assert not other[:9].isfinite().all()
        assert torch.equal(other[9:], outs[0][9:])
