"""Summaries of docstrings name who acts, or the thing itself: a riddle has to be read twice."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RIDDLE = re.compile(r'^ *r?"""(?:Has|Those|The same|Of each|What|Which|That)\b.*', re.MULTILINE)


@pytest.mark.parametrize("folder", ["pagedkv", "kernels", "benchmarks"])
def test_no_summary_is_a_riddle(folder):
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert texts
    found = [(str(path), said.strip()) for path in texts for said in RIDDLE.findall(texts[path])]
    assert not found, "\n".join(f"{path}: {said}" for path, said in sorted(found))
