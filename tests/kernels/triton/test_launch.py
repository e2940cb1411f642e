"""Kernels are compiled rarely and well, by a driver for a GPU that is not there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from pagedkv.kernels import formats
from pagedkv.kernels.triton import checks, decode_tuning, prefill
from pagedkv.kernels.triton.geometry import NOT_THERE, Geometry, Layout, Target

ROOT = Path(__file__).resolve().parents[3]

TRACE = """
import random
from collections import Counter

import torch

from pagedkv.kernels.triton.card import absent_card
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import copy, decode, merge_parts, prefill, work_list, write
from pagedkv.kernels.triton import shared_prefix

H, G, D, P = 8, 2, 64, 16
rng = random.Random(0)
kernels = {
    "decode": decode._decode,
    "merge": merge_parts._merge,
    "prefill": prefill._prefill,
    "cut rows": work_list._cut_rows,
    "write": write._write_kv,
    "copy": copy._copy_pages,
}
with absent_card(80) as gpu:
    pages = torch.zeros(3, 8, G, P, D, dtype=torch.bfloat16)
    buffer = torch.zeros(1 << 16, dtype=torch.int32)
    for step in range(150):
        rows = rng.randint(1, 40)
        most = rng.choice([1, 1, 1, 1, 2, 5, 16, 300])
        new = [rng.randint(1, most) for _ in range(rows)]
        if most == 300:
            new = [n if n > 200 else 1 for n in new]
        lens = [rng.randint(n, 5000) for n in new]
        tokens = sum(new)
        q = torch.zeros(tokens, H + 2 * G, D, dtype=torch.bfloat16)  # a fused projection
        at = 4 * rng.randint(0, 99)  # step tensors lie in one upload, at multiples of 16 bytes
        kv_lens = buffer[at : at + rows].copy_(torch.tensor(lens))
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        table = torch.zeros(rows, 320, dtype=torch.int32)
        shared = None
        if set(new) == {1} and rows > 4 and rng.random() < 0.3:
            prefixes = [Prefix(slice(0, 3), rng.randint(4, 20))]
            shared = shared_prefix.plan(paged.cut_prefixes(prefixes, new, H, pages[0]), q.device)
        plan = paged.plan(
            kv_lens, starts, q[:, :H], pages[0], num_new=new, max_kv=max(lens), shared=shared
        )
        slots = torch.zeros(tokens, dtype=torch.int64)
        for layer in pages:
            paged.write_kv(q[:, H : H + G], q[:, H + G :], layer, layer.clone(), slots)
            paged.paged_attention(
                q[:, :H], layer, layer, table, kv_lens, starts, plan, scale=rng.random()
            )
        if rng.random() < 0.2:
            ids = torch.arange(rng.randint(1, 3))
            paged.copy_pages(pages, ids, ids + 4)
    launches = gpu.launches
for name, kernel in kernels.items():
    print(name, len(kernel.device_caches[80][0]))
print("launches", launches)
"""


@pytest.mark.slow
def test_a_serving_trace_compiles_each_kernel_at_most_four_times(tmp_path, forked):
    said = forked(TRACE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    counts = {name: int(n) for name, _, n in (x.rpartition(" ") for x in said.splitlines())}
    assert counts.pop("launches") > 1000
    assert all(1 <= count <= 4 for count in counts.values()), counts


SHIPPED = {80: 91, 86: 91, 89: 91, 90: 111, 100: 90, 120: 91}  # kernels in Gluon are for 9.0


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHIPPED)
def test_every_shipped_kernel_is_well_compiled(arch):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    command = [sys.executable, "-m", "benchmarks.kernel_report", "--arch", str(arch)]
    done = subprocess.run(
        command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    # None was left out.
    assert len(re.findall(r"^\| .* sm_\d+ \|", done.stdout, re.M)) == SHIPPED[arch]


@pytest.mark.parametrize(("arch", "rows"), [(90, {64, 128}), (100, {32})])
def test_keys_in_several_parts_have_few_rows_where_sums_of_products_are_wrong(arch, rows):
    words = Layout(formats.INT8, 1, 1, 1)
    geometry = Geometry(32, 8, 128, 16, words, words, NOT_THERE, torch.bfloat16, 128)
    target = Target(0, arch, 227 << 10, 132)
    assert {
        decode_tuning.most_rows(target, geometry),
        prefill.tuning(target, geometry).block_m,
    } == rows


def test_more_query_heads_than_such_a_tile_has_rows_are_refused(monkeypatch):
    monkeypatch.setattr(checks, "target_of", lambda device: Target(0, 100, 227 << 10, 148))
    words = Layout(formats.INT8, 64, 64, 64)
    geometry = Geometry(40, 1, 128, 16, words, words, NOT_THERE, torch.bfloat16, 128)
    refuse = checks.check_supported.__wrapped__
    refuse(geometry._replace(num_heads=32), torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"at most 32 .* 10\.x, got 40; backend='torch'"):
        refuse(geometry, torch.device("cpu"))


# Nobody ran these: the least that can be said is that they compile, multiply by MFMA, and fit.
ON_AMD = """
from functools import partial

from benchmarks.compiled.launched import compiled_by
from benchmarks.compiled.shipped import ALL_TERMS, INT8, Heads, _attend, _write
from pagedkv.kernels.prefixes import Prefix
from pagedkv.kernels.triton.card import AMD, absent_card

shared = [Prefix(slice(0, 2), 64)]
with absent_card("gfx942"):
    for kernel, name, call in (
        ("_decode", "decode", partial(_attend, Heads(), 1, ALL_TERMS)),
        ("_decode", "128 heads a KV head", partial(_attend, Heads(128, 1), 1, {})),
        ("_decode", "8 queries", partial(_attend, Heads(head_dim=64), 8, {})),
        ("_decode", "shared prefix", partial(_attend, Heads(), 1, {}, shared)),
        ("_decode", "mass", partial(_attend, Heads(), 1, {"mass": True})),
        ("_prefill", "prefill", partial(_attend, Heads(), 100, ALL_TERMS)),
        ("_merge", "merge", partial(_attend, Heads(), 1, {})),
        ("_cut_rows", "cut rows", partial(_attend, Heads(), 1, {})),
        ("_write_kv", "write", partial(_write, Heads())),
    ):
        made = compiled_by(kernel, call)
        code = made.asm["amdgcn"]
        assert made.metadata.target.arch == "gfx942"
        assert made.metadata.shared <= AMD["gfx942"].shared, name
        assert ("v_mfma" in code) == (kernel in ("_decode", "_prefill")), name
        assert ".vgpr_spill_count: 0" in " ".join(code.split()), name
        assert "scratch_" not in code, name
    for heads in (Heads(**INT8), Heads(8, 1, 256)):
        try:
            _attend(heads, 1, {})
        except NotImplementedError as error:
            print(error)
"""


@pytest.mark.slow
def test_dense_kernels_compile_for_an_architecture_of_amd_and_no_others_are_offered(
    tmp_path, forked
):
    said = forked(ON_AMD, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(said) == 2
    assert all("gfx942 has kernels for dense pages" in line for line in said)


WITH_ALL_TERMS = """
from benchmarks.kernel_report import measure

for row in measure("benchmarks.compiled.shipped", 90, "D128 p16 all terms", False, 0, 1):
    print(row.name, row.problems)
"""


@pytest.mark.slow
def test_kernels_with_every_term_are_well_compiled(tmp_path, forked):
    said = forked(WITH_ALL_TERMS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    kernels = "decode", "prefill", "Gluon decode"
    assert said.splitlines() == [f"{name} D128 p16 all terms []" for name in kernels]
