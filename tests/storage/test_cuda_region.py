"""Pools that grow on a card, as far as a machine without one can tell: see `cuda_memory.py`."""

import gc
import inspect
import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedkv import BudgetExceeded, OutOfPagesError, PagedKVCache
from pagedkv.storage import cuda_region as virtual
from pagedkv.storage import memory
from tests.cache.small import ids
from tests.cases import Case, one_group, two_groups
from tests.contents import advance, assert_contents, start
from tests.effort import examples, sampled
from tests.storage import cuda_memory
from tests.storage.cuda_memory import CHUNK, DEVICE, CUresult, FakeDriver, card, region
from tests.world import World

LAYERS = 3


@pytest.fixture
def driver():
    with card() as driver:
        yield driver


def small(page: int, most: int, pages: int = 1):
    """A tensor of int16, `page` elements a page."""
    return region((LAYERS, most, page), torch.int16, DEVICE, pages)


def cache_on(**fields) -> PagedKVCache:
    """4 KiB a page, layer and tensor: 16 pages a chunk."""
    fields = {"head_dim": 32, "page_size": 16, "max_tokens": 4096, "growth_step": 160, **fields}
    return PagedKVCache(one_group(**fields), device="cpu", debug=True)


# ------------------------------------------------------------------ chunks


def test_a_growth_by_a_chunk_maps_one_a_layer_and_smaller_ones_share_it(driver):
    tensor = small(CHUNK // 8, most=100, pages=4)  # four pages a chunk
    assert driver.taken == LAYERS * CHUNK
    for pages in (5, 6, 7, 8):
        tensor.resize(pages)
        assert driver.taken == LAYERS * 2 * CHUNK
    assert driver.calls.count("cuMemMap") == LAYERS * 2
    assert tensor.cost(8) == 0
    assert tensor.cost(13) == LAYERS * 2 * CHUNK


def test_layers_begin_at_chunks_and_their_pages_are_contiguous(driver):
    tensor = small(1000, most=100).tensor  # 200,000 bytes a layer: three chunks and a bit
    assert tensor.shape == (LAYERS, 100, 1000)
    assert tensor.stride() == (4 * CHUNK // 2, 1000, 1)
    assert list(driver.reserved.values()) == [LAYERS * 4 * CHUNK]
    assert all(layer.data_ptr() % CHUNK == 0 and layer.is_contiguous() for layer in tensor)


def test_layers_smaller_than_a_chunk_lie_close_together_and_are_there_from_the_start(driver):
    tensor = small(100, most=200)  # 40,000 bytes a layer
    assert tensor.tensor.is_contiguous()
    assert driver.taken == 2 * CHUNK == math.ceil(LAYERS * 40_000 / CHUNK) * CHUNK
    calls = len(driver.calls)
    assert tensor.cost(200) == 0
    tensor.resize(200)
    tensor.resize(3)
    tensor.resize(7)
    assert len(driver.calls) == calls
    tensor.tensor.fill_(5)


def test_a_shrink_unmaps_chunks_without_a_page_once_the_device_is_done(driver):
    tensor = small(CHUNK // 8, most=100, pages=12)
    tensor.tensor[:, :12] = 7
    driver.work()
    tensor.resize(9)  # the third chunk still holds one
    assert "cuMemUnmap" not in driver.calls
    tensor.resize(8)
    assert driver.taken == LAYERS * 2 * CHUNK
    assert driver.calls.index("synchronize") < driver.calls.index("cuMemUnmap")
    assert (tensor.tensor[:, :8] == 7).all()
    tensor.release(2, 6)
    assert (tensor.tensor[:, :8] == 7).all(), "pages between others keep their bytes"


@sampled
@settings(max_examples=examples(12, 4))
@example(page=5000, most=5, sizes=[1])  # more than one chunk of layers that are smaller than one
@given(
    st.sampled_from([1, 100, 5000, CHUNK // 2, CHUNK // 2 + 8, CHUNK]),
    st.integers(1, 20),
    st.lists(st.integers(1, 20), max_size=8),
)
def test_growing_and_shrinking_at_random_keeps_pages_and_maps_what_they_take(page, most, sizes):
    with card() as driver:
        tensor = small(page, most)
        at, layer = tensor.tensor.data_ptr(), tensor.tensor.stride(0) * 2
        tensor.tensor[:, 0] = 0
        for wanted in sizes:
            pages, before = min(wanted, most), tensor.pages
            cost, held = tensor.cost(pages), driver.taken
            driver.work()
            tensor.resize(pages)
            assert driver.taken - held == cost or pages < before
            kept = min(pages, before)
            assert all((tensor.tensor[:, i] == i).all() for i in range(kept))
            for i in range(kept, pages):
                tensor.tensor[:, i] = i
            # Layers smaller than a chunk are there as a whole, see above.
            taken = layer if layer < CHUNK else pages * page * 2
            needed = {
                chunk
                for start in (i * layer for i in range(LAYERS))
                for chunk in range(start // CHUNK, -(-(start + taken) // CHUNK))
            }
            assert {(x - at) // CHUNK for x in driver.mapped} == needed
            assert driver.accessible == set(driver.mapped)
            assert tensor.tensor.data_ptr() == at
        del tensor


# ------------------------------------------------------------------ pools


@pytest.mark.parametrize("kv_format", ["dense", "fp8", "int8", "int4", ("int8", "int4")])
def test_a_pool_grows_and_shrinks_as_one_in_host_memory(driver, kv_format, monkeypatch):
    cache = cache_on(kv_format=kv_format)
    monkeypatch.undo()
    twin = PagedKVCache(cache.config, device="cpu")
    pointers = [cache._storage.layer(0)[0], cache._storage.layer(1)[1]]
    pointers = [getattr(x, "data", x).data_ptr() for x in pointers]
    for caches in (cache, twin):
        a, b = start(caches, ids(300)), start(caches, ids(90, seed=1))
        for end in (301, 600, 1500):
            advance(caches, {a: ids(end)})
            caches.check()
        caches.free(a)
        caches.clear_prefixes()
        driver.work()
        caches.shrink()
        advance(caches, {b: ids(900, seed=1)})
        caches.check()
    assert cache.stats() == twin.stats()
    for layer in range(2):
        for x, y in zip(cache.gather(b, layer), twin.gather(b, layer)):
            assert torch.equal(x, y)
    now = [cache._storage.layer(0)[0], cache._storage.layer(1)[1]]
    assert [getattr(x, "data", x).data_ptr() for x in now] == pointers


# Pages of 4 KiB, which are chunks here.
HISTORIES = [
    one_group(max_tokens=64, growth_step=8, head_dim=128, rollback=4),
    two_groups(5, max_tokens=64, growth_step=12, head_dim=128, rollback=4),
    one_group(max_tokens=256, growth_step=40, head_dim=128, page_size=16, kv_format="int4"),
]


@pytest.mark.parametrize("config", HISTORIES, ids=["one", "two", "int4"])
def test_a_long_history_is_the_same_on_a_card(config):
    with card(chunk=4 << 10) as driver:
        world = World(Case("grow", config, debug=True))
        for turn in range(30):
            world.apply(("add", (turn, turn * 7, [turn]), turn, None if turn % 3 else 5))
            world.apply(("step", [(turn, [0, 1], turn % 2)], "uncached", 0, "with"))
            driver.work()
            if turn % 4 == 3:
                world.free(range(turn % 5))
                world.clear()
                world.apply(("shrink",))
        assert driver.calls.count("cuMemUnmap") > 0
        del world


ERRORS = [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_LAUNCH_FAILED]


@pytest.mark.parametrize("status", ERRORS, ids=lambda status: status.name)
def test_every_call_that_fails_in_a_growth_leaves_all_tensors_as_they_were(driver, status):
    """Two groups, K and V: the growth takes a chunk in each of their layers."""
    fields = {"page_size": 16, "head_dim": 32, "max_tokens": 4096, "growth_step": 320}
    cache = PagedKVCache(two_groups(512, **fields, max_sequences=2), device="cpu", debug=True)
    a = start(cache, ids(318))
    driver.work()
    before, mapped = cache.stats(), set(driver.mapped)
    out_of_memory = status is CUresult.CUDA_ERROR_OUT_OF_MEMORY
    for failing in range(6 * 4):
        driver.fails = failing, status
        with pytest.raises(OutOfPagesError if out_of_memory else RuntimeError) as caught:
            advance(cache, {a: ids(330)})
        error = caught.value
        if out_of_memory:
            assert isinstance(error.__cause__, BudgetExceeded)
            error = error.__cause__.__cause__
        assert re.fullmatch(f"cuMem.*: {status.name}", str(error))
        assert (cache.stats(), set(driver.mapped), driver.created) == (before, mapped, set())
        assert driver.accessible == mapped
        cache.check()
    calls = len(driver.calls)
    advance(cache, {a: ids(330)})
    assert len(driver.calls) - calls == 6 * 4, "each of them failed once"
    assert_contents(cache, a, ids(330))
    cache.check()


@pytest.mark.parametrize("status", ERRORS, ids=lambda status: status.name)
def test_a_pool_that_cannot_begin_leaves_nothing(driver, status):
    """K and V: granularity, addresses, and for each of two layers a chunk and access to it."""
    expected = BudgetExceeded if status is CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
    for failing in range(2 * (2 + 2 * 4)):
        driver.fails = failing, status
        with pytest.raises(expected, match=f"cuMem.*: {status.name}") as error:
            cache_on()
        assert driver.fails is None
        del error
        assert (len(driver.reserved), driver.taken) == (0, 0)
    cache = cache_on()
    advance(cache, {start(cache, ids(9)): ids(99)})


def test_a_shrink_that_fails_loses_no_page_that_is_in_use(driver):
    for failing in range(4):
        cache = cache_on(growth_step=512)
        a, b = start(cache, ids(300)), start(cache, ids(2000, seed=1))
        cache.free(b)
        cache.clear_prefixes()
        driver.work()
        driver.fails = failing, CUresult.CUDA_ERROR_LAUNCH_FAILED
        with pytest.raises(RuntimeError, match="cuMemUnmap: CUDA_ERROR_LAUNCH_FAILED"):
            cache.shrink()
        cache.check()
        assert_contents(cache, a, ids(300))
        advance(cache, {a: ids(2500)})
        assert_contents(cache, a, ids(2500))


def test_a_card_without_memory_for_the_next_pages_is_reported_and_works_once_there_is(driver):
    cache = cache_on()
    a = start(cache, ids(300))
    driver.capacity = driver.taken + CHUNK
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="could not grow"):
        advance(cache, {a: ids(700)})
    assert cache.stats() == before
    driver.capacity = 1 << 40
    advance(cache, {a: ids(700)})
    assert_contents(cache, a, ids(700))


# ------------------------------------------------------------------ the end


def test_a_tensor_keeps_its_memory_and_gives_it_back_when_the_device_is_done(driver):
    cache = cache_on()
    start(cache, ids(300))
    k, taken = cache._storage.layer(1)[0], driver.taken
    del cache
    gc.collect()
    assert driver.taken == taken // 2, "that of V is gone"
    assert k[0, 0, 0, 0] == k[0, 0, 0, 0]
    driver.work()
    calls = len(driver.calls)
    del k
    assert driver.calls[calls] == "synchronize"
    assert driver.calls[-1] == "cuMemAddressFree"
    assert driver.taken == 0


def test_what_goes_while_a_graph_is_captured_does_not_spoil_the_capture(driver):
    tensor = small(100, most=200)
    held = tensor._memory
    rest = held._start, held.chunks, held.chunk, held._mapped, held.device
    calls, driver.capturing = len(driver.calls), True
    del tensor, held
    assert len(driver.calls) == calls
    driver.capturing = False
    virtual._free(*rest)


def test_nothing_is_called_at_exit(forked):
    code = """
    from tests.storage.cuda_memory import DEVICE, card, region
    import atexit, contextlib, torch
    stack = contextlib.ExitStack()
    driver = stack.enter_context(card())
    tensor = region((2, 9, 100), torch.int16, DEVICE, 3)
    calls = len(driver.calls)
    stack.pop_all()
    atexit._run_exitfuncs()
    print(len(driver.calls) - calls)
    """
    assert forked(inspect.cleandoc(code)) == "0"


# ------------------------------------------------------------------ refusals


def test_growth_is_refused_by_name_where_it_does_not_work(driver, monkeypatch):
    assert virtual.why_not(DEVICE) is None
    driver.supported = False
    assert "no virtual memory management" in virtual.why_not(DEVICE)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in virtual.why_not(DEVICE)


def test_growth_without_cuda_bindings_is_refused_with_the_way_out(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(virtual, "_driver", missing)
    message = "growth_step: .* cannot grow: cuda-bindings is not installed; .* of fixed size"
    with pytest.raises(NotImplementedError, match=message):
        memory.PageMemory(one_group(growth_step=16), DEVICE)


def test_pages_neither_come_nor_go_while_a_graph_is_captured(driver, monkeypatch):
    cache = cache_on()
    a = start(cache, ids(150))
    monkeypatch.setattr(cache._storage.memory, "device", DEVICE)
    monkeypatch.setattr(memory, "available_memory", lambda device: 1 << 40)
    before, calls, driver.capturing = cache.stats(), len(driver.calls), True
    with pytest.raises(RuntimeError, match=r"growth_step: .* while a CUDA graph is captured"):
        advance(cache, {a: ids(300)})
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        cache.add(max_tokens=500)
    assert (cache.stats(), len(driver.calls)) == (before, calls)
    driver.capturing = False
    advance(cache, {a: ids(300)})
    assert_contents(cache, a, ids(300))
    cache.truncate(a, 100)
    cache.clear_prefixes()
    before, driver.capturing = cache.stats(), True
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        cache.shrink()
    assert cache.stats() == before
    driver.capturing = False
    cache.shrink()
    assert cache.stats().pages < before.pages


# ------------------------------------------------------------------ the real module


def test_the_fake_has_the_names_numbers_and_arguments_of_cuda_bindings():
    real = pytest.importorskip("cuda.bindings.driver")
    functions = [x.removeprefix("_") for x in vars(FakeDriver) if x.startswith("_cu")]
    assert len(functions) > 8
    for name in functions:
        ours = list(inspect.signature(getattr(FakeDriver, "_" + name)).parameters)[1:]
        first = getattr(real, name).__doc__.splitlines()[0]
        theirs = re.fullmatch(r"\w+\((.*)\)", first).group(1)
        theirs = re.sub(r"\[[^]]*\]", "", theirs).split(", ")
        names = [re.split(r"[ :]", re.sub(r":.*", "", x).strip())[-1].lower() for x in theirs]
        assert [x.lower() for x in ours] == names, name
    for kind in vars(cuda_memory).values():
        if inspect.isclass(kind) and kind.__name__.startswith("CU"):
            theirs = getattr(real, kind.__name__)
            if hasattr(kind, "__members__"):
                assert all(int(getattr(theirs, x.name)) == x for x in kind), kind
            elif kind.__slots__:
                made = theirs() if kind is not cuda_memory.CUmemLocation else real.CUmemLocation()
                assert all(hasattr(made, x) for x in kind.__slots__), kind
