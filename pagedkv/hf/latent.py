"""Multi-head latent attention (MLA): pages keep latents; attention reads them, or K and V of them.

A model gives its cache latents `c` and one rotated key for all heads, and later expands them to K
and V. Pages keep both side by side as K; V is the latent. There are two ways to attend:

- *absorbed*: queries are multiplied with the half of `kv_b_proj` that makes K, so that they meet
  the latents themselves, and sums of latents with the half that makes V. All heads share one read
  of the pages, which suits the few queries of decoding.
- *expanded*: the model makes K and V of the latents. A pair of query and key costs less than a
  third of the arithmetic, but all keys have to be made first, which suits prompts.

The model's own `expand_kv` is the truth: the first forward compares the absorbed form with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pagedkv.arrays import Bools, Ints
from pagedkv.attention.api import attend_again, paged_attention, write_kv
from pagedkv.attention.checks import check_grad
from pagedkv.errors import UnsupportedModelError
from pagedkv.kernels.torch.expanded import attend_row
from pagedkv.step.metadata import StepMetadata

from .forward_cache import changed_after_cache
from .layer import PagedLayer
from .placement import is_plain
from .staged import Staged

MOST_ABSORBED = 8  # new tokens of a row that attends in the absorbed form
EXPANDED_BYTES = 64 << 20  # of K and V that are made of latents at a time; it was not tuned
CHECKED = 16  # new tokens whose K and V are made in both forms at a module's first forward
_LINEAR = nn.Linear.forward  # a library may put another one into the class
FAR = 0.05  # both forms may differ by this part of the largest element: bfloat16 rounds so

# Modules whose absorbed form was found to agree with the expanded one.
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Expansion(NamedTuple):
    """K and V that the module made of the latents of a forward's new tokens.

    Attributes:
        module: the attention module, with `expand_kv` and `kv_b_proj`.
        k, v: `[B, H, q, D]`.
    """

    module: Any
    k: Tensor
    v: Tensor


class StagedLatents(Staged):
    """Latents of one layer between `update` and the attention function."""

    def __init__(self, layer: PagedLayer, c: Tensor, rotated: Tensor) -> None:
        super().__init__(layer, torch.cat([c, rotated], dim=-1), c)
        self.made: Expansion | None = None

    def expanded_by(self, module: nn.Module, k: Tensor, v: Tensor) -> Staged | None:
        if self.layer.staged is not self or not hasattr(module, "expand_kv"):
            return None
        self.made = Expansion(module, k, v)
        return self

    def cast(self, query: Tensor) -> Tensor:
        """See `Staged`; the absorbed form uses the model's own weights, so it casts nothing."""
        self.require_no_cast(query)
        return query

    @property
    def given(self) -> list[tuple[str, Tensor]]:
        assert self.made is not None
        return [("latent", self.k), ("key", self.made.k), ("value", self.made.v)]

    @property
    def width(self) -> int:
        assert self.made is not None
        return self.made.v.shape[-1]

    def over_pages(self, query: Tensor, step: StepMetadata, **terms: Any) -> Tensor:
        """Writes the latents and attends; returns `[T, H, D]` with the D of V."""
        call = self._call(q := self.layer.cache.packed(query), step, terms)
        few, latents = call.absorbed_rows(), call.latents
        if few.all():
            return call.absorbed()
        write_kv(latents, latents[..., : call.rank], step, call.layer)
        out = q.new_empty(*q.shape[:2], self.width)
        if few.any():
            mine = torch.from_numpy(np.flatnonzero(np.repeat(few, step.num_new))).to(q.device)
            out[mine] = call.absorbed_again(mine, np.where(few, step.num_new, 0))
        for rows in _runs(step, ~few):
            tokens, sums = call.expanded(rows)
            out[tokens] = sums
        return out

    def over_written(
        self, q: Tensor, step: StepMetadata, rows: Ints | None, **terms: Any
    ) -> Tensor:
        """See `Staged`; a layer without latents of its own attends only in the absorbed form."""
        call = self._call(q, step, terms)
        if not call.absorbed_rows().all():
            raise changed_after_cache(call.layer)
        return call.absorbed_again(slice(None), rows)

    def _call(self, q: Tensor, step: StepMetadata, terms: dict[str, Any]) -> _LatentCall:
        assert self.made is not None
        packed, (module, k, v), rank = self.layer.cache.packed, self.made, self.v.shape[-1]
        for name, x in (("k", k), ("v", v)):  # the absorbed form detaches weights
            check_grad(name, x)
        latents, made = packed(self.k), Expansion(module, packed(k), packed(v))
        halves = Halves.of(made, q, latents, rank)
        return _LatentCall(q, latents, made, halves, step, self.layer.index, rank, terms)


class Halves(NamedTuple):
    """The weights of `kv_b_proj` by head.

    Attributes:
        k: `[H, nope, R]`, weights of the part of K that has no position.
        v: `[H, v, R]`, weights of V.
    """

    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, made: Expansion, q: Tensor, latents: Tensor, rank: int) -> Halves | None:
        """Returns the weights of a module, checked at its first forward; None if not plain.

        Quantised, sharded or adapted weights, and weights that are elsewhere until their module is
        called, can be used only by calling the module.

        Raises:
            UnsupportedModelError: the absorbed form is not what the module computes.
        """
        linear, (_, heads, dim), width = made.module.kv_b_proj, q.shape, made.v.shape[2]
        nope = dim - (latents.shape[2] - rank)
        weight = getattr(linear, "weight", None)
        if type(linear) is not nn.Linear or type(weight) not in (Tensor, nn.Parameter):
            return None
        hooked = linear._forward_hooks or linear._forward_pre_hooks
        changed = hooked or not is_plain(linear) or nn.Linear.forward is not _LINEAR
        shape = heads * (nope + width), rank
        if changed or linear.bias is not None or weight.shape != shape or weight.dtype != q.dtype:
            return None
        halves = cls(*weight.detach().view(heads, -1, rank).split([nope, width], dim=1))
        if made.module not in _checked:
            _require_same(made, halves, latents[:CHECKED, 0])
            seen = made.v[:CHECKED]
            if seen.any() and seen.isfinite().all():  # zeros and NaN prove nothing
                _checked.add(made.module)
        return halves


def _require_same(made: Expansion, halves: Halves, latents: Tensor) -> None:
    """Raises unless the absorbed form gives the K and V that a module has made of latents."""
    rank, tokens = halves.k.shape[2], len(latents)
    c, rotated = latents[:, None, :rank], latents[:, None, rank:]
    plain = torch.einsum("tgr,hnr->thn", c, halves.k)
    k = torch.cat([plain, rotated.expand(-1, plain.shape[1], -1)], dim=-1)
    v = torch.einsum("tgr,hnr->thn", c, halves.v)
    for ours, theirs in ((k, made.k[:tokens]), (v, made.v[:tokens])):
        # Another layout, a norm or a factor would change elements by about their size.
        far = (ours.float() - theirs.float()).abs() > FAR * theirs.float().abs().amax()
        if ours.shape != theirs.shape or far.any():
            name = type(made.module).__name__
            raise UnsupportedModelError(
                f"{name}: its `expand_kv` is not the product with `kv_b_proj` that attention over "
                "latents absorbs; use transformers' own cache for this model"
            )


class _LatentCall(NamedTuple):
    """One layer's attention in one step, `[T, ...]` each."""

    q: Tensor
    latents: Tensor
    made: Expansion
    halves: Halves | None
    step: StepMetadata
    layer: int
    rank: int
    terms: dict[str, Any]

    def absorbed_rows(self) -> Bools:
        """`[B]`, whether each row attends in the absorbed form."""
        new, terms = self.step.num_new, self.terms
        others = terms["softcap"], terms["sinks"], terms.get("indices")
        window = self.step.config.groups[self.step.group_of(self.layer)].window
        # Only attention over pages serves these: terms of scores, windows, chosen tokens, watched
        # queries.
        special = window or self.step.queries is not None or any(x is not None for x in others)
        if self.halves is not None:
            return np.ones(len(new), bool) if special else new <= MOST_ABSORBED
        if special:
            raise UnsupportedModelError(
                f"{type(self.made.module).__name__}: watched queries, chosen tokens, windows and "
                "terms of scores need a `kv_b_proj` of plain weights: a linear layer without bias, "
                "hooks and adapters, whose weights are neither quantised nor of another dtype than "
                "its input"
            )
        if self.step.bounded:  # host lengths are upper bounds, and this form needs exact ones
            raise UnsupportedModelError("its `kv_b_proj` has no plain weights")
        return np.zeros(len(new), bool)

    def absorbed(self) -> Tensor:
        """Writes the latents, and attends for all rows in the absorbed form."""
        seen = self.latents, self.latents[..., : self.rank]
        q = self._meeting(self.q)
        return self._values(paged_attention(q, *seen, self.step, self.layer, **self.terms))

    def absorbed_again(self, tokens: Tensor | slice, counts: Ints | None) -> Tensor:
        """Attends for these tokens, whose rows have `counts` queries; None for all of a step."""
        q = self._meeting(self.q[tokens])
        sums = attend_again(q, self.step, self.layer, num_queries=counts, **self.terms)
        return self._values(sums)

    def _meeting(self, q: Tensor) -> Tensor:
        """Turns queries into ones that meet latents: `[n, H, R + r]`."""
        assert self.halves is not None
        nope = self.halves.k.shape[1]
        absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], self.halves.k)
        return torch.cat([absorbed, q[..., nope:]], dim=-1)

    def _values(self, sums: Tensor) -> Tensor:
        """Turns sums of latents `[n, H, R]` into sums of values `[n, H, D]`."""
        assert self.halves is not None
        return torch.einsum("thr,hvr->thv", sums, self.halves.v)

    def expanded(self, rows: slice) -> tuple[slice, Tensor]:
        """Attends for neighbouring rows of one length; returns their tokens and `[n, H, D]`."""
        step, count = self.step, rows.stop - rows.start
        first, new = int(step.num_new[: rows.start].sum()), int(step.num_new[rows.start])
        tokens = slice(first, first + count * new)
        by_row = (x[tokens].unflatten(0, (count, new)) for x in (self.q, *self.made[1:]))
        q, k, v = (x.transpose(1, 2) for x in by_row)
        past = self._past(rows.start) if count == 1 else ()
        scale = self.terms["scale"]
        out = attend_row(q, k, v, past, q.shape[3] ** -0.5 if scale is None else scale)
        return tokens, out.transpose(1, 2).flatten(0, 1)

    def _past(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields K and V of the tokens before a row's new ones, in blocks `[1, H, s, D]`."""
        step, group = self.step.at(self.layer), self.step.group_of(self.layer)
        by_slot, size = step.storage.layer(self.layer)[0].transpose(1, 2), step.config.page_size
        end = int(step.kv_lens_of(group)[row] - step.num_new[row])
        token = (self.made.k[0].numel() + self.made.v[0].numel()) * self.q.itemsize
        block = max(1, EXPANDED_BYTES // token // size) * size
        ids = step.page_table(group)[row]
        for start in range(0, end, block):
            stop = min(end, start + block)
            held = ids[start // size : -(-stop // size)]
            slots = by_slot.index_select(0, held).flatten(0, 1)[: stop - start]
            latents = slots.transpose(0, 1)[None]
            c, rotated = latents.split([self.rank, latents.shape[3] - self.rank], dim=-1)
            yield self.made.module.expand_kv(c, rotated)


def _runs(step: StepMetadata, chosen: Bools) -> Iterator[slice]:
    """Yields runs of neighbouring chosen rows that can be attended together."""
    rows = np.flatnonzero(chosen).tolist()
    lens = step.kv_lens_host
    start = 0
    for i in range(1, len(rows) + 1):
        row = rows[start]
        if i < len(rows) and rows[i] == rows[i - 1] + 1:
            alike = step.num_new[row] == step.num_new[rows[i]]
            fresh = lens[row] == step.num_new[row] and lens[rows[i]] == step.num_new[rows[i]]
            if alike and fresh:
                continue
        yield slice(row, rows[i - 1] + 1)
        start = i
