"""Pages in fewer bits: words, scales that travel with them, and staging pages.

The layout is that of `dense.py`, by group, with the layer outermost: words `[L, N, G, P, D / 2 or
4]`, scales as in `kernels/formats.py`, and for formats that code whole pages also staging pages
`[L, S, G, P, D]` in the dtype of the model. Ids of staging pages follow ids of coded pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import WrongShapeError
from pagedkv.kernels.formats import Format, Pages
from pagedkv.kernels.torch import page_coding as coded
from pagedkv.kernels.torch.codes import decode, encode

from .dense import DenseStorage, Parts

# A scale maps the first write's largest element to at most this, of 448 that e4m3 holds: the first
# token may be weak, and later ones must not saturate. Below are eleven octaves of full precision.
HEADROOM = 32.0
# The scale of a head before its first finite number other than zero is written: it is no power of
# two, as set scales are, and it is not zero, because kernels divide by it.
UNSET = 1.5


class QuantizedStorage(DenseStorage):
    """K and V of all pages in the formats of a config; see `DenseStorage`.

    Raises:
        NotImplementedError: the device does not support the format.
    """

    def _make_pages(self, config: CacheConfig) -> None:
        self._groups: list[tuple[Pages, Pages]] = []
        self._layers = {}
        self._members = config.groups
        static = any(format.static for format in config.formats)
        self._uncalibrated = set(range(config.num_layers)) if static else set()
        # Host memory, in which the device notes the layers that have all their scales.
        on_card = self.device.type == "cuda"
        with torch.inference_mode(False):
            self._calibrated = torch.zeros(
                config.num_layers, dtype=torch.bool, device="cpu", pin_memory=on_card
            )
        for group, members in enumerate(config.groups):
            shape = len(members.layers), config.num_pages(group), config.num_staging_pages(group)
            heads, *dims, _ = config.shapes[group]
            k, v = (
                self._allocate_format(group, format, *shape, heads, dim)
                for format, dim in zip(config.formats, dims)
            )
            self._groups.append((k, v))
            for index, layer in enumerate(members.layers):
                one = k.each(lambda x: x[index]), v.each(lambda x: x[index])  # noqa: B023
                self._layers[layer] = one

    def _allocate_format(
        self,
        group: int,
        format: Format,
        layers: int,
        pages: int,
        staging: int,
        heads: int,
        dim: int,
    ) -> Pages:
        size, kind = self.page_size, None if format.dense else torch.int16
        data = self._allocate(layers, pages, heads, dim // format.per_word, kind, group)
        scales = None
        if format.static:
            # Each layer's scales begin at a multiple of 16 bytes, as kernels require.
            padded = layers, -(-heads // 4) * 4
            scales = self.memory.empty(None, padded, torch.float32).fill_(UNSET)[:, :heads]
        elif not format.dense:
            shape = layers, *format.scales_shape(pages, heads, size, dim)
            scales = self.memory.empty(group, shape, torch.float16)
        staged = self._allocate(layers, staging, heads, dim) if staging else None
        return Pages(format, data, scales, staged)

    def calibrates(self, layer: int) -> bool:
        return layer in self._uncalibrated

    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Sets the static scales of a layer's pages, each once and for all.

        The first write with a number other than zero sets a head's scale to a power of two, which
        adds no rounding. The host never waits for the device: it measures a layer in every step
        until the device has noted that all its scales are set.
        """
        if layer not in self._uncalibrated:
            return
        if self._calibrated[layer]:
            self._uncalibrated.discard(layer)
            return
        known = []
        for new, pages in zip((k, v), self.layer(layer)):
            if pages.format.static:
                size = new.detach().float().abs()
                # A scale for an infinite number would turn all finite ones to zero for ever.
                most = size.masked_fill(~size.isfinite(), 0).amax((0, 2))
                scale = torch.exp2((most / HEADROOM).log2().ceil()).clamp(2.0**-40, 2.0**40)
                scale = torch.where(most == 0, UNSET, scale)  # zeros say nothing of later tokens
                ours = _scales(pages)
                ours.copy_(torch.where(ours == UNSET, scale, ours))
                known.append((ours != UNSET).all())
        self._calibrated[layer].copy_(torch.stack(known).all(), non_blocking=True)

    def copy_pages(self, group: int, source: Ints, target: Ints) -> None:
        """Copies pages of one group in all its layers; if it has staging pages, only to these."""
        k, v = self._groups[group]
        count = k.data.shape[1]
        if k.staging is None:
            ids = self._ids(source), self._ids(target)
            for pages in (k, v):
                self._kernels.copy_pages(pages.data, *ids)
                if pages.scales is not None and not pages.format.static:
                    pages.scales[:, ids[1]] = pages.scales[:, ids[0]]
            return
        alike = source >= count
        if alike.any():
            ids = self._ids(source[alike] - count), self._ids(target[alike] - count)
            for pages in (k, v):
                self._kernels.copy_pages(pages.staging, *ids)
        if not alike.all():
            ids = self._ids(source[~alike]), self._ids(target[~alike])
            self._kernels.decode_pages(k, v, *ids)

    def code_pages(self, group: int, source: Ints, target: Ints) -> None:
        """Codes staging pages of one group into coded ones, in all its layers."""
        if source.size:
            self._kernels.encode_pages(*self._groups[group], self._ids(source), self._ids(target))

    def read(self, layer: int, pages: Ints, tokens: int) -> tuple[Tensor, Tensor]:
        """Decodes K and V of the first `tokens` slots of a row of pages: `[tokens, G, D]`."""
        ids = self._ids(pages)
        k, v = (coded.read_pages(x, ids, self.dtype) for x in self.layer(layer))
        return k.transpose(1, 2).flatten(0, 1)[:tokens], v.transpose(1, 2).flatten(0, 1)[:tokens]

    def take_out(
        self, group: int, pages: Ints, kind: int = 0, device: torch.device | None = None
    ) -> Parts:
        if kind == 0 or (pages >= self._groups[group][0].data.shape[1]).all():
            return super().take_out(group, self._local(group, pages, kind), kind, device)
        ids, taken = self._ids(pages), {}
        layers = [self.layer(layer) for layer in self._members[group].layers]
        for name, side in zip("kv", zip(*layers)):
            values = torch.stack([coded.read_pages(of, ids, self.dtype) for of in side])
            taken[name] = values.to(device or "cpu")
        return taken

    def put_in(self, group: int, pages: Ints, parts: Parts, kind: int = 0) -> None:
        super().put_in(group, self._local(group, pages, kind), parts, kind)

    def _local(self, group: int, pages: Ints, kind: int) -> Ints:
        """Returns indices of pages in the tensors of their kind."""
        return pages - kind * self._groups[group][0].data.shape[1]

    def _parts(self, group: int, kind: int) -> dict[str, Tensor]:
        parts: dict[str, Tensor | None] = {}
        for name, of in zip("kv", self._groups[group]):
            parts[name] = of.staging if kind else of.data
            parts[f"{name}_scales"] = None if kind or of.format.static else of.scales
        return {name: part for name, part in parts.items() if part is not None}

    def statics(self, group: int) -> Parts:
        sides = zip("kv", self._groups[group])
        return {name: _scales(of).cpu().contiguous() for name, of in sides if of.format.static}

    def adopt(self, group: int, parts: Parts, statics: Parts) -> tuple[Parts, Parts]:
        """Converts as `DenseStorage.adopt` says; unset scales become the other storage's scales."""
        scales = {}
        for name, of in zip("kv", self._groups[group]):
            format = of.format
            if not format.static or name not in parts:
                continue
            theirs, ours = statics[name].to(self.device), _scales(of)
            # Unset scales were zero in older files.
            theirs = torch.where((theirs == UNSET) | (theirs == 0), ours, theirs)
            scales[name] = ours = torch.where(ours == UNSET, theirs, ours)
            words = parts[name].to(self.device)
            each = [x[:, None, :, None, None] for x in (theirs, ours)]
            values = decode(words, each[0], format, torch.float32)
            if (values.abs() > format.largest * each[1]).any():
                raise WrongShapeError(
                    f"{format.name}: some values of {name.upper()} are too large for the scales of "
                    "this cache; load into an empty cache"
                )
            # Scales are powers of two, so only numbers that become too small are rounded.
            parts = parts | {name: encode(values, format, each[1])[0]}
        return parts, scales

    def set_statics(self, group: int, statics: Parts) -> None:
        for name, of in zip("kv", self._groups[group]):
            if name in statics:
                _scales(of).copy_(statics[name])

    def poison(self, group: int, pages: Tensor, first_slot: int = 0) -> None:
        """Writes NaN into pages from a slot on; into coded pages only from slot 0 on."""
        for tensor, ids, value in self._marks(group, pages, first_slot):
            tensor[:, ids, :, first_slot:] = value

    def is_poisoned(self, group: int, page: int, first_slot: int) -> bool:
        """Whether a page still has the marks that `poison` left, from a slot on."""
        pages = torch.tensor([page], device=self.device)
        for tensor, ids, value in self._marks(group, pages, first_slot):
            found = tensor[:, ids, :, first_slot:]
            if not (found.isnan() if math.isnan(value) else found == value).all():
                return False
        return True

    def _marks(
        self, group: int, pages: Tensor, first_slot: int
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields the marks of `poison`: tensors `[L, N, G, P, ..]`, pages in them, and values."""
        for of in self._groups[group]:
            count = of.data.shape[1]
            if of.staging is not None:
                yield of.staging, pages[pages >= count] - count, math.nan
                if first_slot:
                    continue  # a coded page is complete: its last slots are valid as well
            mine = pages[pages < count]
            if of.format.dense:
                yield of.data, mine, math.nan
            elif of.format.static:
                yield of.data, mine, of.format.no_number
            else:  # scales by channel, `[L, N, G, D, 2]`: a mark is for the whole page
                yield _scales(of), mine, math.nan


def _scales(pages: Pages) -> Tensor:
    assert pages.scales is not None
    return pages.scales
