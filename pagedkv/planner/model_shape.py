"""Adds up the bytes of each layer of a model and of what surrounds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pagedkv.models import facts_of
from pagedkv.models.model import Model
from pagedkv.models.weighing import is_matrix, weighed
from pagedkv.models.weights import Weight

from .experts import RoutedExperts

ALIGNMENT = 256  # bytes; where a tensor may begin in a buffer of the device


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a plan is made from.

    Attributes:
        model: the `Model`.
        settings: its decoder's configuration, by one set of names.
        dtype: the dtype it computes in.
        layers: bytes of each layer, every tensor aligned.
        embedding: bytes of the token embedding.
        tables: bytes of larger tables, of n-grams or for each layer.
        head: bytes of the output head; 0 if it is the embedding.
        rest: bytes of all else: norms, learned positions and masks, a tower for images.
        tower: bytes of the tower, and of the parts that join it to the decoder.
        exact: whether bytes were read from headers, not computed from the configuration.
        packed: whether weights are stored in fewer bits than they are computed in.
        unpacked: whether weights are packed in the files, but not in memory.
        active: how many weights of all layers and the head one token is multiplied with.
        experts: experts that can be read alone; None if there are none, or weights are packed.
        assumed: sentences on what was assumed of the model, because nothing says it.
        whole: the whole model, if this is one process's share of it; else None.
    """

    model: Model = field(compare=False, repr=False)
    settings: SimpleNamespace
    dtype: str
    layers: tuple[int, ...]
    embedding: int
    tables: int
    head: int
    rest: int
    tower: int
    exact: bool
    packed: bool
    active: int
    experts: RoutedExperts | None = None
    unpacked: bool = False
    assumed: tuple[str, ...] = ()
    whole: ModelShape | None = None

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.model.name

    @property
    def head_bytes(self) -> int:
        """Bytes of the matrix that makes logits, which may be the embedding's."""
        return self.head or self.embedding

    def layer(self, index: int, expert_slots: int) -> int:
        """Returns the bytes that come with a layer: all, or all but experts if these come alone."""
        apart = self.experts.layers[index] if self.experts and expert_slots else 0
        return self.layers[index] - apart

    @property
    def weights(self) -> int:
        """Bytes of everything."""
        return sum(self.layers) + self.embedding + self.tables + self.head + self.rest


def shape_of(model: Model, weight_dtype: str | None = None, on_cpu: bool = False) -> ModelShape:
    """Sums up a model's sizes by its checkpoint, or by its configuration alone.

    Args:
        on_cpu: whether it computes on a CPU, for which some packed weights are unpacked.

    Raises:
        UnsupportedModelError: pages cannot serve it, or nothing is known of its type.
        CheckpointError: the checkpoint lacks layers.
        ValueError: its configuration lacks a value that is needed.
    """
    c, found = model.settings, weighed(model, weight_dtype, on_cpu)
    parts = _parts(found.weights, c)
    experts, tower = parts.pop("experts"), parts.pop("tower")
    if facts_of(c.model_type).masks:
        parts["rest"] += c.num_hidden_layers * aligned(c.max_position_embeddings**2)
    streams = model.method in ("", "mxfp4")  # the streamer reads no other experts
    return ModelShape(
        model=model,
        settings=c,
        dtype=found.dtype,
        tower=tower if model.checkpoint or model.takes_images else 0,
        exact=found.exact,
        packed=found.packed,
        experts=_routed(c, experts, on_cpu) if streams and not found.packed else None,
        unpacked=found.unpacked,
        assumed=found.assumed,
        **parts,
    )


def _parts(weights: Iterable[tuple[Weight, int]], c: SimpleNamespace) -> dict[str, Any]:
    """Adds up the bytes of weights by part, under the names of `ModelShape`."""
    count = c.num_hidden_layers
    layers, experts, active = [0] * count, [0] * count, 0.0
    parts = {"embedding": 0, "tables": 0, "head": 0, "rest": 0, "tower": 0}
    routed = (c.experts_per_token or 1) / (c.experts or 1)
    for weight, nbytes in weights:
        size = aligned(nbytes)
        if weight.part == "layer":
            (layer,) = weight.layers
            layers[layer] += size
            experts[layer] += size * weight.alone
        else:
            parts[weight.part] += size
        if is_matrix(weight):
            share = routed if weight.is_expert else 1.0
            active += share * len(weight.layers) * weight.elements
    parts["rest"] += parts["tower"]
    active = round(active) + c.hidden_size * c.vocab_size
    return {"layers": tuple(layers), "experts": tuple(experts), "active": active, **parts}


def aligned(nbytes: int) -> int:
    """Rounds the bytes of a tensor up to where the next one may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _routed(c: SimpleNamespace, layers: tuple[int, ...], on_cpu: bool) -> RoutedExperts | None:
    """Returns the experts that can be read alone; None if there are none."""
    if not any(layers) or not c.experts_per_token or facts_of(c.model_type).experts_with_layer:
        return None
    return RoutedExperts(layers, c.experts, c.experts_per_token, in_slots=not on_cpu)
