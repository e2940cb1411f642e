"""The Python blocks of a page run, in order and in one namespace, and print what it says."""

import contextlib
import doctest
import io

import pytest

from tests.docs.pages import DOCS, blocks, missing, name, with_blocks

SAME = doctest.OutputChecker()
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# So that layers of the small language model stream as those of a large one on a card would.
TIGHT = {DOCS / "streaming.md": ("8GiB", "740MB")}

SHOWN = dict.fromkeys([*with_blocks("output"), DOCS / "generate.md", DOCS / "streaming.md"])


def run(page, names, exact):
    """Run a page's blocks; where `exact`, what they print is held against the page."""
    printed, without = "", []
    for block in blocks(page):
        if block.language == "python":
            without = missing(block)
        if without:  # what it would print is left out with it
            continue
        where = f"{name(page)}:{block.line}"
        if block.language == "python" and not block.not_run:
            body = block.body.replace(*TIGHT.get(page, ("", "")) if exact else ("", ""))
            with contextlib.redirect_stdout(io.StringIO()) as out:
                # Empty lines before it, so that a traceback names the line of the page.
                exec(compile("\n" * block.line + body, name(page), "exec"), names)
            printed = out.getvalue()
        elif block.language == "output":
            assert block.follows, f"{where}: no Python block stands before this output"
            agrees = not exact or SAME.check_output(block.body, printed, LOOSE)
            assert agrees, f"{where}: printed was\n{printed}"
    for value in list(names.values()):
        if type(value).__name__ in ("BatchGenerator", "LayerStreamer", "PagedCache"):
            value.close()


@pytest.mark.parametrize("page", with_blocks("python"), ids=name)
def test_the_blocks_of_a_page_run_as_they_stand(page, prelude, tiny_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, prelude(tiny_path), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=name)
@pytest.mark.filterwarnings("ignore:length. planned for")
def test_a_language_model_prints_what_the_page_shows(
    page, prelude, smollm2_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run(page, prelude(smollm2_path), exact=True)
