"""Indexers: the modules of a model that choose the tokens which a query reads.

An indexer scores all tokens of a text by keys of its own. These keys are one more layer of the same
cache, so forks, prefixes and files include them without special code. The module itself is called
row by row, as if each row were alone: with the row's tokens, its keys from pages, and a mask. Its
choice goes on as a handle, and reaches attention as places of tokens in their texts.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pagedkv.attention.api import write_kv
from pagedkv.errors import UnsupportedModelError
from pagedkv.models import facts_of
from pagedkv.models.kinds import Sight
from pagedkv.step.metadata import StepMetadata

from .handles import ChosenHandle, MaskHandle, as_mask
from .layer import PagedLayer
from .mixers import CallByParts, View, index_of
from .model import text_config


class IndexedLayer(PagedLayer):
    """One layer of a cache whose queries read chosen tokens.

    Attributes:
        keys_layer: the layer of the cache that has its index keys.
    """

    keys_layer: int

    @property
    def indexer_position_ids(self) -> None:
        """None, whatever a model sets: the places of a row's tokens are known without it."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor | None) -> None:
        pass

    def open(self, shape: Any, padding: Tensor | None) -> None:
        """Does nothing: its indexer, which comes first, has opened the step."""

    def choose(self, indexer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Called before its indexer; returns the arguments that the indexer runs with instead."""
        cache = self.cache
        if not cache.is_paged:
            raise UnsupportedModelError(
                f"layer {self.index}: its index keys are in pages, where paged attention alone "
                "reads; the model was switched to another one"
            )
        given = [*args, *kwargs.values()]
        found: Any = next((x for x in given if isinstance(x, MaskHandle)), None)
        if facts_of(text_config(cache.model).model_type).indexer == "pools":
            found = self._mask_of_tokens([x for x in given if isinstance(x, Tensor)])
        elif found is None and cache.latest_mask is not None:
            found = cache.latest_mask()  # a mask that only attention is given
        mask = as_mask(found, cache)
        if cache.forward_layer != self.index:  # else K and V are staged already
            self.begin()
        PagedLayer.open(self, (mask.shape[0], 1, mask.shape[-2]), mask.padding)
        return _IndexerCall(self, indexer, args, kwargs, mask).begin()

    def _mask_of_tokens(self, given: list[Tensor]) -> MaskHandle:
        """Makes a causal mask if a model makes none: from `[B, q]`, which tokens are no padding."""
        cache, (hidden, *_) = self.cache, [x for x in given if x.ndim == 3]
        real = next((x for x in given if x.dtype == torch.bool and x.ndim == 2), None)
        (batch, new), kept, seen = hidden.shape[:2], getattr(cache, "kept", None), cache.seen
        if self.is_first and real is not None and not (kept is None and real.all()):
            past = torch.ones(batch, seen, device="cpu") if kept is None else torch.from_numpy(kept)
            real = torch.cat([past.to(real), real], 1)
        else:
            real = None
        shape = batch, 1, new, seen + new
        return MaskHandle.made(cache, (Sight(),), real, shape, hidden.device)

    def mask(self, given: Any) -> MaskHandle:
        """See `PagedLayer`; a mask that a model made of the chosen tokens is compared with them.

        It covers only this forward's tokens, as do the latents that the cache gave the model back.
        """
        told = self.cache.told_places
        places = None if told is None else told()
        if places is None or isinstance(given, MaskHandle) or not isinstance(given, Tensor):
            return super().mask(given)
        mask: MaskHandle = vars(places)["chosen"]
        none = places.shape[1]
        seen = torch.zeros(*places.shape[:2], none + 1, dtype=torch.bool, device=places.device)
        seen.scatter_(2, places.long().where(places >= 0, none), True)
        shown = given if given.dtype == torch.bool else given == 0
        return mask if torch.equal(shown[:, 0], seen[..., :-1]) else super().mask(given)

    def chosen(self, handle: Any) -> Tensor:
        """Returns the places `[T, n]` that its indexer chose, from the handle of attention."""
        if not isinstance(handle, ChosenHandle) or handle.layer != self.keys_layer:
            raise UnsupportedModelError(
                f"layer {self.index}: what its indexer chose did not reach paged attention"
            )
        return handle.places


class RowKeys:
    """The index keys of one row in one call; the indexer takes them for a layer of a cache.

    Args:
        held: `[1, n, D]`, keys of earlier tokens from pages, perhaps with their rotations.
        pools: whether the indexer chooses pools of tokens.

    Attributes:
        new: `[1, n, D]`, keys of the new tokens, once the indexer has made them.
        keys: keys of all tokens.
        rotary: cosines and sines of the new tokens; empty if pages do not keep rotations.
    """

    new: Tensor
    keys: Tensor

    def __init__(self, held: Tensor | None, pools: bool = False) -> None:
        self.held, self.pools = held, pools
        self.rotary: list[Tensor] = []

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Returns all keys of the row, `[1, 1, n, D]`, as one head."""
        return self.behind(idx_k[:, 0])[:, None]

    def behind(self, new: Tensor) -> Tensor:
        """Returns all keys of the row, `[1, n, D]`.

        With pools, a last element says whether a token is no padding. In pages none is padding.
        """
        self.new = new[..., :-1] if self.pools else new
        held = self.held
        if held is not None and self.pools:
            held = torch.cat([held, held.new_ones(*held.shape[:2], 1)], -1)
        self.keys = new if held is None else torch.cat([held[..., : new.shape[2]], new], 1)
        return self.keys

    def get_seq_length(self) -> int:
        """Returns the number of the row's tokens."""
        return self.keys.shape[1]

    @property
    def written(self) -> Tensor:
        """`[n, 1, D]`, the keys and rotations of new tokens, as pages keep them."""
        return torch.cat([self.new, *self.rotary], -1).transpose(0, 1)


class IndexView(View):
    """A cache for one call of an indexer: it has the keys of one row.

    Args:
        index: the index of the indexer's layer.
    """

    def __init__(self, index: int, keys: RowKeys) -> None:
        super().__init__(layers=[None] * index + [keys])
        self.keys = keys

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Returns all keys of the row."""
        return self.keys.behind(indexer_key_states)


class _Row(NamedTuple):
    """A row of a step.

    Attributes:
        number: its place among the rows.
        tokens: its packed tokens.
        length: tokens of its text, the new ones included.
    """

    number: int
    tokens: slice
    length: int

    @property
    def new(self) -> int:
        """The number of its new tokens."""
        return int(self.tokens.stop - self.tokens.start)


class _IndexerCall(CallByParts):
    """An indexer's work in one step, row by row."""

    def __init__(
        self,
        layer: IndexedLayer,
        indexer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        mask: MaskHandle,
    ) -> None:
        self.layer, self.cache, self.mask = layer, layer.cache, mask
        self.opened = self.cache.opened
        self.text = text_config(self.cache.model)
        self.form = facts_of(self.text.model_type).indexer
        # If all tokens are padding, the module runs on one of them, and its result is unused.
        rows = [None] if self.opened is None else _rows(self.opened, layer.keys_layer)
        super().__init__(indexer, args, kwargs, rows)

    def _view_of(self, row: _Row | None) -> IndexView:
        keys = RowKeys(None if row is None else self._held(row), self.form == "pools")
        return IndexView(index_of(self.module), keys)

    def _of_part(self, row: _Row | None, name: str, value: Any) -> Any:
        if isinstance(value, MaskHandle):
            return self._mask_of(row, value)
        if isinstance(value, Tensor):
            part = self._part_of(row, value)
            own = self.form == "blocks by head" and not value.is_floating_point()
            return self._places_of(row, part) if own else part
        if isinstance(value, tuple):
            keys: RowKeys = self.views[-1].keys
            return self._rotary_of(keys, tuple(self._part_of(row, x) for x in value))
        return value

    def _held(self, row: _Row) -> Tensor:
        """Returns the keys that pages hold of a row, `[1, n, D]`."""
        assert self.opened is not None
        layer, count = self.layer.keys_layer, row.length - row.new
        step = self.opened.at(layer)
        ids = step.page_table(step.group_of(layer))[row.number]
        by_slot = step.storage.layer(layer)[0].transpose(1, 2)
        held = by_slot.index_select(0, ids[: -(-count // step.config.page_size)])
        return held.flatten(0, 2)[None, :count]

    def _part_of(self, row: _Row | None, x: Tensor) -> Tensor:
        """Takes the tokens of a row, `[1, n, ...]`, from `[B, q, ...]`."""
        if x.ndim == (4 if x.is_floating_point() else 3):  # positions of three axes
            return torch.stack([self._part_of(row, axis) for axis in x])
        if row is None:
            return x[:1, :1]
        x = x.expand(self.mask.shape[0], *x.shape[1:])  # default positions have one row
        packed = self.cache.packed(x.flatten(2)[:, None] if x.ndim > 2 else x[:, None, :, None])
        return packed[row.tokens].reshape(1, row.new, *x.shape[2:])

    def _mask_of(self, row: _Row | None, mask: MaskHandle) -> Tensor:
        """Makes a causal mask for a row, with as many axes as the mask of all rows."""
        n, length = (1, 1) if row is None else (row.new, row.length)
        seen = torch.ones(n, length, dtype=torch.bool, device=mask.device).tril(length - n)
        return seen[(None,) * (mask.ndim - 2)]

    def _places_of(self, row: _Row | None, positions: Tensor) -> Tensor:
        """Returns the places of a row's tokens, `[1, n]`: blocks go by these, not by positions."""
        n, length = (1, 1) if row is None else (row.new, row.length)
        return torch.arange(length - n, length, device=positions.device)[None]

    def _rotary_of(self, keys: RowKeys, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns cosines and sines of a row's new tokens, or of all if the indexer needs them.

        Blocks of keys are rotated once they are full, by the position of their first token. So
        pages keep each token's rotation beside its key, one half of it, as both halves are equal.
        """
        if self.form != "blocks":
            return new
        keys.rotary = [x[..., : x.shape[-1] // 2] for x in new]
        if keys.held is None:
            return new
        half = keys.rotary[0].shape[-1]
        held = keys.held[..., -2 * half :].split(half, -1)
        return tuple(torch.cat([torch.cat([x, x], -1), y], 1) for x, y in zip(held, new))

    def _finish(self, output: Tensor) -> Tensor:
        """Writes the new keys, and passes on the choice as a handle or as places."""
        outputs, layer, like = [*self.outputs, output], self.layer.keys_layer, self.mask
        chosen = output.new_empty(0, 1, dtype=torch.int32)
        if self.opened is not None:
            keys = torch.cat([view.keys.written for view in self.views])
            write_kv(keys, keys, self.opened, layer)
            places = [place for out in outputs for place in self._chosen_by(out)]
            chosen = pad_sequence(places, batch_first=True, padding_value=-1)
            chosen = chosen.transpose(1, 2) if chosen.ndim == 3 else chosen
        handle = ChosenHandle.made(layer, chosen, output, like)
        if self.form != "pools":
            return handle
        told = self._told(chosen)
        vars(told)["chosen"] = like.narrowed(handle)  # lives as long as `told`
        self.cache.told_places = weakref.ref(told)
        return told

    def _told(self, chosen: Tensor) -> Tensor:
        """Returns the places of chosen tokens among the tokens of this forward, `[B, q, n]`."""
        batch, _, new, _ = self.mask.shape
        if self.opened is None:
            return chosen.new_full((batch, new, 1), -1)
        row = torch.arange(new, device=chosen.device).expand(batch, 1, new)[..., None]
        columns = self.cache.packed(row)[:, 0, 0]
        told = torch.full_like(chosen, -1)
        for one in _rows(self.opened, self.layer.keys_layer):
            assert one is not None
            among = chosen[one.tokens] - (one.length - one.new)
            here = columns[one.tokens][among.clamp(min=0).long()]
            told[one.tokens] = here.where(among >= 0, -1).to(told.dtype)
        query = told.new_empty(batch, 1, new, told.shape[1])
        return self.cache.unpacked(told[:, None] + 1, query)[:, :, 0] - 1

    def _chosen_by(self, output: Tensor) -> list[Tensor]:
        """Returns the tokens that each query of a row reads, `[k]` or `[k, G]`, from an output.

        Args:
            output: the indexer's: a mask of tokens `[1, 1, n, length]`, tokens `[1, n, k]`, or
                blocks of tokens for each KV head `[1, G, n, k]`.
        """
        if output.dtype == torch.bool:
            mask = output[0, 0]
            _, tokens = mask.nonzero(as_tuple=True)
            return list(tokens.int().split(mask.sum(1).tolist()))
        if output.ndim == 3:
            return list(output[0])
        size = self.text.index_block_size
        within = torch.arange(size, device=output.device)
        blocks = output[0].transpose(0, 1)[..., None]  # -1, for none, stays below 0
        return list((blocks * size + within).flatten(2).transpose(1, 2))


def _rows(step: StepMetadata, layer: int) -> list[_Row | None]:
    """Lists the rows of a step."""
    lens, stop, rows = step.kv_lens_of(step.group_of(layer)).tolist(), 0, []
    for number, (new, length) in enumerate(zip(step.num_new.tolist(), lens)):
        rows.append(_Row(number, slice(stop, stop + new), length))
        stop += new
    return [*rows]
