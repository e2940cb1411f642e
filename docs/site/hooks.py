"""What the site has beside the files of `docs/`: the documents of the repository's root, and lists.

`README.md` is the home page. Links are written for the repository; here they are made those of the
site, also those that name the repository itself, as README's do for who reads it elsewhere.
Zensical, the successor of Material for MkDocs, calls no hooks: to move to it, write what is made
here to files before the build.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OF_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
FOLDERS = {"docs/examples": "examples/index.md", "docs/decisions": "decisions/index.md"}
OURS = "https://github.com/pagedkv/pagedkv/"
LINK = re.compile(rf'(\]\(|(?:src|href)=")({OURS}(?:blob|tree|raw)/main/)?([^)"#\s:]+)(?=[)"#\s])')


def on_config(config: Any) -> Any:
    decisions = sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))
    config.nav[-1]["Decisions"] += [f"decisions/{name}" for name in decisions]
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in OF_ROOT.items()}
    made["examples/index.md"] = _examples()
    made["decisions/index.md"] = _decisions()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    source = {page: name for name, page in OF_ROOT.items()}.get(here, f"docs/{here}")
    # A bar in a table's code: GitHub takes the backslash away, Markdown's own tables show it.
    markdown = re.sub(r"`([^`\n]*)\\\|([^`\n]*)`", r"<code>\1&#124;\2</code>", markdown)
    return relinked(markdown, source, here)


def relinked(markdown: str, source: str, page: str) -> str:
    """Makes links between files of the repository those between pages of the site."""

    def link(match: re.Match[str]) -> str:
        opening, absolute, target = match.groups()
        folder = "" if absolute else posixpath.dirname(source)
        path = posixpath.normpath(posixpath.join(folder, target))
        there = OF_ROOT.get(path) or FOLDERS.get(path) or _example(path)
        there = there or path.removeprefix("docs/")
        if absolute and there == path:  # on no page of the site
            return match[0]
        return opening + posixpath.relpath(there, posixpath.dirname(page) or ".")

    return LINK.sub(link, markdown)


def _example(path: str) -> str:
    """Where the page of all examples shows a file of theirs."""
    folder, name = posixpath.split(path)
    there = folder == "docs/examples" and name.endswith(".py")
    return f"{FOLDERS[folder]}#{name.replace('.', '')}" if there else ""


def _examples() -> str:
    """A page with the code of all examples."""
    parts = ["# Examples", "Each runs by itself, with the small model or one of yours."]
    for path in sorted((DOCS / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        first, _, rest = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")
        body = code.split('"""', 2)[2].strip()
        parts += [f"## {path.name}", first, rest.replace("    python", "```\npython", 1)]
        if parts[-1].startswith("```"):
            command, _, more = parts[-1].partition("\n\n")
            parts[-1] = f"{command}\n```\n\n{more}"
        parts.append('??? note "Code"\n\n' + _indented(f"```python\n{body}\n```"))
    return "\n\n".join(parts)


def _decisions() -> str:
    """A page with the titles of all decisions."""
    rows = []
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        rows.append(f"- [{title}]({path.name})")
    text = (
        "Why things are as they are: what was chosen, among what, and what follows. Where a number "
        "is missing, the record was dropped; what remains of it is said where the code is."
    )
    return f"# Decisions\n\n{text}\n\n" + "\n".join(rows)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
