"""`write_pages` refuses pages whose slots share memory, and no others that interleave."""

import random

import pytest
import torch

from pagedkv import AttentionPlan, write_pages
from pagedkv.attention.own_checks import check_apart
from tests.effort import examples, sampled


def pools_in(memory, k_at, v_at, strides, shape, v_dim):
    """K and V pages `[N, G, P, D]` in one piece of memory, of which other slots may be.

    `strides` are those of both, or of each.
    """
    k_strides, v_strides = strides if len(strides) == 2 else (strides, strides)
    return [
        memory.as_strided((*shape[:3], dim), (*steps, 1), at)
        for at, dim, steps in ((k_at, shape[3], k_strides), (v_at, v_dim, v_strides))
    ]


APART = {  # where K and V begin, strides of pages, heads and slots, and D of V
    "a half each": (0, 384, (128, 64, 16), 16),
    "by page": (0, 128, (256, 64, 16), 16),
    "by head": (64, 0, (256, 128, 16), 16),
    "by slot": (0, 32, (256, 16, 64), 16),
    "side by side": (0, 16, (256, 128, 32), 16),
    "narrow values in front": (8, 0, (256, 128, 32), 8),
    "by page, of narrow values": (0, 128, ((192, 64, 16), (192, 32, 8)), 8),
    "by slot, of narrow values": (0, 32, ((192, 16, 48), (192, 8, 48)), 8),
    "by page, each in its order": (128, 0, ((256, 64, 16), (256, 16, 32)), 16),
    "of a head, whose stride says nothing": (0, 64, ((128, 500, 16), (128, 0, 16)), 16),
}
ALIASED = {
    "one page": (0, 512, (0, 64, 16), 16, "^k_pages: expected slots with memory"),
    "one head": (0, 512, (128, 0, 16), 16, "^k_pages: .*strides"),
    "slots over slots": (0, 512, (128, 64, 8), 16, "^k_pages: .*strides"),
    "values over keys": (0, 8, (256, 128, 32), 16, "^v_pages: expected memory of their own"),
    "keys over values": (4, 0, (256, 128, 32), 8, "^v_pages: expected memory of their own"),
    "narrow values a page later": (0, 128, ((128, 64, 16), (128, 32, 8)), 8, "^v_pages: expected"),
    "a page later": (0, 128, (128, 64, 16), 16, "^v_pages: expected memory of their own"),
}


@pytest.mark.parametrize("which", [*APART, *ALIASED])
def test_two_tokens_are_not_written_to_one_place_in_memory(which):
    k_at, v_at, strides, v_dim, *says = (APART | ALIASED)[which]
    heads = 1 if "of a head" in which else 2
    pools = pools_in(torch.zeros(2000), k_at, v_at, strides, (3, heads, 4, 16), v_dim)
    places = torch.tensor([[2, 1]]), torch.tensor([6])
    rest = {"page_size": 4, "kv_layout": "HND", "backend": "torch"}
    plan = AttentionPlan(*places, seqlen_q=6, **rest)
    k, v = torch.randn(6, heads, 16), torch.randn(6, heads, v_dim)
    if says:
        with pytest.raises(ValueError, match=says[0]):
            write_pages(k, v, *pools, plan)
        assert not pools[0].any()
        return
    write_pages(k, v, *pools, plan)
    for pages, new in zip(pools, (k, v)):
        held = torch.cat([pages[2].transpose(0, 1), pages[1, :, :2].transpose(0, 1)])
        assert torch.equal(held, new)


@sampled
def test_no_two_slots_that_are_taken_for_apart_share_an_element():
    """A plan may get pages of one layout and of several sizes, one after another."""
    memory, source, apart = torch.arange(4000.0), random.Random(0), 0
    plan = AttentionPlan(torch.zeros(1, 1).int(), torch.tensor([0]), page_size=1, backend="torch")
    for _ in range(examples(20000, 2000)):
        shape = [source.randint(1, 3) for _ in range(4)]
        steps = 0, 1, 2, 3, 4, 6, 9, 12, 18, 27
        k_strides, other = (source.choices(steps, k=3) for _ in range(2))
        alike = source.choice((0, 1, 3))  # axes along which V has the steps of K
        strides = k_strides, k_strides[:alike] + other[alike:]
        at, v_dim = (source.randint(0, 30), source.randint(0, 30)), source.randint(1, shape[3])
        k, v = pools_in(memory, *at, strides, shape, v_dim)
        try:
            check_apart(k, v, plan, latent=False)
        except ValueError:
            continue
        apart += 1
        elements = torch.cat([k.flatten(), v.flatten()])
        assert len(elements.unique()) == len(elements), (shape, strides, at, v_dim)
    assert apart > 20
