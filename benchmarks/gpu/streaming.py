"""Streaming to a card: `python3 -m benchmarks.gpu.streaming --out DIR`.

A model of the shape of Llama 3 8B with random weights in bf16, 16 GB in a scratch folder, is run
with its layers in pinned host memory: how much of the link a pass uses, what a pass waits that
computes longer than it copies, whether memory stays within the plan, what batches gain, and
transformers' own `device_map="auto"` under the same cap. Then sequences go to host memory and come
back. Last a mixture of experts is read as tokens are routed to them and by whole layers: whether
bits are the same, and which is sooner. Each figure is written to `DIR/streaming.json` as soon as it
is there; needs transformers, accelerate and 16 GB of disk, and with `--folder` it finds the
checkpoints of the run before. `--tiny --device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from pagedkv import (
    BatchGenerator,
    CacheConfig,
    LayerStreamer,
    PagedKVCache,
    plan_memory,
    write_kv,
)

LLAMA_8B = {"vocab_size": 128_256, "intermediate_size": 14_336, "num_key_value_heads": 8}
LLAMA_8B |= {"max_position_embeddings": 32_768, "eos_token_id": None, "bos_token_id": None}
TINY = LLAMA_8B | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"vocab_size": 32_768, "hidden_size": 2048, "moe_intermediate_size": 768}
MIXTURE |= {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 8}
MIXTURE |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
TINY_MIXTURE = MIXTURE | {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32}
SLOTS = 32  # experts of a layer that stay
PROMPT, WIDE, NEW = 64, 16_384, 16  # a pass of 16,384 tokens computes longer than it copies
ROWS, TOKENS = 16, 2048  # that go to host memory and come back
PASSES = 5


def write_checkpoint(shape: dict[str, Any], folder: Path, kind: str = "Llama") -> Path:
    """Writes a file for each layer, all with the first one's random weights: only bytes matter."""
    folder = folder / kind
    if (folder / "config.json").exists():
        return folder
    folder.mkdir()
    from safetensors.torch import save_file

    config = getattr(transformers, f"{kind}Config")(**shape, dtype="bfloat16")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    torch.manual_seed(0)
    known: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, like in model.named_parameters():
        number, first = "glue", name
        if found := re.match(r"(.*\.layers\.)(\d+)(.*)", name):
            number, first = found[2], f"{found[1]}0{found[3]}"
        if first not in known:
            scale = 0.02 if like.dim() > 1 else 1.0
            known[first] = (torch.randn(like.shape) * scale).bfloat16()
        parts.setdefault(number, {})[name] = known[first]
    places = {}
    for part, tensors in parts.items():
        file = f"model-{part}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": places}  # transformers' own loading wants both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return folder


def prompts(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    torch.manual_seed(1)
    return torch.randint(1, vocabulary, (rows, length)).tolist()


def timed(device: torch.device, call: Callable[[], object], times: int) -> float:
    """Seconds of a call and what it leaves to the device: the median, the first one not counted."""
    seconds = []
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(times):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def link_rates(device: torch.device) -> dict[str, float]:
    """GB/s out of pinned memory and into it."""
    nbytes = (512 if device.type == "cuda" else 8) << 20
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = host.to(device)
    ways = {"to the device": (there, host), "to the host": (host, there)}
    return {
        way: nbytes / timed(device, partial(into.copy_, out, non_blocking=True), PASSES + 1) / 1e9
        for way, (into, out) in ways.items()
    }


class Run:
    """One budget: a plan, a streamer, and what is asked of them."""

    def __init__(
        self, folder: Path, asked: argparse.Namespace, memory: str, batch: int, **fields: int
    ) -> None:
        self.device = torch.device(asked.device)
        limits = {"device_memory": memory, "host_memory": "24GiB", "device": self.device.type}
        self.plan = plan_memory(folder, batch=batch, length=asked.length, **limits, **fields)
        self.vocabulary = self.plan.shape.settings.vocab_size
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.streamer = LayerStreamer.from_pretrained(folder, plan=self.plan, device=self.device)

    def tokens_a_second(self, rows: int, new: int) -> tuple[float, Any]:
        """Tokens a second of decoding, by the difference of two lengths; and GB/s streamed."""
        options = {"do_sample": False}
        texts = prompts(rows, PROMPT, self.vocabulary)
        with BatchGenerator(self.streamer.model, plan=self.plan, verify_width=1) as batched:
            batched.generate(texts, max_new_tokens=2, **options)
            spent = []
            for count in (2, new):
                before, start = self.streamer.stats(), time.perf_counter()
                batched.generate(texts, max_new_tokens=count, **options)
                spent.append(time.perf_counter() - start)
            after = self.streamer.stats()
        moved = after.bytes_copied - before.bytes_copied
        return rows * (new - 2) / (spent[1] - spent[0]), moved / spent[1] / 1e9

    def verifies(self, rows: int) -> None:
        """Continues texts that repeat themselves: passes verify all that the plan allows."""
        texts = [text[:8] * (PROMPT // 8) for text in prompts(rows, PROMPT, self.vocabulary)]
        with BatchGenerator(self.streamer.model, plan=self.plan) as batched:
            batched.generate(texts, max_new_tokens=NEW, do_sample=False)

    def wide_pass(self, width: int) -> float:
        """Returns the seconds of a pass over `width` tokens."""
        ids = torch.tensor(prompts(1, width, self.vocabulary), device=self.device)
        with torch.inference_mode():
            one = lambda: self.streamer.model(ids, use_cache=False, logits_to_keep=1)  # noqa: E731
            return timed(self.device, one, 3)

    def peak(self) -> dict[str, float]:
        """The most bytes that torch allocated, and the planned bytes without device context."""
        planned = sum(self.plan.device_bytes.values()) - self.plan.device_bytes["device context"]
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {"peak": peak, "planned": planned, "share": peak / planned, **self.plan.device_bytes}

    def close(self) -> None:
        self.streamer.close()
        del self.streamer  # and its model's resident weights
        gc.collect()
        torch.cuda.empty_cache()


def device_map(folder: Path, asked: argparse.Namespace, memory: int, rows: int) -> float:
    """Tokens a second of transformers' own offloading with the same memory for weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="auto", max_memory={0: memory, "cpu": "64GiB"}
    )
    ids = torch.tensor(prompts(rows, PROMPT, model.config.vocab_size), device=asked.device)
    spent = []
    for count in (2, 2, 6):
        start = time.perf_counter()
        new = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), **new)
        spent.append(time.perf_counter() - start)
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)  # hooks hold its weights
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return rows * 4 / (spent[2] - spent[1])


def passes(folder: Path, asked: argparse.Namespace, note: Callable[..., None]) -> None:
    """Passes of few tokens, which the link holds up, and transformers' own offloading."""
    folder = write_checkpoint(TINY if asked.tiny else LLAMA_8B, folder)
    device = torch.device(asked.device)
    rate = link_rates(device)["to the device"]
    note("pinned host to device, GB/s", rate)
    run = Run(folder, asked, asked.budgets[0], 64)
    for rows in (1, 16, 64):
        speed, link = run.tokens_a_second(rows, NEW)
        note(f"batch {rows}: tokens a second", speed)
        note(f"batch {rows}: share of the link", link / rate)
    run.verifies(64)
    note("memory of the plan", run.peak())
    resident = sum(run.plan.shape.layers[i] for i in run.plan.resident_layers)
    run.close()
    small = Run(folder, asked, asked.budgets[1], 1)
    speed, _ = small.tokens_a_second(1, 4)
    note(f"under {asked.budgets[1]}: tokens a second", speed)
    note(f"under {asked.budgets[1]}: memory of the plan", small.peak())
    small.close()
    for rows in (1, 16) if device.type == "cuda" else ():
        speed = device_map(folder, asked, resident + run.plan.device_bytes["ring"], rows)
        note(f"device_map, batch {rows}: tokens a second", speed)


def wide(folder: Path, asked: argparse.Namespace, note: Callable[..., None]) -> None:
    """A pass that computes longer than it copies, beside the same with all layers there."""
    folder = write_checkpoint(TINY if asked.tiny else LLAMA_8B, folder)
    seconds = []
    for budget in (asked.budgets[0], asked.ample):
        run = Run(folder, asked, budget, 1, step_tokens=asked.wide)
        seconds.append(run.wide_pass(asked.wide))
        note(f"a pass of {asked.wide} tokens under {budget}, seconds", seconds[-1])
        note(f"the same under {budget}: memory of the plan", run.peak())
        run.close()
    note("wide pass: streamed / resident", seconds[0] / seconds[1])


def tier(folder: Path, asked: argparse.Namespace, note: Callable[..., None]) -> None:
    """Sequences that go to host memory and come back."""
    device, length = torch.device(asked.device), 64 if asked.tiny else TOKENS
    sizes = {"max_tokens": ROWS * length, "host_tokens": ROWS * length}
    cache = PagedKVCache(CacheConfig(32, 8, 128, "bfloat16", **sizes), device=device)
    seqs = [cache.add() for _ in range(ROWS)]
    tokens = torch.randn(ROWS * length, 8, 128, dtype=torch.bfloat16, device=device)
    with cache.step(seqs, num_new=length) as step:
        for layer in range(32):
            write_kv(tokens, tokens, step, layer)
    nbytes, wait = cache.stats().bytes, torch.cuda.synchronize if device.type == "cuda" else None
    spent: dict[str, list[float]] = {"offload": [], "restore": []}
    for _ in range(PASSES):
        for name, seconds in spent.items():
            start = time.perf_counter()
            getattr(cache, name)(seqs)
            if wait:
                wait()
            seconds.append(time.perf_counter() - start)
    cache.check()
    for (name, seconds), (way, rate) in zip(spent.items(), reversed(link_rates(device).items())):
        note(f"pinned {way}, GB/s", rate)
        note(f"host tier, {name}: share of the link", nbytes / median(seconds[1:]) / 1e9 / rate)


def mixture(folder: Path, asked: argparse.Namespace, note: Callable[..., None]) -> None:
    """Computes tokens one by one, by whole layers and by experts; the second half is timed.

    Both have one budget, and stream from pinned host memory; then experts stream from their files.
    """
    folder = write_checkpoint(TINY_MIXTURE if asked.tiny else MIXTURE, folder, "Qwen3Moe")
    device, logits, seconds = torch.device(asked.device), [], []
    tokens = torch.tensor(prompts(1, 2 * NEW, 500), device=device)
    limits = {"device_memory": asked.mixture, "device": device.type, "length": asked.length}
    ways: dict[str, dict[str, Any]] = {
        "whole layers": {"host_memory": "24GiB", "expert_slots": 0},
        "experts": {"host_memory": "24GiB", "expert_slots": SLOTS},
        "experts from files": {"expert_slots": SLOTS},
    }
    for way, fields in ways.items():
        plan = plan_memory(folder, **limits, **fields)
        streamer = LayerStreamer.from_pretrained(folder, device=device, plan=plan, progress=False)
        with streamer, torch.inference_mode():
            step = lambda i: streamer.model(tokens[:, i : i + 1], use_cache=False).logits  # noqa: E731, B023
            found = [step(i).cpu() for i in range(NEW)]
            start = time.perf_counter()
            found += [step(i).cpu() for i in range(NEW, 2 * NEW)]
            seconds.append((time.perf_counter() - start) / NEW)
            logits.append(found)
            stats = streamer.stats()
        note(f"mixture, {way}: seconds a token", seconds[-1])
        if plan.expert_slots:
            calls = stats.expert_hits + stats.expert_misses
            note(f"mixture, {way}: share that was there", stats.expert_hits / calls)
            same = all(torch.equal(a, b) for a, b in zip(logits[0], found, strict=True))
            note(f"mixture, {way}: same bits as by whole layers", same)
            note(f"mixture, {way}: times faster than whole layers", seconds[0] / seconds[-1])


def begin(name: str, parts: Iterable[str]) -> tuple[argparse.Namespace, Callable[..., None]]:
    """Reads the command's options; the function notes a figure in `DIR/NAME.json` at once."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--folder", type=Path, help="keeps checkpoints, or has them already")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try it out")
    parser.add_argument("--parts", nargs="*", choices=list(parts), default=list(parts))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "a CPU"
    found: dict[str, Any] = {"machine": where, "commit": asked.commit, "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d")}

    def note(figure: str, value: Any) -> None:
        found[figure] = value
        (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1))
        print(f"{figure}: {value}", flush=True)

    return asked, note


PARTS = {"passes": passes, "wide": wide, "tier": tier, "mixture": mixture}


def main() -> None:
    asked, note = begin("streaming", PARTS)
    asked.length = 96 if asked.tiny else 256
    asked.budgets = ("24MiB", "20MiB") if asked.tiny else ("10GiB", "3GiB")
    asked.ample = "64MiB" if asked.tiny else "40GiB"
    asked.mixture = "34MiB" if asked.tiny else "6GiB"
    asked.wide = 128 if asked.tiny else WIDE
    with tempfile.TemporaryDirectory() as place:
        for part in asked.parts:
            PARTS[part](asked.folder or Path(place), asked, note)


if __name__ == "__main__":
    sys.exit(main())
