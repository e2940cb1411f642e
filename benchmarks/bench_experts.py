"""Decoding passes of a mixture whose experts are read when tokens are routed to them.

Against the same model streamed by whole layers, in one process and in turn, from a file cache that
has everything and from one that has nothing. A Qwen3-MoE of random weights, 128 experts a layer of
590 kB each, 8 a token: routed almost at random, so real texts find more experts in memory. All but
the experts is resident, and logits have to be equal.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
import transformers

from benchmarks.conftest import Alternate, ratio
from benchmarks.peers.streaming import drop
from pagedkv.stream import LayerStreamer

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 2, "experts": 16, "rounds": 2},
    "full": {"layers": 12, "experts": 128, "rounds": 15},
}
TITLE = "Experts: decoding passes against whole layers, one thread"
WORDS = 2048
# Of whole layers: bytes with 8 and with 32 slots; seconds where the file cache is empty.
TARGETS = {1: (0.065, 0.05, 1 / 4), 4: (0.23, None, 1 / 1.5), 16: (0.65, None, None)}
TARGETS[64] = (None, None, 1 / 0.95)


@pytest.fixture(scope="module")
def folder(size: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, on the disk: what is not there yet cannot be dropped from the file cache."""
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


class Ways:
    """The same tokens through whole layers and by experts."""

    def __init__(self, folder: Path, slots: int, rows: int, streamers: ExitStack) -> None:
        self.folder, self.rows = folder, rows
        self.streamers = {
            name: streamers.enter_context(
                LayerStreamer.from_pretrained(
                    folder, device="cpu", resident_layers=resident, expert_slots=count
                )
            )
            for name, resident, count in (("whole", 0, 0), ("experts", 99, slots))
        }
        self.logits: dict[str, torch.Tensor] = {}
        self.shares: list[float] = []  # of the bytes of all experts, in each pass
        self._generator = torch.Generator().manual_seed(rows)

    def before(self) -> None:
        """Ahead of every pass: other tokens than those before, once both have had them."""
        if len(self.logits) != 1:
            assert not self.logits or torch.equal(*self.logits.values())
            self.logits = {}
            self.ids = torch.randint(3, WORDS, (self.rows, 1), generator=self._generator)

    def run(self, name: str) -> None:
        """A pass."""
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
@pytest.mark.parametrize("slots", [8, 32])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def bench_decoding(
    rows: int, slots: int, cold: bool, alternate: Alternate, folder: Path, table: Any,
    figure: Any, shape: dict[str, int],
) -> None:  # fmt: skip
    """Seconds and bytes of a pass, as shares of those by whole layers."""
    slots = min(slots, shape["experts"])
    with ExitStack() as streamers:
        ways = Ways(folder, slots, rows, streamers)
        calls = {name: (lambda name=name: ways.run(name)) for name in ("whole", "experts")}

        def before() -> None:
            ways.before()
            if cold:
                drop(folder)

        rounds = shape["rounds"]
        seconds = alternate(calls, rounds, warmup=8, before=before)
        share = mean(ways.shares[-rounds:])
        spent = {name: median(each) for name, each in seconds.items()}
    name = f"rows {rows}, slots {slots}"
    few, many, time = TARGETS[rows]
    figure(f"{name}: bytes / whole layers", share, "x", few if slots == 8 else many)
    times = ratio(seconds, "experts", "whole")
    figure(f"{name}, {'cold' if cold else 'warm'}: time / whole layers", times, "x",
           time if cold or rows == 64 else None)  # fmt: skip
    row = {"rows": str(rows), "slots": str(slots), "file cache": "empty" if cold else "full"}
    row |= {"bytes": f"{share:.3f}x", "ms whole": f"{1e3 * spent['whole']:.0f}"}
    row |= {"ms experts": f"{1e3 * spent['experts']:.0f}", "faster": f"{1 / times:.2f}x"}
    table(TITLE, row)
