"""A notebook's cells, run one after another; what they print is kept in its file.

    PYTHONSAFEPATH= python -m tests.docs.notebook docs/notebooks/first_steps.ipynb

writes the outputs anew, with the small model of this machine, and with a digest of the code that
made them. The first cell installs the package and is not run.
"""

import contextlib
import hashlib
import io
import json
import logging
import re
import sys
import warnings
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """Tells whether code was changed since its outputs were made."""
    code = json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)])
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def printed(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(notebook: dict[str, Any], model: str | Path) -> list[tuple[str, list[str]]]:
    """Runs the code cells; returns what each prints, and warnings of transformers and Python."""
    names: dict[str, object] = {"__name__": "__main__"}
    first, *others = ("".join(cell["source"]) for cell in code_cells(notebook))
    assert "%pip install" in first
    said: list[tuple[str, list[str]]] = [("", [])]
    logger = logging.getLogger("transformers")
    for number, code in enumerate(others, 2):
        code = re.sub(r'^MODEL = ".*"$', f"MODEL = {str(model)!r}", code, flags=re.M)
        out, heard = io.StringIO(), BufferingHandler(1000)
        logger.addHandler(heard)
        with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as warned:
            exec(compile(code, f"cell {number}", "exec"), names)
        logger.removeHandler(heard)
        messages = [record.getMessage() for record in heard.buffer]
        said.append((out.getvalue(), messages + [str(warning.message) for warning in warned]))
    return said


def main() -> None:
    from benchmarks.smollm2 import smollm2

    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text("utf-8"))
    said = run(notebook, smollm2())
    for number, (cell, (out, _)) in enumerate(zip(code_cells(notebook), said), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": out.splitlines(keepends=True)}
        cell |= {"outputs": [stream] if out else [], "execution_count": number}
    notebook["metadata"]["outputs_of"] = digest(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
