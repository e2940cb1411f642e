"""Checks of the pages themselves: blocks are tagged; files that they name and link to exist."""

import re
from collections import Counter
from functools import cache

import pytest

from tests.docs.pages import DOCS, LANGUAGES, PAGES, ROOT, blocks, name

PLACES = ("pagedkv", "kernels", "tests", "benchmarks", "docs")
RECORDS = sorted((DOCS / "decisions").glob("*.md"))
# How many blocks cannot run, and why. It grows only by an edit that somebody has looked at.
NOT_RUN = {
    "needs a mixture of experts": 1,
    "needs a model that takes images": 4,
    "it needs TRL, see tests/integrations/test_trl.py": 1,
    "it needs outlines and llguidance, see tests/integrations/test_grammars.py": 1,
    "it needs xgrammar, see tests/integrations/test_grammars.py": 1,
    "needs a model that several processes can share out": 2,
    "needs lm-evaluation-harness and its tasks": 2,
    "needs a cluster": 1,
    "takes minutes": 1,
    "installs gigabytes": 1,
    "needs two cards": 2,
    "is started by torchrun": 2,
    "it takes a quarter of a minute, and the interpreter compiles nothing": 1,
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_says_what_it_holds(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^\s*```.*$", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), f"{name(page)}: a fence is indented or left open"
    unknown = [f"{name(page)}:{b.line}" for b in blocks(page) if b.language not in LANGUAGES]
    assert not unknown, f"expected one of {', '.join(LANGUAGES)} after the fence"


def test_no_more_blocks_are_left_out_than_are_known():
    found = [block for page in PAGES for block in blocks(page) if block.not_run]
    assert all(block.language in ("python", "sh") for block in found)
    assert Counter(block.not_run for block in found) == NOT_RUN
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    said = sum(len(re.findall(r"^\s*<!-- not run", text, re.MULTILINE)) for text in texts)
    assert said == len(found), "a comment stands elsewhere than in the line before a fence"


@cache
def paths():
    """The paths of all files and folders; those of folders end with a slash."""
    found = [path for place in PLACES for path in (ROOT / place).rglob("*")]
    return [f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in found]


@pytest.mark.parametrize("page", [p for p in PAGES if p != DOCS / "compat.md"], ids=name)
def test_every_file_and_folder_that_a_page_names_exists(page):
    there = {*(f"/{name}/" for name in PLACES), *paths()}
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))(?::\w+)?`", page.read_text(encoding="utf-8")))
    made = {".gpu/"}  # by a command that the page tells of
    missing = [name for name in named - made if not any(x.endswith(f"/{name}") for x in there)]
    assert not missing, f"{name(page)} names {', '.join(sorted(missing))}"


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_a_record_has_the_parts_of_one_and_the_number_of_its_file(record):
    text = record.read_text(encoding="utf-8")
    assert text.startswith(f"# {record.name[:4]} ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Choice", "Consequences"]
    said = re.findall(r"^.*Superseded.*$", text, re.MULTILINE)
    line = r"\*Superseded (in part )?by \[\d{4}\]\(\d{4}-[\w-]+\.md\)\*"
    assert all(re.match(line, found) for found in said)


def test_records_that_are_named_anywhere_exist():
    files = [path for place in PLACES for path in (ROOT / place).rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".md")]
    files += [ROOT / name for name in ("pyproject.toml", "CHANGELOG.md", "CONTRIBUTING.md")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"decisions?[/\s](\d+(?:-[\w-]+\.md)?)", text)
        gone = [x for x in named if not any(record.name.startswith(x) for record in RECORDS)]
        assert not gone, f"{name(path)} names {', '.join(gone)}"


def test_the_measures_against_threats_name_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = text.partition("## Threats")[2].splitlines()[4:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            assert (
                f"def {test}(" in (ROOT / file).read_text("utf-8")
                if test
                else (ROOT / file).exists()
            )
