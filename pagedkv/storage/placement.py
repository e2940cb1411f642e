"""Devices by their names, and the placement of a cache's layers on one or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pagedkv.config import CacheConfig

Device = str | int | torch.device


def device_of(device: str | int | torch.device) -> torch.device:
    """Returns the device of a name; "auto" is the current card, or the CPU if there is none.

    Raises:
        ValueError: torch knows no such device.
        TypeError: it is no name.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        kind = ValueError if isinstance(device, (str, int)) else TypeError
        raise kind(
            f"device: expected auto, cpu, cuda, cuda:0, mps or a torch.device, got {device!r}"
        ) from None


class Placement(NamedTuple):
    """The device of every layer.

    Attributes:
        home: the device where steps begin, with ids, positions and statistics of pages.
        layers: the device of each layer with K and V.
        states: the device of each state layer.
    """

    home: torch.device
    layers: tuple[torch.device, ...]
    states: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, given: Device | Sequence[Device] | Placement, config: CacheConfig) -> Placement:
        """Returns the placement that a caller asks for.

        Args:
            given: one device, or one for each layer and then one for each state layer.

        Raises:
            ValueError: their number differs from that of the layers, or they are of several kinds.
            TypeError: one is no device.
        """
        count, states = config.num_layers, len(config.states)
        if isinstance(given, Placement):
            home, each = _named(given.home), list(map(_named, (*given.layers, *given.states)))
            if (got := len(given.layers)) != count:
                raise ValueError(f"device: expected those of {count} layers, got {got}")
        elif isinstance(given, (list, tuple)):
            each = [_named(device) for device in given]
            home = each[0] if each else torch.device("cpu")
        else:
            home = _named(given)
            each = [home] * (count + states)
        if len(each) != count + states:
            behind = f", and behind them of {states} state layers" if states else ""
            raise ValueError(
                f"device: expected one device, or those of {count} layers{behind}, got {len(each)}"
            )
        if len(kinds := sorted({device.type for device in (home, *each)})) > 1:
            raise ValueError(f"device: expected devices of one kind, got {' and '.join(kinds)}")
        return cls(home, tuple(each[:count]), tuple(each[count:]))

    @property
    def layers_on(self) -> dict[torch.device, tuple[int, ...]]:
        """The layers with K and V on each device; home comes first and may have none."""
        devices = dict.fromkeys((self.home, *self.layers))
        return {
            device: tuple(i for i, place in enumerate(self.layers) if place == device)
            for device in devices
        }

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices, home first."""
        return tuple(dict.fromkeys((self.home, *self.layers, *self.states)))

    @property
    def is_divided(self) -> bool:
        """Whether there are several devices."""
        return len(self.devices) > 1


def _named(device: Any) -> torch.device:
    """Returns the device of a name with its index, which a tensor has and a bare `cuda` lacks."""
    return torch.empty(0, device=device_of(device)).device
