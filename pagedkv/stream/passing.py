"""`Passes`: the forwards of a streamed model, and which layer's weights are bound while one runs.

Each forward that needs streamed weights takes turns with forwards of other threads, binds the
weights as it begins and takes them back however it ends. The computation in between is
transformers' own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import GradModeError, StreamError
from pagedkv.planner.costs import RING_DEPTH

from .embedding_head import EmbeddingRows, blockwise
from .experts import Experts, Trust, index_of_call, renumbered
from .layers import TensorSite, forget_casts
from .placing import Places
from .progress import PassBar
from .ring import Ring
from .stats import StreamStats
from .weights import WeightStore

Forward = Callable[..., Any]
STEADY = 0.9  # of the share up to which experts are read alone, after passes that read all


class Passes:
    """Wraps a model's forwards so that they bring the weights they need.

    Args:
        ring: brings the units of `places`; None where nothing streams.
        alone: the share of a layer's experts up to which those that a call lacks are read alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        places: Places,
        ring: Ring | None,
        device: torch.device,
        stats: StreamStats,
        bar: PassBar,
        alone: float,
    ) -> None:
        self._reader, self._places, self._ring = store.reader, places, ring
        self._store, self._device = store, device
        self._stats, self._bar, self._most_alone = stats, bar, alone
        self._lock, self._process = threading.RLock(), os.getpid()
        self._depth = 0  # how many forwards run within one another
        # The index of the layer that computes, and its bound weights.
        self._bound: tuple[int, list[tuple[TensorSite, Tensor]]] | None = None
        self._views: dict[tuple[Any, int], list[Tensor]] = {}  # by layout and slot
        # Units of one layout share the tensors over a slot.
        count = len(places.layers)
        self._layouts = [
            (i < count, tuple((p.offset, p.shape, p.dtype) for p in unit.places))
            for i, unit in enumerate(places.units)
        ]
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        if places.embedding is not None:
            site = places.embedding
            rows = EmbeddingRows(store, site, places.source(site.name), device, stats)
            self._undo.append(rows.close)
            self._wrap(rows.module, self._in_turn(rows.forward))
        for index, (layer, sites) in enumerate(places.layers):
            forward = self._with_weights(index, sites, layer.forward)
            self._wrap(layer, self._in_turn(forward))
        self._all_experts: Ring | None = None
        self._turns = self._read_all_in = 0  # outermost forwards so far; the last that read all
        self._trust = Trust()
        for index, (module, experts) in enumerate(places.experts):
            self._wrap(module, self._in_turn(self._routed(index, experts, module.forward)))
        if places.head is not None:
            self._wrap(places.head.owner, self._in_turn(self._whole_head(places.head)))
        for module in models_in(model):
            self._wrap(module, self._in_turn(self._alone(module, module.forward)))
        # A whole pass runs without gradients; a part that is called by itself with gradients
        # enabled raises GradModeError.
        self._wrap(model, self._in_turn(self._counted(torch.no_grad()(model.forward))))

    def close(self) -> None:
        """Waits for the pass that runs, and takes the forwards back."""
        if os.getpid() != self._process:  # the threads that may hold locks are in another one
            self._closed = True
            return
        with self._lock:
            self._closed = True
            for undo in self._undo:
                undo()
            self._views.clear()
            self._close_all_experts()
            if self._ring is not None:
                self._ring.close()
            self._places.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until no other thread computes.

        Raises:
            CheckpointError: a file was written to.
            StreamError: the streamer was closed, or is another process's.
        """
        self._require_open()
        with self._lock:
            self._require_open()
            depth = self._depth
            if not depth:
                self._turns += 1
                self._take_back()  # weights that an interrupt may have left bound
                for _, experts in self._places.experts:
                    experts.take_back()
                self._reader.require_unchanged()
            try:
                self._depth = depth + 1
                yield
            finally:
                self._depth = depth
            if not depth:
                self._reader.require_unchanged()

    def _require_open(self) -> None:
        if self._closed:
            raise StreamError("the streamer of this model was closed")
        if os.getpid() != self._process:
            raise StreamError(
                f"the streamer of this model was opened by process {self._process}, before a fork; "
                "open one in each process"
            )

    def _require_idle(self, caller: str) -> None:
        if self._bound is not None:
            raise StreamError(
                f"{caller}: called while {self._places.units[self._bound[0]].name} computes, whose "
                "weights it would overwrite; call it once that layer has returned"
            )

    def _wrap(self, module: nn.Module, forward: Forward) -> None:
        # Without its attributes: by one of them a torch before 2.13 calls what is wrapped instead.
        forward = functools.wraps(module.forward, updated=())(forward)
        if (
            self._ring is not None or self._places.experts
        ):  # a compiler would trace weights that come and go
            forward = torch.compiler.disable(forward)
        module.forward = forward
        self._undo.append(lambda: module.__dict__.pop("forward", None))

    def _in_turn(self, forward: Forward) -> Forward:
        def in_turn(*args: Any, **kwargs: Any) -> Any:
            with self.turn():
                return forward(*args, **kwargs)

        return in_turn

    def _alone(self, module: nn.Module, forward: Forward) -> Forward:
        """A forward that must not run while a layer computes."""

        def alone(*args: Any, **kwargs: Any) -> Any:
            self._require_idle(type(module).__name__)
            return forward(*args, **kwargs)

        return alone

    def _counted(self, forward: Forward) -> Forward:
        """A whole pass, which statistics and the bar show."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", args[0] if args else None)
            ids = kwargs.get("inputs_embeds") if ids is None else ids
            self._stats.passes += 1
            self._stats.tokens += ids.shape[:2].numel() if ids is not None else 0
            started = perf_counter()
            self._bar.begin()
            try:
                return forward(*args, **kwargs)
            finally:
                self._stats.pass_seconds += perf_counter() - started
                self._bar.end()

        return counted

    def _with_weights(self, index: int, sites: list[TensorSite], forward: Forward) -> Forward:
        """A layer's forward, with its weights."""
        name = self._places.units[index].name

        def with_weights(*args: Any, **kwargs: Any) -> Any:
            if self._bound is not None and self._bound[0] == index:  # it calls itself
                return forward(*args, **kwargs)
            self._require_idle(name)
            for site in sites:
                site.require_empty()
            self._bar.step()
            try:
                self._bind(index, sites)
                return forward(*args, **kwargs)
            finally:
                self._take_back()

        return with_weights

    def _routed(self, index: int, experts: Experts, forward: Forward) -> Forward:
        """A forward of experts, with those that it is routed to, or with all of a layer."""

        def routed(*args: Any, **kwargs: Any) -> Any:
            _require_no_grad(experts.name)
            ids = index_of_call(args, kwargs)
            self._stats.expert_layer_bytes += self._places.expert_units[index][0].file_bytes
            touched, key = experts.touched(ids), experts.key(ids)
            fits = experts.fits(touched, self._most())
            trusted = key is None or self._trust[key]
            expected = None
            if not fits or not trusted:
                with self._with_all_experts(index, experts):
                    expected = forward(*args, **kwargs)
                if not fits or trusted is False:
                    return expected
            self._close_all_experts()
            with experts.alone(touched) as change:
                args, kwargs = renumbered(args, kwargs, change)
                found = forward(*args, **kwargs)
            if expected is not None:
                self._trust.note(key, expected, found)
                return expected
            return found

        return routed

    def _most(self) -> float:
        """The share of a layer's experts that a call may lack if it is to read experts alone.

        A pass that reads all of a layer goes on so, and the next one changes back with a margin:
        else layers at the edge would take turns, and each make its memory anew.
        """
        if self._all_experts is None:
            return self._most_alone
        return -inf if self._read_all_in == self._turns else STEADY * self._most_alone

    @contextmanager
    def _with_all_experts(self, index: int, experts: Experts) -> Iterator[None]:
        """Has all experts of a module in its tensors, from a ring of such units."""
        self._places.give_back()
        if self._all_experts is not None and self._read_all_in != self._turns:
            self._all_experts.cyclic = True  # a second pass in a row: there may well be a third
        self._read_all_in = self._turns
        if self._all_experts is None:
            units = [unit for unit, _ in self._places.expert_units]
            held, how = self._places.held_experts, (RING_DEPTH, self._device, self._stats)
            # What decodes behind a prompt asks for few experts.
            ring = Ring(self._store, units, held, *how, cyclic=False)
            self._all_experts = ring
        ring = self._all_experts
        slot = ring.ring.slots[ring.acquire(index)]
        self._stats.expert_bytes += ring.units[index].file_bytes
        try:
            with torch.inference_mode(False):
                views = self._places.expert_views(index, slot)
            with experts.bound(views):
                yield
        finally:
            ring.release()
        self._stats.wide_passes += 1

    def _close_all_experts(self) -> None:
        """Gives back the memory of all experts, which the last passes needed."""
        ring, self._all_experts = self._all_experts, None
        if ring is not None:
            ring.close()

    def _bind(self, index: int, sites: list[TensorSite]) -> None:
        views = self._in_slot(index)
        self._bound = index, list(zip(sites, views, strict=True))
        for site, view in self._bound[1]:
            if view.requires_grad != site.empty.requires_grad:  # frozen, or thawed, since
                view.requires_grad_(not view.requires_grad)
            site.set(view)

    def _take_back(self) -> None:
        """Takes back the weights that are bound; a tensor that other code put there stays."""
        if self._bound is None:
            return
        for site, view in self._bound[1]:
            if site.where.get(site.key) is view:
                site.set(site.empty)
        self._bound = None
        self._give_back()

    def _whole_head(self, head: TensorSite) -> Forward:
        """The head's forward, over blocks that pass through the ring."""
        module: Any = head.owner
        first = len(self._places.layers)
        blocks = blockwise(
            module,
            len(self._places.units) - first,
            lambda block: self._in_slot(first + block)[0],
            self._give_back,
        )

        def whole(x: Tensor) -> Tensor:
            self._require_idle(head.name)
            head.require_empty()
            return blocks(x)

        return whole

    def _in_slot(self, index: int) -> list[Tensor]:
        """Waits for a unit and returns its tensors, which units of one layout share over a slot."""
        assert self._ring is not None
        _require_no_grad(self._places.units[index].name)
        slot = self._ring.acquire(index)
        forget_casts()
        key = self._layouts[index], slot
        if key not in self._views:
            with torch.inference_mode(False):  # they outlast the mode of this pass
                self._views[key] = self._places.views(index, self._ring.ring.slots[slot])
        return self._views[key]

    def _give_back(self) -> None:
        assert self._ring is not None
        self._ring.release()


def _require_no_grad(name: str) -> None:
    if torch.is_grad_enabled():
        raise GradModeError(
            f"{name}: gradients cannot be computed through streamed weights, which are gone by "
            "then; use torch.no_grad()"
        )


def models_in(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]
