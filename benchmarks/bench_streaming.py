"""A model that streams from its files, beside the same model in memory and beside peers.

Every run is a process of its own on one thread (`peers/streaming.py`); ways take turns, and
tokens are compared. SmolLM2-135M in fp32: 30 layers of 14 MB. Set `AIRLLM_PYTHON` to the
interpreter of an environment with airllm 4.0.0 and the versions of `constraints.txt` to have AirLLM
in it.

Another benchmark streams single experts, when tokens are routed to them, beside whole layers, in
one process: a Qwen3-MoE of random weights, 128 experts a layer of 590 kB each, 8 a token. It routes
almost at random, so real texts find more experts in memory. Everything but the experts is resident,
and logits have to be equal.
"""

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
import transformers

from benchmarks.conftest import Alternate, job, ratio
from benchmarks.peers.streaming import drop
from pagedkv import BatchGenerator
from pagedkv.stream import LayerStreamer

LAYERS = 30
SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 1, "new": 4, "batches": (1,), "parts": (0,), "layers": 2, "experts": 64}
    | {"passes": 7, "routed": ((1, 8),)},
    "full": {"rounds": 7, "new": 32, "batches": (1, 8), "parts": (0, 1, 2, 3), "layers": 12}
    | {"experts": 128, "passes": 15, "routed": ((1, 8), (1, 32), (4, 8), (16, 8), (64, 8))},
}
Runs = dict[str, list[dict[str, Any]]]
WORDS = 2048
MEMORY, STREAM = "in memory", "streamed from files"
DISK, HOST = "accelerate, disk_offload", "accelerate, cpu_offload"


@pytest.fixture(scope="session")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the checkpoint, so that no other process keeps it in the file cache."""
    place = tmp_path_factory.mktemp("weights") / "smollm2"
    shutil.copytree(smollm2_path, place)
    os.sync()  # what is not on the disk yet cannot be dropped
    return place


@pytest.fixture
def take_turns(record: Any, folder: Path, shape: dict[str, Any]) -> Any:
    """Runs ways in turn, each given as the arguments of a job, and records their seconds."""

    def run(name: str, ways: dict[str, list[str]], what: str, **options: Any) -> Runs:
        found: Runs = {way: [] for way in ways}
        common = [f"--{key}={value}" for key, value in ({"new": shape["new"]} | options).items()]
        for _ in range(shape["rounds"]):
            for way, arguments in ways.items():
                found[way].append(run_way(folder, [*arguments, *common]))
        record(name, {way: [run[what] / 1e3 for run in runs] for way, runs in found.items()})
        return found

    return run


def run_way(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Runs one way and removes the files that peers leave behind."""
    way, *rest = arguments
    python = os.environ["AIRLLM_PYTHON"] if way.startswith("airllm") else sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [way, str(folder), *rest, f"--scratch={scratch}"]
        return job("benchmarks.peers.streaming", *arguments, python=python)


def times(runs: Runs, way: str, base: str, what: str = "cpu") -> float:
    """How many times as long `way` took as `base`: the median over pairs of the same round."""
    return median(a[what] / b[what] for a, b in zip(runs[way], runs[base]))


def bench_file_in_the_cache(take_turns: Any, shape: Any, claim: Any) -> None:
    """Processor time of a decoding pass where nothing has to come from the disk."""
    for batch in shape["batches"]:
        name, ways = f"a pass of {batch}, file cached", {MEMORY: ["memory"]}
        if batch == 1:
            ways |= {HOST: ["cpu_offload"], DISK: ["disk_offload"]}
            if "AIRLLM_PYTHON" in os.environ:
                ways["AirLLM without clean-up"] = ["airllm without clean-up"]
        runs = take_turns(name, ways | {STREAM: ["stream"]}, "cpu", batch=batch)
        first = runs[MEMORY][0]["tokens"]
        for way, results in runs.items():
            assert all(result["tokens"] == first for result in results), f"{way}: other tokens"
        targets = {MEMORY: 1.8 if batch == 1 else 1.3, DISK: 1 / 3}
        for way in list(runs)[:-1]:
            claim(name, f"streamed / {way}", times(runs, STREAM, way), target=targets.get(way))


def bench_from_the_disk(take_turns: Any, shape: Any, claim: Any) -> None:
    """Passes whose weights come from the disk, against the slower of reading and computing."""
    name, ways = "a pass from the disk", {MEMORY: ["memory", "--width=1"]}
    for part in shape["parts"]:
        resident = ["--cold", f"--resident={round(LAYERS * part / 4)}"]
        ways[f"preadv alone, {part}/4 resident"] = ["read", *resident]
        ways[f"streamed, {part}/4 resident"] = ["stream", "--width=1", *resident]
    ways["streamed, 16 tokens a row"] = ["stream", "--width=16", "--cold"]
    runs = take_turns(name, ways, "wall", new=max(4, shape["new"] // 4))
    for part in shape["parts"]:
        read, spent = (f"{way}, {part}/4 resident" for way in ("preadv alone", "streamed"))
        slower = median(
            c["wall"] / max(a["wall"], b["wall"])
            for a, b, c in zip(runs[MEMORY], runs[read], runs[spent])
        )
        claim(name, f"{spent} / the slower", slower, target=1.2)
    wide = times(runs, "streamed, 16 tokens a row", "streamed, 0/4 resident", "wall")
    claim(name, "16 tokens a row / 1", wide, target=1.5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.* has the forward hook")  # which drops the cache
def bench_drafts_by_lookup(alternate: Alternate, folder: Path, shape: Any, claim: Any) -> None:
    """A prompt that repeats itself: guesses out of the text, verified in the same pass."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    list_ = " ".join(f"{i}. item number {i};" for i in range(1, 40 if shape["new"] > 4 else 14))
    prompt = [tokenizer(f"{list_}\n{list_}\n")["input_ids"]]
    tokens: dict[int, list[int]] = {}

    def answer(width: int) -> None:
        with (
            LayerStreamer.from_pretrained(folder, device="cpu") as streamer,
            BatchGenerator(streamer.model, max_tokens=2048, verify_width=width) as batched,
        ):
            hook = streamer.model.register_forward_pre_hook(lambda *_: drop(folder))
            new = {"max_new_tokens": 3 * shape["new"], "do_sample": False}
            (result,) = batched.generate(prompt, **new)
            hook.remove()
        assert tokens.setdefault(width, result.tokens) == result.tokens

    name, one, eight = "a list that comes again", "1 token a pass", "8 tokens verified"
    ways = {one: partial(answer, 1), eight: partial(answer, 8)}
    seconds = alternate(name, ways, shape["rounds"], warmup=0, waits=True)
    assert tokens[1] == tokens[8]
    claim(name, f"{eight} / {one}", ratio(seconds, eight, one), target=0.5)


# ------------------------------------------------------------------ experts


@pytest.fixture(scope="module")
def mixture(size: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint to the disk, so that it can be dropped from the file cache."""
    asked = SIZES[size]
    config = transformers.Qwen3MoeConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=asked["layers"],
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=WORDS,
        num_experts=asked["experts"], num_experts_per_tok=8, moe_intermediate_size=96,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 1 if "embed" in name else 0.04)
    place = tmp_path_factory.mktemp("experts")
    model.save_pretrained(place)
    os.sync()
    return place


class Routed:
    """Runs equal random tokens through whole layers and by experts."""

    def __init__(self, streamers: dict[str, LayerStreamer], rows: int) -> None:
        self.streamers, self.rows = streamers, rows
        self.logits: dict[str, torch.Tensor] = {}
        self.shares: list[float] = []  # the share of all experts' bytes that each pass read
        self._generator = torch.Generator().manual_seed(rows)

    def new_tokens(self) -> None:
        """Draws other tokens, once both ways have had the last ones."""
        if len(self.logits) != 1:
            assert not self.logits or torch.equal(*self.logits.values())
            self.logits = {}
            self.ids = torch.randint(3, WORDS, (self.rows, 1), generator=self._generator)

    def run(self, name: str) -> None:
        """Sends the tokens through the model that is streamed in this way."""
        streamer = self.streamers[name]
        before = streamer.stats()
        with torch.no_grad():
            self.logits[name] = streamer.model(self.ids, use_cache=False).logits
        after = streamer.stats()
        if name == "experts":
            whole = after.expert_layer_bytes - before.expert_layer_bytes
            self.shares.append((after.expert_bytes - before.expert_bytes) / whole)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def bench_experts(
    cold: bool, alternate: Alternate, mixture: Path, claim: Any, shape: dict[str, Any]
) -> None:
    """Decoding passes by experts, beside whole layers."""
    for rows, slots in shape["routed"]:
        kept = {"whole layers": (0, 0), "experts": (99, slots)}
        with ExitStack() as stack:
            streamers = {
                name: stack.enter_context(
                    LayerStreamer.from_pretrained(
                        mixture, device="cpu", resident_layers=layers, expert_slots=count
                    )
                )
                for name, (layers, count) in kept.items()
            }
            routed = Routed(streamers, rows)

            def before(routed: Routed = routed) -> None:
                routed.new_tokens()
                if cold:
                    drop(mixture)

            where = "disk" if cold else "cached"
            name = f"experts, {rows} row{'s' * (rows > 1)}, {slots} slots, {where}"
            ways = {name: partial(routed.run, name) for name in streamers}
            seconds = alternate(name, ways, shape["passes"], warmup=4, before=before, waits=cold)
        claim(name, "experts / whole layers", ratio(seconds, "experts", "whole layers"))
        if not cold:
            claim(
                name, "bytes read, experts / whole layers", mean(routed.shares[-shape["passes"] :])
            )
