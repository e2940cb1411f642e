"""Checks single fields of a configuration; each check names the field that it refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index
from typing import Any

from pagedkv.kernels.formats import Format
from pagedkv.models import DTYPE_BYTES, KVShape, LayerGroup, StateLayer


def require_int(name: str, value: Any, least: int | None = None) -> None:
    """Raises unless a value is a whole number, of at least `least`."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def require_bool(name: str, value: Any) -> None:
    """Raises unless a value is True or False; any text would be true."""
    if isinstance(value, bool):
        return
    import numpy as np  # here: a configuration of its own does not wait for it

    if not isinstance(value, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def require_path(name: str, value: Any) -> None:
    """Raises unless a value is a path; `open` would take a number for an open file and close it."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise TypeError(f"{name}: expected a path, got {value!r}")


def require_share(name: str, value: Any) -> None:
    """Raises unless a value is a number that may be a share; other checks bound it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a share such as 0.5, got {type(value).__name__}")


def require_listed(name: str, given: Any, kind: type) -> None:
    """Raises unless a value lists objects of one class."""
    listed = given if isinstance(given, (tuple, list)) else [given]
    if wrong := [each for each in listed if not isinstance(each, kind)]:
        raise TypeError(f"{name}: expected {kind.__name__}s in a tuple, got {wrong[0]!r:.80}")


def check_groups(
    groups: Sequence[LayerGroup], num_layers: int, shapes: Sequence[KVShape], page_size: int
) -> None:
    """Raises unless every layer is in one group, shapes are valid, and chunks are whole pages."""
    listed = sorted(layer for group in groups for layer in group.layers)
    if listed != list(range(num_layers)):
        raise ValueError(
            f"groups: expected every layer 0..{num_layers - 1} exactly once, got {listed}"
        )
    for group in groups:
        if not group.layers:
            raise ValueError("groups: expected at least one layer in every group, got none")
        if group.window is not None:
            require_int("groups: window", group.window, 1)
        for name in ("num_kv_heads", "head_dim", "v_head_dim"):
            require_int(f"groups: {name}", getattr(group, name), 0)
        for name in ("v_is_k", "chunked"):
            value = getattr(group, name)
            if not isinstance(value, bool):
                raise TypeError(f"groups: {name}: expected a bool, got {type(value).__name__}")
        if group.chunked and (group.window is None or group.window % page_size):
            raise ValueError(
                f"page_size: expected a divisor of {group.window}, the tokens of a chunk, since a "
                f"chunk begins with a page, got {page_size}"
            )
    for shape in shapes:
        if shape.v_is_k and shape.v_head_dim > shape.head_dim:
            raise ValueError(
                "groups: v_is_k: expected a v_head_dim of at most head_dim = "
                f"{shape.head_dim}, got {shape.v_head_dim}"
            )


def check_states(states: Sequence[StateLayer]) -> None:
    """Raises unless every state layer has tensors, in supported dtypes."""
    for layer in states:
        if not isinstance(layer, StateLayer) or not layer.tensors:
            raise TypeError(f"states: expected StateLayers with tensors, got {layer!r:.200}")
        for shape, dtype in layer.tensors:
            if dtype not in DTYPE_BYTES:
                raise ValueError(
                    f"states: expected a dtype of {', '.join(DTYPE_BYTES)}, got {dtype!r}"
                )
            for size in shape:
                require_int("states: shape", size, 1)


def check_format(formats: tuple[Format, Format], shapes: Sequence[KVShape], page_size: int) -> None:
    """Raises unless widths and pages are multiples of the units that the formats code at once."""
    for side, format in enumerate(formats):
        name, unit = format.kv_format, format.dim_unit
        for shape in () if format.dense else shapes:
            if shape.v_is_k:
                raise ValueError(
                    f"kv_format: latents, whose V is a part of K, are kept dense, got {name}"
                )
            if shape[1 + side] % unit:
                raise ValueError(
                    f"kv_format: {name} needs a {'v_' * side}head_dim that is a multiple of "
                    f"{unit}, got {shape[1 + side]}"
                )
        if format.staged and page_size % 16:
            raise ValueError(
                f"kv_format: {name} needs a page_size that is a multiple of 16, got {page_size}"
            )
