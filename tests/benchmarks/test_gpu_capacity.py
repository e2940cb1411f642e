"""The GPU benchmark of formats, tried out where there is no GPU."""

from __future__ import annotations

import json

import torch

import tests.benchmarks.test_gpu_grid  # noqa: F401  # where the benchmarks are found
from benchmarks.gpu import capacity
from benchmarks.gpu.dense import sdpa
from benchmarks.gpu.grid import Case


def test_every_line_is_right_and_in_the_table(tmp_path, capsys):
    assert capacity.main(["--out", str(tmp_path), "--device", "cpu", "--shrink"]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())["lines"]
    names = [line.name for line in capacity.lines(shrink=True)]
    assert list(found) == names
    table = capsys.readouterr().out.split("x faster")[1]
    assert all(name in table for name in names)
    assert found["int4 2 x 300"]["bytes"] < found["dense 2 x 300"]["bytes"]


def test_the_peer_attends_to_what_it_is_held_against(monkeypatch):
    """Its own code needs a card; what it is given and compared with does not."""

    def attend(case):
        def call():
            k, v = (x.float() for x in (case.k_pages, case.v_pages))
            own = Case(**{**vars(case), "k_pages": k, "v_pages": v, "q": case.q.float()})
            return sdpa(True)(own)().to(case.q.dtype)

        return call

    monkeypatch.setitem(capacity.PEERS, "flashinfer", attend)
    line = capacity.Line("flashinfer fp8 2 x 300", 2, 300, {}, "")
    record = capacity.measure_line(line, torch.device("cpu"))
    assert 0 < record["error"] < 0.02
    pages = 2 * 19 + 8
    assert record["bytes"] == 2 * pages * 8 * 16 * 128


def test_an_output_of_nan_is_an_error(monkeypatch, tmp_path, capsys):
    real = capacity.paged_attention
    monkeypatch.setattr(capacity, "paged_attention", lambda *args: real(*args) * float("nan"))
    monkeypatch.setattr(capacity, "FORMATS", ("dense",))
    assert capacity.main(["--out", str(tmp_path), "--device", "cpu", "--shrink"]) == 1
