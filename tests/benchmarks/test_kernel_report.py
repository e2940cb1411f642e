"""The gate on compiled kernels can fail, and what it judges is read right out of real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from benchmarks import kernel_report
from benchmarks.compiled import sass, shipped
from pagedkv.kernels.triton.card import CHIPS

ROOT = Path(__file__).resolve().parents[2]
FINE = kernel_report.Figures(
    registers=96,
    stack=0,
    shared=71680,
    blocks=3,
    buffers=2,
    mma="hmma",
    tf32=False,
    length=400,
    loop={"LDGSTS.128": 16, "HMMA": 32},
)
DECODE = kernel_report.Shipped("decode", lambda: None, buffers=2, mma="hmma")


def test_a_kernel_as_promised_has_no_problems():
    assert kernel_report.problems(FINE, DECODE, 90) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stack": 8}, "spills, 8 bytes"),
        ({"narrow": ("k_ptr: 4 bytes",)}, "pages in pieces (k_ptr: 4 bytes)"),
        ({"buffers": 1}, "1 buffers, not 2"),
        ({"shared": 232449}, "232449 bytes of shared memory, of 232448"),
        ({"mma": "ffma"}, "ffma, not hmma"),
        ({"tf32": True}, "TF32"),
        ({"int32": ("tile.py:7",)}, "int32 products reach its pages (tile.py:7)"),
        ({"repeats": 2}, "warps make a product 2 times, not 1"),
        ({"hazards": ("0x40 LDGSTS",)}, "may change while products run (0x40 LDGSTS)"),
    ],
)
def test_each_broken_promise_is_a_sentence(change, sentence):
    (found,) = kernel_report.problems(FINE._replace(**change), DECODE, 90)
    assert found.startswith("sm_90 decode: ")
    assert sentence in found


def test_limits_are_those_of_the_architecture():
    assert kernel_report.problems(FINE._replace(shared=101376), DECODE, 120) == []
    assert kernel_report.problems(FINE._replace(shared=101377), DECODE, 120)


def test_narrow_copies_are_fine_where_they_are_declared():
    narrow = FINE._replace(narrow=("k_ptr: 4 bytes",))
    assert kernel_report.problems(narrow, DECODE._replace(wide=False), 90) == []


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "arch", "blocks"),
    [
        (94, 71680, 4, 90, 3),  # shared memory
        (94, 1024, 4, 90, 5),  # registers
        (32, 0, 8, 90, 8),  # threads
        (16, 0, 1, 90, 32),  # blocks
        (94, 71680, 4, 89, 1),
    ],
)
def test_blocks_that_fit_on_a_multiprocessor(registers, shared, warps, arch, blocks):
    assert kernel_report.resident(registers, shared, warps, arch) == blocks


def instructions(text):
    """`guard name operands` a line."""
    parts = (line.strip().split(" ", 2) for line in text.strip().splitlines())
    return [
        sass.Instruction(16 * at, guard.strip("-"), name, "".join(rest))
        for at, (guard, name, *rest) in enumerate(parts)
    ]


def test_the_main_loop_is_inside_a_persistent_one():
    code = instructions("""
        - S2R
        - LDGSTS.E.BYPASS.128
        - LDGSTS.E.BYPASS.128
        - HMMA.16816.F32.BF16
        @P0 BRA 0x20
        - STG.E.128
        @P1 CALL.REL.NOINC 0x80
        - BRA 0x10
        - EXIT
        - BRA 0x90
    """)
    loop = sass.main_loop(code)
    assert [one.label for one in loop] == ["LDGSTS.128", "HMMA", "BRA"]


def test_a_rare_path_behind_the_end_is_no_loop():
    code = instructions("""
        - LDG.E
        @P0 BRA 0x40
        - STG.E
        - EXIT
        - MUFU.RCP
        - BRA 0x20
    """)
    assert sass.main_loop(code) == []


TINY = """
import torch
import triton
import triton.language as tl
from benchmarks.kernel_report import Shipped

@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, end, stride, D: tl.constexpr, MODE: tl.constexpr
):
    N: tl.constexpr = 32
    PAGE: tl.constexpr = 16
    offs_m, offs_n, offs_d = tl.arange(0, 16), tl.arange(0, N), tl.arange(0, D)
    step = stride if MODE == "strided" else D
    square = offs_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + square)
    acc = tl.zeros([16, D], tl.float32)
    ids = tl.load(table_ptr + offs_n // PAGE)
    for start in tl.range(0, end, N, num_stages=3):
        token = start + offs_n
        if MODE == "late":
            ids = tl.load(table_ptr + token // PAGE)
        if MODE == "int32":
            slot = ids * (PAGE * step) + token % PAGE * step
        else:
            slot = ids.to(tl.int64) * (PAGE * step) + token % PAGE * step
        if MODE != "late":
            ids = tl.load(table_ptr + (token + N) // PAGE, mask=token + N < end, other=0)
        offsets = slot[:, None] + offs_d[None, :]
        k = tl.load(k_ptr + offsets, mask=(token < end)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(token < end)[:, None], other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k)))
        acc = tl.dot(weights.to(v.dtype), v, acc)
    tl.store(out_ptr + square, acc.to(out_ptr.dtype.element_ty))

CORE = {"good torch.bfloat16"}

def shipped(arch):
    def one(mode, dtype=torch.bfloat16):
        x = torch.zeros(16, 64, dtype=dtype)
        args = (x, x, x, torch.zeros(8, dtype=torch.int32), x, 100, 64 + arch, 64, mode)
        name = f"{mode} {dtype}"
        return Shipped(name, lambda: attend.warmup(*args, grid=(1, 1, 1)), buffers=2, mma="hmma")

    modes = "good", "late", "int32", "strided"
    unknown = one("good")._replace(name="unknown", int64_args=("pages_ptr",))
    return [*map(one, modes), one("good", torch.float32), unknown]
"""


def report(folder, *arguments):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "TRITON_CACHE_DIR": folder}
    for name in ("PYTHONSAFEPATH", "TRITON_INTERPRET"):
        env.pop(name, None)
    command = [sys.executable, "-m", "benchmarks.kernel_report", "--module", "tiny", "--jobs=1"]
    command += ["--arch=90", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


MEASURE = """
import json, sys
sys.path.append(sys.argv[1])
from benchmarks.kernel_report import measure

rows = measure("tiny", 90, "", False, 0, 1)
figures = [row.figures and row.figures._asdict() for row in rows]
print(json.dumps({x.name: (y, " ".join(x.problems)) for x, y in zip(rows, figures)}))
"""


@pytest.mark.slow
def test_the_gate_finds_what_is_wrong_in_compiled_kernels(tmp_path, forked):
    (tmp_path / "tiny.py").write_text(TINY)
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = json.loads(forked(MEASURE, str(tmp_path), **env))
    figures, wrong = found["good torch.bfloat16"]
    assert not wrong
    assert (figures["buffers"], figures["mma"], figures["stack"]) == (2, "hmma", 0)
    # K and V are 32 x 64 x 2 bytes each, copied by 128 threads.
    assert (figures["loop"]["LDGSTS.128"], figures["loop"].get("LDGSTS", 0)) == (4, 0)
    assert found["late torch.bfloat16"][1].endswith("its pipeline has 1 buffers, not 2.")
    assert "int32 products reach its pages (tiny.py:24)" in found["int32 torch.bfloat16"][1]
    assert "k_ptr: 2 bytes" in found["strided torch.bfloat16"][1]
    assert "got {'pages_ptr'}" in found["unknown"][1]
    assert found["good torch.float32"][1].endswith("it rounds fp32 to TF32.")


@pytest.mark.slow
def test_the_gate_fails_where_a_kernel_is_wrong_and_reports_those_asked_for(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    done = report(str(tmp_path), f"--json={tmp_path}/all.json")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("| kernel")
    assert len(json.loads((tmp_path / "all.json").read_text())["kernels"]) == 6
    assert report(str(tmp_path), "-k", "good torch.bf").returncode == 0
    done = report(str(tmp_path), "--core", f"--triton={triton.__version__}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"1 of 1 kernels compiled by triton {triton.__version__}" in done.stdout


def test_the_gate_does_not_run_with_another_triton_than_was_asked_for(capsys):
    with pytest.raises(SystemExit):
        kernel_report.main(["--triton", "3.0.0"])
    assert f"expected 3.0.0, found {triton.__version__}" in capsys.readouterr().err


def test_every_kernel_of_the_core_list_is_in_the_list():
    assert {one.name for one in shipped.shipped(90)} > shipped.CORE


@pytest.mark.slow
def test_the_kernels_that_a_card_needs_first_compile_with_the_installed_triton(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET")
    command = [sys.executable, "-P", "-m", "benchmarks.kernel_report", "--arch=90", "--core"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = len(shipped.CORE)
    assert f"{count} of {count} kernels" in done.stdout


SWEEP = """
import itertools, sys
from pagedkv.kernels.triton.card import CHIPS, absent_card
from benchmarks.compiled.shipped import ALL_TERMS, BF16, FP32, Heads, _attend
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.triton.geometry import NOT_THERE, Geometry

arch = int(sys.argv[1])
with absent_card(arch):
    for dim, dtype in itertools.product((64, 80, 128, 144, 256), (BF16, FP32)):
        most = Geometry(1, 1, dim, 16, *[NOT_THERE] * 3, dtype, dim).most_ratio
        for ratio, new in ((most, 1), (4, 16), (most, 100), (2, 100)):
            _attend(Heads(ratio, 1, dim, 16, dtype), new, ALL_TERMS)
        _attend(Heads(2, 1, dim, 16, dtype), 1, {}, [Prefix(slice(0, 2), 64)])
    wide = (576, 512), (512, None), (288, 256)
    for (dim, latent), dtype in itertools.product(wide, (BF16, FP32)):
        for ratio, new in ((16, 1), (20, 1), (128, 1), (16, 8), (128, 100), (1, 100)):
            _attend(Heads(ratio, 1, dim, 16, dtype, latent=latent), new, ALL_TERMS)
        _attend(Heads(16, 1, dim, 16, dtype, latent=latent), 1, {}, [Prefix(slice(0, 2), 64)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_whatever_the_checks_accept_fits_into_shared_memory(arch, tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", SWEEP, str(arch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
