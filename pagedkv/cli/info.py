"""`pagedkv info`: the versions and devices that a report of a mistake should name."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table


def info() -> None:
    """Print versions, devices, and the attention backend that each device would use.

    For example:

    pagedkv info
    """
    import torch

    from pagedkv.attention.backend import choose_backend
    from pagedkv.storage.memory import available_memory

    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="bold")
    table.add_row("python", platform.python_version())
    for package in ("pagedkv", "torch", "triton", "numpy", "transformers"):
        table.add_row(package, version_of(package))
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        name = platform.processor() or platform.machine()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        free = f"{available_memory(device) / 2**30:.1f} GiB available"
        backend = f"backend {choose_backend('auto', device)}"
        table.add_row(str(device), f"{name}, {free}, {backend}")
    Console(highlight=False).print(table)


def version_of(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
