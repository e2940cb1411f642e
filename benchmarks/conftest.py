"""What all benchmarks share: their size, how they take turns, and the table at the end.

The number of threads is recorded; where a benchmark sets it, it says so and puts it back.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch

from benchmarks.report import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "transformers")
Alternate = Callable[..., dict[str, list[float]]]
Figure = Callable[..., None]
FIGURES = pytest.StashKey[list[tuple[str, float, str, float | None]]]()
TABLES = pytest.StashKey[dict[str, list[dict[str, str]]]]()

# A benchmark that needs a model reads it from a folder; none asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: seconds, shows that the benchmarks run; full: the sizes numbers are quoted at",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []
    config.stash[TABLES] = {}


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> str:
    """Either `small` or `full`."""
    return request.config.getoption("--size")


@pytest.fixture
def shape(request: pytest.FixtureRequest, size: str) -> Any:
    """What the benchmark's module has in SIZES for this size."""
    return request.module.SIZES[size]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two wait for each other whenever something else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the whole library is timed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of the small language model; converts it on first use."""
    from benchmarks.smollm2 import smollm2

    try:
        return smollm2()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, smollm2_path: Path, size: str) -> Any:
    """The small model in fp32, with as many layers as the benchmark's module asks for."""
    import transformers

    from benchmarks.smollm2 import load

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    layers = request.module.SIZES[size]["layers"]
    model, _ = load(smollm2_path, torch.float32, num_hidden_layers=layers)
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        model(torch.arange(8)[None])  # touches all weights
    return model


@pytest.fixture
def alternate(benchmark: Any) -> Alternate:
    """Times several ways in turn, A B C A B C ..., so that a busy machine slows them alike.

    The last way is what pytest-benchmark lists. `before` runs untimed ahead of each call.
    """

    def run(
        ways: dict[str, Callable[[], Any]],
        rounds: int,
        warmup: int = 1,
        before: Callable[[], Any] = lambda: None,
    ) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        *others, last = ways

        def timed(name: str) -> None:
            start = perf_counter()
            ways[name]()
            seconds[name].append(perf_counter() - start)

        def setup() -> None:
            for name in others:
                before()
                timed(name)
            before()

        benchmark.pedantic(timed, (last,), setup=setup, rounds=rounds, warmup_rounds=warmup)
        return {name: all_of[-rounds:] for name, all_of in seconds.items()}

    return run


@pytest.fixture
def figure(request: pytest.FixtureRequest, benchmark: Any) -> Figure:
    """Puts one number into the results and into the table: name, value, unit, upper target."""

    def add(name: str, value: float, unit: str, target: float | None = None) -> None:
        benchmark.extra_info[f"{name} ({unit})"] = value
        request.config.stash[FIGURES].append((name, value, unit, target))

    return add


@pytest.fixture
def table(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., None]:
    """Puts one row, a text by column, into the results and into the table of a title."""

    def add(title: str, row: dict[str, str]) -> None:
        benchmark.extra_info |= row
        request.config.stash[TABLES].setdefault(title, []).append(row)

    return add


def job(module: str, *arguments: str, python: str = sys.executable) -> Any:
    """What a module says in its last line, as JSON, in a process of its own on one thread.

    Kernels are compiled there, whatever was wanted in this process.
    """
    unwanted = "TRITON_INTERPRET", "PYTHONSAFEPATH"
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", module, *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ratio(seconds: dict[str, list[float]], way: str, base: str) -> float:
    """How many times as long `way` took as `base`: the median over pairs of the same round."""
    return median(a / b for a, b in zip(seconds[way], seconds[base]))


# Last, so that the tables of pytest-benchmark come first.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for title, rows in config.stash[TABLES].items():
        terminalreporter.section("table")
        terminalreporter.write_line(title)
        for line in markdown([list(rows[0]), *(list(row.values()) for row in rows)]):
            terminalreporter.write_line(line)
    figures = config.stash[FIGURES]
    if not figures:
        return
    full = config.getoption("--size") == "full"
    width = max(len(name) for name, *_ in figures)
    terminalreporter.section("figures" if full else "figures (targets hold at --size=full)")
    for name, value, unit, target in figures:
        line = f"{name:<{width}}  {value:>8.4g} {unit:<5}"
        if target is not None:
            line += f"  target {target:g}"
            line += f", {'met' if value <= target else 'missed'}" if full else ""
        terminalreporter.write_line(line.rstrip())


# pytest-benchmark itself adds the CPU model (machine_info["cpu"]) and the commit (commit_info).
@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
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
