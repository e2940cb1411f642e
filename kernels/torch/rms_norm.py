"""RMS norms in plain torch, and bounds for every computation of them in float32."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-24  # half of the distance from 1 to the next float32
LEAST = 2.0**-118  # smaller numbers may be lost


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: float, rounds: bool) -> Tensor:
    """Divides each row by its root mean square, and weights it.

    Args:
        x: `[..., width]`; computed in float32.
        weight: `[width]`.
        eps: added to a mean square.
        added: added to each weight.
        rounds: whether a row is rounded to its dtype before it is weighted.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = normed.to(x.dtype).float() if rounds else normed
    return (normed * (weight.float() + added)).to(x.dtype)


def bounds(
    x: Tensor, weight: Tensor, eps: float, added: float, rounds: bool
) -> tuple[Tensor, Tensor]:
    """Returns the least and the most that `rms_norm` may give, for every order of its sums.

    They are computed in float64. Rounding keeps order, so they are rounded where results are.
    """
    exact = x.double()
    # A sum of n squares has at most n roundings, and the root halves them; 8 are for the rest.
    error = (exact.count_nonzero(-1)[..., None] / 2 + 8) * UNIT
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    least, most = _around(normed, normed, error)
    if rounds:
        least, most = least.to(x.dtype).double(), most.to(x.dtype).double()
    by = weight.double() + added
    one, other = least * by, most * by
    least, most = _around(torch.minimum(one, other), torch.maximum(one, other), 4 * UNIT)
    return least.to(x.dtype), most.to(x.dtype)


def _around(least: Tensor, most: Tensor, error: Tensor | float) -> tuple[Tensor, Tensor]:
    return least - error * least.abs() - LEAST, most + error * most.abs() + LEAST
