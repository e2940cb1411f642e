"""Steps on coded pages, made of steps on dense ones.

What nobody wrote, or sees, is as bad as the format can make it: words are any bits, scales are NaN.
Where there are staging pages, a row has them wherever it may: its first page, and those that it got
tokens for in the step, but for some that the step filled.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages, encode
from tests.kernels.triton_cases import DEVICE, Step

K_FORMATS = ("fp8", "int8", "int4_channel")
V_FORMATS = ("fp8", "int8", "int4_token")
EACH = list(zip(K_FORMATS, V_FORMATS))
MIXTURES = [
    *(("dense", v) for v in V_FORMATS),
    *((k, "dense") for k in K_FORMATS),
    *((k, v) for k in K_FORMATS for v in V_FORMATS if (k, v) not in EACH),
]


def coded(step: Step, k_format: str, v_format: str, staging: bool | None = None) -> Step:
    """The step with its pages coded.

    Args:
        staging: whether there are staging pages; default, if half of it is int4.
    """
    if staging is None:
        staging = "int4" in k_format + v_format
    assert isinstance(step.k_pages, Tensor)
    assert isinstance(step.v_pages, Tensor)
    count, size = len(step.k_pages), step.k_pages.shape[2]
    table = step.table.clone()
    staged: list[int] = []
    if staging:
        for row, (new, length) in enumerate(zip(step.num_new, step.kv_lens.tolist())):
            written = max(0, length - new) // size
            for column in range(-(-length // size)):
                page = int(table[row, column])
                filled = (column + 1) * size <= length
                # Every other page that the step filled was coded as it was written.
                direct = column * size >= length - new and filled and column % 2
                if page >= 0 and (column == 0 or (column >= written and not direct)):
                    if page not in staged:
                        staged.append(page)
                    table[row, column] = count + 1 + staged.index(page)
    halves = ((step.k_pages, k_format), (step.v_pages, v_format))
    pages = [_coded(x, format, staged if staging else None) for x, format in halves]
    return replace(step, k_pages=pages[0], v_pages=pages[1], table=table)


def _coded(dense: Tensor, format: str, staged: list[int] | None) -> Pages:
    """Pages in a format; those that are staged become staging pages, from the second one on."""
    random = torch.Generator().manual_seed(7)
    staging = None
    if staged is not None:
        staging = torch.full_like(dense[:1], math.nan).repeat(len(staged) + 3, 1, 1, 1)
        staging[1 : 1 + len(staged)] = dense[staged]
        dense = dense.clone()
        dense[staged] = math.nan
    if format == "dense":
        return Pages(format, dense, None, staging)
    x = dense.float().cpu()
    seen = ~x.isnan().any(-1)  # [N, G, P]
    if format == "int4_channel":
        # A page is coded whole: what no query sees of it was seen once.
        whole = seen.any(-1)[..., None]
        x = torch.where(seen[..., None], x, torch.randn(x.shape, generator=random))
        seen = whole.expand_as(seen)
    x = x.nan_to_num(0)
    scale = None
    if format == "fp8":
        heads = torch.arange(x.shape[1])
        scale = 2.0 ** (heads % 3 - 6)
        words, _ = encode(x, format, scale[:, None, None])
        scales = scale
    else:
        words, scales = encode(x, format)
        hidden = ~(seen[:, :, 0] if format == "int4_channel" else seen)
        scales[hidden] = math.nan
    noise = torch.randint(-(2**15), 2**15, words.shape, generator=random, dtype=torch.int16)
    noise[..., ::3] = 0x7F7F  # of fp8 two that are NaN
    words = torch.where(seen[..., None], words, noise)
    return Pages(format, words.to(DEVICE), scales.contiguous().to(DEVICE), staging)
