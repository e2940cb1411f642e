"""A file is whole or the old one whatever a kill interrupts, and goes on loading."""

import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pagedkv.saving import format as files
from tests.cases import two_groups
from tests.contents import assert_contents
from tests.pressing import AtLine
from tests.saving.saved import TEXT, make

GOLDEN = Path(__file__).parent / "sequence-v1.safetensors"


# ------------------------------------------------------------------ kill -9


KILLED = """
import os, signal, sys
from pathlib import Path
from pagedkv import PagedKVCache, write_kv
from pagedkv.cache import forked
from pagedkv.saving import format as files
from tests.cases import one_group
from tests.contents import start

path, cache = Path(sys.argv[1]), PagedKVCache(one_group(), device="cpu")
old, new = start(cache, [1, 2, 3]), start(cache, [4, 5, 6, 7, 8])
cache.save(new, path)
new_bytes = path.read_bytes()
cache.save(old, path)
old_bytes = path.read_bytes()
seen = []
while True:
    forked._living.clear()  # this child stands for the process that is killed
    child = os.fork()
    if not child:
        left = len(seen)
        def trace(frame, event, arg):
            global left
            if frame.f_code.co_filename != files.__file__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        cache.save(new, path)
        sys.settrace(None)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = path.read_bytes()
    seen.append("old" if found == old_bytes else "new" if found == new_bytes else "neither")
    if status != -signal.SIGKILL:
        break
    path.write_bytes(old_bytes)
print(status, " ".join(seen))
"""


def test_a_kill_at_any_line_of_a_save_leaves_the_old_file_or_the_new_one(forked, tmp_path):
    status, *seen = forked(KILLED, str(tmp_path / "x")).split()
    assert status == "0"
    assert len(seen) > 25
    assert seen == sorted(seen, reverse=True)  # old until the move, new from there on
    assert set(seen) == {"old", "new"}


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody traces already")
def test_an_interrupt_at_any_line_of_a_save_leaves_no_file_that_nobody_reads(tmp_path):
    """Also where the fresh file was made, and its name is not yet known to who asked for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    path, lines, n = tmp_path / "x", None, 0
    try:
        while lines is None or lines.pressed:
            lines, n = AtLine(n + 1, {files.__file__, tempfile.__file__}.__contains__), n + 1
            with suppress(KeyboardInterrupt), lines:
                files.write(path, {}, {"a": torch.zeros(3)})
            assert set(tmp_path.iterdir()) <= {path}
            assert not path.exists() or files.verify(path.read_bytes())
    finally:
        signal.signal(signal.SIGINT, before)
    assert n > 50


# ------------------------------------------------------------------ the format lasts


def test_the_golden_file_goes_on_loading():
    """Written by version 1: a change that breaks this needs a version 2 that still reads it."""
    config = two_groups(6, dtype="bfloat16", fingerprint=b"golden")
    cache = make(config)
    seq = cache.load(GOLDEN, salt=b"now")
    assert_contents(cache, seq, TEXT[:13])
    assert cache.uncached(seq).tolist() == TEXT[13:]
    assert cache.gather(seq, 1)[0].shape[0] == 9
    other = make(two_groups(6, dtype="bfloat16", fingerprint=b"golden", page_size=2))
    assert_contents(other, other.load(GOLDEN), TEXT[:13])
    hit = other.add(TEXT)
    assert_contents(other, hit, TEXT[: other.length(hit)])
    assert other.length(hit) == 13
    assert files.verify(GOLDEN.read_bytes())["version"] == 1
