"""The site has a place for every page and every public name, and needs no network to be read."""

import inspect
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import pagedkv
from pagedkv import errors
from tests.docs.pages import DOCS, PAGES, ROOT

SITE = DOCS / "site"
# Named in the reference, though `from pagedkv import ...` does not give them.
MORE = {"Explanation", "StateLayer", "GenerationStats", "StreamStats"}
MORE |= {"Policy", "PageRecords", "Sinks"}
MORE |= {"Events", "Event", "Request", "AsyncEvents", "AsyncRequest"}
MORE |= {
    "PagedLM",
    "PagedRollouts",
    "register",
    "measure_quality",
    "variant",
    "Variant",
    "Quality",
    "Measured",
    "Promise",
    "replay",
}
# Without an underscore, because other parts of the package call them; of no use to a caller.
INSIDE = {
    "PagedKVCache": """abort_abandoned copy_seconds follow mark open_step release_later require_idle
        require_truncatable""",
    "StepMetadata": """again close csr direct is_of keep kept kv_lens_of mark_written in_chunks memo
        narrowed padded require_open watch written""",
    "PagedCache": """abort_step all_attended_again attended_again begin_forward begin_part
        commit_step end_forward enter_mixer forget_forward forward_is_paged forward_layer
        get_seq_length held is_paged is_under_way is_written knows_texts latest_mask length_behind
        num_queries open_step opened packed paged position_ids require_own require_usable
        shared_layers slopes told_places touched transaction turn unpacked update update_dense""",
    "AttentionPlan": "check_pages check_slots once",
    "BatchGenerator": "running tokenizer",
}


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    named = {name.split(".")[-1] for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    assert "errors" in named  # the whole module
    ours = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert named - {"errors"} == (set(pagedkv.__all__) | MORE) - ours


@pytest.mark.parametrize("name", INSIDE)
def test_a_member_is_in_the_reference_or_known_to_be_of_no_use_there(name):
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    options = re.search(rf"^::: pagedkv\.{name}\n((?: .*\n)+)", text, re.MULTILINE)[1]
    named = re.search(r"members: \[(.*)\]", options)[1].split(", ")
    classes = [c for c in getattr(pagedkv, name).__mro__ if c.__module__.startswith("pagedkv.")]
    assert all(inspect.getdoc(getattr(classes[0], member)) for member in named)
    there = {member for c in classes for member in vars(c) if not member.startswith("_")}
    assert there == {*named, *INSIDE[name].split()}
    # The table above the class has the same, in groups.
    grouped = re.findall(rf"\[pagedkv\.{name}\.(\w+)\]", text)
    assert grouped in ([], named)


def test_every_page_stands_in_the_navigation():
    text = (SITE / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- ([\w/]+\.md)\b", text, re.MULTILINE)
    assert len(named) == len(set(named))
    # Pages made of other files, and the decisions, which are added as they come.
    made = {"index.md", "changelog.md", "contributing.md", "security.md", "examples/index.md"}
    decisions = {page for page in named if page.startswith("decisions/")}
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    there = {page for page in there if not page.startswith("decisions/")}
    assert set(named) - made - decisions == there


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of headings, which are alike on GitHub and on the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=str)
def test_links_lead_to_files_and_to_headings(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        link = re.sub(r"^https://github\.com/pagedkv/pagedkv/(blob|tree|raw)/main", str(ROOT), link)
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", path):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_nobody_for_anything(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", SITE / "mkdocs.yml"]
    done = subprocess.run([*command, "-d", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = re.compile(r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=.?https?:")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        assert not fetched.search(page.read_text(encoding="utf-8")), page
    # The names that can be linked to: four lines of header, then compressed text.
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    members = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    for name in pagedkv.__all__:
        assert any(member.endswith(f".{name}") for member in members), name
    for name, inside in INSIDE.items():
        shown = {member.rpartition(".")[2] for member in members if f".{name}." in member}
        assert shown
        assert not shown & {*inside.split()}
    assert "tokens" in {m.rpartition(".")[2] for m in members if ".StepMetadata." in m}


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert str(cited["version"]) == pagedkv.__version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text()
