"""`attend_pages` and `write_pages`: the kernels' cases through a door without a cache.

What these tests alone find: tensors that the door hands over wrongly, what it refuses, and calls
that see behind their own token. The pools are those of the kernels' tests: what no query sees is
NaN, and tables go on with numbers of no page.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv import (
    AttentionPlan,
    CacheConfig,
    PagedKVCache,
    attend_pages,
    paged_attention,
    write_pages,
)
from pagedkv.errors import GradModeError
from pagedkv.kernels import reference
from pagedkv.kernels.c.library import missing
from tests.effort import few
from tests.kernels.shapes import DTYPES, FULL, SMALL, TERMS, Shape
from tests.kernels.steps import LAYOUTS, step_of
from tests.kernels.truth import check

without_c = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")
BACKENDS = ["torch", pytest.param("c", marks=without_c), "triton"]
ACROSS = [(3, 2), (1, 40), (20, 33), (0, 7), (2, 0), (18, 5)]  # more queries than tokens, and none
SHAPE = Shape(3, 2, 32, 16, DTYPES[0])


@pytest.fixture(autouse=True)
def kernels():
    pytest.importorskip("triton")


def plan_of(step, backend, layout="HND", **more):
    lengths = step.kv_lens, step.starts
    more = {"page_size": step.page, "kv_layout": layout, "backend": backend} | more
    return AttentionPlan(step.table, *lengths, **more)


def as_layout(step, layout):
    """K and V pages as a caller has them."""
    pools = step.k_pages, step.v_pages
    return [x.transpose(1, 2) if layout == "NHD" else x for x in pools]


def terms_of(step):
    window = step.options["window"]
    known = {"window_left": -1 if window is None else window - 1, "causal": step.causal}
    apart = "window", "tree"  # the latter is for drafts of a cache's rows
    return known | {name: term for name, term in step.options.items() if name not in apart}


def attend(step, backend, layout="HND", plan=None, **more):
    plan = plan or plan_of(step, backend, layout)
    more = {"return_lse": True} | terms_of(step) | more
    return attend_pages(step.q, *as_layout(step, layout), plan, **more)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", SMALL)
@pytest.mark.parametrize("number", few(range(len(TERMS)), 6, 7))
def test_the_door_agrees_with_the_truth_in_both_layouts(number, rows, backend):
    dtype, layout = DTYPES[(number + number // 3) % 3], LAYOUTS[number // 2 % 3]
    shape = Shape(3, 2, 32, (16, 3)[number % 2], dtype, TERMS[number], layout)
    step = shape.step(SMALL[rows], "cpu")
    result = attend(step, backend)
    check(step, result)
    # A single query is the last token, from which causal or not makes no difference.
    causal = {"causal": False} if rows == "decode" else {}
    for mine, other in zip(attend(step, backend, "NHD", **causal), result):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", TERMS[:4:2], ids=str)
def test_cross_attention_sees_the_whole_row(terms, backend):
    """Behind a causal call of the same plan, and with a log-sum-exp as well as without."""
    causal = Shape(3, 2, 32, 16, DTYPES[0], terms).step(ACROSS, "cpu")
    step, plan = replace(causal, causal=False), plan_of(causal, backend)
    check(causal, attend(causal, backend, plan=plan))
    out, lse = attend(step, backend, plan=plan)
    check(step, (out, lse))
    check(step, (attend(step, backend, plan=plan, return_lse=False), lse))
    mine, sums = reference.paged_attention(
        *(step.q.double(), step.k_pages.double(), step.v_pages.double(), step.table),
        *(step.kv_lens, step.starts),
        **step.options | {"causal": False},
    )
    torch.testing.assert_close((out.double(), lse.double()), (mine, sums), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("rows", FULL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_see_the_whole_row_in_every_dtype(dtype, rows, backend):
    step = Shape(5, 1, 64, 16, dtype).step(FULL[rows], "cpu")
    check(step, attend(step, backend))
    step = replace(step, causal=False)
    check(step, attend(step, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_alone_is_what_it_is_in_a_batch(causal, backend):
    rows = [(1, 20), (3, 50), (17, 30), (1, 0)]
    step = replace(SHAPE.step(rows, "cpu"), causal=causal)
    out, lse = attend(step, backend)
    for row, tokens in enumerate(step.tokens):
        alone = attend(step.row(row), backend)
        for mine, other in zip(alone, (out[tokens], lse[tokens])):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
            assert backend == "torch" or torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_was_written_is_attended_as_if_it_were_contiguous(layout, backend):
    """Twice: a plan serves more than one layer, and keeps nothing of the first one's tensors."""
    step = step_of([(5, 5), (1, 9), (3, 0)], dim=32, page=4, device="cpu")
    plan = plan_of(step, backend, layout)
    assert torch.equal(plan.slot_mapping, step.slots)
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 8, -3, -2, -1]
    for seed in (1, 2):
        draw = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, len(step.q), 2, 32, generator=draw)
        pools = [x.clone() for x in as_layout(step, layout)]
        twins = [x.transpose(1, 2).clone() if layout == "NHD" else x.clone() for x in pools]
        write_pages(k, v, *pools, plan)
        reference.write_kv(k, v, *twins, step.slots)
        for pages, twin in zip(pools, twins):
            pages = pages.transpose(1, 2) if layout == "NHD" else pages
            torch.testing.assert_close(pages, twin, rtol=0, atol=0, equal_nan=True)
        out = attend_pages(step.q, *pools, plan)
        q, keys, values = (x[:5].transpose(0, 1)[None].double() for x in (step.q, k, v))
        whole = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[:5].double(), whole[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        assert not out[6:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_of_the_callers_own_are_written_and_no_others(backend):
    step = SHAPE.step([(4, 40)], "cpu")
    k, v = torch.randn(2, 4, 2, 32)
    slots = torch.tensor([7, -1, 3, -1])
    twins = [x.clone() for x in (step.k_pages, step.v_pages)]
    reference.write_kv(k, v, *twins, slots)
    plan = plan_of(step, backend, slot_mapping=slots)
    slots.fill_(0)  # a plan holds for what it was given
    write_pages(k, v, step.k_pages, step.v_pages, plan)
    for pages, twin in zip((step.k_pages, step.v_pages), twins):
        torch.testing.assert_close(pages, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_move_from_slots_of_the_same_pages(backend):
    """As a caller closes gaps; torch refused V when K was moved."""
    k_pages, v_pages = torch.randn(2, 6, 16, 2, 32)
    k, v = (x.flatten(0, 1)[5:9] for x in (k_pages, v_pages))
    moved = k.clone(), v.clone()
    table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.arange(6, 10)
    lens = torch.tensor([4])
    plan = AttentionPlan(table, lens, page_size=16, seqlen_q=4, slot_mapping=slots, backend=backend)
    write_pages(k, v, k_pages, v_pages, plan)
    for pages, expected in zip((k_pages, v_pages), moved):
        assert torch.equal(pages.flatten(0, 1)[6:10], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_holds_for_what_it_was_given(backend):
    """Also where the caller overwrites that, and outside of inference mode if it was made inside.

    Pages that were checked would else be read by the entries of another step, or by what int32
    leaves of an entry.
    """
    step = SHAPE.step([(2, 20), (1, 7)], "cpu")
    expected = attend(step, backend)
    given = [x.clone() for x in (step.table, step.kv_lens, step.starts)]
    sizes = {"page_size": np.int64(16), "max_seqlen_k": np.int64(20)}
    sizes |= {"kv_layout": "HND", "backend": backend}
    plan = AttentionPlan(*given, **sizes)
    for tensor in given:
        tensor.fill_(10**6)
    with torch.inference_mode():
        attend(step, backend, plan=plan)
    for mine, other in zip(attend(step, backend, plan=plan, window_left=2**63 - 1), expected):
        assert torch.equal(mine, other)
    wide = AttentionPlan(step.table.long() + 2**32, step.kv_lens, step.starts, **sizes)
    with pytest.raises(ValueError, match=r"^page_table: expected a page 0\.\.5"):
        attend(step, backend, plan=wide)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_new_tokens_may_have_any_entries(backend):
    step = SHAPE.step([(0, 20), (1, 7)], "cpu")
    expected = attend(step, backend)
    step.table[0] = 10**6
    for mine, other in zip(attend(step, backend), expected):
        assert torch.equal(mine, other)
    k, v = torch.randn(2, 1, 2, 32)
    write_pages(k, v, step.k_pages, step.v_pages, plan_of(step, backend))
    assert torch.equal(step.contents(1, step.k_pages, k.dtype)[-1], k[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_nothing(backend):
    """It would make products of float32 those of bfloat16."""
    step = Shape(3, 2, 32, 16, DTYPES[0], {"softcap": 2.0}).step([(2, 20), (1, 7)], "cpu")
    expected = attend(step, backend)
    with torch.autocast("cpu", torch.bfloat16):
        result = attend(step, backend)
    for mine, other in zip(result, expected):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_values_of_which_memory_has_the_negatives_are_those_that_are_meant(backend):
    step = SHAPE.step([(2, 20), (1, 7)], "cpu")
    terms = {"sinks": torch.randn(6), "distance_bias": torch.randn(3, 6, 9)}
    expected = attend(step, backend, **terms)
    terms = {name: torch._neg_view(-term) for name, term in terms.items()}
    for mine, other in zip(
        attend(replace(step, q=torch._neg_view(-step.q)), backend, **terms), expected
    ):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_column_write_nowhere(backend):
    step = SHAPE.step([(1, 0)], "cpu")
    plan = plan_of(replace(step, table=step.table[:, :0]), backend)
    twin = step.k_pages.clone()
    write_pages(*torch.randn(2, 1, 2, 32), step.k_pages, step.v_pages, plan)
    assert torch.equal(step.k_pages.nan_to_num(), twin.nan_to_num())
    assert not attend(step, backend, plan=plan)[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_equal_rows_may_have_an_axis_of_its_own(backend):
    step = SHAPE.step([(2, 20), (2, 7)], "cpu")
    flat = attend(step, backend)
    plan = AttentionPlan(
        step.table, step.kv_lens, page_size=16, seqlen_q=2, kv_layout="HND", backend=backend
    )
    q = step.q.view(2, 2, 6, 32)
    for mine, other in zip(attend(replace(step, q=q), backend, plan=plan), flat):
        assert mine.shape[:2] == (2, 2)
        assert torch.equal(mine.flatten(0, 1), other)
    out, lse = torch.full((2, 2, 6, 32), math.nan), torch.full((2, 2, 6), math.nan)
    given = attend(replace(step, q=q), backend, plan=plan, out=out, lse=lse, lse_base="2")
    assert given[0].data_ptr() == out.data_ptr()
    assert given[1].data_ptr() == lse.data_ptr()
    assert torch.equal(out.flatten(0, 1), flat[0])
    torch.testing.assert_close(lse.flatten(0, 1) * math.log(2), flat[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_latents_are_written_and_read_once(backend):
    step = step_of([(3, 40), (1, 9)], dim=48, v_dim=32, latent=True, groups=1, device="cpu")
    check(step, attend(step, backend))
    k = torch.randn(4, 1, 48)
    plan = plan_of(step, backend)
    write_pages(k, k[..., :32], step.k_pages, step.v_pages, plan)
    assert torch.equal(step.k_pages[step.slots // 16, :, step.slots % 16], k)
    with pytest.raises(ValueError, match=r"^v: expected a view of k"):
        write_pages(k, k[..., 16:], step.k_pages, step.v_pages, plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_span_that_sees_itself_is_a_row_that_ends_with_it(backend):
    """Tokens 4 to 11 of 16 are an image's; the text around it is causal."""
    step = SHAPE.step([(16, 16)], "cpu")
    out, span = torch.empty_like(step.q), range(4, 12)
    rest = {"page_size": 16, "kv_layout": "HND", "backend": backend}
    pools = step.k_pages, step.v_pages
    plan = AttentionPlan(step.table.repeat(2, 1), torch.tensor([4, 16]), seqlen_q=4, **rest)
    text = [i for i in range(16) if i not in span]
    out[text] = attend_pages(step.q[text], *pools, plan)
    plan = AttentionPlan(step.table, torch.tensor([12]), seqlen_q=8, **rest)
    out[4:12] = attend_pages(step.q[4:12], *pools, plan, causal=False)
    k, v = (step.contents(0, x, torch.float64).transpose(0, 1) for x in pools)
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    seen[4:12, 4:12] = True
    whole = torch.nn.functional.scaled_dot_product_attention(
        step.q.double().transpose(0, 1), k, v, attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), whole.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_captured_plan_cuts_each_replay_anew(seqlen_q):
    table = torch.arange(24, dtype=torch.int32, device="cuda").view(3, 8)
    lens, others = torch.tensor([[9, 100, 4], [128, 3, 0]], dtype=torch.int32, device="cuda")
    pools = torch.randn(2, 2, 24, 16, 2, 64, device="cuda").bfloat16()
    q, k, v = (torch.randn(3, seqlen_q, n, 64, device="cuda").bfloat16() for n in (6, 2, 2))

    def layers():
        plan = AttentionPlan(table, lens, page_size=16, seqlen_q=seqlen_q)
        for k_pages, v_pages in pools:
            write_pages(k, v, k_pages, v_pages, plan)
        return [attend_pages(q, *pages, plan) for pages in pools]

    layers()  # compiles, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers()
    lens.copy_(others)
    graph.replay()
    replayed = [x.clone() for x in captured]
    for mine, other in zip(replayed, layers()):
        assert torch.equal(mine, other)
    assert not replayed[0][2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_caches_own_pages_give_what_the_cache_gives(backend):
    config = CacheConfig(1, 2, 32, "float32", max_tokens=256, page_size=4)
    cache = PagedKVCache(config, device="cpu", backend=backend)
    seqs = [cache.add(), cache.add()]
    for counts in ([9, 4], [1, 1], [3, 17]):
        with cache.step(seqs, num_new=counts) as step:
            q, k, v = (torch.randn(step.num_tokens, n, 32) for n in (6, 2, 2))
            wanted = paged_attention(q, k, v, step, 0)
            lengths = step.kv_lens(0), step.query_start_loc
            plan = AttentionPlan(
                step.page_table(0), *lengths, page_size=4, kv_layout="HND", backend=backend
            )
            assert torch.equal(plan.slot_mapping, step.slots(0))
            assert torch.equal(plan.positions, step.positions)
            pools = step.storage.layer(0)
            # Torch's own attends to tokens at hand where a row is new, and not to the pages' copy.
            mine = attend_pages(q, *pools, plan)
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
            assert backend == "torch" or torch.equal(mine, wanted)


# ------------------------------------------------------------------ what is refused


def changed(step, **plan):
    """A plan's arguments, some of them others."""
    known = {"page_table": step.table, "cache_seqlens": step.kv_lens, "cu_seqlens_q": step.starts}
    return known | {"page_size": 16, "kv_layout": "HND", "backend": "torch"} | plan


NO_PLAN = {
    "another layout": ({"kv_layout": "DHN"}, ValueError, "^kv_layout: .*got 'DHN'"),
    "no page size": ({"page_size": 0}, ValueError, "^page_size: .*at least 1, got 0"),
    "no bound": ({"max_seqlen_k": 0}, ValueError, "^max_seqlen_k: .*at least 1, got 0"),
    "a share of a page": ({"page_size": 16.0}, ValueError, "^page_size: .*integer.*got 16.0"),
    "a list": ({"page_table": [[1]]}, TypeError, "^page_table: expected a dense tensor, got list"),
    "a row of a table": ({"page_table": torch.ones(2).int()}, ValueError, "^page_table: .*shape"),
    "floats": ({"cache_seqlens": torch.ones(2)}, TypeError, "^cache_seqlens: .*got torch.float32"),
    "lengths of others": (
        {"cache_seqlens": torch.ones(3).int()}, ValueError, r"^cache_seqlens: .*\[2\], got \[3\]"),
    "a negative length": (
        {"cache_seqlens": torch.tensor([1, -1])}, ValueError, "^cache_seqlens: .*got -1 of row 1"),
    "more than the table": (
        {"cache_seqlens": torch.tensor([99, 1])}, ValueError, "^cache_seqlens: .*columns.*got 99"),
    "more than the bound": (
        {"max_seqlen_k": 19}, ValueError, "^cache_seqlens: expected 0..19, max_seqlen_k, got 20"),
    "starts that fall": (
        {"cu_seqlens_q": torch.tensor([0, 3, 2])}, ValueError, r"^cu_seqlens_q: .*got \[0, 3, 2\]"),
    "starts of fewer": (
        {"cu_seqlens_q": torch.tensor([0, 3])}, ValueError, r"^cu_seqlens_q: .*got \[2\]"),
    "slots of fewer": (
        {"slot_mapping": torch.tensor([0])}, ValueError, r"^slot_mapping: .*\[3\], got \[1\]"),
    "no such backend": ({"backend": "cuda"}, ValueError, "^backend: "),
    "several backends": ({"backend": ["c"]}, ValueError, r"^backend: .*got \['c'\]"),
    "several page sizes": (
        {"page_size": np.array([16, 16])}, ValueError, "^page_size: expected an integer"),
}  # fmt: skip


@pytest.mark.parametrize("which", NO_PLAN)
def test_a_plan_names_what_does_not_fit(which):
    plan, error, says = NO_PLAN[which]
    with pytest.raises(error, match=says):
        AttentionPlan(**changed(SHAPE.step([(2, 20), (1, 7)], "cpu"), **plan))


WRONG = {
    "fewer queries": (lambda x: {"q": x["q"][1:]}, ValueError, r"^q: .*\[3, heads, D\]"),
    "other heads": (lambda x: {"q": x["q"][:, 1:]}, ValueError, "^q: .*a multiple of 2"),
    "another head dim": (lambda x: {"q": x["q"][..., 16:]}, ValueError, "^q: .*D 32"),
    "a list of queries": (lambda x: {"q": x["q"].tolist()}, TypeError, "^q: .*dense .*got list"),
    "queries without heads": (lambda x: {"q": x["q"][:, 0]}, ValueError, r"^q: .*got \[3, 32\]"),
    "doubles": (
        lambda x: {name: tensor.double() for name, tensor in x.items()}, TypeError,
        "^k_pages: .*torch.float64"),
    "halves": (lambda x: {"v_pages": x["v_pages"].half()}, TypeError, "^v_pages: .*float16 beside"),
    "queries elsewhere": (lambda x: {"q": x["q"].to("meta")}, ValueError, "^q: .*device cpu"),
    "queries that learn": (
        lambda x: {"q": x["q"].clone().requires_grad_()}, GradModeError, "^q: "),
    "a list of pages": (lambda x: {"k_pages": [x["k_pages"]]}, TypeError, "^k_pages: .*got list"),
    "pages without columns": (
        lambda x: {"k_pages": x["k_pages"][..., 0]}, ValueError, r"^k_pages: .*\[6, 2, 16\]"),
    "wider values": (
        lambda x: {"v_pages": torch.zeros(6, 2, 16, 48)}, ValueError, "^v_pages: .*most 32 .*48"),
    "pages elsewhere": (
        lambda x: {"v_pages": x["v_pages"].to("meta")}, ValueError, "^v_pages: .*device cpu"),
    "pages that learn": (
        lambda x: {"v_pages": x["v_pages"].clone().requires_grad_()}, GradModeError, "^v_pages: "),
    "the other layout": (
        lambda x: {"k_pages": x["k_pages"].transpose(1, 2)}, ValueError,
        r"^k_pages: expected \[N, G, page_size, D\] of page_size 16, as kv_layout HND"),
    "columns apart": (
        lambda x: {"k_pages": x["k_pages"].transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError, "^k_pages: expected a contiguous last axis"),
    "fewer pages of V": (lambda x: {"v_pages": x["v_pages"][1:]}, ValueError, "^v_pages: .*6 "),
    "fewer pages": (
        lambda x: {"k_pages": x["k_pages"][:2], "v_pages": x["v_pages"][:2]}, ValueError,
        r"^page_table: expected a page 0..1 in column 0 of row 0, whose length is 20, got \d"),
    "pages of no head": (
        lambda x: {"k_pages": x["k_pages"][:, :0]}, ValueError, r"^k_pages: .*\[6, 0, 16, 32\]"),
    "pages of negatives": (
        lambda x: {"v_pages": torch._neg_view(x["v_pages"])}, ValueError, "^v_pages: .*lazy minus"),
    "a buffer of negatives": (
        lambda x: {"out": torch._neg_view(x["q"])}, ValueError, "^out: .*lazy minus"),
    "another base": (lambda x: {"lse_base": 2}, ValueError, "^lse_base: .*got 2"),
    "a window of nothing": (lambda x: {"window_left": -2}, ValueError, "^window_left: .*got -2"),
    "a window both ways": (
        lambda x: {"window_left": 3, "causal": False}, NotImplementedError, "^window_left: "),
    "a buffer of another shape": (lambda x: {"out": x["q"][1:]}, ValueError, "^out: .*shape"),
    "a buffer in a list": (lambda x: {"out": [x["q"]]}, TypeError, "^out: .*dense .*got list"),
    "a buffer with gaps": (
        lambda x: {"out": x["q"].repeat(1, 1, 2)[..., :32]}, ValueError, "^out: .*contiguous"),
    "a buffer elsewhere": (lambda x: {"out": x["q"].to("meta")}, ValueError, "^out: .*device cpu"),
    "a buffer that learns": (
        lambda x: {"out": x["q"].clone().requires_grad_()}, GradModeError, "^out: "),
    "a buffer of halves": (lambda x: {"out": x["q"].half()}, TypeError, "^out: .*torch.float16"),
    "sums of halves": (
        lambda x: {"lse": torch.empty(3, 6).half()}, TypeError, "^lse: .*got torch.float16"),
    "slopes both ways": (
        lambda x: {"alibi_slopes": torch.ones(6), "causal": False}, NotImplementedError,
        "^alibi_slopes, distance_bias: expected None where causal is False"),
    "slopes by row": (
        lambda x: {"alibi_slopes": torch.ones(2, 6)}, ValueError,
        r"^alibi_slopes: expected float32, .* of shape \[H\] = \[6\], got .*\[2, 6\]"),
    "a bias of other queries": (
        lambda x: {"distance_bias": torch.ones(2, 6, 9)}, ValueError,
        r"^distance_bias: .* \[T, H, n\] = \[3, 6, n\], got torch.float32 \[2, 6, 9\]"),
    "a bias that reaches nothing": (
        lambda x: {"distance_bias": torch.ones(3, 6, 0)}, ValueError, r"^distance_bias: .*6, 0\]"),
    "sinks of others": (lambda x: {"sinks": torch.zeros(5)}, ValueError, r"^sinks: .*\[6\]"),
    "no plan": (lambda x: {"plan": None}, TypeError, "^plan: expected an AttentionPlan"),
    "a text for no": (lambda x: {"causal": "no"}, TypeError, "^causal: expected True or False"),
    "a text for no sums": (lambda x: {"return_lse": "no"}, TypeError, "^return_lse: .*got str"),
    "no cap": (lambda x: {"softcap": -1.0}, ValueError, "^softcap: expected a positive number"),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_a_call_names_what_does_not_fit(which):
    change, error, says = WRONG[which]
    step = SHAPE.step([(2, 20), (1, 7)], "cpu")
    given = {"q": step.q, "k_pages": step.k_pages, "v_pages": step.v_pages}
    with pytest.raises(error, match=says):
        attend_pages(**{"plan": plan_of(step, "torch")} | given | change(given))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"k": torch.zeros(3, 3, 32)}, ValueError, r"^k: .*\[3, 2, 32\]"),
        ({"v": torch.zeros(3, 2, 16)}, ValueError, "^v: expected shape"),
        ({"v": torch.zeros(3, 2, 32).double()}, TypeError, "^v: .*float64|^v_pages: .*float64"),
        ({"slots": torch.tensor([0, 1, 200])}, ValueError, "^slot_mapping: .*got 0..200"),
        ({"page": 10**6}, ValueError, "^page_table: expected a page 0..5 in column 1 of row 0"),
        ({"pages": torch.zeros(1, 32).expand(6, 2, 16, 32)}, ValueError, "^v_pages: .* their own"),
    ],
)
def test_a_write_that_fails_leaves_the_pages_as_they_were(wrong, error, says, backend):
    step = SHAPE.step([(2, 20), (1, 7)], "cpu")
    v_pages = wrong.get("pages", step.v_pages)
    before = [x.clone() for x in (step.k_pages, v_pages)]
    k, v = wrong.get("k", torch.zeros(3, 2, 32)), wrong.get("v", torch.zeros(3, 2, 32))
    if "page" in wrong:
        step.table[0, 1] = wrong["page"]
    plan = plan_of(step, backend, slot_mapping=wrong.get("slots"))
    with pytest.raises(error, match=says):
        write_pages(k, v, step.k_pages, v_pages, plan)
    for pages, twin in zip((step.k_pages, v_pages), before):
        torch.testing.assert_close(pages, twin, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_torch_writes_pages_made_in_inference_mode_in_it_alone(backend):
    step = SHAPE.step([(1, 7)], "cpu")
    k, v = torch.randn(2, 1, 2, 32)
    plan, before = plan_of(step, backend), step.k_pages.clone()
    with torch.inference_mode():
        made = step.v_pages.clone()
        write_pages(k, v, step.k_pages.clone(), made, plan)
    with pytest.raises(ValueError, match=r"^v_pages: .*torch.inference_mode\(\)"):
        write_pages(k, v, step.k_pages, made, plan)
    torch.testing.assert_close(step.k_pages, before, rtol=0, atol=0, equal_nan=True)
