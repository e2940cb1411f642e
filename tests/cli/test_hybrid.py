"""The command with a model that keeps recurrent states: the same forms, texts and errors."""

import json

import pytest

from tests.cli.conftest import CHAT, SHORT, answers
from tests.hybrids import tiny_hybrid

# Four prompts that part twice, and what is to be computed of them: each place of the tree once.
TREE = [f"abcdefgh{middle}ijklmnop{end}" for middle in "qr" for end in ("stu", "vwx")]
DISTINCT = len({prompt[:n] for prompt in TREE for n in range(1, len(prompt) + 1)})


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints("hybrid", CHAT, tiny_hybrid("lfm2"))


@pytest.fixture
def run(pagedkv, folder):
    def run(*arguments, code=0, **options):
        result = pagedkv("generate", folder, *SHORT, "-t", 0, "--raw", *arguments, **options)
        assert result.exit_code == code, result.output
        return result

    return run


def words(result) -> str:
    return " ".join(result.stderr.split())


def test_prompts_in_a_tree_are_computed_once_and_their_texts_are_those_of_each_alone(run):
    whole = run(*TREE, "-n", 1)
    assert f"{DISTINCT} tokens computed" in words(whole)
    assert "and recurrent states: " in whole.stderr
    texts = run(*TREE).stdout
    assert answers(texts) == [run(prompt).stdout.strip() for prompt in TREE]
    for sizes in (["--cache", "max_states=1", "--max-tokens", 32], ["--device-memory", "64MiB"]):
        assert run(*TREE, *sizes).stdout == texts


def test_a_prefix_and_a_file_that_goes_on_give_the_same_texts(run, tmp_path, rows):
    prefix, prompts, out = (
        tmp_path / name for name in ("prefix.txt", "prompts.jsonl", "out.jsonl")
    )
    prefix.write_text(TREE[0][:8])
    prompts.write_text("\n".join(json.dumps({"prompt": prompt[8:]}) for prompt in TREE))
    job = ("--prefix", prefix, "-f", prompts)
    assert answers(run(*job).stdout) == answers(run(*TREE).stdout)
    run(*job, "-o", out)
    kept = out.read_text("utf-8").splitlines()
    out.write_text(kept[0] + "\n" + kept[1][:20], "utf-8")  # as after a kill
    assert "has 1 of 4 prompts already" in run(*job, "-o", out).stderr
    assert sorted(row["answer"] for row in rows(out)) == sorted(
        json.loads(k)["answer"] for k in kept
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("abc", "--set", "prompt_lookup_num_tokens=2"),
            "drafts cannot be taken back where a model",
        ),
        (("abc", "--cache", "max_states=-1"), "max_states: expected at least 0, got -1"),
        (("abc", "--cache", "max_states=many"), "max_states: expected an int"),
        (("abc", "--cache", "verify_width=2"), "--cache: expected one of "),
        (("abc", "--device-memory", "4KiB"), "would fit"),
    ],
)
def test_what_states_do_not_allow_is_said_with_exit_code_2(run, arguments, says):
    result = run(*arguments, code=2)
    assert says in result.stderr
    assert result.stdout == ""


def test_a_family_that_is_not_served_is_refused_with_the_way_out(pagedkv, checkpoints):
    result = pagedkv("generate", checkpoints("jamba", model=tiny_hybrid("jamba")), "abc")
    assert result.exit_code == 2
    assert "(Mamba-1) lose their state before several tokens" in result.stderr
    assert "with `generate` works" in result.stderr


def test_the_plan_shows_states(pagedkv, folder):
    result = pagedkv("plan", folder, "--device-memory", "64MiB", "--device", "cpu", "-b", 3)
    assert result.exit_code == 0
    assert "4 x " in next(
        line for line in result.stdout.splitlines() if line.startswith("  states")
    )
