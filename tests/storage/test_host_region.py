"""Memory of pools that grow: taken from the system with pages, refused by it, and given back."""

import errno
import textwrap

import pytest
import torch

from pagedkv import BudgetExceeded, CacheConfig, OutOfPagesError, PagedKVCache, paged_attention
from pagedkv.storage import memory
from tests.cache.small import ids
from tests.cases import one_group, two_groups
from tests.contents import advance, assert_contents, start
from tests.pages.growing import make, pages


def test_a_limit_far_beyond_the_machine_costs_addresses_only():
    config = CacheConfig(64, 64, 256, "float32", max_tokens=2**19, growth_step=4, page_size=4)
    assert config.nbytes == 4 << 40
    with pytest.raises(BudgetExceeded, match="max_tokens"):
        PagedKVCache(CacheConfig(64, 64, 256, "float32", max_tokens=2**19), device="cpu")
    cache = PagedKVCache(config, device="cpu")
    for n in (3, 9):
        seq = cache.add()
        step = cache.prepare([seq], num_new=n)
        k = torch.randn(n, 64, 256)
        paged_attention(k, k, k, step, 63)
        cache.commit(step, layers=[63])
        assert torch.equal(cache.gather(seq, 63)[0], k)
    assert pages(cache) == (4, 2**17, 1)


def test_a_first_step_beyond_the_machine_is_refused_with_one_that_fits():
    fields = {"num_layers": 64, "num_kv_heads": 64, "head_dim": 256, "dtype": "float32"}
    with pytest.raises(BudgetExceeded, match=r"growth_step: .* growth_step=\d+ would fit"):
        PagedKVCache(CacheConfig(**fields, max_tokens=2**20, growth_step=2**19), device="cpu")


def test_growth_without_memory_is_refused_and_works_once_there_is_some(monkeypatch):
    cache = make(max_tokens=256, head_dim=128)
    a = start(cache, ids(7))
    before, contents = cache.stats(), cache.gather(a, 0)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_memory", lambda device: 100)
        with pytest.raises(
            OutOfPagesError, match=r"could not grow: .* 100 are available"
        ) as caught:
            advance(cache, {a: ids(9)})
        assert isinstance(caught.value.__cause__, BudgetExceeded)
        assert caught.value.__cause__.available == 100
        assert (caught.value.pages_needed, caught.value.pages_free) == (1, 0)
        with pytest.raises(OutOfPagesError, match="could not grow"):
            cache.add(max_tokens=30)
        assert cache.stats() == before
        assert torch.equal(cache.gather(a, 0)[0], contents[0])
        cache.check()
    advance(cache, {a: ids(9)})
    assert_contents(cache, a, ids(9))


@pytest.mark.parametrize("failing", range(8))
def test_every_single_refusal_of_the_system_leaves_all_tensors_as_they_were(failing, monkeypatch):
    """Two groups of three layers, K and V: the growth of one page takes six calls, or twelve."""
    from pagedkv.storage import host_region as lazy

    cache = make(two_groups(64, page_size=64, head_dim=8, max_tokens=1024, growth_step=64))
    a, calls = start(cache, ids(60)), []
    before, real = cache.stats(), lazy._call
    accesses = {}

    def call(name, address, size, access):
        calls.append(name)
        if len(calls) == failing + 1:
            raise MemoryError(f"{name}: {errno.errorcode[errno.ENOMEM]}, injected")
        real(name, address, size, access)
        accesses[address, size] = access

    with monkeypatch.context() as patch:
        patch.setattr(lazy, "_call", call)
        if failing < 6:
            with pytest.raises(OutOfPagesError, match="could not grow") as caught:
                advance(cache, {a: ids(70)})
            assert isinstance(caught.value.__cause__, BudgetExceeded)
            assert set(accesses.values()) <= {lazy.NONE}, "something stayed accessible"
            assert cache.stats() == before
            assert cache._storage.memory.pages == [1, 1]
    advance(cache, {a: ids(70)})
    assert_contents(cache, a, ids(70))
    assert cache._storage.memory.pages == [2, 2]


# Runs in a process of its own, where limits can be set and faults happen.
CHILD = """
import os, resource, signal, torch
from pagedkv import BudgetExceeded, CacheConfig, OutOfPagesError, PagedKVCache, write_kv

MIB = 1 << 20

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB

def cache_of(tokens, step, layers=2):
    # 4 KiB a token and layer.
    config = CacheConfig(layers, 4, 128, "float32", max_tokens=tokens, growth_step=step)
    return PagedKVCache(config, device="cpu")

def feed(cache, seq, n):
    for some in [200] * (n // 200) + [n % 200] * (n % 200 > 0):  # small ones, to measure pages
        with cache.step([seq], num_new=some) as step:
            for layer in range(cache.config.num_layers):
                write_kv(*torch.full((2, some, 4, 128), float(seq + 1)), step, layer)
"""


@pytest.fixture
def child(forked):
    return lambda code: forked(CHILD + textwrap.dedent(code))


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4", ("dense", "int4"), ("int8", "int4")])
def test_every_part_of_coded_pages_grows_with_them(kv_format):
    fields = {"kv_format": kv_format, "head_dim": 32, "page_size": 16, "max_tokens": 4096}
    grown, whole = (make(one_group(**fields, growth_step=step)) for step in (48, None))
    a, b = (start(cache, ids(400)) for cache in (grown, whole))
    for end in (401, 480, 700, 1003):
        for cache, seq in ((grown, a), (whole, b)):
            advance(cache, {seq: ids(end)})
            cache.check()
    assert grown.stats().growths == 4
    assert grown.stats().bytes < whole.stats().bytes
    for layer in range(2):
        for x, y in zip(grown.gather(a, layer), whole.gather(b, layer)):
            assert torch.equal(x, y)
    held = grown.config
    staging = held.num_staging_pages() * held.bytes_per_staging_page()
    static = 16 * held.kv_format.count("fp8") * 2  # padded to four heads
    pages = grown.stats().pages - held.num_staging_pages()
    assert grown._storage.nbytes == pages * held.bytes_per_page() + staging + static
    grown.truncate(a, 100)
    grown.clear_prefixes()
    assert grown.shrink() > 0
    grown.check()
    assert torch.equal(grown.gather(a, 0)[0], whole.gather(b, 0)[0][:100])


@pytest.mark.parametrize("where", ["behind the last page", "behind a layer", "after a shrink"])
def test_a_write_to_a_page_that_does_not_exist_is_a_fault(child, where):
    code = f"""
    cache = cache_of(4096, 1024)
    seq, where = cache.add(), {where!r}
    feed(cache, seq, 2000)
    pages = cache._storage.k[0]
    assert cache.stats().pages == 128
    pages[:, 127, :, :] = 5.0  # the last one that exists
    page, layer = 128, 0 if where == "behind the last page" else 1
    if where == "after a shrink":
        cache.free(seq)
        cache.clear_prefixes()
        cache.shrink()
        page, layer = 64, 0
        pages[:, 63] = 5.0
    child = os.fork()
    if not child:
        pages[layer, page, 0, 0, 0] = 1.0
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status)
    """
    assert child(code) == "SIGSEGV"


def test_resident_memory_follows_tokens_and_a_shrink_returns_it(child):
    code = """
    cache, seq = cache_of(131072, 1024), None
    seq = cache.add()
    feed(cache, seq, 4096)
    levels = [resident()]  # with all code loaded
    for _ in range(4):
        feed(cache, seq, 4096)
        levels.append(resident())
    grown = [b - a for a, b in zip(levels, levels[1:])]
    assert all(26 < each < 38 for each in grown), grown  # 32 MiB of pages, and a heap
    assert cache.shrink() == 0
    cache.free(seq)
    gone = cache.shrink()  # fed by count, nothing is findable
    print(gone // MIB, cache.stats().pages, levels[-1] - resident() > 140)
    """
    assert child(code) == "152 64 True"


def test_free_pages_between_live_ones_return_their_memory(child):
    code = """
    cache = cache_of(65536, 1024)
    first, last = cache.add(), cache.add()
    feed(cache, first, 8192)
    feed(cache, last, 16)
    full = resident()
    cache.free(first)
    assert cache.shrink() == 0, "the last page is live"
    print(58 < full - resident() < 70, cache.gather(last, 1)[0].unique().tolist())
    feed(cache, last, 8192)
    cache.check()
    """
    assert child(code) == "True [2.0]"


def test_a_system_that_refuses_memory_is_reported_and_survived(child):
    code = """
    cache = cache_of(65536, 1024)
    seq = cache.add()
    feed(cache, seq, 1000)
    before = cache.stats()
    with open("/proc/self/status") as status:
        data = next(int(x.split()[1]) << 10 for x in status if x.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + 80 * MIB, resource.RLIM_INFINITY))
    try:
        cache.prepare([seq], num_new=16000)
    except OutOfPagesError as error:
        assert isinstance(error.__cause__, BudgetExceeded)
        print("mprotect: Cannot allocate memory" in str(error.__cause__.__cause__))
    assert cache.stats() == before
    cache.check()
    feed(cache, seq, 2000)  # so much still fits
    print(cache.length(seq), cache.gather(seq, 1)[0].unique().tolist())
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    try:
        cache_of(2**20, 1024, layers=64)
    except BudgetExceeded as error:
        print(error)
    """
    lines = child(code).splitlines()
    assert lines[:2] == ["True", "3000 [1.0]"]
    assert lines[2].startswith("max_tokens: ")


def test_memory_of_a_pool_that_is_gone_is_returned(child):
    code = """
    level = None
    for _ in range(6):
        cache = cache_of(131072, 1024)
        seq = cache.add()
        feed(cache, seq, 4096)
        if level is None:
            level = resident()
        k = cache._storage.layer(1)[0]
        del cache
        assert k[0, 0, 0, 0] == 1.0, "a tensor keeps its memory"
        del k
    import gc
    gc.collect()
    print(resident() < level + 16)
    """
    assert child(code) == "True"
