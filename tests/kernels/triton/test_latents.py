"""K and V of different widths, V that is a view of K, and heads too wide to lie in one tile."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.formats import FORMATS, Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import launch
from pagedkv.kernels.triton.geometry import Geometry
from tests.effort import examples, few, sampled, slow
from tests.kernels import steps
from tests.kernels.steps import DEVICE, LAYOUTS, step_of
from tests.kernels.triton import test_page_mass
from tests.kernels.triton_cases import assert_same_bits, random_bits, with_half
from tests.kernels.truth import attend, check

# Decoding rows, drafts, chunks, rows without tokens or keys; around tiles, pages and splits.
ROWS = [(1, 70), (3, 20), (20, 50), (0, 9), (4, 90), (2, 1)]
LATENT = {"groups": 1, "dim": 576, "v_dim": 512, "latent": True}
SHAPES = {
    "latents, 4 heads": {**LATENT, "heads": 4},
    "latents, 16 heads, pages of 3": {**LATENT, "heads": 16, "page": 3},
    "latents, 67 heads, which are no two equal shares": {
        **LATENT, "heads": 67, "rows": ROWS[: examples(6, 2)]},
    "latents of 256": {
        **LATENT, "heads": 40, "dim": 288, "v_dim": 256, "page": 64,
        "rows": ROWS[: examples(6, 3)]},
    "tiny latents": {**LATENT, "heads": 12, "dim": 32, "v_dim": 16},
    "latents of two heads, no powers of two": {
        "heads": 6, "dim": 144, "v_dim": 96, "latent": True, "layout": LAYOUTS[1], "page": 1},
    "latents with all terms": {
        **LATENT, "heads": 5, "dim": 48, "v_dim": 32,
        "window": 20, "sinks": True, "softcap": 3.0, "scale": 0.4},
    "heads of 512": {"heads": 8, "dim": 512},
    "heads of 512, a window": {"heads": 4, "groups": 4, "dim": 512, "window": 33, "sinks": True},
    "K of 192, V of 128": {"heads": 8, "dim": 192, "v_dim": 128, "sinks": True, "window": 40},
    "V of less than a tile": {"heads": 3, "groups": 1, "dim": 80, "v_dim": 48},
}  # fmt: skip
# What no other shape holds as well.
OFTEN = [name for name in SHAPES if name not in ("latents, 4 heads", "heads of 512")]


@sampled
@pytest.mark.parametrize(("shape", "dtype"), with_half(SHAPES, *OFTEN), ids=str)
def test_k_and_v_of_any_widths_agree_with_the_twin(shape, dtype):
    check(step_of(**{"rows": ROWS, **SHAPES[shape]}, dtype=dtype))


MANY = {"decode": [(1, 100), (1, 3)], "drafts": [(2, 40), (3, 3)], "a chunk": [(17, 30)]}


@pytest.mark.parametrize("rows", [*slow(*MANY)])
def test_128_heads_on_one_are_shared_out_among_tiles(rows):
    check(step_of(MANY[rows], heads=128, dtype=torch.bfloat16, **LATENT))


SHARED = {
    "latents": {**LATENT, "heads": 20},
    "heads of 512": {"heads": 6, "dim": 512},
    "K of 96, V of 32": {"heads": 6, "dim": 96, "v_dim": 32},
}


@pytest.mark.parametrize("shape", SHARED)
def test_a_prefix_is_read_once_for_several_rows(shape):
    step = step_of([(1, 75), (1, 70), (1, 64), (1, 200)], shared=4, **SHARED[shape])
    check(step, attend(step, prefixes=[Prefix(slice(0, 4), 4)]))


@pytest.mark.parametrize("shape", few(SHARED, "latents", "heads of 512"))
def test_mass_of_pages_is_noted_down(shape):
    rows = [(1, 33), (1, 7), (2, 70)]
    test_page_mass.check(step_of(rows, **SHARED[shape]), [1, 0, 2])


@sampled
def test_a_row_of_latents_is_the_same_in_a_step_and_alone():
    step = step_of(ROWS[: examples(6, 3)], heads=20, **LATENT)
    out, lse = attend(step)
    for index, (new, tokens) in enumerate(zip(step.num_new, step.tokens)):
        if new:
            # The widest row that decodes says how many queries lie in a tile.
            alone = attend(step.row(index), num_new=[4 if new <= 16 else new])
            assert torch.equal(alone[0], out[tokens])
            assert torch.equal(alone[1], lse[tokens])


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(576, 512), (48, 32), (192, 128), (512, 512)])
def test_tokens_come_to_their_slots_and_latents_are_written_once(dim, v_dim, dtype, layout):
    groups, count, size = 2, 5, 16
    k_pages, v_pages = steps.pages_of(layout, (count, groups, size, dim), dtype, DEVICE, v_dim)
    latent = dim in (576, 48)
    if latent:
        v_pages = k_pages[..., :v_dim]
    k, v = (random_bits(9, groups, x, dtype=dtype, seed=x) for x in (dim, v_dim))
    for pages in (k_pages, v_pages):
        pages.copy_(random_bits(*pages.shape, dtype=dtype))
    wanted = [k_pages.clone(), v_pages.clone()]
    slots = torch.tensor([3, -1, 79, 0, 17, 18, -1, 40, 41], device=DEVICE)
    paged.write_kv(k, v, k_pages, v_pages, slots)
    for pages, new in zip(wanted, (k, k[..., :v_dim] if latent else v)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                pages[slot // size, :, slot % size] = new[token]
    assert_same_bits(k_pages, wanted[0])
    assert_same_bits(v_pages.contiguous(), wanted[1])


# ------------------------------------------------------------------ views and refusals


def test_v_is_a_view_of_k_only_where_it_is_the_same_memory():
    step = step_of([(1, 20)], heads=4, groups=2, dim=48, v_dim=32, latent=True)
    k, v = step.k_pages, step.v_pages
    assert Geometry.of(step.q, k, v).rest == 16
    assert Geometry.of(step.q, k, v.clone()).rest == 0
    assert Geometry.of(step.q, k, k[..., 16:]).rest == 0
    assert Geometry.of(step.q, k, k).rest == 0


def pages(dim, heads=1, dtype=torch.bfloat16):
    return torch.zeros(2, heads, 16, dim, dtype=dtype, device=DEVICE)


K = pages(576)
REFUSED = {
    "a head dim of latents, but not its view": (K, None, r"head_dim: .*or 512, got 576; 512 is"),
    "pages of V as wide": (K, pages(512), "head_dim: .*got 576"),
    "other columns of K": (K, K[..., 64:], "head_dim: .*got 576"),
    "odd columns of V": (K, K[..., :500], r"head_dim: .*got 500; 512 is the nearest"),
    "V wider than K": (pages(64), pages(128), "v_pages: expected at most .* 64, got 128"),
    "V of an odd head dim": (pages(64), pages(24), "v_pages' head dim: .*got 24; 32 is"),
    "latents that are too wide": (pages(640), None, "k_pages: .*up to 576 .*got 640, and 512"),
    "latents with odd columns": (pages(520), None, "k_pages: .*multiple of 16 .*got 520"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_widths_without_a_kernel_are_refused(case):
    k, v, message = REFUSED[case]
    if v is None and k.shape[3] in (640, 520):
        v = k[..., :512]
    with pytest.raises(NotImplementedError, match=message):
        paged.check_pages(k, v)


def test_widths_with_a_kernel_are_accepted():
    for dim, v_dim in ((576, 512), (288, 256), (32, 16), (528, 512), (576, 256)):
        k = pages(dim)
        paged.check_pages(k, k[..., :v_dim])
    for dim, v_dim in ((512, 512), (192, 128), (512, 16)):
        paged.check_pages(pages(dim), pages(v_dim))


def test_coded_pages_of_several_widths_are_refused():
    words = torch.zeros(2, 1, 16, 256, dtype=torch.int16, device=DEVICE)
    scales = torch.zeros(2, 1, 16, dtype=torch.float16, device=DEVICE)
    int8 = Pages(FORMATS["int8"], words, scales)
    for k, v in ((int8, int8), (int8, pages(512)), (pages(512), int8)):
        with pytest.raises(NotImplementedError, match="kv_format: expected dense pages of head"):
            paged.check_pages(k, v, torch.bfloat16)
    half = Pages(FORMATS["int8"], words[..., :32].contiguous(), scales)
    with pytest.raises(NotImplementedError, match=r"kv_format: .*dims 128 of K and 64 of V"):
        paged.check_pages(pages(128), half, torch.bfloat16)


def test_v_other_than_planned_is_refused_before_any_kernel_runs(monkeypatch):
    step = step_of([(1, 20)], heads=4, groups=1, dim=48, v_dim=32, latent=True)
    lens = step.kv_lens, step.starts, step.q
    plan = paged.plan(*lens, step.k_pages, step.v_pages, num_new=[1], max_kv=20)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: pytest.fail("launched"))
    for v_pages in (step.v_pages.clone(), step.k_pages[..., :16], step.k_pages):
        with pytest.raises(ValueError, match=r"v_pages: expected .* a view of k_pages with 32"):
            paged.paged_attention(
                *(step.q, step.k_pages, v_pages, step.table, step.kv_lens, step.starts, plan),
                **step.options,
            )
