"""How big the benchmarks are, and on what they ran.

The number of threads is recorded, never set: it is the caller's choice (`OMP_NUM_THREADS`).
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

PACKAGES = ("torch", "triton", "numpy", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: seconds, shows that the benchmarks run; full: the sizes numbers are quoted at",
    )


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> str:
    """Either `small` or `full`."""
    return request.config.getoption("--size")


# pytest-benchmark itself adds the CPU model (machine_info["cpu"]) and the commit (commit_info).
@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    import torch

    machine_info["packages"] = {name: _version(name) for name in PACKAGES}
    machine_info["threads"] = {
        "torch": torch.get_num_threads(),
        "torch_interop": torch.get_num_interop_threads(),
        "cpus": os.cpu_count(),
    }
    machine_info["size"] = config.getoption("--size")
    if torch.cuda.is_available():
        machine_info["gpu"] = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
