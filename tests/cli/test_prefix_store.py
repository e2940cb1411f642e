"""`generate --prefix-store`: a second run finds what the first left."""

import pytest

from pagedkv import BudgetExceeded, plan_memory

LONG = "abcdefghijklmnopqrstuvwxyz" * 6  # 156 letters, each a token


def test_a_second_run_finds_the_prefix_and_says_so(generate, tmp_path):
    plain = generate(LONG + "q", LONG + "r", "-n", 4)
    first = generate(LONG + "q", LONG + "r", "-n", 4, "--prefix-store", tmp_path / "store")
    again = generate(LONG + "q", LONG + "r", "-n", 4, "--prefix-store", tmp_path / "store")
    assert first.stdout == again.stdout == plain.stdout
    assert "prefix store" not in plain.stderr
    assert "from the prefix store" not in first.stderr
    assert "128 tokens from the prefix store" in " ".join(again.stderr.split())


def test_a_job_goes_on_with_or_without_a_store(generate, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    generate(LONG, "-n", 4, "-o", out)
    generate(LONG, "abc", "-n", 4, "-o", out, "--prefix-store", tmp_path / "store")
    assert len(rows(out)) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefix-store", "{file}"), "--prefix-store: expected a folder, got the file"),
        (("--prefix-store", "{file}/x"), "--prefix-store: expected a folder"),
        (("--prefix-store-size", "1GiB"), "--prefix-store-size: expected with --prefix-store"),
        (
            ("--prefix-store", "{folder}", "--prefix-store-size", "many"),
            "--prefix-store-size: expected bytes",
        ),
    ],
)
def test_what_is_no_store_is_refused_before_anything_runs(generate, tmp_path, options, said):
    (tmp_path / "file").write_text("mine")
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    result = generate("abc", *(option.format(**places) for option in options), code=2)
    assert said in " ".join(result.stderr.split())


def test_a_damaged_file_is_told_by_name_and_changes_no_answer(generate, tmp_path):
    store = tmp_path / "store"
    first = generate(LONG, "-n", 4, "--prefix-store", store)
    (file,) = store.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="is passed over") as told:
        again = generate(LONG, "-n", 4, "--prefix-store", store)
    assert file.name in str(told[0].message)
    assert again.stdout == first.stdout


def test_a_job_whose_weights_stream_finds_what_one_that_streamed_left(generate, model, tmp_path):
    options = {"device": "cpu", "page_size": 4, "length": 160, "batch": 1}
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(model, device_memory="4KiB", **options)
    tight = refused.value.needed
    assert plan_memory(model, device_memory=tight, **options).streams
    here = "-n", 4, "--device", "cpu", "--prefix-store", tmp_path / "store"
    first = generate(LONG, *here, "--device-memory", tight)
    again = generate(LONG, *here, "--device-memory", tight)
    assert "streaming" in again.stderr
    assert "128 tokens from the prefix store" in " ".join(again.stderr.split())
    assert again.stdout == first.stdout
