"""Fixtures of all benchmarks: their size, how ways take turns, and the tables at the end.

A job is done in several ways; one of them is what its user would do without us. Each way is a row
in pytest-benchmark's table of the job, and each claim about ways is a row in the table of the area,
which has the name of the file: `bench_whole_jobs.py` is the area "whole jobs".
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import pytest
import torch

from benchmarks import ratios
from benchmarks.ratios import Claim
from benchmarks.report import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "numpy", "transformers")
Seconds = dict[str, list[float]]  # of each way, round by round
Alternate = Callable[..., Seconds]
CLAIMS = pytest.StashKey[list[Claim]]()
TABLES = pytest.StashKey[dict[str, list[dict[str, str]]]]()

# A benchmark that needs a model reads it from a folder; none asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: minutes, shows how ways compare; full: the sizes numbers are quoted at",
    )
    for option, words in (
        ("--save-ratios", "adds this run's ratios to a file"),
        ("--compare-ratios", "holds this run's ratios against those of a file"),
    ):
        parser.addoption(option, type=Path, metavar="FILE", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CLAIMS] = []
    config.stash[TABLES] = {}
    if config.getoption("--size") == "small":  # several threads would wait for other programs
        torch.set_num_threads(1)
    if config.getoption("--compare-ratios"):
        _saved(config)  # before minutes are spent


def _saved(config: pytest.Config) -> ratios.Saved | None:
    path = config.getoption("--compare-ratios")
    try:
        return ratios.load(path, config.getoption("--size")) if path else None
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--compare-ratios: {error}") from error


@pytest.fixture(scope="session")
def size(request: pytest.FixtureRequest) -> str:
    """Either `small` or `full`."""
    return request.config.getoption("--size")


@pytest.fixture
def shape(request: pytest.FixtureRequest, size: str) -> Any:
    """Returns the entry of the benchmark's SIZES for this size."""
    return request.module.SIZES[size]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread; two wait for each other whenever something else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which the whole library is timed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of the small language model; converts it on first use."""
    from benchmarks.smollm2 import smollm2

    try:
        return smollm2()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def loaded(smollm2_path: Path) -> Callable[[int], tuple[Any, Any]]:
    """Returns a loader of the small model in fp32 with n layers, and its tokenizer; reads once."""
    import transformers

    from benchmarks.smollm2 import load

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    @cache
    def read(layers: int) -> tuple[Any, Any]:
        model, tokenizer = load(smollm2_path, torch.float32, num_hidden_layers=layers)
        model.generation_config.eos_token_id = None  # every row gets all its tokens
        model.generation_config.pad_token_id = 0
        with torch.no_grad():
            model(torch.arange(8)[None])  # touches all weights
        return model, tokenizer

    return read


@pytest.fixture
def model(loaded: Any, shape: Any) -> Any:
    """The small model with as many layers as the benchmark's module asks for."""
    return loaded(shape["layers"])[0]


@pytest.fixture
def area(request: pytest.FixtureRequest) -> str:
    """The group, named by the benchmark's file."""
    name = Path(request.module.__file__).stem.removeprefix("bench_").replace("_", " ")
    return getattr(request.module, "AREA", name)


@pytest.fixture
def record(benchmark: Any, area: str) -> Callable[[str, Seconds], None]:
    """Makes ways of a job, with their seconds, rows in pytest-benchmark's table of the job."""

    def add(job: str, seconds: Seconds) -> None:
        benchmark._mode = "rows of ways"  # else it warns that it was not used
        for way, spent in seconds.items() if benchmark.enabled else ():
            row = copy(benchmark)  # one fixture makes one row
            row.name, row.group = way, f"{area}: {job}"
            row.fullname = f"{row.group}: {way}"  # saved runs are compared by it
            stats = row._make_stats(1)
            for each in spent:
                stats.update(each)

    return add


@pytest.fixture
def alternate(benchmark: Any, record: Any, size: str) -> Alternate:
    """Times ways of a job in turn, A B C A B C ..., so that a busy machine slows them alike.

    The small size is timed by the processor's clock, which other programs hardly change.
    """

    def run(
        job: str,
        ways: dict[str, Callable[[], Any]],
        rounds: int,
        warmup: int = 1,
        before: Callable[[], Any] = lambda: None,
        known: Seconds | None = None,
        waits: bool = False,
    ) -> Seconds:
        """Seconds of each way, round by round, without those of the warm-up.

        Args:
            before: is called ahead of each call and not timed.
            known: ways of the job that were timed elsewhere.
            waits: some way waits for a disk, which the processor's clock does not see.
        """
        clock = process_time if size == "small" and not waits else perf_counter
        rounds, warmup = (rounds, warmup) if benchmark.enabled else (1, 0)
        seconds: Seconds = {name: [] for name in ways}
        for _ in range(warmup + rounds):
            for name, way in ways.items():
                before()
                start = clock()
                way()
                seconds[name].append(clock() - start)
        before()  # frees what the last call made
        counted = (known or {}) | {name: spent[warmup:] for name, spent in seconds.items()}
        record(job, counted)
        return counted

    return run


@pytest.fixture
def claim(request: pytest.FixtureRequest, benchmark: Any, area: str) -> Callable[..., None]:
    """Puts one figure into the results and into the table of the area."""

    def add(
        job: str, name: str, value: float, unit: str = "x", target: float | None = None
    ) -> None:
        benchmark.extra_info[f"{job}: {name} ({unit})"] = value
        request.config.stash[CLAIMS].append(Claim(area, job, name, value, unit, target))

    return add


@pytest.fixture
def table(request: pytest.FixtureRequest, benchmark: Any, area: str) -> Callable[..., None]:
    """Puts one row, a text by column, into the results and into a further table of the area."""

    def add(row: dict[str, str]) -> None:
        benchmark.extra_info |= row
        request.config.stash[TABLES].setdefault(area, []).append(row)

    return add


def job(module: str, *arguments: str, python: str = sys.executable) -> Any:
    """Runs a module in a process of its own on one thread; returns its last line, read as JSON.

    Kernels are compiled there, even if this process interprets them.
    """
    unwanted = "TRITON_INTERPRET", "PYTHONSAFEPATH"
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", module, *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ratio(seconds: Seconds, way: str, base: str) -> float:
    """How many times as long `way` took as `base`: the median over pairs of the same round."""
    return median(a / b for a, b in zip(seconds[way], seconds[base]))


# Last, so that the tables of pytest-benchmark come first.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    claims, further, size = config.stash[CLAIMS], config.stash[TABLES], config.getoption("--size")
    full = size == "full"
    if not claims or config.getoption("--benchmark-disable"):
        return
    saved = _saved(config)
    title = "claims" if full or saved else "claims (targets are those of --size=full)"
    terminalreporter.section(title)
    terminalreporter.write_line("a / b: how many times as long a took as b, the median over rounds")
    for area, lines in ratios.tables(claims, full, saved).items():
        if rows := further.get(area):
            names = 2 if "job" in rows[0] else 1
            jobs = [""] + [row.get("job", "") for row in rows]
            named = [
                row | {"job": ""} if row.get("job") == job else row for job, row in zip(jobs, rows)
            ]
            lines += ["", *markdown([list(rows[0]), *(list(r.values()) for r in named)], names)]
        terminalreporter.write_line("\n".join([f"\n{area}\n", *lines]))
    if saved is not None:
        outside = [each.beside(saved)[1] for each in claims if each.unit == "x"]
        count = f"{sum(map(bool, outside))} of {len(outside)}"
        terminalreporter.write_line(f"\n{count} ratios lie outside of the baseline")
    if path := config.getoption("--save-ratios"):
        ratios.save(claims, path, size)


# pytest-benchmark itself adds the CPU model (machine_info["cpu"]) and the commit (commit_info).
@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    for name in [name for name in machine_info["cpu"] if name.startswith("hz_actual")]:
        del machine_info["cpu"][name]  # it changes, so that each run would have another machine
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
