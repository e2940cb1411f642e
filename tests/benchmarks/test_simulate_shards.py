"""The simulation counts what it says it counts."""

import runpy
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "simulate_shards.py"


def test_every_way_is_counted_and_the_split_by_prefix_is_the_quickest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--prompts", "400", "--shards", "1", "4"])
    runpy.run_path(str(FILE), run_name="__main__")
    said, head, _, *lines = capsys.readouterr().out.splitlines()
    assert said.startswith("400 prompts of ")
    assert head == "| shards | way | computed | largest / mean | slowest |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {(int(n), name): tuple(map(float, more)) for n, name, *more in rows}
    assert len(found) == 12
    assert {found[place] for place in found if place[0] == 1} == {(1, 1, 1)}
    four = {name: more for (n, name), more in found.items() if n == 4}
    assert min(four.values(), key=lambda more: more[2]) == four["`--shard`"]
    assert four["`--shard`"][0] < 1.1 < four["rows `i::n`"][0]
