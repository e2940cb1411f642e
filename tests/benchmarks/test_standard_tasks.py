"""The tasks that Python's docstrings make: files that lm-eval reads, and answers that are right."""

from __future__ import annotations

import json
from pathlib import Path

import tests.benchmarks.test_gpu_grid  # noqa: F401  # where the benchmarks are found
from benchmarks.peers.standard_tasks import EXAMPLES, TASKS, write_tasks


def test_documents_have_one_right_answer_of_four_and_examples_are_others(tmp_path: Path) -> None:
    write_tasks(tmp_path, 8)
    splits = {
        split: list(map(json.loads, (tmp_path / f"{split}.jsonl").read_text().splitlines()))
        for split in ("examples", "test")
    }
    assert [len(rows) for rows in splits.values()] == [EXAMPLES, 8]
    every = [row for rows in splits.values() for row in rows]
    for row in every:
        assert row["names"][row["answer"]] == row["name"]
        assert row["summaries"][row["answer"]] == row["summary"]
        assert len(set(row["summaries"])) == 4
    assert len({row["summary"] for row in every}) == len(every)
    for name in TASKS:
        task = json.loads((tmp_path / f"{name}.yaml").read_text())
        files = task["dataset_kwargs"]["data_files"]
        assert all(Path(file).exists() for file in files.values())
