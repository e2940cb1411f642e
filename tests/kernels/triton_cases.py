"""Cases for the tests of Triton kernels that are not steps: dtypes, marks, and bits."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.effort import slow
from tests.kernels.steps import DEVICE

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = [torch.float16, torch.bfloat16]


def with_half(names: Iterable[str]) -> list[Any]:
    """Each case in float32 and in one of the narrower types; one of the two is left to slow tests.

    The fast tests take the narrower types twice as often.
    """
    found: list[Any] = []
    for number, (name, half) in enumerate(zip(names, itertools.cycle(HALF))):
        single, narrow = (name, torch.float32), (name, half)
        found += [*slow(single), narrow] if number % 3 < 2 else [single, *slow(narrow)]
    return found


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all, NaN and subnormal numbers among them."""
    random = torch.Generator().manual_seed(seed)
    number = BITS[dtype.itemsize]
    info = torch.iinfo(number)
    bits = torch.randint(info.min, info.max, shape, generator=random, dtype=number)
    return bits.view(dtype).to(DEVICE)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """As torch.equal, but NaN is like NaN of the same bits only."""
    number = BITS[found.element_size()]
    assert torch.equal(found.view(number), expected.view(number))
