"""Fixtures of all tests: the seed, the small language model, and skips for missing devices."""

import gc
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.effort import in_part

ROOT = Path(__file__).resolve().parents[1]

# A test that needs a model makes one or takes `smollm2_path`; none asks a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Triton kernels are interpreted where there is no CUDA device, and only there. Triton decides as it
# is imported, and each kernel as it is defined: this stands before any test module is imported.
if importlib.util.find_spec("torch"):
    import torch

    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"


# How many slow cases there are, and how many of them run.
SLOW = pytest.StashKey[tuple[int, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="one part of the slow and sampled cases")


def pytest_configure() -> None:
    settings.register_profile("any time", settings.default, deadline=None)  # no test fails by time
    settings.load_profile("any time")
    spec = importlib.util.find_spec("kernels")
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    if found and found.is_relative_to(ROOT) and "site-packages" not in found.parts:
        raise pytest.UsageError(
            f"`import kernels` would run {found.relative_to(ROOT)}, and `import transformers` "
            "does just that import: remove this file, kernels/ must stay a folder without it "
            "(docs/decisions/0001-kernels-top-level-symlink.md)"
        )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
    if part := config.getoption("part", None):
        number, _, parts = part.partition("/")
        if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
            raise pytest.UsageError(f"--part: expected I/N with I from 1 to N, got {part}")
        slow = [
            item
            for item in items
            if {"slow", "sampled"} & {mark.name for mark in item.iter_markers()}
        ]
        chosen = in_part(slow, int(number), int(parts))
        left_out = {*slow} - chosen
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
        config.stash[SLOW] = len(chosen), len(slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SLOW in session.config.stash and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash[SLOW]


@pytest.hookimpl(optionalhook=True)  # of xdist: the process that reports collects nothing itself
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", {}).get("slow"):
        node.config.stash[SLOW] = found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if SLOW in config.stash:
        ran, of = config.stash[SLOW]
        part = config.option.part.replace("/", " of ")
        terminalreporter.write_line(
            f"part {part}: {ran:,} of {of:,} slow and sampled cases ran; `make test-all` runs all"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the collector of garbage from the objects of all cases: it would look for seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 50)  # a test's few objects go by count of references, or later


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def seed() -> None:
    # The floors that work without torch are tested where there is none, too.
    if torch := sys.modules.get("torch"):
        # Torch notes the whole stack of who seeds devices that are not there.
        here = torch.cuda.is_available()
        (torch.manual_seed if here else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Where kernels are interpreted, numbers are right, and addresses and overflows are checked."""
    # Kernels are imported as their tests are collected; other tests wait for no Triton.
    if "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels import interpreter

    interpreter.install()
    yield
    interpreter.uninstall()


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A model made by a module draws the same numbers whichever files are collected before."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    """A model shared by tests draws the same numbers whichever of them asks for it first."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., str]:
    """Run an interpreter as a user would and return what it prints.

    It starts in `cwd`, by default the repository root; `path` comes first on its module path.
    """

    def run(*arguments: str, cwd: Path = ROOT, path: Path | None = None) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        if path:
            env["PYTHONPATH"] = str(path)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run


FORKED = """
import os, sys
os.dup2(said.fileno(), 1)
os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
sys.argv = ["-c", *arguments]
os.environ |= env
sys.path.insert(0, root)
"""


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run code in a process of its own, which may import `tests`, and return what it prints.

    The process is forked off one that has imported torch, once for all tests; `env` is set in it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "pagedkv.cache.cache"])

    def run(code: str, *arguments: str, **env: str) -> str:
        errors = tmp_path_factory.mktemp("forked") / "errors"
        hears, said = context.Pipe(duplex=False)
        names = {"said": said, "errors": str(errors), "root": str(ROOT)}
        names |= {"arguments": arguments, "env": env}
        process = context.Process(target=exec, args=(FORKED + code, names))
        process.start()
        said.close()
        with open(hears.fileno(), closefd=False) as file:
            text = file.read()
        process.join()
        assert process.exitcode == 0, errors.read_text()
        return text.strip()

    return run


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of the small language model; converts it on first use."""
    # By file, because `import benchmarks` would need the repository root on sys.path.
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "benchmarks" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.smollm2()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
