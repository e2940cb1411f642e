"""The notebook runs from its first cell to its last, with the small model on this machine."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_what_it_printed(path):
    assert cells(path)
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_cell_by_cell(path, smollm2_path, capsys):
    pytest.importorskip("transformers")
    names: dict[str, object] = {"__name__": "__main__"}
    first, *others = ("".join(cell["source"]) for cell in cells(path))
    assert first.startswith("%pip install")
    for number, cell in enumerate(others):
        cell = re.sub(r'^MODEL = ".*"$', f"MODEL = {os.fspath(smollm2_path)!r}", cell, flags=re.M)
        exec(compile(cell, f"{path.name}, cell {number + 1}", "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"\d+ tokens computed, \d{2,} spared", said)
    assert re.search(r"^S+o+", said, re.MULTILINE)
