"""Kernels that stay off until a run on a card has shown that they are right, and not slower.

    gluon_prefill       the prefill kernel of `gluon/`, of head dims 64 and 128
    gluon_rest          the same of head dim 256, or where scores have sinks or a softcap
    gluon_decode        the decode kernel of `gluon/`, of head dims 64 and 128
    gluon_decode_rest   the same of head dim 256, or where scores have sinks or a softcap
    gluon_latents       the same of latents, with more than 32 query heads

`make gpu` tries each, and notes those that passed in `proved.json`, by architecture. With a Triton
newer than `NEWEST` they are off as well.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import triton

FILE = Path(__file__).with_name("proved.json")
NAMES = ("gluon_prefill", "gluon_rest", "gluon_decode", "gluon_decode_rest", "gluon_latents")
SINCE = 90  # compute capability; older hardware cannot run them
# Release of Triton that compiles them well: Gluon is experimental. With 3.9 they compile and spill
# registers, latents within their loop, and no card has run that.
NEWEST = 3, 8
TRY = "PAGEDKV_TRY"  # in the environment: names that are on without proof, separated by commas

_tried: ContextVar[tuple[str, ...] | None] = ContextVar("what is tried", default=None)


def is_on(name: str, arch: int | str) -> bool:
    """Whether a kernel is on for an architecture, such as 90; 0, the interpreter's, has none."""
    assert name in NAMES
    if isinstance(arch, str) or arch < SINCE:
        return False
    tried = _tried.get()
    if tried is not None:
        return name in tried
    return name in _asked() or (is_compiled_well() and str(arch) in _noted()[name])


@contextmanager
def trying(*names: str) -> Iterator[None]:
    """Turns these on, and no others, inside."""
    token = _tried.set(_checked(names, "names"))
    try:
        yield
    finally:
        _tried.reset(token)


def is_compiled_well() -> bool:
    """Whether the installed Triton is known to compile Gluon well."""
    return tuple(map(int, triton.__version__.split(".")[:2])) <= NEWEST


@functools.cache
def _noted() -> dict[str, dict[str, object]]:
    noted: dict[str, dict[str, object]] = json.loads(FILE.read_text(encoding="utf-8"))
    return noted


@functools.cache
def _asked() -> tuple[str, ...]:
    names = os.environ.get(TRY, "").split(",")
    return _checked(tuple(name.strip() for name in names if name.strip()), TRY)


def _checked(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    if unknown := set(names) - set(NAMES):
        known = ", ".join(NAMES)
        raise ValueError(f"{source}: expected some of {known}, got {', '.join(sorted(unknown))}")
    return names
