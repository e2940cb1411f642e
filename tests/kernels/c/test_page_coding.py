"""Coded pages that C writes, beside those that torch writes: the same words and scales.

What these cases alone find: a code off by one where elements are halfway between two, are no
numbers or are too large, and a page, slot or head that is not the one meant.
"""

import math

import pytest
import torch

from pagedkv.kernels.c import page_coding as c
from pagedkv.kernels.c.library import missing
from pagedkv.kernels.formats import FORMATS, Pages
from pagedkv.kernels.torch import page_coding as twin
from tests.effort import each_value
from tests.kernels.shapes import DTYPES
from tests.kernels.steps import EACH, MIXTURES

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")

LAYERS, N, S, G, P = 2, 9, 6, 3, 16


def elements(*shape, dtype):
    """Elements of all sizes, some halfway between codes, some tokens alike, some no numbers."""
    x = torch.randn(*shape) * 10.0 ** torch.randint(-3, 4, (shape[-1],))
    flat = x.view(-1, shape[-1])
    flat[1::7] = torch.randint(-30, 31, flat[1::7].shape) / 2
    flat[2::7], flat[3::7] = 0, -1.5
    flat[4::14] *= 1e-7
    flat[5::21] *= 1e9
    for i, value in enumerate((math.inf, -math.inf, math.nan, -math.nan)):
        flat[6 + 7 * i, i] = value
    return x.to(dtype)


def pages(format, dim, dtype, staging):
    """Makes pages of all layers, full of random bits; the slots of a head lie apart."""
    of = FORMATS[format]
    kind, width = (dtype, dim) if of.dense else (torch.int16, dim // of.per_word)
    data = torch.randint(-99, 99, (LAYERS, N, P, G, width)).to(kind).transpose(2, 3)
    scales = None
    if of.static:
        scales = 2.0 ** torch.randint(-8, 3, (LAYERS, G))
    elif not of.dense:
        scales = torch.rand(LAYERS, *of.scales_shape(N, G, P, dim)).half()
    staged = elements(LAYERS, S, P, G, dim, dtype=dtype).transpose(2, 3) if staging else None
    return Pages(of, data, scales, staged)


def same(mine, other):
    for x, y in zip(mine[1:], other[1:]):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def both(pair, dim, dtype):
    """Returns equal pages twice, and whether some of them are staging pages."""
    torch.manual_seed(0)
    staging = any(FORMATS[format].staged for format in pair)
    ours = [pages(format, dim, dtype, staging) for format in pair]
    return ours, [x.each(torch.Tensor.clone) for x in ours], staging


def layer(of, i):
    return [x.each(lambda tensor: tensor[i]) for x in of]


AXES = [*EACH, *MIXTURES], [32, 96], DTYPES


@pytest.mark.parametrize(("pair", "dim", "dtype"), each_value(*AXES), ids=str)
def test_tokens_and_whole_pages_are_what_torch_writes(pair, dim, dtype):
    ours, theirs, staging = both(pair, dim, dtype)
    tokens = 100 + 3 * P
    k, v = (elements(G, tokens, dim, dtype=dtype).transpose(0, 1) for _ in "kv")
    first = N if staging else 0
    slots = first * P + torch.randperm((S if staging else N) * P)[:90]
    c.write_kv(k[:90], v[:90], *layer(ours, 1), slots)
    twin.write_kv(k[:90], v[:90], *layer(theirs, 1), slots)
    whole = torch.tensor([90, 40, 100 + 2 * P]), torch.tensor([3, 0, 8])
    c.write_pages(k, v, *layer(ours, 1), *whole)
    twin.write_pages(k, v, *layer(theirs, 1), *whole)
    if staging:
        moved = torch.tensor([N + 5, N, N + 2]), torch.tensor([7, 1, 2])
        c.encode_pages(*ours, *moved)
        twin.encode_pages(*theirs, *moved)
    for mine, other in zip(ours, theirs):
        same(mine, other)
