"""Where a process gets no more memory: calls raise what they promise, and nothing has changed."""

import json

import pytest
import torch

from pagedkv.storage.memory import memory_errors

LIMITED = """
import ctypes, json, os, resource, sys
from contextlib import contextmanager
import torch
from pagedkv import CacheConfig, PagedKVCache
from tests.contents import advance, assert_contents, start

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back at once
MIB = 1 << 20
said = {}

@contextmanager
def limited(what, extra=6 * MIB):
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, resource.RLIM_INFINITY))
    try:
        yield
        error = "none"
    except Exception as caught:
        error = type(caught).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    said[what] = error

def make(**fields):  # 32 KiB a token, 512 KiB a page
    sizes = {"max_tokens": 1600, "max_sequences": 8, "page_size": 16, **fields}
    return PagedKVCache(CacheConfig(2, 16, 128, "float32", **sizes), device="cpu")

long = [i % 7 for i in range(1000)]
torch.set_num_threads(1)
with limited("a cache"):
    make()
with limited("its tables"):
    make(max_tokens=16, max_sequences=2**22)

cache = make(host_tokens=1600)
seq = start(cache, long)

def unchanged(what, call):
    before = cache.stats()
    with limited(what):
        call()
    assert cache.stats() == before, what
    cache.check()

unchanged("offload", lambda: cache.offload(seq))
assert_contents(cache, seq, long)
cache.offload(seq)
cache.clear_prefixes()  # else its pages would be there still
unchanged("restore", lambda: cache.restore(seq))
cache.restore(seq)
assert_contents(cache, seq, long)
path = sys.argv[1]
unchanged("save", lambda: cache.save(seq, path))
assert not os.path.exists(path)
cache.save(seq, path)
cache.free(seq)
cache.clear_prefixes()
unchanged("load", lambda: cache.load(path))
seq = cache.load(path)
assert_contents(cache, seq, long)
cache.free(seq)

cache = make(host_tokens=1600)
cache.free(start(cache, long))
other = cache.add([9] * 1500)
with limited("prepare that reuses what was cached"):
    step = cache.prepare([other])
cache.abort(step)
assert cache.stats().host_cached == 0
cache.free(other)
cache.check()

cache = make(host_tokens=1600)
cache.free(start(cache, long))
cache.free(start(cache, [9] * 1500))
cached = cache.stats().host_cached
assert cached > 30
seqs = []
with limited("add of what is in host memory"):
    seqs.append(cache.add(long))
assert cache.length(seqs[0]) < 200
assert cache.stats().host_cached == cached
cache.free(seqs)
cache.check()
assert cache.length(cache.add(long)) > 400
print(json.dumps(said))
"""


def test_a_process_without_memory_gets_the_promised_errors_and_everything_is_as_before(
    forked, tmp_path
):
    said = json.loads(forked(LIMITED, str(tmp_path / "x")))
    assert said == {
        "a cache": "BudgetExceeded",
        "its tables": "BudgetExceeded",
        "offload": "HostMemoryError",
        "restore": "HostMemoryError",
        "save": "HostMemoryError",
        "load": "HostMemoryError",
        "prepare that reuses what was cached": "none",
        "add of what is in host memory": "none",
    }


def test_only_a_want_of_memory_is_called_one():
    with pytest.raises(MemoryError, match="allocate"), memory_errors():
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError, match="out of memory"), memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        torch.zeros(3).view(2)
