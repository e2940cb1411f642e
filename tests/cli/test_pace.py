"""The time left of a job, told while its rows run: jobs are replayed with a clock of their own."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.batch.forecast import Forecast
from pagedkv.batch.results import GenerationStats, Result, Running
from pagedkv.cli.pace import NEAR, Pace
from tests.effort import each_value

AT_ONCE, STEP_TOKENS = 256, 1024
COSTS = {"card": (0.05, 5e-5), "laptop": (0.3, 0.03)}  # seconds of a step, and of each token


class Replay:
    """A job whose rows end at given lengths, and the pace that is told of it.

    Args:
        lengths: of each row, in the order in which they join.
        limit: of every row; one that reaches it did not end by itself.
        prefix: tokens that all prompts share, `own` those that each has behind them.
        unread: whether nobody knows how long prompts are.
    """

    def __init__(self, lengths, limit, cost, prefix=0, own=30, samples=1, unread=False) -> None:
        self.lengths, self.limit, self.cost, self.samples = lengths, limit, cost, samples
        prompts = len(lengths) // samples
        self.prompts = [prefix + own] + [own] * (prompts - 1)
        self.stats, self.now = GenerationStats(), 100.0
        self.rows, self.waiting = [], [(i, k) for i in range(prompts) for k in range(samples)]
        known = [None] * prompts if unread else self.prompts
        forecast = Forecast(self.stats, lambda: self.rows, [limit] * prompts, known, samples)
        self.pace = Pace(self.stats, forecast, len(lengths), clock=lambda: self.now)

    def step(self) -> None:
        """Feeds every row that runs, and lets others join, as the scheduler does."""
        fed = sum(not row.uncomputed for row in self.rows)
        rows, self.rows = self.rows, []
        while rows or self._may_join(fed):
            row = rows.pop(0) if rows else self._joining()
            count = min(row.uncomputed, STEP_TOKENS - fed)
            fed += count
            tokens = row.tokens if row.uncomputed > count else [*row.tokens, 0]
            self.rows.append(Running(row.index, row.sample, tokens, row.uncomputed - count))
        seconds = self.cost[0] + self.cost[1] * fed
        self.now += seconds
        self.stats.steps, self.stats.computed = self.stats.steps + 1, self.stats.computed + fed
        self.stats.seconds += seconds
        self.stats.new_tokens += sum(not row.uncomputed for row in self.rows)
        self.stats.step_cost.add(1, fed, seconds)
        ended = [row for row in self.rows if len(row.tokens) >= self._length(row)]
        self.rows = [row for row in self.rows if row not in ended]
        for row in ended:
            self.end(row)

    def end(self, row, error=None) -> None:
        by_itself = len(row.tokens) < self.limit
        reason = "error" if error else "stop" if by_itself else "length"
        result = Result(row.index, row.sample, row.tokens, "", None, reason, 0, error)
        self.pace.end(result)

    def _length(self, row: Running) -> int:
        return self.lengths[row.index * self.samples + row.sample]

    def _may_join(self, fed: int) -> bool:
        first = self.stats.steps == 0 and self.rows  # the others wait for its prefix
        return bool(self.waiting) and len(self.rows) < AT_ONCE and fed < STEP_TOKENS and not first

    def _joining(self) -> Running:
        index, sample = self.waiting.pop(0)
        return Running(index, sample, [], 0 if sample else self.prompts[index])

    def told(self, every: int = 1) -> list[tuple[float, float | None, float, str]]:
        """After steps the time that has passed, what is said to be left, the bar, the words."""
        looks = []
        while self.rows or self.waiting:
            self.step()
            pace = self.pace
            if self.stats.steps % every == 0 or not (self.rows or self.waiting):
                looks.append((self.now - 100, pace.seconds_left, pace.share, str(pace)))
        return looks


def lengths_of(job: str) -> tuple[list[int], int]:
    """Lengths of the rows of a job, and their limit."""
    draw = np.random.default_rng(7)
    rows = 3000
    if job == "demo":
        return [8, 14, 10, 7, 25, 8, 8, 16, 7, 8, 11, 7, 13, 8, 13, 8], 32
    if job == "mean of 38":
        return draw.geometric(1 / 40, rows).clip(1, 128).tolist(), 128
    if job == "far from the limit":
        return draw.gamma(4, 15, rows).astype(int).clip(1, 1024).tolist(), 1024
    long, short = draw.integers(60, 300, rows), draw.integers(4, 12, rows)
    if job == "short":
        return np.where(draw.random(rows) < 0.75, short, long).clip(1, 256).tolist(), 256
    long, short = draw.normal(150, 20, rows), draw.normal(20, 4, rows)
    both = np.where(draw.random(rows) < 0.5, short, long).astype(int)
    return both.clip(1, 256).tolist(), 256


JOBS = ["demo", "mean of 38", "short", "two peaks", "far from the limit"]


@pytest.mark.parametrize(("cost", "job"), each_value(COSTS, JOBS))
def test_what_is_told_after_a_fifth_of_the_time_comes_true(job, cost):
    lengths, limit = lengths_of(job)
    small = job == "demo"
    looks = Replay(lengths, limit, COSTS[cost], prefix=256 if small else 0).told(1 if small else 9)
    total = looks[-1][0]
    for passed, told, share, words in looks[:-1]:
        assert "0:00:00 left" not in words
        assert ("left" in words) == (told is not None)
        assert share < 1
        left = total - passed
        if passed < total / 5:
            continue
        if told is not None and abs(told - left) > NEAR + total / 100:
            assert 0.7 <= told / left <= 1.4, (passed, words)
        if not small:
            assert abs(share - passed / total) < 0.15
            assert told is not None or not total / 3 < passed < 0.95 * total
    assert looks[-1][1:3] == (None, 1.0)
    assert "left" not in looks[-1][3]


def test_samples_of_a_prompt_and_prompts_that_nobody_has_read_come_true_as_well():
    lengths, limit = lengths_of("mean of 38")
    for others in ({"samples": 4}, {"unread": True, "own": 200}):
        looks = Replay(lengths, limit, COSTS["laptop"], **others).told(9)
        total = looks[-1][0]
        for passed, told, _, words in looks[:-1]:
            left = total - passed
            if passed > total / 5 and told is not None and abs(told - left) > NEAR + total / 100:
                assert 0.7 <= told / left <= 1.4, (others, passed, words)
            assert told is not None or passed < total / 4


def test_prompts_that_are_still_to_be_computed_count_as_work():
    # Two rows of four tokens: the one prompt was ten times as long as both answers.
    looks = Replay([4, 4], 4, (0.0, 1.0), prefix=900, own=10).told()
    (first, _, share, _), *_, (total, *_) = looks
    assert first / total > 0.9
    assert share == 0.0  # what a step takes is not known from the first
    assert all(abs(look[2] - look[0] / total) < 0.1 for look in looks[1:])


def test_nothing_is_said_of_the_time_left_before_there_is_ground_for_it():
    job = Replay([40] * 400, 200, COSTS["laptop"])
    assert str(job.pace) == "0/400 rows, 0.0 tokens/s, 0:00:00 passed"
    looks = [(len(job.lengths) - len(job.waiting), *look) for look in job.told()]
    silent = [look for look in looks if "left" not in look[-1]]
    assert silent[0] == looks[0]
    # All of the first rows end at once; then it is known how long the others get.
    assert 39 <= len(silent) <= 60


def test_rows_that_fail_do_not_promise_that_others_end_early():
    paces = []
    for error in (None, "no room"):
        job = Replay([100] * 20, 100, (0.1, 0.0))
        for _ in range(5):
            job.step()
        for row in [*job.rows[:10]]:
            job.rows.remove(row)
            job.end(row, error)
        paces.append(job.pace)
    ended, failed = paces
    assert failed.ended == ended.ended == 10
    assert failed.seconds_left == ended.seconds_left is None
    # Ten rows may get 95 more, a step for each; where half ended early, others will.
    assert failed._forecast.left().most == pytest.approx(9.5, rel=0.02)
    assert ended._forecast.left().most < 9


def test_the_layer_of_a_streamed_pass_is_told_and_a_narrow_terminal_not_what_has_passed():
    stats = GenerationStats()
    forecast = Forecast(stats, lambda: [], [10], [5])
    pace = Pace(stats, forecast, 1, layers=SimpleNamespace(done=3, total=30), clock=lambda: 0.0)
    whole = "0/1 rows, 0.0 tokens/s, 0:00:00 passed, layer 3 of 30"
    assert pace.told(len(whole)) == whole
    assert pace.told(len(whole) - 1) == "0/1 rows, 0.0 tokens/s, layer 3 of 30"
