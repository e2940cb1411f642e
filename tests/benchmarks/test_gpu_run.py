"""A run on a card as far as a machine without one can tell: its order, and what failures stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cells import Cell
from benchmarks.gpu import correctness, grid, measure, proving, run
from benchmarks.gpu.ours import TRIED
from pagedkv.kernels.triton import proved
from tests.kernels.correctness import Case

ROOT = Path(__file__).resolve().parents[2]
WAITS = "import time; time.sleep(100)"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY = grid.everything()
FIRST = grid.one_of_each(EVERY)
MACHINE = {"arch": 90, "device": "a card", "triton": "3.6.0", "date": "today"}
FLAGS = ["--precompile", "--commit", "abc", "--device", DEVICE, "--out"]


def record(**times: float) -> run.Record:
    ways = {name: {"error": 1e-3, "times": {"graph_cold": spent}} for name, spent in times.items()}
    return {"ways": ways, "seconds": 0.1}


class DeathError(BaseException):
    """As when a process dies: nothing it would have written afterwards is there."""


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("planted")


def dies() -> None:
    raise DeathError


class Card:
    """Stands in for a card, and for the processes of a run; notes what happens in order.

    Attributes:
        behind: kernels that are compiled in the background; done once 16 cells are measured.
        wrong: what does not compile, of cells and of checks, and what of the cache is not right.
        cases: by name, and then by group.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.seen: list[str] = []
        self.behind: subprocess.Popen[bytes] | None = None
        self.wrong: dict[str, list[str]] = {"cells": [], "checks": [], "cache": []}
        self.cases: dict[str, dict[str, Callable[[], None]]] = {
            correctness.OURS: {"grow": passes, "decode": passes},
            "gluon_prefill": {"hopper": passes},
            "gluon_rest": {"hopper": passes},
            "gluon_decode": {"hopper": passes},
            "gluon_decode_rest": {"hopper": passes},
            "gluon_latents": {"hopper": passes},
        }
        self.folder = folder
        file = folder.parent / "proved.json"
        file.write_text(json.dumps({name: {} for name in proved.NAMES}))
        patch.setattr(proved, "FILE", file)
        patch.setattr(run, "names_to_try", lambda: proved.NAMES)
        patch.setattr(run, "machine", lambda device, commit: MACHINE | {"commit": commit})
        patch.setattr(run, "ceilings", lambda device: {"read_gbs": 3000.0})
        patch.setattr(run, "COMPILE_SECONDS", 0)
        patch.setattr(run, "child", self.child)
        patch.setattr(run, "start", self.start)
        patch.setattr(correctness, "cases_of", self.cases_of)
        patch.setattr(measure, "measure_cell", self.measure_cell)

    def child(self, module: str, arguments: list[str], seconds: float, notes: Any) -> int:
        if module == "precompile":
            self.seen.append("compile cells")
            Path(arguments[2]).write_text(json.dumps(self.wrong["cells"]))
            return 0
        if module == "cached":
            self.seen.append("look at binaries")
            Path(arguments[0]).write_text(json.dumps(self.wrong["cache"]))
            return 0
        try:
            return run.main(arguments)
        except DeathError:
            return -11

    def start(self, module: str, arguments: list[str], **options: bool) -> subprocess.Popen[bytes]:
        assert [module, arguments[3]] == ["precompile", "checks"]
        self.seen.append("begin to compile checks")
        self.behind = subprocess.Popen([sys.executable, "-c", WAITS], **options)
        return self.behind

    def measure_cell(self, cell: Any, tries: Any, without: set[str], **_: Any) -> run.Record:
        assert all("cases" not in each for each in without)
        tries(measure.TIMING)
        self.seen.append(cell.id)
        if len([each for each in self.seen if "/" in each]) == 16:
            run.compiled(self.folder, "checks").write_text(json.dumps(self.wrong["checks"]))
        times = {"ours": 10.0} | dict.fromkeys(TRIED, 9.0)
        return record(**{way: spent for way, spent in times.items() if way not in without})

    def cases_of(self, name: str, device: str) -> Iterator[Case]:
        for title, call in self.cases[name].items():

            def noted(title: str = title, call: Callable[[], None] = call) -> None:
                assert proved.is_on(name, 90) if name in proved.NAMES else True
                self.seen.append(f"{name}: {title}")
                call()

            yield Case(title, "one", noted)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    return Card(monkeypatch, tmp_path / "out")


@pytest.mark.slow
def test_what_a_minute_buys_most_with_comes_first(card: Card, capsys) -> None:
    assert run.main([*FLAGS, str(card.folder)]) == 0
    first = [cell.id for cell in FIRST]
    others = [cell.id for cell in EVERY if cell not in FIRST]
    checks = [
        "ours: grow",
        "ours: decode",
        "gluon_prefill: hopper",
        "gluon_rest: hopper",
        "gluon_decode: hopper",
        "gluon_decode_rest: hopper",
        "gluon_latents: hopper",
    ]
    few = 16 - len(first)
    wanted = ["compile cells", "begin to compile checks", *first, *others[:few]]
    assert card.seen == [*wanted, *checks, *others[few:], "look at binaries"]
    kinds = "decode pages prefill chunk mixed verify ragged delta-rule append copy shared capacity"
    assert {each.partition("/")[0] for each in first} == set(kinds.split())
    assert "decode/M/b64/8k/p64" in first  # latents
    assert card.behind is not None
    assert card.behind.returncode  # ended with the run
    assert "0 failures\nall is done" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failure_stops_nothing_else(card: Card, capsys) -> None:
    card.cases[correctness.OURS]["grow"] = fails
    card.cases["gluon_latents"]["hopper"] = fails
    card.wrong["cells"] = ["_decode is wrong"]
    card.wrong["cache"] = ["_prefill waits for nothing"]
    assert run.main([*FLAGS, str(card.folder)]) == 1
    data, printed = run.Results(card.folder / "cells.json").data, capsys.readouterr().out
    assert data["checks"] == {
        "ours": {"grow, one": "AssertionError: planted", "decode, one": "passed"},
        "gluon_prefill": {"hopper, one": "passed"},
        "gluon_rest": {"hopper, one": "passed"},
        "gluon_decode": {"hopper, one": "passed"},
        "gluon_decode_rest": {"hopper, one": "passed"},
        "gluon_latents": {"hopper, one": "AssertionError: planted"},
    }
    assert data["runs"][0]["correctness"] == "failed: 1 of 2 cases"
    assert data["runs"][0]["binaries"] == "failed"
    passed = dict.fromkeys(proved.NAMES[:-1], "passed")
    assert data["tried"] == passed | {"gluon_latents": "failed: 1 of 1 cases"}
    assert list(data["cells"]) == [each for each in card.seen if "/" in each]
    assert len(data["cells"]) == len(EVERY)
    last = data["cells"][EVERY[-2].id]["ways"]
    assert "ours-gluon" in last
    assert "ours-gluon-latents" not in last  # left out once its own cases had failed
    assert "gluon_prefill: right, and 0.900 times" in printed
    assert "90" in json.loads(proved.FILE.read_text())["gluon_prefill"]
    told = "kernel: _decode is wrong\nkernel: _prefill waits for nothing\n"
    told += "ours: grow, one: AssertionError: planted\n"
    assert f"{told}gluon_latents: hopper, one: AssertionError: planted\n4 failures" in printed


@pytest.mark.slow
def test_a_case_that_ends_its_process_is_left_out_and_the_rest_goes_on(card: Card) -> None:
    card.cases[correctness.OURS] = {f"case {i}": (passes, dies)[i in (1, 2, 4)] for i in range(7)}
    assert run.main([*FLAGS, str(card.folder)]) == 1
    data = run.Results(card.folder / "cells.json").data
    told = data["checks"][correctness.OURS]
    assert [title for title, each in told.items() if each == "passed"] == [
        "case 0, one",
        "case 3, one",
    ]
    assert len(told) == 5  # after three that died the others are left out
    assert data["tried"] == dict.fromkeys(proved.NAMES, "passed")
    assert len(data["cells"]) == len(EVERY) == len([each for each in card.seen if "/" in each])


def test_a_file_that_was_carried_goes_on_elsewhere(card: Card, tmp_path: Path) -> None:
    card.cases[correctness.OURS]["grow"] = fails
    assert run.main([*FLAGS, str(card.folder), "-k", "pages/"]) == 1
    carried = tmp_path / "carried.json"
    (card.folder / "cells.json").rename(carried)
    card.seen.clear()
    card.folder = tmp_path / "elsewhere"
    card.cases[correctness.OURS]["grow"] = passes
    resume = ["--resume", str(carried), "-k", "pages/A/b32/8k/p"]
    assert run.main([*FLAGS, str(card.folder), *resume]) == 0
    looked = "look at binaries"
    assert card.seen == ["compile cells", "begin to compile checks", "ours: grow", looked]
    data = run.Results(card.folder / "cells.json").data
    assert [each["correctness"] for each in data["runs"]] == ["failed: 1 of 2 cases", "passed"]
    assert [each["binaries"] for each in data["runs"]] == ["passed", "passed"]
    with pytest.raises(SystemExit):
        run.main([*FLAGS, str(card.folder), "--resume", str(tmp_path / "not there.json")])


def test_another_commit_has_to_pass_its_cases_again(card: Card) -> None:
    assert run.main([*FLAGS, str(card.folder), "-k", "pages/"]) == 0
    card.seen.clear()
    flags = [*FLAGS, str(card.folder), "-k", "pages/", "--commit", "another"]
    assert run.main(flags) == 0
    assert [each for each in card.seen if each.startswith("ours")] == ["ours: grow", "ours: decode"]


def test_checks_can_be_skipped(card: Card) -> None:
    assert run.main([*FLAGS, str(card.folder), "--skip-checks", "-k", "pages/"]) == 0
    assert card.behind is None
    assert card.seen[0] == "compile cells"
    assert {each.partition("/")[0] for each in card.seen[1:]} == {"pages"}


def test_time_that_is_over_ends_checks_and_cells(card: Card, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "MARGIN", 0)
    seconds = ["--limit-seconds", "0"]
    assert run.main([*FLAGS, str(card.folder), *seconds]) == 0
    assert card.seen == ["compile cells", "begin to compile checks"]
    printed = capsys.readouterr().out
    assert "not all is done" in printed
    assert "binaries not checked" in printed


def test_a_process_that_is_quiet_is_ended(tmp_path: Path, monkeypatch) -> None:
    notes = tmp_path / "cells.json"
    notes.touch()
    monkeypatch.setattr(run, "start", lambda *_: subprocess.Popen([sys.executable, "-c", WAITS]))
    monkeypatch.setattr(run, "QUIET", 0.5)
    monkeypatch.setattr(run, "POLL", 0.01)
    begun = time.monotonic()
    assert run.child("run", [], 100.0, notes) is None
    assert run.child("precompile", [], 0.5, None) is None
    assert time.monotonic() - begun < 60
    monkeypatch.setattr(run, "start", lambda *_: subprocess.Popen(["false"]))
    assert run.child("precompile", [], 100.0, None) == 1


def test_what_loses_the_device_is_left_out_next_time(tmp_path: Path) -> None:
    """As when a process dies: nothing it would have written afterwards is there."""
    cell, left_out = EVERY[0], []

    def dying(at: str):
        def measured(cell: Cell, tries, without: set[str]) -> run.Record:
            left_out.append(without)
            tries(at)
            raise RuntimeError("illegal access")

        return measured

    for at in ("flashinfer", measure.TIMING, measure.TIMING):
        results = run.Results(tmp_path / "cells.json")
        with pytest.raises(RuntimeError):
            run.run_cells([cell], results, dying(at))
        again = run.Results(tmp_path / "cells.json")
        assert again.data["trying"] == [cell.id, at]
        assert cell.id not in again.data["cells"]
        again.note_loss()
    assert left_out == [set(), {"flashinfer"}, {"flashinfer", measure.TIMING}]
    assert measure.INPUTS in again.without(cell.id)
    again.tries(EVERY[1].id, "flashinfer")
    again.note_loss()
    assert again.without(EVERY[2].id) == {"flashinfer"}  # lost twice, so everywhere


def test_processes_that_die_or_hang_are_replaced(tmp_path: Path, monkeypatch) -> None:
    path, statuses = tmp_path / "cells.json", iter([1, None, 0])
    run.Results(path).save()

    def child(module: str, arguments: list[str], seconds: float, notes: Path) -> int | None:
        run.Results(path).tries("a cell", "a peer")
        return next(statuses)

    monkeypatch.setattr(run, "child", child)
    assert run.measure_in_turns(path, [], 100.0)
    assert run.Results(path).data["losses"] == [["a cell", "a peer"]] * 2


@pytest.mark.parametrize(
    ("state", "mine", "is_on"),
    [("passed", 0.9, True), ("passed", 1.1, False), ("failed: exit status 1", 0.9, False)],
)
def test_what_was_tried_is_on_from_then_on_if_it_was_right_and_not_slower(
    state, mine, is_on, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "proved.json"
    file.write_text(json.dumps({name: {} for name in proved.NAMES}))
    monkeypatch.setattr(proved, "FILE", file)
    machine = {"arch": 90, "device": "a card", "triton": "3.6.0", "date": "today"}
    found = {EVERY[0].id: record(**{"ours": 10.0, "ours-gluon": 10 * mine})}
    data = {"runs": [{"machine": machine}], "cells": found, "tried": {"gluon_prefill": state}}
    (told,) = proving.prove(data, tmp_path)
    noted = json.loads(file.read_text())
    assert ("on from now on" in told) is is_on
    assert not noted["gluon_decode"]
    assert ("90" in noted["gluon_prefill"]) is is_on
    if is_on:
        assert noted["gluon_prefill"]["90"]["ratio"] == 0.9
        assert noted["gluon_prefill"]["90"]["device"] == "a card"


def test_what_failed_where_it_was_tried_is_left_out_of_all_cells(tmp_path: Path) -> None:
    results = run.Results(tmp_path / "cells.json")
    results.data["tried"] = {"gluon_prefill": "failed: exit status 1", "gluon_decode": "passed"}
    assert results.without("any") == {"ours-gluon"}


def test_counts_in_the_documentation(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    numbers = [len(list(correctness.cases_of(correctness.OURS, "cuda")))]
    numbers += [len(list(correctness.cases_of(name, "cuda"))) for name in proved.NAMES]
    every, *tried = numbers
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for told in (
        f"{every} cases are held to a float64 twin",
        f"then {sum(tried)} more",
        *(f"{count} for `{name}`" for name, count in zip(proved.NAMES, tried)),
        f"{len(EVERY)} in all",
        f"{len(FIRST)} kinds of cells",
        f"{len(EVERY) - len(FIRST)} other cells",
    ):
        assert told in " ".join(text.split())


@pytest.mark.slow
def test_a_run_in_processes_of_its_own(tmp_path: Path) -> None:
    """As on a card, with kernels that are interpreted and a small cell."""
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.run", "--device", "cpu", "--shrink"]
    command += ["-k", "append/A/256x1", "--commit", "abc", "--out", str(tmp_path)]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    results = run.Results(tmp_path / "cells.json")
    assert "times" in results.data["cells"]["append/A/256x1"]["ways"]["ours"]
    assert len(results.data["checks"][correctness.OURS]) > 20
    assert done.returncode == bool(results.failures())
    assert "all is done" in done.stdout
    assert done.stdout.index("append/A/256x1: ") < done.stdout.index("correctness, ours: ")


def test_make_passes_its_flags_on() -> None:
    command = ["make", "-n", "gpu", "RESUME=a/cells.json", "LIMIT=90", "GPU_FLAGS=--skip-checks"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for flag in ("--resume a/cells.json", "--limit-seconds 90", "--skip-checks", "--precompile"):
        assert flag in " ".join(printed.replace('"', "").split())
