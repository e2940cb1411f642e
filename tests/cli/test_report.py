"""The summary: its numbers, its map of the pages, and that it can be read anywhere."""

import io
import random

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console

from pagedkv.batch.results import GenerationStats
from pagedkv.cli.report import CELLS, STATES, page_map, summary
from pagedkv.pages.stats import CacheStats

PAGE = 16
SIGNS = {sign: state for state, (_, sign) in STATES.items()}


def pages(live=0, shared=0, cached=0, free=0, wasted_slots=0, **others) -> CacheStats:
    fields = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
    total = live + cached + free
    counts = {"live": live, "shared": shared, "cached": cached, "free": free}
    return CacheStats(**fields | counts | {"pages": total, "wasted_slots": wasted_slots} | others)


def cells(stats: CacheStats) -> dict[str, int]:
    """Cells of each state in the map."""
    _, *lines, _, _ = page_map(stats, PAGE).plain.split("\n")
    drawn = "".join(line.strip() for line in lines)
    return {state: drawn.count(sign) for sign, state in SIGNS.items()}


def legend(stats: CacheStats) -> dict[str, int]:
    words = " ".join(page_map(stats, PAGE).plain.split("\n")[-2:]).split()
    assert [SIGNS[sign] for sign in words[::3]] == words[1::3] == list(STATES)
    return dict(zip(words[1::3], (int(number.replace(",", "")) for number in words[2::3])))


def test_a_small_cache_has_a_cell_for_each_page():
    stats = pages(live=9, shared=2, cached=4, free=7, wasted_slots=3 * PAGE)
    expected = {"live": 4, "shared": 2, "wasted": 3, "cached": 4, "free": 7}
    assert cells(stats) == legend(stats) == expected


def test_cells_and_pages_add_up_and_every_state_with_pages_has_a_cell():
    random.seed(0)
    for _ in range(500):
        most = random.choice([1, 2, 5, 100, 10_000, 1_000_000])
        live, cached, free = (random.choice([0, random.randint(0, most)]) for _ in range(3))
        shared = random.choice([0, live, random.randint(0, live)])
        wasted_slots = random.choice([0, random.randint(0, live * (PAGE - 1))])
        stats = pages(live + 1, shared, cached, free, wasted_slots)
        drawn, said = cells(stats), legend(stats)
        assert sum(drawn.values()) == min(CELLS, stats.pages)
        assert sum(said.values()) == stats.pages
        for state, number in said.items():
            assert number >= 0
            assert (drawn[state] > 0) == (number > 0), (state, said, drawn)


def printed(stats: GenerationStats, **console) -> str:
    file = io.StringIO()
    Console(file=file, width=80, **console).print(summary(stats, 1234567, PAGE))
    return file.getvalue()


@pytest.fixture
def large():
    peak = pages(
        live=51_200, shared=20_000, cached=12_000, free=12_345, wasted_slots=10_000 * PAGE,
        live_bytes=123_456 << 20,
    )  # fmt: skip
    numbers = 98765.4, 9_999_999, 10**9, 10**9, 10**10, 10**10, 123_456, peak
    return GenerationStats(*numbers, drafted=10**10, accepted=10**9)


def test_drafts_are_told_only_where_there_were_any(large):
    assert "of 10,000,000,000 drafted tokens were right" in printed(large)
    large.drafted = large.accepted = 0
    assert "drafted" not in printed(large)


def test_it_fits_80_columns_without_a_line_being_broken(large):
    lines = printed(large).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.strip()[:1] in SIGNS for line in lines) == CELLS // 64 + 2


def test_it_is_understood_without_colour(large):
    plain = printed(large)
    assert "\x1b" not in plain
    said = " ".join(plain.split())
    for words in (
        "10,125.0 tokens a second",
        "1,000,000,000 tokens generated for 1,234,567 rows in 98765.4 s",
        "10,000,000,000 tokens reused",
        "123,456 rows put back because pages ran short",
        "75,545 pages of 16 tokens at their fullest: 51,200 in use, 123,456.0 MiB",
        *(f"{sign} {state}" for state, (_, sign) in STATES.items()),
    ):
        assert words in said
    assert "\x1b" in printed(large, force_terminal=True)


def test_a_run_that_computed_nothing_is_summed_up_as_well():
    assert printed(GenerationStats()).split()[:4] == ["0.0", "tokens", "a", "second"]
    assert "pages of" not in printed(GenerationStats(peak=pages(free=5)))
