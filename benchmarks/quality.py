"""What a model loses when its cache keeps less: `python -m benchmarks.quality --model FOLDER`.

Every way of keeping K and V reads the same texts (`probes.py`) through this library's cache, a few
tokens a step as in decoding, each token given and predicted. A table tells, beside the full cache:

- perplexity of two running texts, and how much worse it is;
- KL: mean KL(full || this) of the distributions predicted there, in nats. Sharper than perplexity,
  in which errors partly cancel;
- recall: perplexity of a passage when it comes again. Running text cannot rank what forgets;
- needles: mean log-probability, in nats, of digits hidden in the text and asked for behind it, and
  the share of them that the model finds most likely.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

# A model is read from a folder; no hub is asked. Said before transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.texts.probes import NAMES, SHA256, WARM, Probe, probes
from pagedkv.batch.packed import PackedModel
from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import KV_FORMATS
from pagedkv.hf.model import cache_config

FORMATS = tuple(KV_FORMATS)


@dataclass(frozen=True)
class Way:
    """One way of keeping K and V.

    Attributes:
        name: its row in the tables.
        fields: of `CacheConfig`.
        runner: reads the texts; takes the model and `cache`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    runner: Callable[..., PackedModel] = PackedModel


FULL = Way("full")


@dataclass
class Reading:
    """What a model thought of each token `[n]` of a probe; the first has no prediction: NaN.

    Attributes:
        nats: -log p of the token.
        rank: 1 if nothing was more likely than the token.
        kl: KL(full || this) of the distribution it was predicted from; None if not asked for.
    """

    probe: Probe
    nats: Tensor
    rank: Tensor
    kl: Tensor | None = None

    @property
    def perplexity(self) -> float:
        return self.nats[self.probe.scored].mean().exp().item()

    def perplexity_since(self, token: int) -> float:
        """Of a running text from this token on."""
        return self.nats[token:].mean().exp().item()

    @property
    def mean_kl(self) -> float:
        assert self.kl is not None, "only running texts are compared with the full cache"
        return self.kl[self.probe.scored].mean().item()

    @property
    def found(self) -> tuple[float, float]:
        """Mean log-probability of the tokens that count, and the share of them ranked first."""
        scored = self.probe.scored
        return -self.nats[scored].mean().item(), (self.rank[scored] == 1).float().mean().item()


class Quality:
    """A model, the probes in its tokens, and what the full cache made of them.

    Args:
        model, tokenizer: a decoder that packed rows can be computed with.
        tokens: length of each text.
        names: which probes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokens: int = 1024,
        names: Iterable[str] = NAMES,
    ) -> None:
        self.model, self.tokens = model, tokens
        self.probes = probes(tokenizer, tokens, names)
        self._full: dict[str, Tensor] = {}  # log-probabilities [n, vocab] of running texts

    @cached_property
    def full(self) -> dict[str, Reading]:
        """All probes with everything kept as it is."""
        running = {name: [] for name, probe in self.probes.items() if probe.running}
        readings = self._read(FULL, list(self.probes.values()), running)
        self._full = {name: torch.cat(parts) for name, parts in running.items()}
        return readings

    def read(self, way: Way, names: Iterable[str] | None = None) -> dict[str, Reading]:
        """Reads probes, default all, as rows of one batch."""
        assert self.full
        return self._read(way, [self.probes[name] for name in names or self.probes])

    @torch.inference_mode()
    def _read(
        self, way: Way, asked: list[Probe], keep: dict[str, list[Tensor]] | None = None
    ) -> dict[str, Reading]:
        empty = [torch.full((len(probe.ids),), torch.nan) for probe in asked]
        readings = {
            probe.name: Reading(probe, blank.clone(), blank.clone())
            for probe, blank in zip(asked, empty)
        }
        for name, full in self._full.items():
            if name in readings:
                readings[name].kl = torch.full((len(full),), torch.nan)
        for name, begin, logits in logits_of(self.model, way, asked):
            log_p, reading = logits.float().log_softmax(-1), readings[name]
            if keep and name in keep:
                keep[name].append(log_p.half())
            if reading.kl is not None:
                # What rounding to float16 did is normalised away: a distance of 0 stays 0.
                full = self._full[name][begin : begin + len(log_p)].float().log_softmax(-1)
                kl = (full.exp() * (full - log_p)).sum(-1)
                reading.kl[begin + 1 : begin + 1 + len(kl)] = kl[: len(reading.kl) - begin - 1]
            told = reading.probe.ids[begin + 1 : begin + 1 + len(log_p)]
            chosen = log_p[: len(told)].gather(1, told[:, None])
            here = slice(begin + 1, begin + 1 + len(told))
            reading.nats[here] = -chosen[:, 0]
            reading.rank[here] = 1.0 + (log_p[: len(told)] > chosen).sum(-1)
        return readings


def logits_of(model: Any, way: Way, texts: list[Probe]) -> Iterator[tuple[str, int, Tensor]]:
    """Reads texts as rows of one batch through a cache that keeps them in some way.

    Yields:
        Name of a text, index of its first token in this step, logits `[tokens, vocab]`.
    """
    longest = max(len(text.ids) for text in texts)
    fields = {"max_sequences": len(texts), **way.fields}
    room = len(texts) * (longest + 64)  # and what is begun of a page
    kv = PagedKVCache(cache_config(model, room, **fields), device=model.device)
    runner = way.runner(model, cache=kv)
    try:
        # A page, or half of one where whole pages are coded: what reads a page while it is filled
        # shall see it as decoding does.
        chunk = max(1, kv.config.page_size // (2 if kv.config.staged else 1))
        # Texts that begin alike would share pages, and shared pages are never evicted.
        seqs = [kv.add(salt=text.name.encode()) for text in texts]
        # Only decoding queries choose what they read: nothing counts that came in larger steps.
        alone = min(int(text.scored[0]) for text in texts) if kv.config.read_tokens else longest
        ends = [*range(0, alone, chunk), *range(alone, longest + 1)]
        for begin, end in itertools.pairwise(ends):
            parts = [text.ids[begin:end] for text in texts]
            left = [i for i, part in enumerate(parts) if len(part)]
            fed = [parts[i].numpy() for i in left]
            with kv.step([seqs[i] for i in left], tokens=fed) as step:
                rows = torch.arange(step.num_tokens, device=model.device)
                logits = runner.logits(step, rows).cpu()
            for i, own in zip(left, logits.split([len(part) for part in fed])):
                yield texts[i].name, begin, own
    finally:
        runner.close()


# ---------------------------------------------------------------------- from the command line


def way_of(
    format: str = "dense",
    policy: str = "none",
    budget: float = 1,
    read: float = 1,
    tokens: int = 1024,
    page_size: int | None = None,
) -> Way:
    """A row of the table.

    Args:
        format: one of `FORMATS`, or two for K and V as in `int8/int4`.
        policy: what is forgotten first, or `none`.
        budget, read: shares of so many tokens that are kept, and that a decoding query reads, but
            never less than four pages.
    """
    fields: dict[str, Any] = {}
    name, size = [format], 32 if "int4" in format else 16
    if page_size is not None:
        fields["page_size"] = size = page_size
        name.append(f"pages of {page_size}")
    if format != "dense":
        fields["kv_format"] = tuple(format.split("/")) if "/" in format else format
    if policy != "none":
        fields |= {"retention": policy, "budget": int(budget * tokens) // size * size}
        name.append(f"{policy} {budget:.0%}")
    if read < 1:
        fields["read_tokens"] = max(int(read * tokens) // size, 4) * size
        name.append(f"read {read:.0%}")
    return Way(", ".join(name), fields)


def rows(quality: Quality, ways: Iterable[Way]) -> Iterator[dict[str, str]]:
    """Cells by column of one way after the other, the full cache first, as they are found."""
    for way in itertools.chain([FULL], ways):
        row = {"kept": way.name}
        for name, reading in (quality.full if way is FULL else quality.read(way)).items():
            row |= _cells(reading, quality.full[name])
        yield row


def _cells(reading: Reading, full: Reading) -> dict[str, str]:
    name, late = reading.probe.name, len(reading.nats) // 2
    if name == "needles":
        found, share = reading.found
        return {"needles": f"{found:.2f}", "found": f"{share:.0%}"}
    if not reading.probe.running:
        return {name: f"{reading.perplexity:.2f}"}
    whole = reading.perplexity, full.perplexity
    second = reading.perplexity_since(late), full.perplexity_since(late)
    show = [f"{a:.3f}" if reading is full else f"{a / b - 1:+.1%}" for a, b in (whole, second)]
    kl = "0" if reading is full else f"{reading.mean_kl:.4f}"
    return {name: show[0], f"{name}, 2nd half": show[1], f"{name}, KL": kl}


def heading(quality: Quality) -> str:
    """What a table was measured on: model, texts, versions."""
    model = quality.model
    whole = AutoConfig.from_pretrained(model.config.name_or_path).num_hidden_layers
    layers = model.config.num_hidden_layers
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    texts = ", ".join(f"{name} {digest[:12]}" for name, digest in SHA256.items())
    return (
        f"{Path(model.config.name_or_path).name}"
        f"{'' if layers == whole else f', {layers} of {whole} layers'}: {model.config.model_type}, "
        f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}; {packages}; "
        f"texts of {quality.tokens} tokens, the first {WARM} not counted; "
        f"sha256 {texts}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="a folder of transformers, or its id")
    add("--format", nargs="+", default=["dense"], metavar="NAME",
        help=f"any of {', '.join(FORMATS)}, or K/V as in int8/int4")  # fmt: skip
    add("--policy", nargs="+", default=["none"], metavar="NAME", help="what is forgotten first")
    add("--budget", nargs="+", type=float, default=[0.25], metavar="SHARE",
        help="of the text that a policy keeps")  # fmt: skip
    add("--page-size", type=int, metavar="TOKENS", help="default 16, or 32 with int4")
    add("--read", type=float, default=1.0, metavar="SHARE", help="of the text that a step reads")
    add("--tokens", type=int, default=1024, help="length of each text")
    add("--probes", nargs="+", default=NAMES, choices=NAMES, help="what is read; default all")
    add("--layers", type=int, help="use so many of the model's layers, for a quick look")
    add("--dtype", default="float32", help="the model is computed in; default float32")
    add("--device", default="cpu")
    asked = parser.parse_args(arguments)

    from benchmarks.smollm2 import load

    changes = {"num_hidden_layers": asked.layers} if asked.layers else {}
    model, tokenizer = load(asked.model, getattr(torch, asked.dtype), **changes)
    quality = Quality(model.to(asked.device), tokenizer, asked.tokens, asked.probes)
    ways = []
    for format, policy in itertools.product(asked.format, asked.policy):
        for budget in asked.budget if policy != "none" else [1.0]:
            way = way_of(format, policy, budget, asked.read, asked.tokens, asked.page_size)
            if way.fields:
                ways.append(way)
    print(heading(quality) + "\n")
    for i, row in enumerate(rows(quality, ways)):
        if not i:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(row.values()) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
