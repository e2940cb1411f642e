"""The GPU benchmark of formats, tried out where there is no GPU."""

from __future__ import annotations

import json

import tests.benchmarks.test_gpu_grid  # noqa: F401  # where the benchmarks are found
from benchmarks.gpu import capacity


def test_every_line_is_right_and_in_the_table(tmp_path, capsys):
    assert capacity.main(["--out", str(tmp_path), "--device", "cpu", "--shrink"]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())["lines"]
    names = [line.name for line in capacity.lines(shrink=True)]
    assert list(found) == names
    table = capsys.readouterr().out.split("x faster")[1]
    assert all(name in table for name in names)
    assert found["int4 2 x 300"]["bytes"] < found["dense 2 x 300"]["bytes"]
