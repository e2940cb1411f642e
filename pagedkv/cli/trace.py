"""`pagedkv trace`: follows and draws what `--trace` recorded."""

from __future__ import annotations

from pathlib import Path

import typer

from pagedkv.errors import PagedKVError

from .errors import refusing, require_apart
from .option import PLAIN, REQUIRED, Given, Panel, argument, takes

DRAWN = Panel("Pictures")
EXIT_CODES = "Exit codes: 0 done, 2 the file cannot be read, or does not add up."


@takes(
    argument(
        "FILE",
        Path,
        "A recording: what generate --trace wrote, or in Python trace=.",
        REQUIRED,
    ),
    DRAWN(
        "--html FILE",
        Path | None,
        "Write a page for a browser that shows the life of every page.",
    ),
    DRAWN("--chrome FILE", Path | None, "Write a timeline in JSON, for ui.perfetto.dev."),
    PLAIN("--check", bool, "Verify after every event that each page has its owners."),
    epilog=EXIT_CODES,
)
def trace(given: Given) -> None:
    """Follow a recording of a cache's pages: print its totals, and draw it.

    For example:

    pagedkv trace answers.trace --html answers.html
    """
    from pagedkv.trace.chrome import chrome as timeline
    from pagedkv.trace.history import history_of
    from pagedkv.trace.page import page, totals
    from pagedkv.trace.read import Trace

    file, html, chrome = given.file, given.html, given.chrome
    with refusing(PagedKVError, OSError):
        require_apart("--html", html, ("FILE", file))
        require_apart("--chrome", chrome, ("FILE", file), ("--html", html))
        recorded = Trace(file)
        history = history_of(recorded, given.check)
        if html is not None:
            html.write_text(page(history), encoding="utf-8")
        if chrome is not None:
            chrome.write_text(timeline(history), encoding="utf-8")
    found = totals(history)
    typer.echo(
        f"{found['steps']:,} steps, {found['sequences']:,} sequences, {found['tokens']:,} tokens "
        f"in {found['seconds']:.1f} s; at most {found['peak']:,} of {found['pages']:,} pages live "
        f"(step {found['peak_step']:,}); sharing spared up to {found['spared'] / 2**20:.1f} MiB"
    )
    if recorded.torn:
        typer.echo("the last line is cut off: the process was killed while it wrote it", err=True)
    for path in filter(None, (html, chrome)):
        typer.echo(f"wrote {path}, {path.stat().st_size / 1024:,.0f} KiB")
