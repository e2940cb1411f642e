"""The report at the end of a run: an exit code, a table, a map of the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # they bring torch along, for which --help does not wait
    from pagedkv.batch.results import GenerationStats
    from pagedkv.pages.stats import CacheStats

DONE, SOME_FAILED, USAGE, BAD_PROMPTS, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
EXIT_CODES = (
    "Exit codes: 0 every row finished, 1 some rows ended in an error or the run had to stop (what "
    "was finished is kept; running it again computes the rest), 2 nothing was run because of what "
    "was given, 3 every row finished, but some prompts are bad (empty or too long, for example; "
    "running it again changes nothing), 130 interrupted by Ctrl-C and 143 by SIGTERM (what was "
    "finished is kept)."
)
LINES, WIDTH, LEAST = 3, 64, 16  # lines and columns of the map, and its fewest columns
COLUMNS = 80  # width of a terminal that does not say it
# State, colour, and a sign that tells them apart without colour.
STATES = {
    "live": ("green", "█"),
    "shared": ("cyan", "▓"),
    "wasted": ("red", "▒"),
    "saved by sharing": ("bright_black", "·"),
}


def summary(
    stats: GenerationStats,
    rows: int,
    page_size: int,
    bytes_per_state: int = 0,
    width: int = COLUMNS,
    from_store: int = 0,
    cut: int = 0,
) -> Group:
    """Speed, tokens computed and reused, and a map of the pages when most were in use.

    Args:
        from_store: tokens that a prefix store brought.
        cut: rows that ended at their limit.
        width: columns of the terminal.
    """
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", style="bold")
    done, verb = (stats.scored, "scored") if stats.scored else (stats.new_tokens, "generated")
    speed = done / stats.seconds if stats.seconds else 0.0
    lines = [
        (f"{speed:,.1f}", "tokens a second"),
        (f"{done:,}", f"tokens {verb} for {rows:,} rows in {stats.seconds:.1f} s"),
        (f"{stats.computed:,}", f"tokens computed in {stats.steps:,} steps"),
        (f"{stats.reused:,}", "tokens reused: found as a prefix, or shared by a fork"),
    ]
    if cut:
        lines.append((f"{cut:,}", "rows cut at their limit: --max-new-tokens"))
    if from_store:
        lines.append((f"{from_store:,}", "tokens from the prefix store"))
    if (peak := stats.peak) is not None and peak.unshared > peak.live:
        saved = _size(peak.unshared_bytes - peak.live_bytes)
        need = f"{_size(peak.live_bytes)} in {peak.live:,} pages"
        without = f"{_size(peak.unshared_bytes)} in {peak.unshared:,}"
        lines.append((saved, f"saved by sharing: {need}, where rows apart need {without}"))
    if stats.preemptions:
        lines.append((f"{stats.preemptions:,}", "rows put back because pages ran short"))
    if stats.drafted:
        lines.append((f"{stats.accepted:,}", f"of {stats.drafts}"))
    for line in lines:
        table.add_row(*line)
    parts: list[Table | Text] = [Text(), table]
    if peak is not None and peak.live:
        parts += [Text(), page_map(peak, page_size, width)]
        if states := peak.states:
            size = _size(states * bytes_per_state)
            parts.append(Text(f"  and recurrent states: {states:,} in use, {size}"))
    return Group(*parts)


def page_map(stats: CacheStats, page_size: int, columns: int = COLUMNS) -> Text:
    """Cells in proportion to the pages of each state, and a legend.

    Empty slots of live pages are drawn as pages of their own, `wasted`, and so are the pages that
    sharing spares. Cached and free pages are only counted, because they would fill most maps.
    """
    wasted = min(round(stats.wasted_slots / page_size), stats.live - stats.shared)
    pages = {
        "live": stats.live - stats.shared - wasted,
        "shared": stats.shared,
        "wasted": wasted,
        "saved by sharing": stats.unshared - stats.live,
    }
    text = Text()
    pool = Text(f"{stats.pages:,} pages of {page_size} tokens at their fullest:")
    _append(text, [pool, Text(f"{stats.live:,} in use, {_size(stats.live_bytes)}")], " ", columns)
    text.append("\n").append(drawn(pages, columns))
    text.append(f"\n  not drawn: {stats.cached:,} cached, {stats.free:,} free")
    return text


def drawn(pages: dict[str, int], columns: int = COLUMNS) -> Text:
    """Cells in proportion to the pages of some states, and a legend."""
    width = max(LEAST, min(WIDTH, columns - 2))
    cells = _proportional(pages, min(LINES * width, sum(pages.values())))
    text, column = Text("  "), 0
    for state, count in cells.items():
        colour, sign = STATES[state]
        for _ in range(count):
            if column == width:
                text.append("\n  ")
                column = 0
            text.append(sign, style=colour)
            column += 1
    text.append("\n")
    legend = [
        Text.assemble((STATES[state][1], STATES[state][0]), f" {state} {count:,}")
        for state, count in pages.items()
    ]
    _append(text, legend, "  ", columns)
    return text


def _append(text: Text, parts: list[Text], between: str, columns: int) -> None:
    """Puts parts beside each other, indented by two; one that does not fit begins a line."""
    end = 0
    for part in parts:
        before = between if end else "  "
        if end and end + len(before) + len(part) > columns:
            text.append("\n")
            end, before = 0, "  "
        text.append(before).append(part)
        end += len(before) + len(part)


def _proportional(pages: dict[str, int], cells: int) -> dict[str, int]:
    """Shares out the cells; a state that has pages gets at least one."""
    total = sum(pages.values()) or 1
    shares = {state: max(n > 0, round(n * cells / total)) for state, n in pages.items()}
    largest = max(shares, key=lambda state: shares[state])
    shares[largest] += cells - sum(shares.values())
    return {state: int(share) for state, share in shares.items()}


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
