"""The pages of the documentation, cut into their fenced blocks.

A fence says what it holds: `python` and `sh` are run, `output` is what the Python block before it
prints, `text` and `json` are shown only. A comment in the line before a fence, `<!-- not run:
reason -->`, says why a block cannot run.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "sh", "output", "text", "json")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

# Libraries that are not installed everywhere; blocks that import one of them run where it is.
TABLES = ("pandas", "polars", "pyarrow", "datasets")

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n\Z")


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int  # of its first line, counted from 0
    not_run: str  # the reason, or nothing
    follows: bool  # only blank lines lie between the block before and this one


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for fence in _FENCE.finditer(text):
        before = text[end : fence.start()]
        reason = _NOT_RUN.search(before)
        found.append(
            Block(
                fence[1],
                fence[2],
                text.count("\n", 0, fence.start(2)),
                reason[1] if reason else "",
                bool(found) and not before.strip(),
            )
        )
        end = fence.end()
    return found


def missing(block: Block) -> list[str]:
    """Libraries for tables that a block imports and that are not installed."""
    named = re.findall(r"^(?:import|from) (\w+)", block.body, re.MULTILINE)
    return [name for name in named if name in TABLES and find_spec(name) is None]


def with_blocks(language: str) -> list[Path]:
    """Pages with at least one block of a language that can run."""
    return [p for p in PAGES if any(b.language == language and not b.not_run for b in blocks(p))]
