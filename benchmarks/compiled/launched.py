"""Finds the kernel that a call launches, as its launcher compiled it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

from pagedkv.kernels.triton import launch, proved


def compiled_by(kernel: str, call: Callable[[], object]) -> Any:
    """The kernel of this name that a call launches first, as its launcher compiled it."""
    launched: list[launch.Launcher] = []
    launch_it = launch.Launcher._launch

    def note(self: launch.Launcher, *args: Any) -> None:
        launch_it(self, *args)
        launched.append(self)

    # Without this, Hopper's own kernels would be launched.
    plain = proved.trying() if kernel in ("_prefill", "_decode") else nullcontext()
    with mock.patch.object(launch.Launcher, "_launch", note), plain:
        call()
    return next(one.compiled for one in launched if one.kernel.fn.__name__ == kernel)
