"""Runs `pagedkv quality`, and prints, draws and saves what was found."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from pagedkv.errors import PagedKVError
from pagedkv.quality import Measured, Promise, Quality, measure_quality, variant
from pagedkv.quality.measure import FORGETS, GOOD, LEAST_RECALL, VISIBLE
from pagedkv.quality.probes import probes
from pagedkv.quality.promise import DRAWS, ENOUGH, windows_of

from .errors import UsageError
from .loading import load, model_of, pick
from .option import Given
from .report import DONE, SOME_FAILED
from .rows import in_json
from .screen import Progress, Screen

STYLES = {GOOD: "green", VISIBLE: "yellow", FORGETS: "red"}


class Reading(Progress):
    """Progress of reading, counted in tokens of all texts and variants."""

    def __init__(self) -> None:
        super().__init__()
        self._done, self._total = 0, 1
        self.seconds = 0.0

    def tell(self, done: int, total: int) -> None:
        """Takes in how many tokens are read, and how many there are."""
        self._done, self._total = done, total
        self.seconds = self._clock() - self._begun

    @property
    def share(self) -> float:
        return self._done / self._total

    @property
    def passed(self) -> float:
        return self.seconds

    def done(self) -> list[str]:
        return [f"reading texts, {self.share:.0%}"]


def run(
    given: Given, asked: list[dict[str, Any]], texts: dict[str, str] | None, screen: Screen
) -> int:
    """Measures variants of a model's cache.

    Args:
        asked: arguments of `variant`.

    Returns:
        The command's exit code.

    Raises:
        UsageError: something given cannot be used; nothing was computed.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, length, at_most = given.model, given.length, given.at_most
    chosen = pick(given.device)
    screen.doing("reading the tokenizer")
    tokenizer = load(AutoTokenizer, name)
    screen.doing("encoding texts")
    try:
        found = probes(tokenizer, length, texts)
        if at_most is not None:
            windows_of(tokenizer, length, texts)
        longest = max(len(probe.ids) for probe in found.values() if probe.running)
        sizes = {"length": longest, "page_size": given.page_size}
        variants = [variant(**each, **sizes) for each in asked]
        for each in variants:
            _require_effect(each.name, each.fields, longest)
        screen.doing("loading the model")
        model = model_of(name, given.dtype, chosen)
        pace = Reading()
        screen.doing(pace)
        wish = {"length": length, "at_most": at_most}
        quality = measure_quality(model, tokenizer, variants, texts, **wish, tell=pace.tell)
    except (PagedKVError, ValueError, TypeError) as error:
        raise UsageError(_words(str(error))) from error
    except (RuntimeError, MemoryError) as error:
        screen.console.print(f"stopped: {type(error).__name__}: {error}", style="red")
        return SOME_FAILED
    screen.close()
    if sys.stdout is not None:
        show(quality, length, Console(highlight=False, markup=False, emoji=False))
    return _write(quality, given, pace.seconds, screen.console)


def show(quality: Quality, length: int, console: Console) -> None:
    """Prints a table, what its columns are, and what to use."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("")  # a narrow screen breaks names, never figures
    headings = ["bytes/\ntoken", "times\nfewer", "\nKL", "KL\n99 %", "same\ntoken", "\nrecall"]
    hidden = quality.full.needles is not None
    for heading in [*headings, *["\nneedles"] * hidden]:
        table.add_column(heading, justify="right", no_wrap=True)
    if quality.promise is not None:
        table.add_column("\nheld", justify="right", no_wrap=True)
    table.add_column("\nverdict", no_wrap=True)
    for each in (quality.full, *quality.variants):
        *cells, verdict = _cells(each, each is quality.full, hidden)
        table.add_row(*cells, *_held(quality.promise, each.name), verdict)
    never = ["never saw it", *[""] * 5, f"{quality.unseen:.2f}"]
    table.add_row(*never, style="dim")
    console.print(table)
    console.print(_caption(quality, length), style="dim")
    for sentence in quality.lengths:
        console.print(sentence)
    console.print(f"\n{quality.recommendation}", style="bold")


def _cells(measured: Measured, is_full: bool, hidden: bool) -> list[Any]:
    kl = [measured.worst_kl, max(measured.kl_p99.values())]
    cells: list[Any] = [
        measured.name,
        f"{measured.bytes_per_token:,.0f}",
        f"{measured.fewer:.2f}",
        *("0" if is_full else f"{each:.4f}" for each in kl),
        f"{min(measured.agreement.values()):.1%}",
        f"{measured.recall:.2f}",
    ]
    if hidden:
        cells.append(f"{measured.needles:.0%}")
    verdict = "" if is_full else measured.verdict
    return [*cells, Text(verdict, style=STYLES[measured.verdict] if verdict else "")]


def _held(promise: Promise | None, name: str) -> list[str]:
    if promise is None:
        return []
    return [f"{promise.held[name]:.1%}" if name in promise.held else ""]


def _caption(quality: Quality, length: int) -> str:
    """Says what was read, and what the columns mean."""
    lines = []
    for name, tokens in quality.tokens.items():
        whole = f", which is all of it: fewer than {length:,}" if tokens < length else ""
        lines.append(f"{name}: {tokens:,} tokens{whole}.")
    kind = "bfloat16" if quality.dtype == "float32" else quality.dtype
    lines = [
        " ".join(lines) + f" Computed in {quality.dtype}; bytes of K and V beside {kind}.",
        "KL: mean distance of predictions from the full cache's, in nats, and its 99th percentile; "
        "same token: how often the likeliest is the same; of the text that comes off worst.",
        "recall: perplexity of a passage that comes again.",
    ]
    if quality.full.needles is not None:
        lines[-1] += " needles: share of hidden digits that are found."
    if quality.full.recalled is None:
        lines.append("The full cache recalls nothing itself, so the verdict goes by KL alone.")
    if quality.dtype != "float32":
        lines.append(
            f"Rounding in {quality.dtype} is part of every figure; --kv-format dense measures it."
        )
    if (promise := quality.promise) is not None:
        lines.append(
            f"held: share of {DRAWS:,} draws in which the KL of texts like these is at most "
            f"{promise.at_most:g} nats. They are cut in windows of {length:,} tokens. Some of them "
            f"put in order, the closest first, what keeps its recall; {promise.windows} others, "
            "held out, judge it in this order, until one holds in fewer than "
            f"{ENOUGH:.0%} of the draws. A draw has as many of them, with replacement."
        )
    lines.append(
        f"good: KL below {quality.most_kl:g} nats and at least {LEAST_RECALL:.0%} of the recall; "
        "visible: answers differ now and then; loses recall: what was read is not found again."
    )
    return "\n".join(lines)


def _require_effect(name: str, fields: Mapping[str, Any], longest: int) -> None:
    for field, option in (("budget", "--retention"), ("read_tokens", "--read-tokens")):
        if fields.get(field, 0) >= longest:
            raise UsageError(
                f"{option}: {name} has no effect, the longest text has {longest:,} tokens; give "
                "less, or longer texts and a larger --length"
            )


def _words(error: str) -> str:
    """An error of the library in the words of the command."""
    if error.startswith("at_most:"):
        return error.replace("at_most", "--at-most").replace("smaller length", "smaller --length")
    return f"--{error}" if error.startswith(("length:", "page_size:")) else error


def _write(quality: Quality, given: Given, seconds: float, console: Console) -> int:
    """Writes the JSON and the picture that were asked for; returns the command's exit code."""
    name = given.model
    try:
        if path := given.json:
            found = {"model": name, "seconds": round(seconds, 1), **asdict(quality)}
            found |= {"recommendation": quality.recommendation}
            path.write_text(json.dumps(in_json(found), indent=2) + "\n", encoding="utf-8")
        if path := given.plot:
            from pagedkv.quality.picture import draw

            draw(quality, Path(name).resolve().name if Path(name).is_dir() else name, path)
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror or error}", style="red")
        return SOME_FAILED
    return DONE
