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


# Ways to make scores; those that fast tests try meet each term, and borders of pages and tiles.
FEATURES: dict[str, dict[str, Any]] = {
    "a window of one token": {"window": 1},
    "a window within a page": {"window": 5},
    "a window of a page and one": {"window": 17},
    "a window of a tile, less one": {"window": 31},
    "a window of a tile": {"window": 32},
    "a window of a tile of tokens and one of queries": {"window": 64},
    "a window with whole tiles that all see": {"window": 110},
    "a window that nothing leaves": {"window": 500},
    "sinks": {"sinks": True},
    "a softcap": {"softcap": 30.0},
    "a softcap that bends everything": {"softcap": 0.3},
    "a scale": {"scale": -1.5},
    "all, in a narrow window": {"window": 3, "sinks": True, "softcap": 2.0, "scale": -0.7},
    "all, in a wide window": {"window": 90, "sinks": True, "softcap": 5.0, "scale": 0.7},
    "a tree": {"tree": True},
    "a tree, sinks and a softcap": {"tree": True, "sinks": True, "softcap": 2.0},
    "slopes": {"alibi": True},
    "a bias of each query": {"distances": 40},
    "a bias of each head, slopes and a softcap, in a window": {
        "window": 90,
        "alibi": True,
        "distances": 200,
        "by_query": False,
        "softcap": 5.0,
    },
}
OFTEN = "a window of one token", "a window of a tile", "a window with whole tiles that all see"
OFTEN += "all, in a narrow window", "a bias of each query"
OFTEN += ("a tree, sinks and a softcap", "a bias of each head, slopes and a softcap, in a window")


def with_half(names: Iterable[str], *chosen: str) -> list[Any]:
    """Each case in float32 and in one of the narrower types; one of the two is left to slow tests.

    The fast tests take the narrower types twice as often, and only those `chosen` if some are.
    """
    found: list[Any] = []
    for number, (name, half) in enumerate(zip(names, itertools.cycle(HALF))):
        single, narrow = (name, torch.float32), (name, half)
        if chosen and name not in chosen:
            found += slow(single, narrow)
        else:
            found += [*slow(single), narrow] if number % 3 < 2 else [single, *slow(narrow)]
    return found


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all, NaN and subnormal numbers among them."""
    random = torch.Generator().manual_seed(seed)
    number = BITS[dtype.itemsize]
    info = torch.iinfo(number)
    bits = torch.randint(info.min, info.max, shape, generator=random, dtype=number)
    return bits.view(dtype).to(DEVICE)


def misaligned(tensor: Tensor) -> Tensor:
    """Copies a tensor to memory one element behind a multiple of 16 bytes."""
    moved = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)[1:]
    return moved[: tensor.numel()].view(tensor.shape).copy_(tensor)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """As torch.equal, but NaN is like NaN of the same bits only."""
    number = BITS[found.element_size()]
    assert torch.equal(found.view(number), expected.view(number))
