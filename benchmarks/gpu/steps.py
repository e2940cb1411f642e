"""Random steps out of poisoned pools, and the truth about them in float64, on any device.

What no query sees is NaN: free pages, slots that nobody wrote, and the page in front of the pool,
where an id of -1 leads. Tables go on beyond a row's end with the id of a poisoned page, so that no
fault reads memory that is not mapped; it shows as NaN instead.

On the device "meta" all of this works without memory, as far as calling kernels goes: so
`precompile.py` learns what will be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = Sequence[tuple[int, int]]  # new tokens of each row, and its length with them
LAYOUTS = ("heads outermost", "slots outermost", "K and V side by side")
POISON = 1  # page that nobody owns, next to page 0, which masked lanes fall back to
TABLE_SPARE = 2  # columns beyond the longest row's end


class Terms(NamedTuple):
    """What scores are made of, but the products."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        given = [f"{name} {value}" for name, value in zip(self._fields, self[:2]) if value]
        return ", ".join(given + ["sinks"] * self.sinks) or "plain"


class Shape(NamedTuple):
    """A layer: what kernels are compiled for."""

    ratio: int
    groups: int
    dim: int
    page: int
    dtype: torch.dtype
    terms: Terms = Terms()
    layout: str = LAYOUTS[0]

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        heads = f"{self.ratio * self.groups}/{self.groups} heads of {self.dim}"
        return f"{name}, {heads}, page {self.page}, {self.terms}, {self.layout}"


@dataclass(frozen=True)
class Step:
    """What `paged_attention` is given, and what the host knows."""

    shape: Shape
    rows: Rows
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    kv_lens: Tensor
    starts: Tensor
    sinks: Tensor | None
    slots: Tensor  # of the new tokens, -1 where a row is shorter than what is new
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_new(self) -> list[int]:
        return [new for new, _ in self.rows]

    @property
    def max_kv(self) -> int:
        return max(length for _, length in self.rows)

    def row(self, index: int) -> Step:
        """One row by itself, on the same pool."""
        begin = sum(self.num_new[:index])
        new = self.num_new[index]
        return replace(
            self,
            rows=self.rows[index : index + 1],
            q=self.q[begin : begin + new].clone(),
            table=self.table[index : index + 1].clone(),
            kv_lens=self.kv_lens[index : index + 1].clone(),
            starts=torch.tensor([0, new], dtype=torch.int32).to(self.q.device),
            slots=self.slots[begin : begin + new].clone(),
        )


def poisoned(shape: Shape, pages: int, device: str) -> tuple[Tensor, Tensor]:
    """K and V pages `[N, G, P, D]`, all NaN, behind one more page of NaN."""
    _, heads, dim, size, dtype, _, layout = shape
    options = {"dtype": dtype, "device": device}
    if layout == "K and V side by side":
        both = torch.full((pages + 1, 2, heads, size, dim), math.nan, **options)[1:]
        return both[:, 0], both[:, 1]
    swapped = layout == "slots outermost"
    inner = (size, heads, dim) if swapped else (heads, size, dim)
    k, v = (torch.full((pages + 1, *inner), math.nan, **options)[1:] for _ in range(2))
    return (k.transpose(1, 2), v.transpose(1, 2)) if swapped else (k, v)


def make_step(
    shape: Shape,
    rows: Rows,
    device: str,
    *,
    shared: int = 0,
    pages: int | None = None,
    columns: int | None = None,
    seed: int = 0,
) -> Step:
    """A step on shuffled pages.

    Args:
        shared: leading pages that all rows have in common.
        pages: of the pool; those in use are its last ones.
        columns: of the table.
    """
    ratio, heads, dim, size, dtype, terms, _ = shape
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    counts = [-(-length // size) for _, length in rows]
    used = shared + sum(max(0, count - shared) for count in counts)
    pages = used + POISON + 2 if pages is None else pages
    ids = pages - used + torch.randperm(used, generator=random)
    columns = max(counts) + TABLE_SPARE if columns is None else columns
    table = torch.full((len(rows), columns), POISON, dtype=torch.int32)
    held, inside, slots = [], [], []
    start = shared
    for row, ((new, length), count) in enumerate(zip(rows, counts)):
        mine = torch.cat([ids[:shared], ids[start : start + max(0, count - shared)]])[:count]
        start += max(0, count - shared)
        table[row, :count] = mine
        first = 0 if terms.window is None else max(0, length - new - terms.window + 1)
        table[row, : first // size] = -1  # pages that a window has left are dropped
        token = torch.arange(first, length)
        held.append(mine[token // size])
        inside.append(token % size)
        token = torch.arange(length - new, length)
        at = token.clamp(min=0)
        known = mine[at // size] * size + at % size if count else at
        slots.append(known.where(token >= 0, -1))
    k_pages, v_pages = poisoned(shape, pages, device)
    where = torch.cat(held).to(device), slice(None), torch.cat(inside).to(device)
    for content in (k_pages, v_pages):
        content[where] = torch.randn(len(where[0]), heads, dim, device=device, dtype=dtype)
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0)
    many = ratio * heads
    return Step(
        shape,
        rows,
        torch.randn(sum(new for new, _ in rows), many, dim, device=device, dtype=dtype),
        k_pages,
        v_pages,
        table.to(device),
        torch.tensor([length for _, length in rows], dtype=torch.int32).to(device),
        starts.int().to(device),
        torch.randn(many, device=device) if terms.sinks else None,
        torch.cat(slots).to(device),
        {"scale": dim**-0.5, "window": terms.window, "softcap": terms.softcap},
    )


class Truth(NamedTuple):
    """The float64 twin's result.

    Attributes:
        slack: what the output would be if all of V were positive: rounding a weight moves the
            output by that rounding's share of it.
        score: the largest score.
        value: the largest value.
    """

    out: Tensor
    lse: Tensor
    slack: Tensor
    score: Tensor
    value: Tensor


def twin(step: Step) -> Truth:
    """`reference.paged_attention`, a row at a time instead of a query."""
    ratio, heads, dim, size, _, (window, softcap, _), _ = step.shape
    device = step.q.device
    out, slack = (torch.zeros(step.q.shape, dtype=torch.float64, device=device) for _ in range(2))
    sink = torch.full(step.q.shape[1:2], -math.inf, dtype=torch.float64, device=device)
    if step.sinks is not None:
        sink = step.sinks.double()
    lse = sink.repeat(len(step.q), 1)
    score, value = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    start = 0
    for row, (new, length) in enumerate(step.rows):
        tokens = slice(start, start + new)
        start += new
        position = torch.arange(length - new, length, device=device)[:, None]
        first = 0 if window is None else max(0, length - new - window + 1)
        if not new or first >= length:
            continue
        token = torch.arange(first, length, device=device)
        where = step.table[row].long()[token // size], slice(None), token % size
        k, v = step.k_pages[where].double(), step.v_pages[where].double()  # [n, G, D]
        q = step.q[tokens].double().view(new, heads, ratio, dim)
        scores = torch.einsum("qgrd,kgd->qgrk", q, k) * step.options["scale"]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = token > position
        if window is not None:
            hidden |= token <= position - window
        hidden = hidden[:, None, None]
        score = torch.maximum(score, scores.masked_fill(hidden, 0).abs().max())
        value = torch.maximum(value, v.abs().max())
        scores = scores.masked_fill(hidden, -math.inf)
        sums = torch.logaddexp(scores.logsumexp(-1).flatten(1), sink)
        lse[tokens] = sums
        level = sums.masked_fill(sums.isneginf(), 0).view(new, heads, ratio, 1)
        weights = (scores - level).exp()
        out[tokens] = torch.einsum("qgrk,kgd->qgrd", weights, v).flatten(1, 2)
        slack[tokens] = torch.einsum("qgrk,kgd->qgrd", weights, v.abs()).flatten(1, 2)
    return Truth(out, lse, slack, score, value)


def check(
    step: Step,
    out: Tensor,
    lse: Tensor,
    *,
    weights: torch.dtype | None = None,
    scores: float | Tensor = 0.0,
) -> None:
    """Raises AssertionError unless the result is the truth but for rounding.

    The bound is what arithmetic explains and little more: weights are rounded to the dtype before
    they multiply V, the output once more; scores and their sums are float32.

    Args:
        weights: what weights are rounded to instead.
        scores: how far a score may be off besides.
    """
    if out.is_meta:
        return
    assert out.dtype == step.q.dtype, f"the output is {out.dtype}"
    assert lse.dtype == torch.float32, f"the log-sum-exp is {lse.dtype}"
    true = twin(step)
    half = torch.finfo(out.dtype).eps / 2
    fine = half if weights is None else torch.finfo(weights).eps / 2
    noise = 1e-5 * (2 + true.score + (step.options["softcap"] or 0.0) / 4) + scores
    bound = half * true.out.abs() + (1.5 * fine + noise) * true.slack + 1e-12
    if torch.float16 in (out.dtype, weights):  # weights below its smallest normal number
        bound = bound + 2.0**-25 * step.max_kv * true.value
    worst = ((out.double() - true.out).abs() / bound).amax()
    sums = (lse.double() - true.lse).abs().where(true.lse.isfinite(), 0.0).amax() / noise
    infinite = torch.equal(lse.isneginf(), true.lse.isneginf())
    # NaN compares as false, so it is not let through.
    assert worst <= 1, f"the output is off by {worst:.3g} times the bound"
    assert infinite, "the log-sum-exp is infinite in other places"
    assert sums <= 1, f"the log-sum-exp is off by {sums:.3g} times the bound"
