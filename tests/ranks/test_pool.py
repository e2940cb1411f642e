"""Several processes run a function as ranks of one group, and none of them makes a test wait."""

import os

import pytest

from tests.ranks import pool
from tests.ranks.pool import outcomes, run

pytestmark = pytest.mark.filterwarnings("error")
ME = "tests.ranks.test_pool"


def place(word):
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return word, dist.get_rank(), int(os.environ["RANK"]), int(total)


def ends(how):
    import threading

    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("on purpose")
        if how == "dies":
            os.kill(os.getpid(), 9)
        threading.Event().wait()
    dist.barrier()


@pytest.mark.parametrize("n", [2, 3])
def test_each_rank_returns_its_own(n):
    total = n * (n + 1) // 2
    assert run(n, f"{ME}:place", "word") == [("word", i, i, total) for i in range(n)]


def test_ranks_stay_for_the_next_call():
    assert run(2, "os:getpid") == run(2, "os:getpid")


def test_what_a_rank_raises_is_told_with_its_traceback(monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.5)  # the other rank waits for ever
    with pytest.raises(AssertionError, match=r"rank 1: (.|\n)*in ends(.|\n)*on purpose"):
        run(2, f"{ME}:ends", "raises")


@pytest.mark.parametrize(
    ("how", "said", "seconds"), [("dies", "died", pool.SECONDS), ("waits", "not done after ", 1)]
)
def test_one_rank_that_fails_makes_no_test_wait_and_no_other_fail(how, said, seconds, monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.5)
    found = outcomes(2, f"{ME}:ends", how, seconds=seconds)
    assert said in found[1].error
    assert found[0].error
    assert len(run(2, "os:getpid")) == 2


def test_ranks_that_died_between_two_calls_are_told_once_and_replaced():
    # Alone finds: a pool that keeps dead ranks, and every later test of that size fails with them.
    os.kill(run(3, "os:getpid")[0], 9)
    assert outcomes(3, "os:getpid")[0].error == "died"
    assert len(run(3, "os:getpid")) == 3
