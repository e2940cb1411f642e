"""Calls of the Triton attention kernels, and the float64 truth they are held to, on any device.

Nothing here needs pytest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import shared_prefix
from tests.kernels.steps import Step, one_thread


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fills what is allocated inside with NaN, or with numbers that lead nowhere."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 2**30)

    with mock.patch.object(torch, "empty", poisoned):
        yield


def attend(
    step: Step,
    *,
    num_new: list[int] | None = None,
    max_kv: int | None = None,
    prefixes: Sequence[Prefix] = (),
    watched: Any = None,
) -> tuple[Tensor, Tensor]:
    """The kernels' output and log-sum-exp; the host may know less than is true."""
    with poisoned_outputs():
        shared = None
        if prefixes:
            heads, dtype = step.q.shape[1], step.q.dtype
            work = paged.cut_prefixes(prefixes, step.num_new, heads, step.k_pages, dtype)
            shared = shared_prefix.plan(work, step.q.device)
        plan = paged.plan(
            *(step.kv_lens, step.starts, step.q, step.k_pages, step.v_pages),
            num_new=step.num_new if num_new is None else num_new,
            max_kv=step.max_kv if max_kv is None else max_kv,
            window=step.options["window"],
            causal=step.causal,
            shared=shared,
        )
        return paged.paged_attention(
            *(step.q, step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts, plan),
            **step.options,
            watched=watched,
        )


# ------------------------------------------------------------------ the truth


class Truth(NamedTuple):
    """The float64 twin's result.

    Attributes:
        slack: what the output would be if all that weights multiply were positive: rounding a
            weight moves the output by that rounding's share of it.
        score: no score, and no sum of a part of its products, is larger.
        bias: no bias by distance is larger.
        value: the largest value.
    """

    out: Tensor
    lse: Tensor
    slack: Tensor
    score: float
    bias: float
    value: float


@one_thread()
def twin(step: Step) -> Truth:
    """`reference.paged_attention`, a row at a time instead of a query."""
    device, (_, heads, dim) = step.q.device, step.q.shape
    scale, window, softcap, sinks, slopes, bias, _ = (step.options[x] for x in Scoring._fields)
    shape = *step.q.shape[:2], Pages.of(step.v_pages).head_dim
    out, slack = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
    sink = torch.full((heads,), -math.inf, dtype=torch.float64, device=device)
    sink = sink if sinks is None else sinks.double()
    lse = sink.repeat(len(step.q), 1)
    score = value = most = 0.0
    for row, ((new, length), tokens) in enumerate(zip(step.rows, step.tokens)):
        seen = step.seen(row)
        if not new or not seen:
            continue
        k, v = (step.contents(row, x, torch.float64) for x in (step.k_pages, step.v_pages))
        groups = k.shape[1]
        q = step.q[tokens].double().view(new, groups, heads // groups, dim)
        scores = torch.einsum("qgrd,kgd->qgrk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length - new, length, device=device)[:, None]
        token = torch.arange(seen.start, length, device=device)
        hidden = (token > position) & step.causal
        distance = position - token
        if slopes is not None:
            added = slopes.double().view(groups, -1, 1) * -distance[:, None, None]
            scores, most = scores + added, max(most, float(added.abs().max()))
        if bias is not None:
            reach = bias.shape[2]
            index = distance.clamp(0, reach - 1)[:, None].expand(-1, heads, -1)
            added = bias[tokens].double().gather(2, index)
            added = added.masked_fill((distance < 0)[:, None] | (distance >= reach)[:, None], 0)
            scores += added.view(scores.shape)
            most = max(most, float(added.abs().max()))
        if window is not None:
            hidden |= token <= position - window
        if step.tree is not None:
            bits = step.tree[tokens, None] >> distance.clamp(0, 63)
            hidden |= (bits & 1 == 0) & (distance < 63)
        scores = scores.masked_fill(hidden[:, None, None], -math.inf)
        score = max(score, abs(scale) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()))
        value = max(value, float(v.abs().max()))
        sums = torch.logaddexp(scores.logsumexp(-1).flatten(1), sink)
        lse[tokens] = sums
        level = sums.masked_fill(sums.isneginf(), 0).view(new, groups, -1, 1)
        weights = (scores - level).exp()
        out[tokens] = torch.einsum("qgrk,kgd->qgrd", weights, v).flatten(1, 2)
        moved = v.abs()
        if Pages.of(step.v_pages).format.pairs:  # codes count from the least value of a token
            moved = moved.maximum(v - v.amin(-1, keepdim=True))
        slack[tokens] = torch.einsum("qgrk,kgd->qgrd", weights, moved).flatten(1, 2)
    return Truth(out, lse, slack, score, most, value)


@one_thread()
def mass_of(step: Step, queries: Sequence[int]) -> Tensor:
    """`[B, columns]` float64, the weight that rows' last queries give each page, mean over heads.

    Args:
        queries: `[B]`, of each row how many.
    """
    heads, options = step.q.shape[1], step.options
    mass = torch.zeros(step.table.shape, dtype=torch.float64)
    for row, count in enumerate(queries):
        if not count:
            continue
        k = step.contents(row, step.k_pages, step.q.dtype).cpu().double()
        k = k.repeat_interleave(heads // k.shape[1], 1)
        q = step.q[step.tokens[row]].cpu().double()[-count:]
        scores = torch.einsum("qhd,khd->hqk", q, k) * options["scale"]
        if options["softcap"]:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        last = torch.arange(len(k) - count, len(k))
        scores = scores.masked_fill(torch.arange(len(k)) > last[:, None], -math.inf)
        sums = scores.logsumexp(-1)
        if options["sinks"] is not None:
            sums = torch.logaddexp(sums, options["sinks"].cpu().double()[:, None])
        weights = (scores - sums[..., None]).exp().mean(0).sum(0)
        mass[row].index_add_(0, torch.arange(len(k)) // step.page, weights)
    return mass


def check(step: Step, result: tuple[Tensor, Tensor] | None = None) -> None:
    """Raises AssertionError unless the kernels' result is the truth but for rounding.

    The bound is what arithmetic explains and little more: weights are rounded before they multiply
    V, the output once more; scores and their sums are float32. A bias is rounded four times: its
    slope, their product, in another base, and in the sum.
    """
    out, lse = attend(step) if result is None else result
    if out.is_meta:
        return
    assert out.dtype == step.q.dtype, f"the output is {out.dtype}"
    assert lse.dtype == torch.float32, f"the log-sum-exp is {lse.dtype}"
    if not len(out):
        return
    true = twin(step)
    half = torch.finfo(out.dtype).eps / 2
    weights = rounded(step)
    noise = 1e-5 * (2 + true.score + (step.options["softcap"] or 0.0) / 4) + 2.0**-22 * true.bias
    if out.dtype != torch.float32 and Pages.of(step.k_pages).format.scales == "channel":
        noise += 2.0**-12 * true.score  # minima by channel are rounded once more
    bound = half * true.out.abs()
    bound += (0.75 * torch.finfo(weights).eps + noise) * true.slack + 1e-12
    if torch.float16 in (out.dtype, weights):  # weights below its smallest normal number
        bound += 2.0**-25 * step.max_kv * true.value
    worst = ((out.double() - true.out).abs() / bound).amax()
    sums = (lse.double() - true.lse).abs().where(true.lse.isfinite(), 0.0).amax() / noise
    # NaN compares as false, so it is not let through.
    assert worst <= 1, f"the output is off by {worst:.3g} times the bound"
    # Queries without keys and without a sink, and only those, have no finite sum.
    infinite = torch.equal(lse.isneginf(), true.lse.isneginf())
    assert infinite, "the log-sum-exp is infinite in other places"
    assert sums <= 1, f"the log-sum-exp is off by {sums:.3g} times the bound"


def rounded(step: Step) -> torch.dtype:
    """Returns the dtype of rounded weights; scales multiplied into them take another range."""
    if step.q.dtype == torch.float32:
        return torch.float32
    scaled = {"token": torch.bfloat16, "head": torch.float16}
    return scaled.get(Pages.of(step.v_pages).format.scales, step.q.dtype)
