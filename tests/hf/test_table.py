"""The tables of `docs/compat.md` say of every type of model what its tests find."""

import re

import pytest
import transformers

from tests.effort import few
from tests.hf.table import BEGIN, DOCUMENT, END, TYPES, judge, parsed, part, rendered

WRITE = "python -m tests.hf.table docs/compat.md writes it anew"


@pytest.fixture(scope="module")
def text():
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document.count(BEGIN) == document.count(END) == 1
    return part(document)


@pytest.fixture(scope="module")
def release(text):
    return re.search(r"types of transformers ([\w.]+)\*\*", text)[1]


@pytest.fixture
def said(text, release):
    """By type, what the table says, of the release that it was made with."""
    if release != transformers.__version__:
        pytest.skip(f"the table is of transformers {release}")
    return parsed(text)


def test_the_table_has_every_type_once_and_its_counts_add_up(text, said):
    assert sorted(said) == TYPES
    rows = re.findall(r"^\| \d+ .*\| (\d+) \|$", text, re.MULTILINE)
    assert sum(map(int, rows)) == len(TYPES)
    assert rendered(said) == text, WRITE


@pytest.mark.parametrize("kind", few(TYPES, "llama", "deepseek_v3", "bart", "voxtral"))
def test_a_type_is_right_or_refused_by_name_and_the_table_says_which(kind, text, release):
    found = judge(kind)
    if release == transformers.__version__:
        assert found == parsed(text)[kind], WRITE
