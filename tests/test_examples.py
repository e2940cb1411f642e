"""The examples run, and what they claim to be equal is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture
def run(smollm2_path, tmp_path):
    """Runs an example as `make demo` does, away from the repository; returns what it prints."""

    def run(name: str, *sizes: str) -> str:
        # One thread: two processes that spin for each other on two cores take many times as long.
        env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        command = [sys.executable, str(EXAMPLES / name), *sizes]
        if name not in ("drop_in.py", "hybrid.py"):  # which find their models by themselves
            command += ["--model", str(smollm2_path)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 100
        return done.stdout

    return run


def test_drop_in_gives_the_tokens_of_transformers_own_cache(run):
    printed = run("drop_in.py", "--rows", "3", "--new-tokens", "4")
    assert "3 of 3 equal" in printed
    # 242 tokens once, then 26, 12 and 24 for the rows, and 3 new ones each, in pages of 16
    table = {line[:21].strip(): line[21:].split() for line in printed.splitlines()}
    assert table["paged, shared prefix"][2:] == [str(242 + 26 + 12 + 24), str(16 + 2 + 2 + 2)]
    assert table["transformers' cache"][2:] == [str(3 * 268), str(17 + 17 + 17)]


def test_own_loop_finds_the_common_prefix_and_gives_the_tokens_of_generate(run):
    printed = run("own_loop.py", "--rows", "3", "--new-tokens", "5")
    assert "3 of 3 equal" in printed
    prompts = [line.split()[:3] for line in printed.splitlines() if line.endswith("?")]
    found = [int(found) for _, found, _ in prompts]
    assert found[0] == 0
    assert min(found[1:]) > 40


def test_best_of_n_and_beams_share_their_prompt(run):
    printed = run("best_of_n.py", "--samples", "4", "--beams", "3", "--new-tokens", "4")
    assert "2 of 2 equal" in printed
    held = [line.split() for line in printed.splitlines() if line.endswith("without sharing")]
    assert len(held) == 3
    assert all(int(words[-5]) < int(words[-3]) for words in held)


def test_a_loop_of_grpo_computes_prompts_once_and_draws_from_the_weights_of_each_step(run):
    printed = run("grpo.py", "--steps", "2", "--samples", "3", "--new-tokens", "5")
    steps = [line.replace(",", "").split() for line in printed.splitlines()]
    assert len(steps) == 2
    computed, far = {words[4] for words in steps}, [float(words[-1]) for words in steps]
    assert len(computed) == 1  # of other weights nothing is found
    assert [words[9] for words in steps] == ["9", "9"]
    assert max(far) < 1e-4


def test_chat_computes_only_what_is_new(run):
    printed = run("chat.py", "--turns", "3", "--new-tokens", "5")
    turns = [line.split() for line in printed.splitlines() if line.endswith("computed]")]
    computed = [int(words[-2]) for words in turns]
    assert len(turns) == 3
    assert max(computed[1:]) < computed[0]


def test_of_two_users_who_chat_one_leaves_and_the_other_gets_its_answer(run):
    printed = run("live_chat.py")
    assert "Ann: The sea is salty because" in printed
    assert "Ben: " in printed
    assert "Ben has left" in printed


def test_a_policy_of_ones_own_keeps_what_it_ranks_highest(run):
    printed = run("own_policy.py", "--tokens", "288", "--budget", "96")
    rows = {line[:18].strip(): line[18:].split() for line in printed.splitlines()[2:]}
    stored = {name: int(words[2]) for name, words in rows.items()}
    marks = {name: words[-1] for name, words in rows.items()}
    assert stored.pop("everything") == 288
    assert set(stored.values()) == {96}
    assert marks["the newest"] == "." * 12 + "#" * 6
    assert marks["sinks, the newest"] == "#" + "." * 12 + "#" * 5
    assert marks["sinks, Fading"].startswith("#")
    perplexity = {name: float(words[1]) for name, words in rows.items()}
    assert perplexity["sinks, Fading"] < perplexity["the newest"] / 1.2


def test_streaming_under_a_budget_gives_the_tokens_of_the_model_in_memory(run):
    printed = run("streaming.py", "--new-tokens", "4", "--device-memory", "420MiB")
    assert "8 of 8 equal" in printed
    assert "of 30" in printed
    assert "prompt tokens were shared" in printed


def test_a_model_with_states_computes_a_prefix_once_and_goes_back_to_a_checkpoint(run):
    printed = run("hybrid.py", "--new-tokens", "6")
    assert "6 of 6 equal" in printed
    found = [
        line.split()[:3] for line in printed.splitlines() if "tokens of the rules found" in line
    ]
    rules = found[0][2]
    assert found == [["0", "of", rules], [rules, "of", rules], [rules, "of", rules]]
    assert "0 more states for a fork" in printed
