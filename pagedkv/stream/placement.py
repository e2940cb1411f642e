"""`Places`: where each tensor of a model is: on the device, in host memory, or in its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.skeleton import ends_of, experts_in, tables_of
from pagedkv.planner import MemoryPlan
from pagedkv.planner.costs import RING_DEPTH

from .arena import HostArena
from .embedding_head import head_units
from .experts.files import ExpertFiles
from .experts.memory import WideMemory, mappings_of, most_mappings
from .experts.modules import require_supported
from .experts.residency import MOST_ALONE, Experts
from .experts.rows import RowExperts
from .experts.slots import SlottedExperts, Staging
from .layers import GLUE, TensorSite, by_layer, make_absent, sites_of
from .stats import StreamStats
from .weights import Unit, WeightStore


@dataclass(frozen=True)
class Wanted:
    """The weights that stay on the device or in host memory.

    Attributes:
        resident: layers that stay on the device.
        host: layers that stay in host memory; on a card with their experts.
        embedding: whether the embedding stays on the device.
        tables: whether tables larger than the embedding stay there; else their rows are read.
        head: whether the head stays on the device.
        head_rows: rows of a streamed head in one block.
        head_in_host: whether a streamed head stays in host memory, with an embedding tied to it.
        embedding_in_host: whether an embedding that is not on the device stays in host memory.
        depth: slots of the ring.
        expert_slots: how many experts of a layer stay in memory; others come when they are routed
            to. 0: layers are read as a whole.
        alone: the share of a layer's experts up to which lacking ones are read singly; if a call
            lacks more, all are read.
        all_fit: whether there is room for all experts of a layer beside the experts that stay.
    """

    resident: Sequence[int] = ()
    host: Sequence[int] = ()
    embedding: bool = True
    tables: bool = True
    head: bool = True
    head_rows: int = 0
    head_in_host: bool = False
    embedding_in_host: bool = False
    depth: int = RING_DEPTH
    expert_slots: int = 0
    alone: float = MOST_ALONE
    all_fit: bool = True

    @property
    def most_alone(self) -> float:
        """The share up to which experts are read singly; infinite without room for all."""
        return self.alone if self.all_fit else inf

    @staticmethod
    def by(plan: MemoryPlan) -> Wanted:
        """Returns the places that a plan chose."""
        experts = plan.shape.experts
        return Wanted(
            resident=plan.resident_layers,
            host=plan.host_layers,
            embedding=plan.embedding_resident,
            tables=plan.tables_resident,
            head=plan.head_resident,
            head_rows=plan.head_rows,
            head_in_host=plan.head_in_host,
            embedding_in_host=plan.embedding_in_host,
            depth=plan.ring_depth or RING_DEPTH,
            expert_slots=plan.expert_slots,
            alone=plan.alone,
            all_fit=experts is None or not experts.are_few(plan.step_tokens, plan.alone),
        )


class Places:
    """Gives every tensor its place, and reads resident tensors once, for good.

    Attributes:
        units: units that pass through the ring, in the order of a pass: layers, then blocks of the
            head.
        layers: for each unit that is a layer, the module and the sites of its tensors.
        held: the bytes of units that stay in host memory, by index of the unit.
        experts: modules whose experts are read when they are routed to, and their `Experts`.
        expert_units: for each of these modules, a unit of all its experts, and its sites.
        held_experts: the bytes of these units if they stay in host memory, by index.
        by_row: the sites of embeddings whose rows are gathered when they are looked up, and the
            embedding if it stays in host memory.
        head: the site of the head's weight, if that is not resident.

    Raises:
        UnsupportedModelError: a tensor, the embedding or the head has a form that cannot stream.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        layers: nn.ModuleList,
        wanted: Wanted,
        device: torch.device,
        stats: StreamStats,
    ) -> None:
        _require_layers(wanted.resident, len(layers))
        self._model, self._store, self._device, self._stats = model, store, device, stats
        found = [module for layer in layers for module in experts_in(layer)]
        require_supported(wanted.expert_slots, found, model, device)
        self.units: list[Unit] = []
        self.layers: list[tuple[nn.Module, list[TensorSite]]] = []
        self._pinned: list[HostArena] = []
        self.held: dict[int, Tensor] = {}
        self.experts: list[tuple[nn.Module, Experts]] = []
        self.expert_units: list[tuple[Unit, list[TensorSite]]] = []
        self.held_experts: dict[int, Tensor] = {}
        self._staging = Staging(device) if has_own_memory(device) else None
        self._mappings = most_mappings()  # left for rows of experts
        self._wide = WideMemory() if wanted.all_fit and not self._staging else None
        self.by_row: list[tuple[TensorSite, Tensor | None]] = []
        self.head: TensorSite | None = None
        make_absent(
            model,
            device,
            lambda name, like, places: store.elements(self.source(name), like, places),
        )
        groups, apart = by_layer(model, layers), {id(x.weight) for x in tables_of(model)}
        tables = [x for sites in groups.values() for x in sites if id(x.tensor) in apart]
        groups = {i: [x for x in sites if x not in tables] for i, sites in groups.items()}
        for index, layer in enumerate(layers):
            self._place_layer(index, layer, self._to_fill(groups.get(index, [])), wanted)
        if wanted.tables:
            groups[GLUE] += tables
        else:
            self.by_row += [(site, None) for site in tables]
        self._place_glue(self._to_fill(groups[GLUE]), wanted)

    def close(self) -> None:
        """Gives back the memory of experts, and host memory; waits until nothing copies from it."""
        if self._staging is not None:  # first: it waits until nothing is copied to slots
            self._staging.close()
        for _, experts in self.experts:
            experts.close()
        for arena in self._pinned:
            arena.close()
        self._pinned.clear()
        self.held.clear()
        self.held_experts.clear()
        self.by_row.clear()
        self.give_back()

    def give_back(self) -> None:
        """Gives back the memory of wide passes, if all experts of a layer need the room."""
        if self._wide is not None:
            self._wide.give_back()

    def source(self, name: str) -> str:
        """Returns the name in the store of a tensor of the model."""
        return self._store.origins.tied.get(name, name)

    def views(self, index: int, buffer: Tensor) -> list[Tensor]:
        """Returns a unit's tensors over its bytes, as the model holds them."""
        unit = self.units[index]
        if index < len(self.layers):
            return self._made(unit, self.layers[index][1], buffer)
        assert self.head is not None
        return [self.head.like(unit.places[0].view(buffer))]

    def expert_views(self, index: int, buffer: Tensor) -> list[Tensor]:
        """Returns tensors of all experts of a module over a unit's bytes."""
        return self._made(*self.expert_units[index], buffer)

    def _place_layer(
        self, index: int, layer: nn.Module, sites: list[TensorSite], wanted: Wanted
    ) -> None:
        cpu = not has_own_memory(self._device)
        if wanted.expert_slots:
            sites = self._without_experts(index, layer, sites, wanted)
        unit = self._unit(f"layer {index}", sites)
        if index in wanted.resident or not sites or (cpu and index in wanted.host):
            self._read_for_good(unit, sites)
            return
        if index in wanted.host:
            self.held[len(self.units)] = self._hold(unit)
        self.units.append(unit)
        self.layers.append((layer, sites))

    def _without_experts(
        self, index: int, layer: nn.Module, sites: list[TensorSite], wanted: Wanted
    ) -> list[TensorSite]:
        """Returns a layer's sites without its experts, which come when they are routed to."""
        for module in experts_in(layer):
            mine = [site for site in sites if site.owner is module]
            if mine:
                name = f"experts of layer {index}"
                unit = self._unit(name, mine)
                sources = [self.source(site.name) for site in mine]
                files = ExpertFiles(name, mine, sources, self._store, self._stats)
                number = len(self.expert_units)
                if self._staging and index in wanted.host:
                    self.held_experts[number] = self._hold(unit)
                self.expert_units.append((unit, mine))
                experts = self._of_module(module, files, wanted.expert_slots, number)
                self.experts.append((module, experts))
                sites = [site for site in sites if site.owner is not module]
        return sites

    def _of_module(self, module: nn.Module, files: ExpertFiles, slots: int, number: int) -> Experts:
        """Makes the object that brings the experts of a module."""
        if self._staging is None:
            needed = mappings_of(files.places(files.count, 1)[0])
            moves = needed <= self._mappings
            self._mappings -= needed * moves
            return RowExperts(files, slots, self._stats, self._wide, moves)
        held = self.held_experts.get(number)
        home = None if held is None else self.expert_views(number, held)
        return SlottedExperts(files, slots, self._stats, module, self._staging, home)

    def _place_glue(self, glue: list[TensorSite], wanted: Wanted) -> None:
        first, last = ends_of(self._model)
        embedding = wanted.embedding
        head = wanted.head or (wanted.head_in_host and not has_own_memory(self._device))
        tied = getattr(first, "weight", None) is getattr(last, "weight", None)
        if tied:
            embedding = head = embedding or head  # one tensor, resident for both or neither
        held = None
        if not head:
            self.head = self._weight_of(last)
            held = self._place_head(self.head, wanted)
        if not embedding:
            site, table = self._weight_of(first), held if tied else None
            if wanted.embedding_in_host and table is None:
                unit = self._unit("embedding", [site])
                table = unit.places[0].view(self._read(unit).tensor)
            self.by_row.append((site, table))
        away = [*(site for site, _ in self.by_row), self.head]
        elsewhere = {site.name for site in away if site is not None}
        glue = [site for site in glue if site.name not in elsewhere]
        self._read_for_good(self._unit("glue", glue), glue)

    def _place_head(self, head: TensorSite, wanted: Wanted) -> Tensor | None:
        """Adds the blocks of the head; returns the head if it stays in host memory."""
        name, held = self.source(head.name), None
        blocks = head_units(self._store, head, name, wanted.head_rows)
        if wanted.head_in_host:
            (whole,) = head_units(self._store, head, name, head.empty.shape[0])
            memory = self._hold(whole)
            self.held |= enumerate(memory.split(blocks[0].nbytes), len(self.units))
            held = whole.places[0].view(memory)
        self.units += blocks
        return held

    def _weight_of(self, module: nn.Module | None) -> TensorSite:
        """Returns the site of the weight of the embedding or the head."""
        for site in sites_of(self._model):
            if site.owner is module and site.key == "weight":
                return site
        raise UnsupportedModelError(
            f"{type(self._model).__name__}: its embedding or head has no weight to stream"
        )

    def _to_fill(self, sites: list[TensorSite]) -> list[TensorSite]:
        """Moves tensors with values to the device; returns sites to fill from the checkpoint."""
        for site in sites:
            if not site.tensor.is_meta:
                site.set(site.like(site.tensor.detach().to(self._device)))
        return [site for site in sites if site.tensor.is_meta]

    def _unit(self, name: str, sites: list[TensorSite]) -> Unit:
        return self._store.unit(name, {self.source(site.name): site.tensor for site in sites})

    def _read_for_good(self, unit: Unit, sites: list[TensorSite]) -> None:
        """Reads a unit once; it stays."""
        if sites:
            buffer = self._read(unit).tensor.to(self._device)
            for site, view in zip(sites, self._made(unit, sites, buffer)):
                site.set(view)

    def _made(self, unit: Unit, sites: list[TensorSite], buffer: Tensor) -> list[Tensor]:
        """Returns a unit's tensors over its bytes; tied sites share one object."""
        places = {place.name: place for place in unit.places}
        made: dict[str, Tensor] = {}
        for site in sites:
            name = self.source(site.name)
            if name not in made:
                made[name] = site.like(places[name].view(buffer))
        return [made[self.source(site.name)] for site in sites]

    def _hold(self, unit: Unit) -> Tensor:
        """Reads a unit once into host memory from which a device copies; returns its bytes."""
        self._pinned.append(self._read(unit, pin=True))
        return self._pinned[-1].tensor

    def _read(self, unit: Unit, pin: bool = False) -> HostArena:
        arena = HostArena(unit.nbytes, pin and self._device.type == "cuda")
        self._store.fill(unit, arena)
        return arena


def has_own_memory(device: torch.device) -> bool:
    """Whether weights come by copies, experts to slots; a CPU has addresses without memory."""
    return device.type != "cpu"


def _require_layers(resident: Sequence[int], count: int) -> None:
    for i in resident:
        if type(i) is not int or not 0 <= i < count:
            raise ValueError(f"resident_layers: expected ints from 0 to {count - 1}, got {i!r}")
