"""The statistics of a call, as they are printed."""

from dataclasses import fields

from pagedkv.batch.results import GenerationStats
from pagedkv.pages.stats import CacheStats

NOTHING = dict.fromkeys((field.name for field in fields(CacheStats)), 0)
PEAK = CacheStats(
    **NOTHING
    | {"pages": 329, "live": 76, "live_bytes": 53 << 20, "unshared": 208}
    | {"unshared_bytes": 146 << 20}
)


def test_they_are_a_few_lines():
    stats = GenerationStats(6.7, 26, 900, 1377, 1122, 3848, peak=PEAK)
    assert str(stats).splitlines() == [
        "1,377 tokens generated in 6.7 s, 205.5 a second",
        "1,122 tokens computed in 26 steps, 3,848 reused",
        "76 of 329 pages, 53.0 MiB in use at their fullest; without sharing 208 pages, 146.0 MiB",
    ]


def test_what_did_not_happen_is_not_told():
    assert str(GenerationStats()).splitlines() == [
        "0 tokens generated in 0.0 s, 0.0 a second",
        "0 tokens computed in 0 steps, 0 reused",
    ]
    happened = {
        "preemptions": 3,
        "offloaded": 2,
        "drafted": 10,
        "accepted": 4,
        "vision_forwards": 5,
    }
    assert str(GenerationStats(**happened)).splitlines()[2:] == [
        "3 rows put back because pages ran short, 2 of them to host memory",
        "4 of 10 drafted tokens were right",
        "5 times images or audio went through the model",
    ]
    assert str(GenerationStats(preemptions=3)).endswith("ran short")
