"""`pagedkv generate --draft`: the same answers in fewer steps, and the same file goes on."""

import re

from tests.hf.tiny import tiny

PROMPTS = ("abc", "bcd" * 9, "e")
OPTIONS = ("-n", 12, "--page-size", 4)


def of(result):
    """Returns a command's messages in one line."""
    return " ".join(result.stderr.split())


def test_answers_are_the_same_and_the_summary_says_how_many_drafts_were_right(generate, model):
    alone = generate(*PROMPTS, *OPTIONS)
    drafted = generate(*PROMPTS, *OPTIONS, "--draft", model)
    assert drafted.stdout == alone.stdout
    assert re.search(r"\d+ of \d+ drafted tokens were right, made in \d+ steps", of(drafted))
    assert "drafted" not in of(alone)


def test_a_file_goes_on_with_a_draft_and_without(generate, model, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    generate(*PROMPTS[:1], *OPTIONS, "-o", out)
    generate(*PROMPTS[:2], *OPTIONS, "-o", out, "--draft", model)
    generate(*PROMPTS, *OPTIONS, "-o", out)
    assert [row["index"] for row in rows(out)] == [0, 1, 2]


def test_a_draft_counts_where_answers_depend_on_the_cut_into_steps(generate, model, tmp_path):
    pages = ("--cache", "retention=sinks", "--cache", "budget=48")
    out = tmp_path / "out.jsonl"
    generate(*PROMPTS, *OPTIONS, *pages, "-o", out)
    refused = generate(*PROMPTS, *OPTIONS, *pages, "-o", out, "--draft", model, code=2)
    assert "draft: " in of(refused)


def test_a_draft_that_does_not_fit_is_refused_before_anything_is_computed(
    generate, model, checkpoints, tmp_path
):
    other = checkpoints("other", model=tiny(vocab_size=90))
    for file in other.glob("tokenizer*"):  # with the same words another size would do
        file.unlink()
    for given, said in (
        (other, "draft: expected the model's vocabulary of 101 ids, got 90"),
        (tmp_path / "none", f"--draft: no folder {tmp_path / 'none'}"),
    ):
        refused = generate(*PROMPTS, "--draft", given, code=2)
        assert said.replace(" ", "") in of(refused).replace(" ", "")
        assert refused.stdout == ""
    refused = generate("abc", "-n", 6, "--draft", model, "--device-memory", "1GiB", code=2)
    assert "--draft: expected none with --device-memory" in of(refused)
