"""The summary: its numbers, its map of the pages, and that it can be read anywhere."""

import io
import random
import re
from dataclasses import replace

import pytest
from rich.console import Console

from pagedkv.batch.results import GenerationStats
from pagedkv.cli.report import LINES, STATES, WIDTH, page_map, summary
from pagedkv.pages.stats import CacheStats

PAGE = 16
SIGNS = {sign: state for state, (_, sign) in STATES.items()}


def pages(live=0, shared=0, cached=0, free=0, wasted_slots=0, **others) -> CacheStats:
    fields = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
    counts = {"live": live, "shared": shared, "cached": cached, "free": free, "unshared": live}
    sums = {"pages": live + cached + free, "wasted_slots": wasted_slots}
    return CacheStats(**fields | counts | sums | others)


def cells(stats: CacheStats) -> dict[str, int]:
    """Cells of each state in the map."""
    _, *lines, _, _ = page_map(stats, PAGE).plain.split("\n")
    drawn = "".join(line.strip() for line in lines)
    return {state: drawn.count(sign) for sign, state in SIGNS.items()}


def legend(stats: CacheStats) -> dict[str, int]:
    words = page_map(stats, PAGE).plain.split("\n")[-2]
    said = [re.search(rf"{sign} {state} ([\d,]+)", words)[1] for sign, state in SIGNS.items()]
    return dict(zip(STATES, (int(number.replace(",", "")) for number in said)))


def test_few_pages_have_a_cell_each():
    stats = pages(live=9, shared=2, cached=4, free=7, wasted_slots=3 * PAGE, unshared=15)
    expected = {"live": 4, "shared": 2, "wasted": 3, "saved by sharing": 6}
    assert cells(stats) == legend(stats) == expected
    assert "20 pages of 16 tokens at their fullest: 9 in use, 0.0 MiB\n" in (
        page_map(stats, PAGE).plain
    )
    assert page_map(stats, PAGE).plain.endswith("\n  not drawn: 4 cached, 7 free")


def test_the_map_is_no_wider_than_the_terminal(large):
    for width in (80, 40, 20, 3, 1):
        drawn = summary(large, 1, PAGE, width=width).renderables[-1].plain.split("\n")
        lines = [line for line in drawn if {*line.strip()} <= {*SIGNS}]
        assert [len(line) for line in lines] == [2 + max(16, min(WIDTH, width - 2))] * LINES


def test_words_about_the_map_are_broken_between_and_never_in_their_parts():
    stats = pages(live=146, shared=10, free=202, wasted_slots=60 * PAGE, unshared=272)
    stats = replace(stats, live_bytes=1027 * 2**20 // 10)
    narrow = page_map(stats, PAGE, 60).plain.split("\n")
    assert narrow[:2] == ["  348 pages of 16 tokens at their fullest:", "  146 in use, 102.7 MiB"]
    assert narrow[-3:-1] == ["  █ live 76  ▓ shared 10  ▒ wasted 60", "  · saved by sharing 126"]
    wide = page_map(stats, PAGE, 80).plain.split("\n")
    assert wide[0] == "  348 pages of 16 tokens at their fullest: 146 in use, 102.7 MiB"
    assert wide[-2] == "  █ live 76  ▓ shared 10  ▒ wasted 60  · saved by sharing 126"


def test_pages_that_nobody_owns_take_no_room_in_the_map():
    assert cells(pages(live=2, free=10**6, cached=10**6)) == cells(pages(live=2))


def test_cells_and_pages_add_up_and_every_state_with_pages_has_a_cell():
    random.seed(0)
    for _ in range(500):
        most = random.choice([1, 2, 5, 100, 10_000, 1_000_000])
        live, saved = (random.choice([0, random.randint(0, most)]) for _ in range(2))
        shared = random.choice([0, live, random.randint(0, live)])
        wasted_slots = random.choice([0, random.randint(0, live * (PAGE - 1))])
        stats = pages(live + 1, shared, 7, 9, wasted_slots, unshared=live + 1 + saved)
        drawn, said = cells(stats), legend(stats)
        every = live + 1 + saved
        assert sum(drawn.values()) == min(LINES * WIDTH, every)
        assert sum(said.values()) == every
        for state, number in said.items():
            assert number >= 0
            assert (drawn[state] > 0) == (number > 0), (state, said, drawn)


def test_what_sharing_saved_is_one_line_where_there_was_any():
    peak = pages(live=76, shared=16, live_bytes=53 << 20, unshared=208, unshared_bytes=146 << 20)
    said = " ".join(printed(GenerationStats(peak=peak)).split())
    found = "saved by sharing: 53.0 MiB in 76 pages, where rows apart need 146.0 MiB in 208"
    assert f"93.0 MiB {found}" in said
    assert "saved by sharing: " not in printed(GenerationStats(peak=pages(live=76, shared=0)))


def printed(stats: GenerationStats, **console) -> str:
    file = io.StringIO()
    Console(file=file, width=80, **console).print(summary(stats, 1234567, PAGE))
    return file.getvalue()


@pytest.fixture
def large():
    peak = pages(
        live=51_200, shared=20_000, cached=12_000, free=12_345, wasted_slots=10_000 * PAGE,
        live_bytes=123_456 << 20, unshared=10**7, unshared_bytes=24_123_456 << 20,
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
    assert sum(line.strip()[:1] in SIGNS for line in lines) == LINES + 1


def test_it_is_understood_without_colour(large):
    plain = printed(large)
    assert "\x1b" not in plain
    said = " ".join(plain.split())
    for words in (
        "10,125.0 tokens a second",
        "1,000,000,000 tokens generated for 1,234,567 rows in 98765.4 s",
        "10,000,000,000 tokens reused",
        "123,456 rows put back because pages ran short",
        "23,437.5 GiB saved by sharing: 120.6 GiB in 51,200 pages, "
        "where rows apart need 23,558.1 GiB in 10,000,000",
        "75,545 pages of 16 tokens at their fullest: 51,200 in use, 120.6 GiB",
        "not drawn: 12,000 cached, 12,345 free",
        *(f"{sign} {state}" for state, (_, sign) in STATES.items()),
    ):
        assert words in said
    assert "\x1b" in printed(large, force_terminal=True)


def test_a_run_that_computed_nothing_is_summed_up_as_well():
    assert printed(GenerationStats()).split()[:4] == ["0.0", "tokens", "a", "second"]
    assert "pages of" not in printed(GenerationStats(peak=pages(free=5)))
