"""Runs a model that is not to stay in memory in one way, in a process of its own on one thread.

    python -m benchmarks.peers.streaming stream FOLDER --batch 8 --new 32

prints one line of JSON: the tokens, and the median milliseconds of a decoding pass, by the clock
and of the processor. Peers are run as they are documented; AirLLM without the clean-up that it does
after every layer, which is nearly all of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import transformers
from transformers import LogitsProcessor

PROMPT = 64


class Passes:
    """Milliseconds of passes, by the clock and of the processor; with `cold` nothing is cached."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.marks = asked, list[tuple[float, float]]()
        self._begin = 0.0, 0.0

    def begin(self) -> None:
        if self.asked.cold:
            drop(self.asked.folder)
        self._begin = perf_counter(), process_time()

    def end(self) -> None:
        wall, cpu = self._begin
        self.marks.append((1e3 * (perf_counter() - wall), 1e3 * (process_time() - cpu)))

    def result(self) -> dict[str, Any]:
        wall, cpu = map(median, zip(*self.marks))
        return {"wall": wall, "cpu": cpu, "passes": len(self.marks)}


class Stamps(LogitsProcessor):
    """Notes the time of every pass but the first."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.begun = passes, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.begun:
            self.passes.end()
        self.begun = True
        self.passes.begin()
        return scores


def drop(folder: Path) -> None:
    """Takes the weights out of the file cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(folder: Path, _: argparse.Namespace) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def streamed(folder: Path, asked: argparse.Namespace) -> Any:
    from pagedkv.stream import LayerStreamer

    return LayerStreamer.from_pretrained(folder, device="cpu", resident_layers=asked.resident).model


def cpu_offload(folder: Path, asked: argparse.Namespace) -> Any:
    import accelerate

    return accelerate.cpu_offload(in_memory(folder, asked), execution_device=torch.device("cpu"))


def disk_offload(folder: Path, asked: argparse.Namespace) -> Any:
    import accelerate

    model, place = in_memory(folder, asked), tempfile.mkdtemp(dir=asked.scratch)
    return accelerate.disk_offload(model, place, execution_device=torch.device("cpu"))


def airllm(folder: Path, asked: argparse.Namespace) -> Any:
    import airllm
    import airllm.airllm_base as base

    base.clean_memory = lambda *_, **__: None
    place = tempfile.mkdtemp(dir=asked.scratch)
    return airllm.AutoModel.from_pretrained(
        str(folder), device="cpu", layer_shards_saving_path=place
    )


WAYS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "memory": in_memory,
    "stream": streamed,
    "cpu_offload": cpu_offload,
    "disk_offload": disk_offload,
    "airllm without clean-up": airllm,
}


def generate(model: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens, and the time of each pass after the first."""
    torch.manual_seed(0)
    ids = torch.randint(10, 40_000, (asked.batch, PROMPT))
    stamps = Stamps(Passes(asked))
    new = {"max_new_tokens": asked.new, "min_new_tokens": asked.new, "do_sample": False}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, logits_processor=[stamps], **new)
    return {"tokens": out[:, PROMPT:].tolist()} | stamps.passes.result()


@torch.inference_mode()
def verify(model: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Passes of several tokens a row, as when guesses are verified."""
    torch.manual_seed(0)
    cache, passes = transformers.DynamicCache(config=model.config), Passes(asked)
    chosen = torch.randint(10, 40_000, (asked.batch, PROMPT))
    for _ in range(asked.new + 1):
        passes.begin()
        logits = model(chosen, cache=cache, use_cache=True).logits
        passes.end()
        chosen = logits.argmax(-1)[:, -1:].repeat(1, asked.width)
    del passes.marks[0]
    return {"tokens": chosen.tolist()} | passes.result()


def plain_read(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Reads the streamed layers' bytes into one buffer by `preadv`: the file system's own speed."""
    from pagedkv.models.checkpoint import Checkpoint
    from pagedkv.planner.costs import spread

    named = [
        (int(each.name.split(".layers.")[1].split(".")[0]), each)
        for each in Checkpoint.open(folder).tensors.values()
        if ".layers." in each.name
    ]
    resident = spread(asked.resident, 1 + max(layer for layer, _ in named))
    ranges = sorted(
        (each.file, each.offset, each.nbytes) for layer, each in named if layer not in resident
    )
    buffer = torch.empty(max(size for *_, size in ranges), dtype=torch.uint8).numpy()
    files = {file: os.open(file, os.O_RDONLY) for file, *_ in ranges}
    passes = Passes(asked)
    for _ in range(asked.new):
        passes.begin()
        for file, first, size in ranges:
            done = 0
            while done < size:
                done += os.preadv(files[file], [buffer[done:size]], first + done)
        passes.end()
    return {"bytes": sum(size for *_, size in ranges)} | passes.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=[*WAYS, "read"])
    parser.add_argument("folder", type=Path)
    for name, usual in (("batch", 1), ("new", 32), ("resident", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--width", type=int, default=0, help="tokens a pass, not by generate")
    parser.add_argument("--cold", action="store_true", help="drop the file cache before each pass")
    parser.add_argument("--scratch", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.way == "read":
        found = plain_read(asked.folder, asked)
    else:
        run = verify if asked.width else generate
        found = run(WAYS[asked.way](asked.folder, asked), asked)
    print(json.dumps(found), flush=True)
    os._exit(0)  # some peers take long to say goodbye


if __name__ == "__main__":
    main()
