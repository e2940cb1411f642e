"""Steps of the gated delta rule out of poisoned pools, and the float64 truth they are held to.

Slots that no row reads are NaN. Nothing here needs pytest, and all of it works on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNIT = 2.0**-24  # what float32 rounds by


class Sizes(NamedTuple):
    """Rows, key heads, value heads, keys and values of a head; whether each key has a gate."""

    rows: int
    key_heads: int
    heads: int
    key_dim: int
    dim: int
    channels: bool = False


@dataclass(frozen=True)
class Token:
    """Arguments of `delta_rule_step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    states: Tensor
    source: Tensor
    target: Tensor

    def row(self, row: int) -> Token:
        """The step of one row alone; the pool is the same."""
        names = [field.name for field in fields(self) if field.name != "states"]
        return replace(self, **{name: getattr(self, name)[row : row + 1] for name in names})

    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def make(
    sizes: Sizes, dtype: torch.dtype, device: torch.device | str = "cpu", mixed: bool = True
) -> Token:
    """A step as models make it: q, k and v are parts of one tensor, gate is float32.

    Args:
        mixed: as of `slots`.
    """
    rows, key_heads, heads, key_dim, dim, channels = sizes
    widths = [key_heads * key_dim] * 2 + [heads * dim]
    packed = torch.randn(rows, sum(widths), device=device).to(dtype).split(widths, 1)
    q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(packed, (key_heads, key_heads, heads)))
    q[-1] *= 1e-3  # so short that what is added below the root shows
    k[-1] *= 1e-3
    shape = (rows, heads, key_dim) if channels else (rows, heads)
    gate = -8 * torch.rand(shape, device=device) ** 3
    beta = 2 * torch.rand(rows, heads, device=device).to(dtype)
    states, source, target = slots(rows, (heads, key_dim, dim), torch.float32, device, mixed)
    return Token(q, k, v, gate, beta, states * math.sqrt(8 / key_dim), source, target)


def slots(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, mixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A pool, and the slots that rows read and write: NaN is in all that are not read.

    Args:
        mixed: rows begin, stay in their slot, go to another one or keep nothing; of five and more,
            two read the same slot, as forks do. Else each goes from a slot to another one.
    """
    source, target = [*range(3, 3 + rows)], [*range(3 + rows, 3 + 2 * rows)]
    if mixed:
        target[::3], target[2::3] = source[::3], source[2::3]
        source[2::5] = [-1] * len(source[2::5])
        target[3::7] = [-1] * len(target[3::7])
    if mixed and rows > 4:
        source[4] = source[1]
    states = torch.full((2 * rows + 4, *shape), math.nan, device=device, dtype=dtype)
    for slot in {*source} - {-1}:
        states[slot] = torch.randn(shape, device=device).to(dtype)
    return states, torch.tensor(source, device=device), torch.tensor(target, device=device)


class Truth(NamedTuple):
    """Outputs and states of all rows in float64, and how far float32 may be off.

    A bound follows each number through the step: what it may be off by already, and what each
    operation rounds by; a sum of n terms by n roundings of all its terms' sizes.
    """

    out: Tensor
    state: Tensor
    out_bound: Tensor
    state_bound: Tensor


def truth(token: Token, normalize: bool = True) -> Truth:
    """The rule itself, head by head."""
    rows, heads, dim = token.v.shape
    key_heads, key_dim = token.k.shape[1:]
    found = []
    for row in range(rows):
        for head in range(heads):
            of_key = head // (heads // key_heads)
            q, k = token.q[row, of_key].double(), token.k[row, of_key].double()
            v, beta = token.v[row, head].double(), token.beta[row, head].double()
            gate = token.gate[row, head].double()
            slot = int(token.source[row])
            before = token.states[slot, head].double() if slot >= 0 else torch.zeros(key_dim, dim)
            before = before.double().to(v.device)

            off = 8 * UNIT  # the inverse root of hardware, and two products
            if normalize:
                q, k = (x / (x.dot(x) + 1e-6).sqrt() for x in (q, k))
                off += key_dim / 2 * UNIT
            q = q * key_dim**-0.5
            decay = gate.exp()[..., None].expand(key_dim, 1)
            decay_off = (8 + 2 * gate.abs()[..., None]) * UNIT  # a power of two of a product
            left = decay * before
            left_bound = left.abs() * (decay_off + UNIT)
            sum_off = off + (key_dim + 2) * UNIT
            seen = left.T @ k
            seen_bound = left_bound.T @ k.abs() + (left.abs().T @ k.abs()) * sum_off
            delta = beta * (v - seen)
            delta_bound = beta * (seen_bound + 3 * UNIT * (v.abs() + seen.abs()))
            after = left + torch.outer(k, delta)
            after_bound = left_bound + torch.outer(k.abs(), delta_bound + delta.abs() * off)
            after_bound = after_bound + 2 * UNIT * (left.abs() + torch.outer(k, delta).abs())
            out = after.T @ q
            out_bound = after_bound.T @ q.abs() + (after.abs().T @ q.abs()) * sum_off
            found.append((out, after, out_bound, after_bound))
    out, after, out_bound, after_bound = (
        torch.stack(each).unflatten(0, (rows, heads)) for each in zip(*found)
    )
    info = torch.finfo(token.v.dtype)
    out_bound = out_bound + info.eps / 2 * out.abs() + info.smallest_normal * info.eps
    return Truth(out, after, out_bound, after_bound)


def check(step: Callable[..., Tensor], token: Token, **options: Any) -> None:
    """Raises AssertionError unless a step is right, and nothing else was written.

    With `into` among the options that pool is what is written.
    """
    if token.v.is_meta:
        step(*token.arguments(), **options)
        return
    true = truth(token, options.get("normalize", True))
    written = options.get("into", token.states)
    with nothing_else_written(token.states, written, token.target):
        out = step(*token.arguments(), **options)
    assert out.dtype == token.v.dtype, f"the output is {out.dtype}"
    worst = ((out.double() - true.out).abs() / true.out_bound).amax()
    assert worst <= 1, f"the output is off by {worst:.3g} times the bound"  # not where it is NaN
    kept = token.target >= 0
    after, state, bound = written[token.target[kept]], true.state[kept], true.state_bound[kept]
    worst = ((after.double() - state).abs() / (bound + 1e-30)).amax() if kept.any() else 0
    assert worst <= 1, f"states are off by {worst:.3g} times the bound"


@contextmanager
def nothing_else_written(states: Tensor, into: Tensor, target: Tensor) -> Iterator[None]:
    """Raises AssertionError if anything but the targets has other bits afterwards."""
    pools = (states,) if into is states else (states, into)
    before = [pool.clone() for pool in pools]
    yield
    others = torch.ones(len(into), dtype=torch.bool, device=into.device)
    others[target[target >= 0]] = False
    for pool, was in zip(pools, before):
        rest = others if pool is into else slice(None)
        same = torch.equal(pool[rest].view(torch.uint8), was[rest].view(torch.uint8))
        assert same, "a slot was written that is no target"
