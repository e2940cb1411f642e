"""The notebook shows what its cells print, with the small model on this machine."""

import json
from pathlib import Path

import pytest

from tests.docs.notebook import code_cells, digest, printed, run

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
AGAIN = "PYTHONSAFEPATH= python -m tests.docs.notebook docs/notebooks/..."


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request) -> dict:
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_a_notebook_is_kept_with_what_its_code_printed(notebook):
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["outputs_of"] == digest(notebook), AGAIN
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert bool(printed(cell)) == ("print(" in "".join(cell["source"]))


@pytest.mark.slow
def test_a_notebook_prints_what_it_shows_and_warns_of_nothing(notebook, smollm2_path):
    for cell, (out, warned) in zip(code_cells(notebook), run(notebook, smollm2_path)):
        assert out == printed(cell), AGAIN
        assert not warned
