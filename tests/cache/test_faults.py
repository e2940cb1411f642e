"""Whatever fails, and wherever, leaves a cache as it was."""

import pytest

from pagedkv import PagedKVCache
from pagedkv.step import device_tables
from pagedkv.step.device_tables import DeviceTables
from tests.cases import one_group, two_groups
from tests.contents import Boom, assert_contents, write_step


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("layer", range(4))
def test_an_exception_at_any_layer_of_a_step_leaves_everything_as_it_was(layer, error):
    config = two_groups(5, max_tokens=64, rollback=2)
    cache = PagedKVCache(config, device="cpu", debug=True)
    prompt = [1, 2, 3, 4, 5, 6]
    a = cache.add(prompt)
    with cache.step([a]) as step:
        write_step(cache, step, [prompt])
    b = cache.fork(a)[0]
    before = cache.stats()

    def die_in_a_step():
        # b copies the shared tail and grows by a page; a writes where it stands.
        with cache.step([a, b], tokens=[[7], [8, 9, 10, 11]]) as step:
            write_step(cache, step, [[*prompt, 7], [*prompt, 8, 9, 10, 11]], layers=range(layer))
            raise error

    for _ in range(3):
        with pytest.raises(error):
            die_in_a_step()
        cache.check()
        assert cache.stats() == before
        assert_contents(cache, a, prompt)
        assert_contents(cache, b, prompt)
    with cache.step([a, b], tokens=[[7], [8]]) as step:
        write_step(cache, step, [[*prompt, 7], [*prompt, 8]])
    assert_contents(cache, a, [*prompt, 7])
    assert_contents(cache, b, [*prompt, 8])


@pytest.mark.parametrize("where", ["copy_pages", "upload"])
def test_an_exception_while_a_step_is_prepared_leaves_everything_as_it_was(where, monkeypatch):
    cache = PagedKVCache(one_group(), device="cpu", debug=True)
    prompt = [1, 2, 3, 4, 5, 6]
    a = cache.add(prompt)
    with cache.step([a]) as step:
        write_step(cache, step, [prompt])
    b = cache.fork(a)[0]
    before = cache.stats()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "copy_pages":
            patch.setattr(type(cache._storage), "copy_pages", fail)
        else:
            patch.setattr(DeviceTables, "send", fail)
        with pytest.raises(KeyboardInterrupt):
            cache.prepare([a, b], tokens=[[7], [8]])
    cache.check()
    assert cache.stats() == before
    assert_contents(cache, a, prompt)
    assert_contents(cache, b, prompt)
    with cache.step([a, b], tokens=[[7], [8]]) as step:
        write_step(cache, step, [[*prompt, 7], [*prompt, 8]])
    assert_contents(cache, a, [*prompt, 7])
    assert_contents(cache, b, [*prompt, 8])


@pytest.mark.parametrize("failing", range(3))
def test_buffers_that_did_not_fit_into_memory_are_asked_for_anew(failing, monkeypatch):
    """Half of the larger ones would be written, and the other half sent."""
    cache = PagedKVCache(one_group(), device="cpu", debug=True)
    first, text, left, lasting = cache.add([1]), [*range(2, 60)], [failing], device_tables.Lasting
    with cache.step([first]) as step:
        write_step(cache, step, [[1]])

    def short(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError
        return lasting(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(device_tables, "Lasting", short)
        with pytest.raises(MemoryError):
            cache.prepare([seq := cache.add(text)])
    with cache.step([seq]) as step:
        write_step(cache, step, [text])
    cache.check()
    assert_contents(cache, seq, text)


def test_an_error_in_the_body_is_not_hidden_by_the_abort():
    cache = PagedKVCache(one_group(), device="cpu")
    a = cache.add([1, 2])

    def die():
        with cache.step([a]) as step:
            cache.abort(step)
            raise Boom("first")

    with pytest.raises(Boom, match="first"):
        die()
    cache.check()
    assert cache.length(a) == 0
