"""`print(streamer.stats())` shows what was moved and waited for, and nothing that was not."""

from pagedkv.stream import StreamStats

MOVED = StreamStats(
    passes=24, tokens=96, bytes_read=7_776_000_000, read_seconds=3.6, pass_seconds=12.5,
    stall_seconds=2.5, link_gbps=1.21934,
)  # fmt: skip


def test_sizes_have_one_unit_and_rates_three_digits():
    assert str(MOVED).splitlines() == [
        "passes                 24  4.0 tokens each",
        "read             7.776 GB  0.324 GB a pass, at 2.16 GB/s",
        "time              12.50 s  520.8 ms a pass",
        "  computing       10.00 s  416.7 ms a pass",
        "  waiting          2.50 s  104.2 ms a pass",
        "of the link           51%  of 1.22 GB/s",
    ]


def test_what_did_not_happen_has_no_row():
    assert len(str(StreamStats()).splitlines()) == 1
    both = StreamStats(passes=2, bytes_read=10**9, bytes_copied=10**9, cold_bytes=10**8)
    names = [line[:13].strip() for line in str(both).splitlines()]
    assert names == ["passes", "read", "from disk", "copied"]
