"""A model that streams from its files beside the same model in memory, and beside peers.

Every run is a process of its own on one thread (`peers/streaming.py`); ways take turns, and
tokens are compared. SmolLM2-135M in fp32: 30 layers of 14 MB. Set `AIRLLM_PYTHON` to the
interpreter of an environment with airllm 4.0.0 and the versions of `constraints.txt` to have AirLLM
in it.
"""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from benchmarks.conftest import Alternate, Figure, job

LAYERS = 30
SIZES = {"small": {"rounds": 1, "new": 4}, "full": {"rounds": 7, "new": 32}}
Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint in shards of its own, so that no other process keeps it in the file cache."""
    place = tmp_path_factory.mktemp("weights") / "smollm2"
    shutil.copytree(smollm2_path, place)
    os.sync()  # what is not on the disk yet cannot be dropped
    return place


@pytest.fixture
def take_turns(alternate: Alternate, folder: Path, shape: dict[str, int]) -> Any:
    """Runs ways in turn, so often; each way is the arguments of a job."""

    def run(ways: dict[str, list[str]], **options: Any) -> Runs:
        found: Runs = {name: [] for name in ways}
        common = [f"--{name}={value}" for name, value in ({"new": shape["new"]} | options).items()]

        def turn(name: str) -> None:
            found[name].append(run_way(folder, [*ways[name], *common]))

        alternate({name: partial(turn, name) for name in ways}, shape["rounds"], warmup=0)
        return found

    return run


def run_way(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """One run; peers leave files behind, which go."""
    way, *rest = arguments
    python = os.environ["AIRLLM_PYTHON"] if way.startswith("airllm") else sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [way, str(folder), *rest, f"--scratch={scratch}"]
        return job("benchmarks.peers.streaming", *arguments, python=python)


def middle(runs: Runs, way: str, what: str) -> float:
    return median(run[what] for run in runs[way])


def times(runs: Runs, way: str, base: str, what: str = "cpu") -> float:
    """How many times as long: the median over pairs of the same round."""
    return median(a[what] / b[what] for a, b in zip(runs[way], runs[base]))


def tell(figure: Figure, title: str, runs: Runs, what: str) -> None:
    """The median pass of each way, and of its runs the largest over the smallest."""
    for way, results in runs.items():
        values = [run[what] for run in results]
        figure(f"{title}: {way}, a pass", median(values), "ms")
        figure(f"{title}: {way}, largest / smallest", max(values) / min(values), "x")


def require_same_tokens(runs: Runs) -> None:
    first = next(iter(runs.values()))[0]["tokens"]
    for way, results in runs.items():
        assert all(result["tokens"] == first for result in results), f"{way} got other tokens"


@pytest.mark.parametrize("batch", [1, 8])
def bench_warm(batch: int, take_turns: Any, figure: Figure) -> None:
    """Processor time of a decoding pass with the file in the cache."""
    ways = {"memory": ["memory"]}
    if batch == 1:
        ways |= {"cpu_offload": ["cpu_offload"], "disk_offload": ["disk_offload"]}
        ways |= {"held": ["stream", f"--resident={LAYERS}"]}
        if "AIRLLM_PYTHON" in os.environ:
            ways["airllm"] = ["airllm without clean-up"]
    runs = take_turns(ways | {"stream": ["stream"]}, batch=batch)
    require_same_tokens(runs)
    tell(figure, f"batch {batch}", runs, "cpu")
    figure(f"batch {batch}: stream / memory", times(runs, "stream", "memory"), "x",
           1.8 if batch == 1 else 1.3)  # fmt: skip
    if batch == 1:
        figure("held in host memory / cpu_offload", times(runs, "held", "cpu_offload"), "x", 1.0)
        figure("stream / disk_offload", times(runs, "stream", "disk_offload"), "x", 1 / 3)
    if "airllm" in runs:
        figure("stream / AirLLM without clean-up", times(runs, "stream", "airllm"), "x", 1 / 1.2)


def bench_cold(take_turns: Any, figure: Figure) -> None:
    """Passes whose weights come from the disk: against reading alone, and 16 tokens wide."""
    ways = {
        "read": ["read"],
        "16 tokens": ["stream", "--width=16"],
        "1 token": ["stream", "--width=1"],
    }
    runs = take_turns({name: [*way, "--cold"] for name, way in ways.items()}, new=8)
    rate = median(run["bytes"] / run["wall"] / 1e6 for run in runs["read"])
    figure("cold: preadv alone", rate, "GB/s")
    tell(figure, "cold", runs, "wall")
    figure("cold: pass / reading alone", times(runs, "1 token", "read", "wall"), "x", 1 / 0.85)
    figure("cold: 16 tokens / 1 token", times(runs, "16 tokens", "1 token", "wall"), "x", 1.5)


def bench_resident(take_turns: Any, figure: Figure) -> None:
    """Cold passes with some layers resident, against the slower of reading and computing."""
    ways = {"memory": ["memory", "--width=1"]}
    for quarter in range(4):
        resident = f"--resident={round(LAYERS * quarter / 4)}"
        ways[f"read {quarter}/4"] = ["read", "--cold", resident]
        ways[f"{quarter}/4"] = ["stream", "--width=1", "--cold", resident]
    runs = take_turns(ways, new=8)
    compute = middle(runs, "memory", "wall")
    figure("resident: computing alone", compute, "ms")
    for quarter in range(4):
        name = f"{quarter}/4"
        read, spent = (middle(runs, way, "wall") for way in (f"read {name}", name))
        figure(f"resident {name}: reading alone", read, "ms")
        figure(f"resident {name}: a pass", spent, "ms")
        figure(f"resident {name}: pass / law", spent / max(read, compute), "x", 1.2)


@pytest.mark.usefixtures("one_thread")
def bench_lookup(benchmark: Any, folder: Path, shape: dict[str, int], figure: Figure) -> None:
    """A prompt that repeats itself: guesses out of the text, verified in the same pass."""
    import transformers

    from benchmarks.peers.streaming import drop
    from pagedkv import BatchGenerator
    from pagedkv.stream import LayerStreamer

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    list_ = " ".join(f"{i}. item number {i};" for i in range(1, 40))
    prompt = [tokenizer(f"{list_}\n{list_}\n")["input_ids"]]
    new = 3 * shape["new"]
    seconds: dict[int, list[float]] = {1: [], 8: []}
    tokens: dict[int, list[int]] = {}

    def turn() -> None:
        for width in seconds:
            with (
                LayerStreamer.from_pretrained(folder, device="cpu") as streamer,
                BatchGenerator(streamer.model, max_tokens=2048, verify_width=width) as batched,
            ):
                hook = streamer.model.register_forward_pre_hook(lambda *_: drop(folder))
                start = perf_counter()
                (result,) = batched.generate(prompt, max_new_tokens=new, do_sample=False)
                seconds[width].append((perf_counter() - start) / new)
                hook.remove()
            assert tokens.setdefault(width, result.tokens) == result.tokens

    benchmark.pedantic(turn, rounds=shape["rounds"])
    assert tokens[1] == tokens[8]
    gain = median(b / a for a, b in zip(seconds[1], seconds[8]))
    figure("lookup: 8 tokens verified / 1, per token", gain, "x", 0.5)
