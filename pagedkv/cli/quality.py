"""`pagedkv quality`: measures what a model loses when its cache keeps less."""

from __future__ import annotations

import importlib.util
import sys
from math import inf
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from pagedkv.names import POLICIES as BORROWED
from pagedkv.names import meant

from .errors import UsageError, require_apart
from .option import MODEL, Given, Panel, takes
from .options import DTYPES_SAID, dtype_of, kv_formats_of
from .plan import KV_HELP, PAGE_SIZE_HELP
from .screen import Screen
from .start import console, running
from .text_files import UNDECODED, text_of

TITLES = "Texts", "What is tried", "Computation", "Output"
TEXTS, TRIED, COMPUTE, OUTPUT = map(Panel, TITLES)
EXIT_CODES = (
    "Exit codes: 0 everything was measured, 1 it had to stop, 2 nothing was run because of what "
    "was given, 130 interrupted by Ctrl-C and 143 by SIGTERM."
)
PICTURES = (".png", ".pdf", ".svg")
# The names of `pagedkv.retention.POLICIES`, which brings numpy along: --help does not wait for it.
POLICIES = ("fifo", "sinks", "lru", "importance", "keydiff", "semantic")
# Tried for --at-most alone: formats, and policies that keep a share, alone and with each format.
WISHED = ("int8", "int8,int4", "int4"), ("keydiff:0.75", "keydiff:0.5")
SEVERAL = ("--kv-format", "--retention", "--read-tokens", "--text")


class Several(TyperCommand):
    """A command whose options may take several values: `--kv-format int8 int4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeats such an option in front of each of its values."""
        given: list[str] = []
        option = None
        for i, word in enumerate(args):
            if word == "--":
                return super().parse_args(ctx, given + args[i:])
            if word.startswith("-") and word != "-":
                option, further = (word if word in SEVERAL else None), False
            elif option:
                given += [option] if further else []
                further = True
            given.append(word)
        return super().parse_args(ctx, given)


QUALITY_OPTIONS = (
    MODEL,
    TEXTS(
        "--text FILE...",
        list[Path] | None,
        "Texts in UTF-8 that the model reads. [dim]Default: pieces of a novel and of a "
        "manual, which come with pagedkv.[/dim]",
    ),
    TEXTS("--length -l TOKENS", int, "How much of each text is read.", 1024),
    TRIED("--kv-format FORMAT...", list[str] | None, KV_HELP),
    TRIED(
        "--retention POLICY:KEEP...",
        list[str] | None,
        f"Which policy gives pages up ({', '.join(POLICIES)}), and how much it keeps: "
        "keydiff:0.5 keeps half of the text, keydiff:2048 so many tokens.",
    ),
    TRIED(
        "--read-tokens TOKENS...",
        list[str] | None,
        "How much a new token attends to: 0.25 is a quarter of the text, 2048 is so many tokens.",
    ),
    TRIED("--combine", bool, "Try every format with every policy and reading as well."),
    TRIED("--page-size TOKENS", int | None, PAGE_SIZE_HELP, min=1),
    COMPUTE("--dtype DTYPE", str, f"What the model computes in: {DTYPES_SAID}.", "auto"),
    COMPUTE("--device DEVICE", str, "auto, or for example cpu, cuda, cuda:1.", "auto"),
    TRIED(
        "--at-most NATS",
        float | None,
        "Find the smallest cache that stays below this KL on texts like these, read in windows "
        "of --length tokens. [dim]Readers hardly ever notice 0.01.[/dim]",
    ),
    OUTPUT("--plot PICTURE", Path | None, "Draw the figures into a .png, .pdf or .svg."),
    OUTPUT("--json FILE", Path | None, "Write all figures as JSON."),
)


@takes(*QUALITY_OPTIONS, epilog=EXIT_CODES, cls=Several)
def quality(given: Given) -> None:
    """Measure what a model loses when its cache keeps less, and say what to use.

    MODEL comes first, because some options take several values.
    If nothing is asked for, int8 and int4 are tried, and with --at-most some formats and shares.

    For example:

    pagedkv quality MODEL --text mine.txt --retention keydiff:0.5 sinks:512

    pagedkv quality MODEL --text mine.txt --at-most 0.01
    """
    with running() as command:
        try:
            command.code = _measured(given)
        except KeyboardInterrupt:
            console.print("interrupted; nothing was measured to its end")
            raise


def _measured(given: Given) -> int:
    """Checks what is asked, and measures it; returns the command's exit code."""
    if given.at_most is not None and not 0 < given.at_most < inf:
        raise UsageError(f"--at-most: expected nats above 0, got {given.at_most:g}")
    if given.at_most is not None and not (given.kv_format or given.retention or given.read_tokens):
        given.kv_format, given.retention, given.combine = [*WISHED[0]], [*WISHED[1]], True
    asked = combinations(given.kv_format, given.retention, given.read_tokens, given.combine)
    texts = read_texts(given.text) if given.text else None
    _require_outputs(given.plot, given.json, given.text or [])
    given.dtype = dtype_of(given.dtype)
    with Screen(console) as screen:
        screen.doing("loading torch and transformers")
        from .quality_run import run

        return run(given, asked, texts, screen)


def combinations(
    formats: list[str] | None, policies: list[str] | None, reads: list[str] | None, combine: bool
) -> list[dict[str, Any]]:
    """Returns arguments of `variant` for each way of keeping that was asked for, each once."""
    coded: list[dict[str, Any]] = [{"kv_format": kv_formats_of(each)} for each in formats or []]
    changed = [_policy(each) for each in policies or []]
    changed += [{"read": _amount("--read-tokens", each, each)} for each in reads or []]
    if not coded and not changed:
        coded = [{"kv_format": kv_formats_of(each)} for each in ("int8", "int4")]
    both = [one | other for one in coded for other in changed] if combine else []
    found: list[dict[str, Any]] = []
    for each in coded + changed + both:
        if each not in found:
            found.append(each)
    return found


def read_texts(paths: list[Path]) -> dict[str, str]:
    """The texts of files by their names, or by their paths where names are alike."""
    alike = len({path.name for path in paths}) < len(paths)
    found: dict[str, str] = {}
    for path in paths:
        name = str(path) if alike else path.name
        if name in found:
            raise UsageError(f"--text: expected each file once, got {path} twice")
        found[name] = text = text_of(str(path), "--text")
        if byte := UNDECODED.search(text):
            raise UsageError(
                f"--text: expected text in UTF-8, got byte {ord(byte[0]) & 0xFF:#04x} at "
                f"{byte.start()} of {path}; `iconv -t utf-8` converts other encodings"
            )
        if not found[name].strip():
            raise UsageError(f"--text: expected some text, {path} has none")
    return found


def _policy(text: str) -> dict[str, Any]:
    name, colon, amount = text.partition(":")
    if name not in POLICIES:
        known = f"expected one of {', '.join(POLICIES)}, got {name}"
        near = meant(name, POLICIES, BORROWED)
        raise UsageError(f"--retention: {known}{near}")
    if not colon:
        raise UsageError(
            f"--retention: expected with {name} how much stays: {name}:0.5 for half of what was "
            f"seen, {name}:512 for a budget of 512 tokens"
        )
    found = _amount("--retention", amount, text)
    return {"retention": name, "keep" if found < 1 else "budget": found}


def _amount(option: str, text: str, given: str) -> float:
    """A share of the text, or a number of tokens."""
    try:
        found = float(text) if "." in text else int(text)
    except ValueError:
        found = 0
    if found <= 0 or found == 1 or (found > 1 and isinstance(found, float)):
        raise UsageError(
            f"{option}: expected a share between 0 and 1 or a number of tokens, got {given}"
        )
    return found


def _require_outputs(plot: Path | None, as_json: Path | None, texts: list[Path]) -> None:
    read = [("--text", path) for path in texts]
    require_apart("--plot", plot, *read)
    require_apart("--json", as_json, ("--plot", plot), *read)
    if sys.stdout is None and as_json is None:
        raise UsageError("standard output is closed; the table needs it, or --json FILE")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot: expected a name that ends in {', '.join(PICTURES)}, got {plot}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot: needs matplotlib: pip install 'pagedkv[viz]'")
    for option, path in (("--plot", plot), ("--json", as_json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{option}: no folder {path.parent}")
