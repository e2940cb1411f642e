"""Triton's own launcher passes a layer's arguments, in a process whose CUDA driver is a stub."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

STUB = Path(__file__).with_name("libcuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")

H, G, D = 8, 2, 64

BEGIN = """
import ctypes
import json

stub = ctypes.CDLL(arguments[0], mode=ctypes.RTLD_GLOBAL)

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from pagedkv.kernels.triton.card import AbsentCard
from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.attention import on_triton
from pagedkv.kernels.triton import backend


class Launched(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("parameters", ctypes.c_uint64 * 64),
    ]


class Map(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 2),
        ("stride", ctypes.c_uint64),
        ("type", ctypes.c_uint),
        ("box", ctypes.c_uint * 2),
        ("swizzle", ctypes.c_uint),
    ]


stub.stub_launch.restype = ctypes.POINTER(Launched)
stub.stub_map.restype = ctypes.POINTER(Map)
stub.stub_name.restype = ctypes.c_char_p


class GPU(AbsentCard):
    launcher_cls = CudaLauncher

    def __init__(self):
        super().__init__(90)
        self.utils = CudaUtils()


def sizes(types):
    for one in types:
        if isinstance(one, (tuple, list)):
            yield from sizes(one)
        elif one != "constexpr":
            yield 4 if one in ("i32", "fp32") else 8


counts = {}


def expect(launches, *others):
    '''Tells the stub how many parameters of which sizes the kernels have, before they are bound.'''
    for launcher, _, _ in launches:
        compiled = launcher.compiled
        each = list(sizes(compiled.src.signature.values()))
        counts[compiled.name] = len(each)
        stub.stub_expect(compiled.name.encode(), (ctypes.c_int * len(each))(*each), len(each))
    return bind(launches, *others)


bind, on_triton.bind = on_triton.bind, expect


def layer(number, named):
    '''What a layer launches: kernel, grid and parameters, known addresses by name.'''
    stub.stub_forget()
    out, lse = paged_attention(q, k, v, step, number, return_lse=True)
    named = {x.data_ptr(): name for name, x in (("out", out), ("lse", lse), *named.items())}
    found = []
    for i in range(stub.stub_launched()):
        one = stub.stub_launch(i).contents
        name = stub.stub_name(one.kernel).decode()
        parameters = [named.get(x, x) for x in one.parameters[: counts.get(name, 0)]]
        found.append((name, list(one.grid), parameters))
    return found, stub.stub_pointers()


B, H, G, D, P = 4, 8, 2, 64, 16
driver.set_active(GPU())
"""

LAYERS = """
from pagedkv.kernels.triton.proved import trying

plain = trying()  # the kernels of every architecture
plain.__enter__()
config = CacheConfig(3, G, D, "bfloat16", page_size=P, max_tokens=8192, max_sequences=B)
cache = PagedKVCache(config, device="cpu", backend="torch")
cache.backend, cache._storage._kernels = "triton", backend  # only a card is let through
said = {}
for tokens, kind in ((900, "split"), (20, "whole")):
    seqs = [cache.add() for _ in range(B)]
    with cache.step(seqs, num_new=tokens, layers=()):
        pass
    step = cache.prepare(seqs, num_new=1)
    made = torch.randn(B, H + 2 * G, D, dtype=torch.bfloat16)
    q, k, v = made[:, :H], made[:, H : H + G], made[:, H + G :]
    layer(0, {})
    pages = step.storage.layer(1)
    named = {"q": q, "k": k, "v": v, "k_pages": pages[0], "v_pages": pages[1]}
    again = on_triton.again
    bound = layer(1, named)
    on_triton.again = lambda *call: None
    ordinary = layer(1, named)
    on_triton.again = again
    said[kind] = {"bound": bound, "ordinary": ordinary}
    cache.abort(step)
    for seq in seqs:
        cache.free(seq)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def driver_stub(tmp_path_factory):
    """A folder with a libcuda.so.1 that launches nothing."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("stub")
    library = folder / "libcuda.so.1"
    named = "-Wl,-soname,libcuda.so.1"  # so that Triton's module finds it in the process
    subprocess.run([COMPILER, "-shared", "-fPIC", named, "-o", library, STUB], check=True)
    return library


def test_bound_launches_pass_the_driver_what_ordinary_ones_do(driver_stub, tmp_path, forked):
    env = {"TRITON_LIBCUDA_PATH": str(driver_stub.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    said = json.loads(forked(BEGIN + LAYERS, str(driver_stub), TRITON_INTERPRET="0", **env))
    for kind, kernels in (("split", 3), ("whole", 2)):
        (bound, asked), (ordinary, usually) = said[kind]["bound"], said[kind]["ordinary"]
        names, grids, parameters = zip(*bound)
        assert names == ("_write_kv", "_decode", "_merge")[:kernels]
        # 4 tokens of 2 KV heads, 16 a program; at most 3 programs a multiprocessor; (row, query,
        # head) each.
        assert grids[0] == [1, 1, 1]
        assert 0 < grids[1][0] <= 132 * 6
        assert grids[2:] == ([4, 1, 8],)[: kernels - 2]
        assert [len(each) for each in parameters] == [11, 19, 8][:kernels]
        assert bound == ordinary
        assert parameters[0][:4] == ["k", "v", "k_pages", "v_pages"]
        assert parameters[1][:3] == ["q", "k_pages", "v_pages"]
        assert "out" in parameters[-1]
        assert "lse" in parameters[-1]
        assert asked == 0 < usually  # whether an address is one of the device


PROVED = """
from pagedkv.kernels.triton.proved import trying

config = CacheConfig(2, G, D, "bfloat16", page_size=P, max_tokens=8192, max_sequences=B)
cache = PagedKVCache(config, device="cpu", backend="torch")
cache.backend, cache._storage._kernels = "triton", backend  # only a card is let through
seqs = [cache.add() for _ in range(B)]
said = []
for name, tokens in (("gluon_prefill", 600), ("gluon_decode", 1)):
    with trying(name):  # 600 tokens are cut into splits
        with cache.step(seqs, num_new=tokens) as step:
            made = torch.randn(B * tokens, H + 2 * G, D, dtype=torch.bfloat16)
            q, k, v = made[:, :H], made[:, H : H + G], made[:, H + G :]
            for number in range(2):
                stub.stub_forget()
                paged_attention(q, k, v, step, number)
                assert step.kept(("bound", step.config.group_of.get(number))) is not None
                pages = step.storage.layer(number)
                found = []
                for i in range(stub.stub_launched()):
                    one = stub.stub_launch(i).contents
                    name = stub.stub_name(one.kernel).decode()
                    found.append((name, list(one.grid)))
                maps = []
                for i in range(2):
                    one = stub.stub_map(i).contents
                    first = one.address - pages[i].data_ptr()
                    shapes = list(one.shape), one.stride, list(one.box)
                    maps.append((first, *shapes, one.swizzle))
                said.append((found, maps))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_what_waits_for_a_card_to_be_proved_is_launched_as_it_asks(driver_stub, tmp_path, forked):
    env = {"TRITON_LIBCUDA_PATH": str(driver_stub.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    said = json.loads(forked(BEGIN + PROVED, str(driver_stub), TRITON_INTERPRET="0", **env))
    prefills, decodes = said[:2], said[2:]
    for _, maps in said:
        # Slots as rows, of which 16 are copied at once, and the 64 elements of a KV head.
        assert maps == [[0, [G * D, 8192], 2 * G * D, [D, 16], 3]] * 2
    for launches, _ in prefills:
        names, grids = zip(*launches)
        assert names[-2:] == ("_write_kv", "_prefill_hopper")
        assert grids[-1] == [132, 1, 1]  # a program a multiprocessor
    for launches, _ in decodes:
        names, grids = zip(*launches)
        assert names[-3:] == ("_write_kv", "_decode_hopper", "_merge")
        assert grids[-2] == [4 * 3 * G, 1, 1]  # a program an item: fewer than fit
