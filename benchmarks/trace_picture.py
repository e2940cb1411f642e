"""A recorded job as the viewer of traces draws it, for the README.

    PYTHONSAFEPATH= python -m benchmarks.trace_picture docs/trace.png demo.trace step=9 page=4

`pagedkv generate ... --trace demo.trace` records the job; the words behind it name the cell that is
pointed at. A headless Chromium draws the page, without what only a reader of the page can use.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pagedkv.trace.history import history_of
from pagedkv.trace.page import page
from pagedkv.trace.read import Trace

SIZE = "1200,700"
STILL = "<style>#legend button, #legend span:last-child { display: none; }</style>"


def main() -> None:
    target, trace, *cell = sys.argv[1:]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        raise SystemExit("needs chromium or google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "trace.html"
        drawn.write_text(page(history_of(Trace(trace))) + STILL, encoding="utf-8")
        options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size={SIZE}"
        options += f" --virtual-time-budget=10000 --user-data-dir={folder}/profile"
        address = f"{drawn.as_uri()}#{'&'.join(cell)}"
        command = [browser, *options.split(), f"--screenshot={Path(target).resolve()}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
