"""A library that cannot be compiled, kept, loaded or trusted does no harm."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from pagedkv import CacheConfig, PagedKVCache
from pagedkv.attention.backend import choose_backend
from pagedkv.kernels.c import library as module
from tests.beside import run_all
from tests.effort import slow
from tests.kernels.c.calls import attend
from tests.kernels.steps import step_of
from tests.kernels.truth import check

ROOT = Path(__file__).resolve().parents[3]
CONFIG = CacheConfig(1, 1, 16, "float32", max_tokens=64)
CPU = torch.device("cpu")
WHY = module.missing()
needs_compiler = pytest.mark.skipif(bool(WHY), reason=WHY or "there is one")


@pytest.fixture(scope="module")
def in_haste(tmp_path_factory):
    """A compiler that leaves optimising out, which takes a fifth of the time."""
    return compiler_of(tmp_path_factory.mktemp("compiler"), 'exec cc "$@" -O0\n')


def compiler_of(folder, *lines):
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + "".join(lines))
    path.chmod(0o700)
    return str(path)


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path, in_haste):
    """Each test looks for its own library."""
    monkeypatch.setenv("PAGEDKV_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", in_haste)
    for found in (module.library, module.missing, module._said):
        found.cache_clear()
    yield tmp_path
    for found in (module.library, module.missing, module._said):
        found.cache_clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, in_haste):
    """A library that was compiled for this processor."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PAGEDKV_CACHE", str(folder))
        patched.setenv("CC", in_haste)
        module._of_this_processor()
    return kept(folder)[0]


@pytest.fixture
def found(anew, whole):
    """The same where the next process looks for it."""
    (anew / "kernels").mkdir(0o700)
    return Path(shutil.copy2(whole, anew / "kernels"))


def kept(folder):
    return sorted((folder / "kernels").glob("*.so"))


@pytest.mark.skipif("CC" in os.environ or not shutil.which("cc"), reason="no compiler is at hand")
def test_a_compiler_that_is_at_hand_makes_a_library_with_all_flags():
    assert WHY == ""


@needs_compiler
def test_it_is_compiled_once_and_found_by_the_next_process(anew):
    assert choose_backend("auto", CPU) == "c"
    (path,) = kept(anew)
    written = path.stat().st_mtime_ns
    module.library.cache_clear()
    module.library()
    assert [x.stat().st_mtime_ns for x in kept(anew)] == [written]


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", sys.executable, '"'])
def test_without_a_compiler_torch_attends_and_one_line_says_why(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match="attention gathers pages first"):
        cache = PagedKVCache(CONFIG)
    assert cache.backend == "torch"
    with pytest.raises(NotImplementedError, match="use 'torch'"):
        PagedKVCache(CONFIG, backend="c")


SCRIPT = "from pagedkv.kernels.c.library import missing; print(missing() or 'there')"


@pytest.fixture
def next_process(forked, anew, in_haste):
    """What the next process says of the library; it begins where torch is imported already."""
    return lambda: forked(SCRIPT, PAGEDKV_CACHE=str(anew), CC=in_haste)


@needs_compiler
@pytest.mark.parametrize("left", [4000, *slow(0, 20)])
def test_a_library_that_was_cut_off_is_compiled_again(left, found, next_process):
    size = found.stat().st_size
    os.truncate(found, left)
    assert next_process() == "there"
    assert found.stat().st_size == size


@needs_compiler
def test_a_compiler_whose_openmp_cannot_be_loaded_makes_a_library_of_one_thread(anew, monkeypatch):
    compiler = compiler_of(
        anew,
        'for a; do if [ "$a" = -fopenmp ]; then while [ "$1" != -o ]; do shift; done\n',
        'echo junk > "$2"; exit 0; fi; done\n',
        'exec cc "$@" -O0\n',
    )
    monkeypatch.setenv("CC", compiler)
    assert module.missing() == ""
    assert len(kept(anew)) == 1


@needs_compiler
def test_a_library_without_its_functions_is_none(anew, monkeypatch):
    compiler = compiler_of(
        anew,
        'while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done\n',
        '[ $# = 0 ] || echo "int x;" | cc -shared -fPIC -x c - -o "$2"\n',
    )
    monkeypatch.setenv("CC", compiler)
    assert "paged_attention" in module.missing()
    assert not kept(anew)


@needs_compiler
@pytest.mark.parametrize("what", ["the folder", "the library"])
def test_what_others_may_write_is_not_loaded(what, found):
    (found if what == "the library" else found.parent).chmod(0o722)
    assert "can be written by others" in module.missing()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_no_error(anew):
    anew.chmod(0o500)
    assert "no library of attention" in module.missing()


def test_a_file_where_the_folder_should_be_is_no_error(anew):
    (anew / "kernels").write_text("")
    assert "no library of attention" in module.missing()


@needs_compiler
def test_processes_that_compile_at_once_all_find_a_whole_library(anew, next_process):
    said = []
    run_all(*[lambda: said.append(next_process())] * 2)
    assert said == ["there"] * 2
    assert len(kept(anew)) == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory, in_haste):
    """Builds the library that a wheel has for this processor."""
    folder = tmp_path_factory.mktemp("wheel")
    level = module.LEVELS[platform.machine()][""]
    module._compiled([in_haste], f"-march={level}", folder / f"attend-{level}.so")
    return next(folder.iterdir()).read_bytes()


@needs_compiler
@pytest.mark.parametrize(
    "what", ["whole", "cut off", "of another processor", "that others may write"]
)
def test_without_a_compiler_the_library_of_the_wheel_is_taken_if_it_can_be(
    what, anew, built, monkeypatch
):
    level = module.LEVELS[platform.machine()][""]
    monkeypatch.setattr(module, "LEVELS", {platform.machine(): {"": level}})
    monkeypatch.setattr(module, "HERE", anew)
    monkeypatch.setenv("CC", "/nowhere/cc")
    if what == "cut off":
        built = built[:-4000]
    if what == "of another processor":
        built = built[:18] + b"\0\0" + built[20:-32]  # e_machine
        built += hashlib.sha256(built).digest()
    library = anew / f"attend-{level}.so"
    library.write_bytes(built)
    library.chmod(0o722 if what == "that others may write" else 0o644)
    assert bool(module.missing()) == (what != "whole")
    if what == "whole":
        step = step_of([(1, 40), (9, 20)], heads=4, groups=2, dim=32, device="cpu")
        check(step, attend(step))
    else:
        assert "no C compiler" in module.missing()


@needs_compiler
def test_a_device_without_a_processor_has_no_c():
    with pytest.raises(NotImplementedError, match="no C kernels for cuda"):
        choose_backend("c", torch.device("cuda"))


SANITIZED = """
    import sys, torch
    torch.set_num_threads(1)
    from pagedkv.kernels.c import eight_bits, library
    library.TIMEOUT = 600
    from tests.kernels.c.calls import KINDS, attend, check_choice, check_eight_bits, check_norms
    from tests.kernels.c.calls import check_products
    from tests.kernels.c.test_page_coding import AXES
    from tests.kernels.c.test_page_coding import test_tokens_and_whole_pages_are_what_torch_writes
    from tests.kernels.shapes import SMALL, shapes, wide
    from tests.kernels.steps import EACH, LAYOUTS, coded, step_of
    from tests.kernels.truth import check
    for shape in [*shapes(), *wide("cuda")][::4]:
        for rows in SMALL.values():
            step = shape.step(rows, "cpu")
            check(step, attend(step))
    for pair in EACH:
        step = coded(step_of(SMALL["mixed"], dim=32, layout=LAYOUTS[1], device="cpu"), *pair)
        check(step, attend(step))
    for pair in AXES[0]:
        test_tokens_and_whole_pages_are_what_torch_writes(pair, 96, torch.bfloat16)
    for kept in KINDS:
        check_products(kept)
        check_choice(kept, 3, 3, 80)
    for dtype in (torch.float32, torch.bfloat16):
        check_norms(dtype)
    if not eight_bits.why_not(torch.float32):
        check_eight_bits()
    print("clean")
"""


@pytest.mark.slow
@needs_compiler
def test_sanitizers_find_nothing(anew, monkeypatch):
    """All kernels under those of addresses and of undefined behaviour."""
    monkeypatch.delenv("CC")
    compiler = module._compiler()
    asan = module._said(*compiler, "-print-file-name=libasan.so").strip()
    if not os.path.isabs(asan):
        pytest.skip("the compiler has no sanitizer of addresses")
    checked = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
    environment = os.environ | {
        "CC": " ".join([*compiler, checked]),
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    script = textwrap.dedent(SANITIZED)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "clean", done.stderr[-3000:]
