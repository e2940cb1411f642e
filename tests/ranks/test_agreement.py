"""Facts that one rank alone knows decide nothing: all give the same, or raise the same."""

import pytest

from tests.hf.tiny import prompts
from tests.ranks.differing import sizes
from tests.ranks.pool import outcomes, run

ME = "tests.ranks.differing"


def asked(n=4, length=9):
    return [ids.tolist() for ids in prompts(*[length] * n)]


@pytest.fixture
def llama(saved):
    return saved("llama")


def on_all(n, what, *args, **kwargs):
    """Runs a function on n ranks; returns what all of them return alike."""
    found = run(n, f"{ME}:{what}", *args, **kwargs)
    assert found.count(found[0]) == n, found
    return found[0]


@pytest.mark.parametrize("n", [2, 3])
def test_the_least_memory_makes_the_size(llama, n):
    smallest = run(n, f"{ME}:sizes", llama, 1.0)
    assert on_all(n, "sizes", llama, 1.5) == smallest[0]
    assert smallest[0] > 64
    alone = sizes(llama, 1.0)
    # A rank has one part of the heads, and of the host's memory.
    assert smallest[0] == pytest.approx(alone, rel=0.1)


def test_a_rank_without_memory_is_an_error_of_all(llama):
    kind, said = on_all(2, "without_memory", llama)
    assert kind == "BudgetExceeded"
    assert "max_tokens" in said


def test_time_is_over_when_it_is_on_the_first_rank(llama):
    results = on_all(2, "late", llama, asked(), at=1)
    assert [one["finish_reason"] for one in results] == ["length"] * 4
    results = on_all(2, "late", llama, asked(), at=0)
    assert all(len(one["tokens"]) < 8 or one["error"] for one in results)


@pytest.mark.parametrize(
    "what",
    ["prompt", "count", "option", "seed", "salt", "size", "processor", "continuation", "iterator"],
)
def test_ranks_that_were_given_something_else_are_told(llama, what):
    kind, said = on_all(2, "differing", llama, asked(), what)
    assert kind == "ValueError"
    assert said.endswith("expected the same on all 2 processes")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("prompts", "expected a list of prompts, got one str"),
        ("place", "expected the same on all 2 processes"),  # of one rank it is an error of its row
        ("option", "on purpose"),
        ("tokenizer", "on purpose"),
        ("iterator", "on purpose"),
        ("decoding", "on purpose"),
        ("factory", "on purpose"),
        ("criterion", "on purpose"),
        ("processor", "on purpose"),
    ],
)
def test_an_error_of_one_rank_is_heard_by_all(llama, what, said):
    found = run(2, f"{ME}:failing", llama, asked(), what)
    assert said in str(found[1])
    assert all(found), found


@pytest.mark.parametrize("within", [True, False])
def test_a_rank_that_dies_ends_the_others_by_a_named_error(llama, within):
    # Alone finds: an error of the process group, in its words and of its class, or a hang.
    first, last = outcomes(2, f"{ME}:killed", llama, asked(), within)
    assert last.error == "died"
    kind, said = first.result
    assert kind == "OtherRankError"
    assert said.startswith("another of 2 ranks is gone or late: ")


@pytest.mark.parametrize("pressed", [(1,), (0,), (0, 1)])
def test_ctrl_c_on_any_rank_ends_all_at_the_same_step(llama, pressed):
    results, steps = on_all(2, "interrupted", llama, asked(30), pressed)
    assert 0 < len(results) < 30
    assert steps < 100


@pytest.mark.parametrize("loads", [False, True])
def test_prefixes_that_one_rank_forgets_are_forgotten_by_all(llama, loads, tmp_path):
    # Alone finds: steps of other tokens on each rank, which meet at random.
    ids = asked(3)
    first, again, behind = on_all(2, "changed", llama, ids, str(tmp_path / "x") if loads else None)
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in behind]
    of_file = [8 * loads, 0, 0]  # the whole pages of a loaded text
    assert [cached for _, cached in behind] == [
        max(cached, loaded) for (_, cached), loaded in zip(first, of_file)
    ]
    assert sum(cached for _, cached in again) > sum(cached for _, cached in behind)


def test_prompts_of_an_iterator_are_read_alike(llama):
    ids = asked(40)
    results = on_all(2, "slowly", llama, ids)
    assert len(results) == 40


def test_calls_of_two_threads_are_refused(llama):
    assert on_all(2, "two_threads", llama, asked(2)) == "RuntimeError"


def test_a_stream_that_is_left_by_all_leaves_nothing(llama):
    assert on_all(2, "left_early", llama, asked(6)) == 0
