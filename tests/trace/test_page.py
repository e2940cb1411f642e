"""The page in a real browser: it draws itself, answers the mouse and the keyboard, and stays small.

Each test starts a headless Chromium; without one they are skipped (CONTRIBUTING.md says more).
"""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedkv import PagedKVCache
from pagedkv.trace.history import history_of
from pagedkv.trace.page import page
from pagedkv.trace.read import Trace
from tests.cases import one_group
from tests.contents import advance, start

NAMES = "chromium", "google-chrome", "chromium-browser"
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
PROBE = Path(__file__).with_name("probe.js").read_text("utf-8")
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium or google-chrome")


@pytest.fixture
def written(tmp_path) -> Path:
    """A page of five steps: a text that grows, is forked, offloaded and freed."""
    config = one_group(host_tokens=64)
    cache = PagedKVCache(config, device="cpu", trace=tmp_path / "job.trace")
    first = start(cache, [1, 2, 3, 4, 5])
    advance(cache, {first: [1, 2, 3, 4, 5, 6]})
    second = cache.fork(first)[0]
    advance(cache, {first: [1, 2, 3, 4, 5, 6, 7]})
    cache.offload(second)
    third = start(cache, [9, 9])
    cache.free([first, second])
    advance(cache, {third: [9, 9, 9]})
    (tmp_path / "job.html").write_text(page(history_of(Trace(tmp_path / "job.trace"))), "utf-8")
    return tmp_path / "job.html"


def browse(path: Path, code: str = "", anchor: str = "") -> dict:
    """Opens a page, runs code in it, and returns what that found beside the text it shows."""
    probed, probe = path.with_suffix(".probe.html"), PROBE.replace("CODE", code)
    probed.write_text(f"{path.read_text('utf-8')}<script>{probe}</script>", "utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800",
        f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=10000", "--dump-dom",
        f"{probed.as_uri()}{anchor}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    answer = json.loads(html.unescape(found[1]))
    assert answer["errors"] == []
    return {"dom": html.unescape(done.stdout), "result": answer.get("result")}


@needs_browser
def test_the_page_draws_itself_and_says_the_totals(written):
    dom = browse(written)["dom"]
    assert "<title>job.trace: pages of a KV cache</title>" in dom
    assert "5 steps, 3 sequences" in dom
    assert "pages live (step 2)" in dom
    assert 'role="img"' in dom


@needs_browser
def test_an_address_may_name_a_cell(written):
    dom = browse(written, anchor="#step=2&page=0")["dom"]
    assert "page 0 (2 layers): sequence 0 and others, 4 of 4 tokens, 2 references" in dom
    assert "before it: fork 0 to 1" in dom


@needs_browser
def test_the_mouse_over_a_cell_is_told_what_it_is(written):
    code = "return [over(0, 1), over(1, 1), over(3, 0), over(4, 0), over(0, 7)];"
    told = [text.split("\n")[0] for text in browse(written, code)["result"]]
    assert told[0] == "page 1 (2 layers): sequence 0, 1 of 4 tokens, 1 reference"
    assert told[1] == "page 1 (2 layers): sequence 0, 2 of 4 tokens, 1 reference"
    assert told[3].startswith("page 0 (2 layers): cached: of sequence 0, 4 of 4 tokens")
    assert told[4] == "page 7 (2 layers): free"


@needs_browser
def test_states_of_pages_are_told_apart_by_more_than_colour(written):
    code = "return [colour(0, 0), colour(2, 0), colour(4, 0), colour(0, 7)];"
    live, shared, cached, free = browse(written, code)["result"]
    assert len(live) == len(cached) == len(free) == 1
    assert len(shared) == 2  # stripes
    assert live[0] in shared
    assert len({live[0], cached[0], free[0]}) == 3


@needs_browser
def test_the_chart_is_as_high_as_what_is_used_and_the_legend_names_what_is_there(written):
    code = 'return [highest, numPages, one("#counts").textContent, one("#legend").textContent];'
    highest, pages, counts, legend = browse(written, code)["result"]
    assert 2 * highest < pages
    assert f"{pages} exist" in counts
    assert "dashes: in host memory" in counts
    assert "offloaded" in legend
    assert "evicted" not in legend


@needs_browser
def test_times_of_a_job_of_days_are_told(written):
    recorded = written.with_name("job.trace")
    text, hours = recorded.read_text(), re.compile(r'(?<="us":)\d+')
    recorded.write_text(hours.sub(lambda us: f"{14_400_000_000 + int(us[0])}", text))
    written.write_text(page(history_of(Trace(recorded))), "utf-8")
    told = browse(written, "return over(0, 1);")["result"]
    assert re.search(r"step 0, 144\d\d\.", told)


@needs_browser
def test_keys_and_the_wheel_move_and_zoom_within_the_map(written):
    code = """
      const whole = { ...view }, near = press("+"), right = press("ArrowRight");
      for (let i = 0; i < 50; i++) press("ArrowRight");
      const end = { ...view };
      map.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, clientX: 600, clientY: 300 }));
      const wheel = { ...view };
      return { whole, near, right, end, wheel, back: press("0") };
    """
    found = browse(written, code)["result"]

    def width(name):
        return found[name]["x1"] - found[name]["x0"]

    assert width("near") < width("whole")
    assert found["right"]["x0"] > found["near"]["x0"]
    assert found["end"]["x1"] == found["whole"]["x1"]
    assert width("wheel") <= width("end")
    assert found["back"] == found["whole"]


def test_200_rows_on_4000_pages_make_a_small_page(tmp_path):
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 16}
    config = one_group(**shape, max_tokens=64_000, max_sequences=200)
    cache = PagedKVCache(config, device="cpu", trace=tmp_path / "a.trace")
    source = random.Random(3)
    seqs = [cache.add([1000 + i, *range(319)]) for i in range(200)]
    while left := [seq for seq in seqs if cache.uncached(seq).size]:
        widths = [min(cache.uncached(seq).size, source.choice((1, 2, 9))) for seq in left]
        step = cache.prepare(left, num_new=widths)
        step.wrote[:] = [0]
        cache.commit(step)
    assert cache.stats().live == 4000
    assert len(page(history_of(Trace(tmp_path / "a.trace")))) < 100_000
