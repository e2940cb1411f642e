"""What the pages say of themselves: blocks are tagged, files that they name and link to exist."""

import re
from collections import Counter

import pytest

from tests.docs.pages import DOCS, LANGUAGES, ROOT, TODAY, blocks, name

PLACES = ("pagedkv", "kernels", "tests", "benchmarks", "docs")
# How many blocks cannot run, and why. It grows only by an edit that somebody has looked at.
NOT_RUN = {
    "needs a mixture of experts": 1,
    "needs a model that takes images": 3,
    "it needs TRL, see tests/integrations/test_trl.py": 1,
    "it needs outlines and llguidance, see tests/integrations/test_grammars.py": 1,
    "it needs xgrammar, see tests/integrations/test_grammars.py": 1,
    "needs a model that several processes can share out": 2,
    "needs lm-evaluation-harness and its tasks": 3,
    "needs a cluster": 1,
    "takes minutes": 1,
    "needs two cards": 2,
    "is started by torchrun": 2,
    "transformers would take most of the free memory": 1,
    "it takes a quarter of a minute, and the interpreter compiles nothing": 1,
}


@pytest.mark.parametrize("page", TODAY, ids=name)
def test_every_fence_says_what_it_holds(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^\s*```.*$", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), f"{name(page)}: a fence is indented or left open"
    unknown = [f"{name(page)}:{b.line}" for b in blocks(page) if b.language not in LANGUAGES]
    assert not unknown, f"expected one of {', '.join(LANGUAGES)} after the fence"


def test_no_more_blocks_are_left_out_than_are_known():
    found = [block for page in TODAY for block in blocks(page) if block.not_run]
    assert all(block.language in ("python", "sh") for block in found)
    assert Counter(block.not_run for block in found) == NOT_RUN
    texts = [page.read_text(encoding="utf-8") for page in TODAY]
    said = sum(len(re.findall(r"^\s*<!-- not run", text, re.MULTILINE)) for text in texts)
    assert said == len(found), "a comment stands elsewhere than in the line before a fence"


@pytest.mark.parametrize("page", [p for p in TODAY if p != DOCS / "compat.md"], ids=name)
def test_every_file_and_folder_that_a_page_names_exists(page):
    there = {f"/{name}/" for name in PLACES}
    for place in PLACES:
        for path in (ROOT / place).rglob("*"):
            ending = "/" if path.is_dir() else ""
            there.add(f"/{path.relative_to(ROOT).as_posix()}{ending}")
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", page.read_text(encoding="utf-8")))
    made = {".gpu/"}  # by a command that the page tells of
    missing = [name for name in named - made if not any(x.endswith(f"/{name}") for x in there)]
    assert not missing, f"{name(page)} names {', '.join(sorted(missing))}"
