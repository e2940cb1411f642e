"""Binds the launches of a layer's call once a step, for all layers of its kind.

The first layer of a kind goes the ordinary way, with all checks, and its launches are noted down.
For later layers the same kernels are launched with other addresses, as integers, which Triton
passes on without asking the driver about them. Nothing else can differ: a call whose tensors are
not like the first ones is not served here, and goes the ordinary way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.like import Like, has_tangent
from pagedkv.kernels.scoring import Scoring, Terms

from .geometry import Geometry
from .launch import ALIGNMENT, Launch, Launcher, check_aligned, is_ready

Pair = tuple[Tensor | Pages, Tensor | Pages]  # K and V pages of a layer
New = tuple[Tensor, Tensor, Tensor]  # q, k and v of a step's new tokens


class _Replayed(NamedTuple):
    """A launch to be repeated.

    Attributes:
        arguments: overwritten at every launch.
        places: which of them take values of a layer, and which value each takes.
        grids: arguments that describe a layer's pages to the tensor memory accelerator, and which
            tensor each describes.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    arguments: list[Any]
    places: list[tuple[int, int]]
    grids: list[tuple[Any, int]]


class Bound:
    """The launches of a kind of layers in one step."""

    def __init__(
        self, launches: Sequence[_Replayed], new: New, pages: Pair, scoring: Scoring, out: Tensor
    ) -> None:
        _, k, v = new
        self._launches = launches
        self._device = launches[0].launcher.device
        self._like = [Like.of(tensor) for tensor in new]
        self._v_is_k = k.data_ptr() == v.data_ptr()
        self._pools = [_memory(tensor) for tensor in _tensors(pages)]
        self._scoring, self._terms = scoring, scoring.arguments()[1]
        self._has_tensors = bool(scoring.tensors)
        # Making a tensor like another one takes a third of the time; these take no memory.
        self._out = out.new_empty(()).expand(out.shape)
        self._lse = out.new_empty((), dtype=torch.float32).expand(out.shape[:2])
        # The log-sum-exp goes here if the caller does not ask for it; each layer overwrites it.
        self._unasked = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)

    def __call__(
        self, new: New, pages: Pair, scoring: Scoring, return_lse: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Writes and attends, if the call is like the one that was bound.

        Args:
            pages: of a layer of the same group; they differ from the first layer's only in where
                they lie.
            scoring: the caller's terms, with the window of the group.

        Returns:
            Output and log-sum-exp, the latter undefined unless asked for; None if nothing was
            done, because the call has to go the ordinary way.
        """
        if not (self._fits(*new) and is_ready(self._device)):
            return None
        terms = self._terms_of(new[0], scoring)
        if terms is None:
            return None
        out = torch.empty_like(self._out, memory_format=torch.contiguous_format)
        lse = self._unasked
        if return_lse:
            lse = torch.empty_like(self._lse, memory_format=torch.contiguous_format)
        tensors = [*new, out, lse, *_tensors(pages)]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if any(address % ALIGNMENT for address in addresses):
            return None
        values = [*(addresses if self._device >= 0 else tensors), terms]
        for launcher, grid, arguments, places, grids in self._launches:
            for place, which in places:
                arguments[place] = values[which]
            for described, which in grids:
                described.base = tensors[which]
            launcher.again(grid, arguments)
        return out, lse

    def _fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether q, k and v of a layer are laid out like those of the first one."""
        like_q, like_k, like_v = self._like
        if not (like_q.fits(q) and like_k.fits(k) and like_v.fits(v)):
            return False
        addresses = k.data_ptr(), v.data_ptr()
        if (addresses[0] == addresses[1]) is not self._v_is_k:
            return False
        return not any(begin <= x < end for x in addresses for begin, end in self._pools)

    def _terms_of(self, q: Tensor, scoring: Scoring) -> Terms | None:
        """The terms as kernels take them; None if they are of another kind.

        Raises:
            NotImplementedError, TypeError, ValueError: as in a call that goes the ordinary way.
        """
        mine = self._scoring
        if (
            scoring.sinks is scoring.alibi_slopes is scoring.distance_bias is scoring.tree is None
            and not self._has_tensors
            and scoring.softcap is mine.softcap
            and scoring.scale.__class__ is float
            and scoring.scale == mine.scale
        ):
            return self._terms
        given = [term for term in scoring if isinstance(term, Tensor)]
        if torch.is_grad_enabled() and any(term.requires_grad for term in given):
            return None
        if any(map(has_tangent, given)):
            return None
        scoring = scoring.checked(q, mine.window)
        scoring.check_served(q)
        check_aligned(**dict(scoring.tensors))
        return scoring.arguments()[1] if scoring.kind == mine.kind else None


def bind(
    launches: Sequence[Launch],
    new: New,
    pages: Pair,
    scoring: Scoring,
    results: tuple[Tensor, Tensor],
    lasting: Any,
) -> Bound | None:
    """Binds the launches of one layer, for the others of its kind.

    Args:
        launches: from `launch.noted`, of a call that went the ordinary way.
        scoring: its terms, checked.
        results: its output and log-sum-exp.
        lasting: the step's tensors that all layers of the kind are given, within nested tuples.

    Returns:
        None if two arguments cannot be told apart, or one is neither the layer's nor the step's.
    """
    values = [*new, *results, *_tensors(pages)]
    which = {id(tensor): number for number, tensor in enumerate(values)}
    if len(which) < len(values) or not launches:
        return None
    steps = {id(tensor) for tensor in _flat(lasting)}
    bound = []
    for launcher, grid, given in launches:
        places, grids, arguments = [], [], list(given)
        for place, argument in enumerate(arguments):
            if isinstance(argument, Terms):
                places.append((place, len(values)))
            elif isinstance(argument, Tensor):
                if id(argument) in which:
                    places.append((place, which[id(argument)]))
                elif id(argument) not in steps:
                    return None
            elif id(getattr(argument, "base", None)) in which:  # Triton's TensorDescriptor
                arguments[place] = copy.copy(argument)
                grids.append((arguments[place], which[id(arguments[place].base)]))
            elif not isinstance(argument, int | float | None):  # it may be about a layer's memory
                return None
        prepared = launcher.prepared(tuple(arguments))
        bound.append(_Replayed(launcher, grid, prepared, places, grids))
    return Bound(bound, new, pages, scoring, results[0])


def _tensors(pages: Pair) -> list[Tensor]:
    """The tensors of both, as many for every layer of a group."""
    if isinstance(pages[0], Tensor) and isinstance(pages[1], Tensor):
        return [pages[0], pages[1]]
    return [x for half in pages for x in Pages.of(half)[1:] if x is not None]


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns where the memory that a tensor is a view of begins and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _flat(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple) and not isinstance(nested, Geometry):  # it has no tensors
        for part in nested:
            yield from _flat(part)
