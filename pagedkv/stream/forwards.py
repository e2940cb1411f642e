"""`Passes`: the forwards of a streamed model, which bind a layer's weights while it runs.

Each forward that needs streamed weights takes turns with forwards of other threads, binds the
weights when it begins, and takes them back even if it raises. The computation in between is
transformers' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import GradModeError, StreamError
from pagedkv.planner.costs import RING_DEPTH

from .embedding_head import EmbeddingRows, blockwise
from .experts.modules import require_index
from .experts.residency import Experts
from .experts.slots import Trust
from .layers import TensorSite, forget_casts
from .pass_lock import PassLock
from .placement import Places
from .progress import PassBar
from .ring import Ring
from .stats import StreamStats
from .weights import WeightStore

Forward = Callable[..., Any]
STEADY = 0.9  # factor of `most_alone` after passes that read all experts of a layer


class Passes:
    """Wraps a model's forwards so that they bring the weights they need.

    Args:
        ring: brings the units of `places`; None if nothing streams.
        most_alone: if a call lacks at most this share of a layer's experts, it reads only the
            lacking ones.
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
        most_alone: float,
    ) -> None:
        self._places, self._ring = places, ring
        self._store, self._device = store, device
        self._stats, self._bar, self._most_alone = stats, bar, most_alone
        self._turns = PassLock(self._begin, store.reader.require_unchanged)
        self.in_turn = self._turns.run
        # The index of the layer that computes, and its bound weights.
        self._bound: tuple[int, list[tuple[TensorSite, Tensor]]] | None = None
        self._routing: str | None = None  # the name of the experts that compute
        self._views: dict[tuple[Any, int], list[Tensor]] = {}  # by layout and slot
        # Units of one layout share the tensors over a slot.
        count = len(places.layers)
        self._layouts = [
            (i < count, tuple((p.offset, p.shape, p.dtype) for p in unit.places))
            for i, unit in enumerate(places.units)
        ]
        self._undo: list[Callable[[], None]] = []
        for site, table in places.by_row:
            rows = EmbeddingRows(store, site, places.source(site.name), device, stats, table)
            self._undo.append(rows.close)
            self._wrap(rows.module, rows.forward)
        for index, (layer, sites) in enumerate(places.layers):
            self._wrap(layer, self._with_weights(index, sites, layer.forward))
        self._all_experts: Ring | None = None
        self._read_all_in = 0  # the last turn that read all experts of a layer
        self._trust = Trust()
        for index, (module, experts) in enumerate(places.experts):
            self._wrap(module, self._routed(index, experts, module.forward))
        if places.head is not None:
            self._wrap(places.head.owner, self._whole_head(places.head))
        for module in models_in(model):
            self._wrap(module, self._outside_layers(module, module.forward))
        # A whole pass runs without gradients. A part that is called by itself while gradients are
        # enabled raises GradModeError.
        self._wrap(model, self._counted(torch.no_grad()(model.forward)))

    def close(self) -> None:
        """Waits for the pass of another thread, and restores the original forwards."""
        self._turns.close(self._end)

    def _end(self) -> None:
        for undo in self._undo:
            undo()
        self._views.clear()
        self._close_all_experts()
        if self._ring is not None:
            self._ring.close()
        self._places.close()

    def _begin(self) -> None:
        """Takes back tensors that an interrupt may have left bound.

        Raises:
            CheckpointError: a file was written to.
        """
        self._take_back()
        for _, experts in self._places.experts:
            experts.take_back()
        self._routing = None
        if self._all_experts is not None and self._all_experts.closed:
            self._close_all_experts()
        self._store.reader.require_unchanged()

    def _require_idle(self, caller: str) -> None:
        computing = self._routing
        if computing is None and self._bound is not None:
            computing = self._places.units[self._bound[0]].name
        if computing is not None:
            raise StreamError(
                f"{caller}: called while {computing} computes, whose weights it would overwrite; "
                "call it once that layer has returned"
            )

    def _wrap(self, module: nn.Module, forward: Forward) -> None:
        """Replaces a module's forward by this one, which takes turns with other threads."""
        forward = self._turns.taking(forward)
        # Without the attributes: because of one, torch before 2.13 calls the wrapped function.
        forward = functools.wraps(module.forward, updated=())(forward)
        # A compiler must not trace weights that come and go.
        if self._ring is not None or self._places.experts:
            forward = torch.compiler.disable(forward)
        module.forward = forward
        self._undo.append(lambda: module.__dict__.pop("forward", None))

    def _outside_layers(self, module: nn.Module, forward: Forward) -> Forward:
        """Wraps a forward that must not run while a layer computes."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._require_idle(type(module).__name__)
            return forward(*args, **kwargs)

        return outside

    def _counted(self, forward: Forward) -> Forward:
        """Wraps the forward of a whole pass, which statistics and the bar show."""

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
        """Wraps a layer's forward so that it has its weights."""
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
        """Wraps a forward of experts so that it has the routed ones, or all of a layer."""

        def routed(hidden_states: Any, top_k_index: Any = None, *args: Any, **kwargs: Any) -> Any:
            _require_no_grad(experts.name)
            if self._routing is not None:
                self._require_idle(experts.name)
            require_index(top_k_index)
            self._stats.expert_layer_bytes += self._places.expert_units[index][0].file_bytes
            self._routing = experts.name
            try:
                return self._compute(
                    index,
                    experts,
                    top_k_index,
                    lambda ids: forward(hidden_states, ids, *args, **kwargs),
                )
            finally:
                self._routing = None

        return routed

    def _compute(
        self, index: int, experts: Experts, ids: Tensor, forward: Callable[[Tensor], Any]
    ) -> Any:
        touched, key = experts.touched(ids), experts.key(ids)
        fits = touched is not None and experts.fits(touched, self._most())
        trusted = key is None or self._trust[key]
        expected = ring = None
        if not fits or not trusted:
            try:
                ring = self._bind_all(index, experts)
                expected = forward(ids)
            finally:
                experts.release()
                if ring is not None:
                    ring.release()
            self._stats.wide_passes += 1
            if not fits or trusted is False:
                return expected
        assert touched is not None
        self._close_all_experts()
        try:
            found = forward(experts.bring(touched, ids))
        finally:
            experts.release()
        if expected is None:
            return found
        self._trust.note(key, expected, found)
        return expected

    def _most(self) -> float:
        """Returns the largest share of lacking experts with which a call reads single experts.

        After a pass read all experts of a layer once, it reads all until its end, and the next pass
        changes back only with a margin: else layers near the limit would remake memory in turn.
        """
        if self._all_experts is None:
            return self._most_alone
        # -inf, because the lacking count less the free slots may be negative.
        return -inf if self._read_all_in == self._turns.count else STEADY * self._most_alone

    def _bind_all(self, index: int, experts: Experts) -> Ring:
        """Binds all experts of a module to its tensors; a second ring brings them."""
        self._places.give_back()
        if self._all_experts is not None and self._read_all_in != self._turns.count:
            self._all_experts.cyclic = True  # a second pass in a row: there may well be a third
        self._read_all_in = self._turns.count
        if self._all_experts is None:
            units = [unit for unit, _ in self._places.expert_units]
            held, how = self._places.held_experts, (RING_DEPTH, self._device, self._stats)
            # Decoding steps behind a prompt ask for few experts, so nothing is read ahead.
            self._all_experts = Ring(self._store, units, held, *how, cyclic=False)
        ring = self._all_experts
        slot = ring.ring.slots[ring.acquire(index)]
        self._stats.expert_bytes += ring.units[index].file_bytes
        with torch.inference_mode(False):
            views = self._places.expert_views(index, slot)
        experts.bind(views)
        return ring

    def _close_all_experts(self) -> None:
        """Gives back the memory for all experts of a layer."""
        if self._all_experts is not None:
            self._all_experts.close()
            self._all_experts = None  # after `close`, which an interrupt may cut short

    def _bind(self, index: int, sites: list[TensorSite]) -> None:
        views = self._in_slot(index)
        self._bound = index, list(zip(sites, views, strict=True))
        for site, view in self._bound[1]:
            site.bind(view)

    def _take_back(self) -> None:
        if self._bound is None:
            return
        for site, view in self._bound[1]:
            site.take_back(view)
        self._bound = None
        self._give_back()

    def _whole_head(self, head: TensorSite) -> Forward:
        """Makes the head's forward, over blocks that pass through the ring."""
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
        """Waits for a unit and returns its tensors; units of one layout share them in a slot."""
        assert self._ring is not None
        _require_no_grad(self._places.units[index].name)
        slot = self._ring.acquire(index)
        forget_casts()
        key = self._layouts[index], slot
        if key not in self._views:
            with torch.inference_mode(False):  # they outlast a pass in inference mode
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
    """Returns the model and the models inside it."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]
