"""Layers that kernels are checked for, and the rows of their steps.

Every dtype meets every page size, head dimension, group size, layout and way to make scores.
Nothing here needs pytest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.steps import LAYOUTS, Rows, Step, step_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGES = (16, 1, 64, 3, 128, 32)
RATIOS = (1, 3, 5, 7, 8, 16)
DIMS = (64, 80, 96, 128, 256)
TERMS: tuple[dict[str, float], ...] = (
    {},
    {"window": 100},
    {"sinks": True},
    {"softcap": 20.0},
    {"window": 33, "softcap": 5.0, "sinks": True},
    {"window": 1},
    {"window": 700, "sinks": True, "distances": 70},
    {"softcap": 30.0, "sinks": True, "alibi": True},
)

# New tokens and lengths around pages, tiles and splits, on a card and in the interpreter.
SMALL: dict[str, Rows] = {
    "decode": [(1, 1), (1, 17), (1, 70)],
    "verify": [(2, 33), (1, 5), (4, 4)],
    "prefill": [(17, 20)],
    "mixed": [(1, 20), (17, 17), (2, 9)],
    "empty": [(1, 0), (0, 0), (3, 2), (18, 0)],
}
FULL: dict[str, Rows] = {
    "decode": [(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 255, 257, 300, 513, 1100, 3000)],
    "verify": [(n, n + 97 * n % 800) for n in range(1, 17)],
    "prefill": [(17, 17), (40, 100), (200, 200), (130, 900), (64, 64), (33, 1030), (128, 129)],
    "mixed": [(1, 300), (5, 70), (100, 400), (16, 16), (0, 50), (1, 1), (31, 530)],
    "empty": [(1, 0), (0, 0), (0, 40), (5, 2), (1, 70), (16, 0), (20, 0), (30, 10)],
}


class Shape(NamedTuple):
    """A layer: what kernels are compiled for."""

    ratio: int
    groups: int
    dim: int
    page: int
    dtype: torch.dtype
    terms: dict[str, float] = TERMS[0]
    layout: str = LAYOUTS[0]
    v_dim: int | None = None  # of V, if it is narrower than K
    latent: bool = False  # V is a view of K

    @property
    def by_distance(self) -> bool:
        """Whether it matters how far in front of its query a token is."""
        return bool({"window", "alibi", "distances"} & set(self.terms))

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        heads = f"{self.ratio * self.groups}/{self.groups} heads of {self.dim}"
        if self.v_dim is not None:
            heads += f" and {self.v_dim}{' of them' * self.latent}"
        terms = ", ".join(f"{name} {value}" for name, value in self.terms.items()) or "plain"
        return f"{name}, {heads}, page {self.page}, {terms}, {self.layout}"

    def step(self, rows: Rows, device: str, **more: int) -> Step:
        ratio, groups, dim, page, dtype, terms, layout, v_dim, latent = self
        sizes = {"heads": ratio * groups, "groups": groups, "dim": dim, "page": page}
        sizes |= {"v_dim": v_dim, "latent": latent}
        return step_of(rows, device=device, dtype=dtype, layout=layout, **sizes, **terms, **more)


def wide(device: str) -> list[Shape]:
    """Latents, heads of 512, and V narrower than K; on a card also of more heads than a tile."""
    both, alone = {"v_dim": 512, "latent": True}, {"v_dim": 128}
    if device == "cpu":
        return [Shape(5, 1, 48, 16, DTYPES[0], v_dim=32, latent=True)]
    found = []
    for i, dtype in enumerate(DTYPES):
        found += [
            Shape(16, 1, 576, (64, 16, 1)[i], dtype, **both),
            Shape((20, 67, 128)[i], 1, 576, (16, 64, 3)[i], dtype, TERMS[(2, 4, 0)[i]], **both),
            Shape(40, 1, 288, 16, dtype, v_dim=256, latent=True),
            Shape(8, 2, 512, (16, 3, 64)[i], dtype, TERMS[(0, 1, 3)[i]], LAYOUTS[i]),
            Shape(16, 2, 192, 16, dtype, {"window": 700, "sinks": True}, **alone),
        ]
    return found


def shapes() -> list[Shape]:
    """Eight a dtype; each list is gone through at another offset, so that all pairs occur."""
    found = []
    for shift, dtype in enumerate(DTYPES):
        for i in range(len(TERMS)):
            ratio, dim = RATIOS[(i + 2 * shift) % 6], DIMS[(i + shift) % 5]
            layout, terms = LAYOUTS[(i + shift) % 3], TERMS[(i + 3 * shift) % len(TERMS)]
            groups = 2 if ratio < 8 else 1
            found.append(Shape(ratio, groups, dim, PAGES[i % 6], dtype, terms, layout))
    return found


def page_choice(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, columns: int = 70
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Queries, bounds, ids and lengths of rows that choose pages, and the size of a page.

    Some bounds are no numbers, or infinite.
    """
    pages, size = 5 * columns, 16
    source = torch.Generator().manual_seed(0)
    bounds = torch.rand(pages, kv_heads, dim, 2, generator=source).half()
    bounds[..., 1] -= 0.5
    lens = torch.tensor([1, 16, 17, 500, columns * size], dtype=torch.int32)
    ids = torch.randperm(pages, generator=source).int().view(5, columns)
    for row, length in zip(ids, lens.tolist()):
        row[-(-length // size) :] = 10**6  # of nobody
        row[0] = pages + 5  # a staging page
    bounds[ids[3, 30:32].long()] = torch.nan  # the newest, not complete
    for at, bad in enumerate((torch.nan, torch.inf, -torch.inf)):  # of one channel of one head
        for part in (0, 1):
            bounds[ids[4, 5 + 9 * at + part].long(), at % kv_heads, at, part] = bad
    q = torch.randn(5, heads, dim, generator=source).to(dtype)
    q[3, 1, 0] = torch.nan
    return q, bounds, ids, lens, size


def chosen_by_twins(
    case: tuple[Tensor, Tensor, Tensor, Tensor, int], count: int, decoding: bool
) -> tuple[Tensor, Tensor]:
    """Tables of the pages that rows choose, by the kernel, and by sorting the kernel's scores.

    Half of the scores are equal. Unless all rows decode, every third has two new tokens.
    """
    from pagedkv.kernels.triton import select_pages as choose

    q, bounds, ids, lens, size = case
    bounds = bounds.clone()
    bounds[::2] = 0.25  # of these pages all have one score
    new = torch.ones_like(lens)
    if not decoding:
        new[::3] = 2
    starts = torch.cat([torch.zeros_like(new[:1]), new.cumsum(0, dtype=torch.int32)])
    tokens = q if decoding else q.new_zeros(len(q) + len(new[::3]), *q.shape[1:])
    if not decoding:
        tokens[(starts[1:] - 1).long()] = q
    got = choose.chosen_table(tokens, bounds, ids, lens, starts, size, count, decoding)
    scores = choose.score_columns(q, bounds, ids, lens, size)
    best = scores.sort(stable=True, dim=-1, descending=True).indices[..., :count].sort(-1).values
    every = ids[:, None].expand(-1, scores.shape[1], -1)
    chooses = ((new == 1) & (lens > count * size))[:, None, None]
    first = torch.where(chooses, every.gather(2, best), every[..., :count])
    return got, first if decoding else torch.cat([first, every[..., count:]], 2)
