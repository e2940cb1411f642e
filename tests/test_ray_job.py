"""Rows of a Ray job are answered once each, whatever dies in the middle."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.conftest import tiny_path  # noqa: F401

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "ray_job.py"
LIMIT = 240  # seconds, after which a job hangs

# Not `importorskip`: to import Ray takes a second, for which the fast tests do not wait.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make test-ray")

# Put in front of `main`: actors write down what they are given; one dies, or each waits
# for ever with its second batch, so that nothing is half written when the job is killed.
MAIN = 'if __name__ == "__main__":'
WATCHED = """
import time

class Watched(Answers):
    def __init__(self, *args):
        super().__init__(*args)
        self.is_held = False
        with open("cards", "a") as cards:
            cards.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")

    def __call__(self, batch):
        while self.is_held:
            time.sleep(0.05)
        self.is_held = bool(os.environ.get("HOLD"))
        with open("given", "a") as given:
            given.write("".join(f"{i}\\n" for i in batch["id"].to_pylist()))
        answers = super().__call__(batch)
        try:
            os.rename("die", "died")  # one of them alone can
        except FileNotFoundError:
            return answers
        os._exit(9)

Answers = Watched
"""


def write(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def rows_in(*files):
    from pyarrow import parquet

    return [row for file in sorted(files) for row in parquet.read_table(file).to_pylist()]


class Job:
    """The job in a folder of its own, on a cluster that it starts with the resources given."""

    def __init__(self, folder, model, **resources):
        given = ", ".join(f"{name}={count}" for name, count in resources.items())
        text = EXAMPLE.read_text().replace("ray.init()", f"ray.init({given})")
        (folder / "watched.py").write_text(text.replace(MAIN, f"{WATCHED}\n\n{MAIN}"))
        self.folder, self.command = folder, [sys.executable, "watched.py", "prompts.parquet", "out"]
        self.command += ["--model", str(model), "--max-tokens", "4096"]
        self.rows, self.done = folder / "out" / "rows", folder / "out" / "done"
        self.env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self.env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, *options):
        for name in ("given", "cards"):
            (self.folder / name).unlink(missing_ok=True)
        with (self.folder / "log").open("w") as log:
            where = {"cwd": self.folder, "env": self.env, "stdout": log, "stderr": log}
            return subprocess.Popen([*self.command, *options], **where)

    def run(self, *options):
        driver = self.start(*options)
        try:
            code = driver.wait(LIMIT)
        finally:
            driver.kill()  # which ends its cluster
        assert code == 0, (self.folder / "log").read_text()

    def wrote(self, name):
        """Returns what actors wrote into a file, sorted: ids of rows given, cards seen."""
        file = self.folder / name
        return sorted(file.read_text().split()) if file.exists() else []


@needs_ray
@pytest.mark.slow
def test_rows_keep_their_columns_and_get_answers_although_an_actor_dies(tiny_path, tmp_path):  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagedkv import BatchGenerator

    rng = random.Random(0)
    begins = ["".join(rng.choices("abcdefgh ", k=100)) for _ in range(8)]
    prompts = [f"{begin} {word}?" for begin in begins for word in ("when", "where", "who", "why")]
    prompts += [None, "", "z" * 5000]
    rng.shuffle(prompts)
    tags = [None if i % 5 == 0 else [str(i)] for i in range(35)]
    write(tmp_path / "prompts.parquet", id=range(35), prompt=prompts, tags=tags)
    (tmp_path / "die").touch()
    job = Job(tmp_path, tiny_path, num_cpus=2)

    job.run("--batch", "12", "--max-new-tokens", "5", "--actors", "2")

    assert (tmp_path / "died").exists()
    assert set(job.wrote("cards")) <= {"none", ""}
    assert len(job.wrote("given")) == 35 + 12  # those of the batch in hand twice
    rows = sorted(rows_in(*job.rows.glob("*")), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(35))
    assert [row["prompt"] for row in rows] == prompts
    assert [row["tags"] for row in rows] == tags
    errors = {row["prompt"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {None, "", "z" * 5000}
    assert "at least one token" in errors[None]
    assert "can never fit" in errors["z" * 5000]

    model = AutoModelForCausalLM.from_pretrained(tiny_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    good = [row for row in rows if not row["error"]]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in good]
    with BatchGenerator(model, tokenizer, max_tokens=4096) as generator:
        alone = generator.generate(chats, max_new_tokens=5, do_sample=False)
    assert [row["answer"] for row in good] == [result.text for result in alone]
    assert [row["finish_reason"] for row in good] == [result.finish_reason for result in alone]
    # A prefix is computed once, or twice where it lies across two batches.
    assert sum(row["cached_tokens"] < 100 for row in good) <= 8 + 2


@needs_ray
@pytest.mark.slow
def test_a_killed_job_goes_on_with_what_is_missing_and_then_has_nothing_to_do(
    tiny_path,  # noqa: F811
    tmp_path,
):
    # Cards that are not there: the actors compute on the CPU, but Ray hands them out.
    job = Job(tmp_path, tiny_path, num_cpus=2, num_gpus=2)
    ids = {f"row{i}" for i in range(40)}
    write(tmp_path / "prompts.parquet", id=list(ids), text=["why?"] * 40)
    options = ("--batch", "4", "--max-new-tokens", "2", "--column", "text", "--raw")
    job.env["HOLD"] = "from the second batch on"
    driver = job.start(*options)
    try:
        for _ in range(LIMIT * 10):
            committed = [f for f in job.done.glob("*.parquet") if "pending" not in f.name]
            if len(committed) == 2:
                break
            assert driver.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        else:
            pytest.fail((tmp_path / "log").read_text())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    whole = {row["id"] for row in rows_in(*job.rows.glob("*"))}
    assert job.wrote("cards") == ["0", "1"]
    assert len(whole) == 8
    # As if it had been killed while it wrote one of the files.
    torn = committed[0]
    (data,) = job.rows.glob(f"{torn.stem}*")
    missing = ids - whole | {row["id"] for row in rows_in(data)}
    os.truncate(data, data.stat().st_size // 2)
    torn.rename(torn.with_name(f"{torn.stem}.pending.parquet"))
    del job.env["HOLD"]

    job.run(*options, "--actors", "3")  # the third waits for a card
    assert set(job.wrote("cards")) <= {"0", "1"}
    assert job.wrote("given") == sorted(missing)
    rows = rows_in(*job.rows.glob("*"))
    assert sorted(row["id"] for row in rows) == sorted(ids)

    job.run(*options)
    assert job.wrote("given") == []
    assert rows_in(*job.rows.glob("*")) == rows


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_one_cpu_is_refused(tiny_path, tmp_path):  # noqa: F811
    write(tmp_path / "prompts.parquet", id=[1], prompt=["why?"])
    job = Job(tmp_path, tiny_path, num_cpus=1)
    assert job.start().wait(LIMIT) == 1
    assert "expected a cluster with 2 CPUs or more, got 1" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def ray_job():
    """The example as a module, in this process."""
    spec = importlib.util.spec_from_file_location("ray_job", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def look_at(ray_job):
    """Returns the example's check of its prompts: it counts them, or ends."""
    return ray_job.look_at


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": ["a"]}, "there is no column id, but prompt"),
        ({"id": [1], "text": ["a"]}, "there is no column prompt, but id, text"),
        ({"id": [1, 2, 1], "prompt": ["a", "b", "c"]}, "--id: expected another value in each row"),
        ({"id": [1, None], "prompt": ["a", "b"]}, "--id: expected another value in each row"),
        ({"id": [1], "prompt": [7]}, "--column: expected one of texts, got prompt of int64"),
        ({"id": [0.5], "prompt": ["a"]}, "--id: expected one of whole numbers or texts"),
        ({"id": [[1]], "prompt": ["a"]}, "--id: expected one of whole numbers or texts"),
        ({"id": [1], "prompt": ["a"], "error": ["b"]}, "expected no column error"),
        ({"id": [], "prompt": []}, "there are no rows"),
    ],
)
def test_prompts_that_cannot_be_answered_once_each_are_refused_at_once(
    look_at, tmp_path, columns, said
):
    write(tmp_path / "prompts.parquet", **columns)
    with pytest.raises(SystemExit, match=said):
        look_at(str(tmp_path / "prompts.parquet"), "prompt", "id")


@needs_ray
@pytest.mark.slow
def test_what_is_no_parquet_is_refused_at_once(look_at, tmp_path):
    (tmp_path / "prompts.csv").write_text("id,prompt\n1,why?\n")
    (tmp_path / "empty.parquet").touch()
    for name, said in {
        "prompts.csv": "expected Parquet",
        "empty.parquet": "expected Parquet",
        "absent.parquet": "there is no such file or folder",
    }.items():
        with pytest.raises(SystemExit, match=f"{name}: {said}"):
            look_at(str(tmp_path / name), "prompt", "id")


@needs_ray
@pytest.mark.slow
def test_several_files_are_prompts_of_one_job(look_at, tmp_path):
    for name, ids in {"a": ["x", "y"], "b": ["z"]}.items():
        write(tmp_path / f"{name}.parquet", id=ids, prompt=["why?"] * len(ids))
    assert look_at(str(tmp_path), "prompt", "id") == 3


@needs_ray
@pytest.mark.slow
def test_long_texts_are_texts(look_at, tmp_path):
    import pyarrow

    texts = pyarrow.array(["a", "b"], pyarrow.large_string())  # which polars writes
    write(tmp_path / "prompts.parquet", id=texts, prompt=texts)
    assert look_at(str(tmp_path / "prompts.parquet"), "prompt", "id") == 2


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["--batch", "--actors", "--max-tokens", "--max-new-tokens"])
def test_a_number_below_one_is_refused_by_its_name(ray_job, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["ray_job.py", "in", "out", "--model", "m", name, "0"])
    with pytest.raises(SystemExit, match="2"):
        ray_job.main()
    assert f"{name}: expected 1 or more, got 0" in capsys.readouterr().err


def test_without_ray_it_says_what_to_install():
    without = f"import sys, runpy; sys.modules['ray'] = None; runpy.run_path({str(EXAMPLE)!r})"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'pagedkv[hf,ray]'")
