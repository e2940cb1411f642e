"""`Places`: where each tensor of a model is: on the device, in host memory, or in its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.planner import MemoryPlan

from .arena import HostArena
from .embedding_head import head_units
from .spots import GLUE, TensorSite, by_layer, make_absent, spots_of
from .weights import Unit, WeightStore

DEPTH = 2


@dataclass(frozen=True)
class Wanted:
    """What is to be where.

    Attributes:
        resident: layers that stay on the device.
        host: layers that stay in host memory.
        embedding, head: whether these stay on the device.
        head_rows: of the head that pass at once.
        depth: slots of the ring.
    """

    resident: Sequence[int] = ()
    host: Sequence[int] = ()
    embedding: bool = True
    head: bool = True
    head_rows: int = 0
    head_in_host: bool = False
    depth: int = DEPTH

    @staticmethod
    def by(plan: MemoryPlan) -> Wanted:
        """What a plan says."""
        return Wanted(
            resident=plan.resident_layers,
            host=plan.host_layers,
            embedding=plan.embedding_resident,
            head=plan.head_resident,
            head_rows=plan.head_rows,
            head_in_host=plan.head_in_host,
            depth=plan.ring_depth or DEPTH,
        )


class Places:
    """Gives every tensor its place, and reads for good what stays.

    Attributes:
        units: what passes through the ring, in the order of a pass: layers, blocks of the head.
        layers: of the units that are layers, the module and where it holds its tensors.
        held: units that host memory holds, by index.
        embedding, head: where their weights are, if they are not resident.

    Raises:
        UnsupportedModelError: a tensor's form, or that of embedding or head, cannot stream.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        layers: nn.ModuleList,
        wanted: Wanted,
        device: torch.device,
    ) -> None:
        _require_layers(wanted.resident, len(layers))
        self._model, self._store, self._device = model, store, device
        self.units: list[Unit] = []
        self.layers: list[tuple[nn.Module, list[TensorSite]]] = []
        self.held: dict[int, HostArena] = {}
        self.embedding: TensorSite | None = None
        self.head: TensorSite | None = None
        make_absent(
            model,
            device,
            lambda name, like, places: store.elements(self.source(name), like, places),
        )
        groups = by_layer(model, layers)
        for index, layer in enumerate(layers):
            self._place_layer(index, layer, self._to_fill(groups.get(index, [])), wanted)
        self._place_glue(self._to_fill(groups[GLUE]), wanted)

    def source(self, name: str) -> str:
        """What a tensor of the model is called in the store."""
        tied = self._model.all_tied_weights_keys.get(name)
        return name if name in self._store or tied not in self._store else tied

    def views(self, index: int, buffer: Tensor) -> list[Tensor]:
        """A unit's tensors over its bytes, as the model holds them."""
        unit = self.units[index]
        if index < len(self.layers):
            return self._made(unit, self.layers[index][1], buffer)
        assert self.head is not None
        return [self.head.like(unit.places[0].view(buffer))]

    def _place_layer(
        self, index: int, layer: nn.Module, spots: list[TensorSite], wanted: Wanted
    ) -> None:
        cpu = self._device.type == "cpu"  # host memory is where it computes
        unit = self._unit(f"layer {index}", spots)
        if index in wanted.resident or not spots or (cpu and index in wanted.host):
            self._settle(unit, spots)
            return
        if index in wanted.host:
            self.held[len(self.units)] = self._read(unit, pin=True)
        self.units.append(unit)
        self.layers.append((layer, spots))

    def _place_glue(self, glue: list[TensorSite], wanted: Wanted) -> None:
        first, last = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        embedding = wanted.embedding
        head = wanted.head or (wanted.head_in_host and self._device.type == "cpu")
        if getattr(first, "weight", None) is getattr(last, "weight", None):
            embedding = head = embedding or head  # one tensor, resident for both or for none
        if not embedding:
            self.embedding = self._weight_of(first)
        if not head:
            self.head = self._weight_of(last)
            self._place_head(self.head, wanted)
        elsewhere = {spot.name for spot in (self.embedding, self.head) if spot is not None}
        glue = [spot for spot in glue if spot.name not in elsewhere]
        self._settle(self._unit("glue", glue), glue)

    def _place_head(self, head: TensorSite, wanted: Wanted) -> None:
        blocks = head_units(self._store, head, self.source(head.name), wanted.head_rows)
        for number, unit in enumerate(blocks, len(self.units)):
            if wanted.head_in_host:
                self.held[number] = self._read(unit, pin=True)
        self.units += blocks

    def _weight_of(self, module: nn.Module | None) -> TensorSite:
        """Where the embedding or the head has its weight."""
        for spot in spots_of(self._model):
            if spot.owner is module and spot.key == "weight":
                return spot
        raise UnsupportedModelError(
            f"{type(self._model).__name__}: its embedding or head has no weight to stream"
        )

    def _to_fill(self, spots: list[TensorSite]) -> list[TensorSite]:
        """Those that have a source; others are moved to the device."""
        for spot in spots:
            if not spot.tensor.is_meta:
                spot.set(spot.like(spot.tensor.detach().to(self._device)))
        return [spot for spot in spots if spot.tensor.is_meta]

    def _unit(self, name: str, spots: list[TensorSite]) -> Unit:
        return self._store.unit(name, {self.source(spot.name): spot.tensor for spot in spots})

    def _settle(self, unit: Unit, spots: list[TensorSite]) -> None:
        """Reads a unit once, for good."""
        if spots:
            buffer = self._read(unit).tensor.to(self._device)
            for spot, view in zip(spots, self._made(unit, spots, buffer)):
                spot.set(view)

    def _made(self, unit: Unit, spots: list[TensorSite], buffer: Tensor) -> list[Tensor]:
        """A unit's tensors over its bytes, one object where tied."""
        places = {place.name: place for place in unit.places}
        made: dict[str, Tensor] = {}
        for spot in spots:
            name = self.source(spot.name)
            if name not in made:
                made[name] = spot.like(places[name].view(buffer))
        return [made[self.source(spot.name)] for spot in spots]

    def _read(self, unit: Unit, pin: bool = False) -> HostArena:
        arena = HostArena(unit.nbytes, pin and self._device.type == "cuda")
        self._store.fill(unit, arena)
        return arena


def _require_layers(resident: Sequence[int], count: int) -> None:
    for i in resident:
        if type(i) is not int or not 0 <= i < count:
            raise ValueError(f"resident_layers: expected ints from 0 to {count - 1}, got {i!r}")
