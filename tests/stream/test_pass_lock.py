"""One pass at a time, whoever asks: threads, hooks, other processes, and a streamer that closes."""

import os
import threading
import time
from itertools import count, cycle

import pytest
import torch

from pagedkv.errors import StreamError
from tests.effort import each_value
from tests.stream.models import in_memory, placed, stream

TEXTS = [torch.tensor([[i, i + 1, i + 2]]) for i in range(1, 9)]
GLUE = {"embedding": False, "head": False, "head_rows": 101}
CALLS = {
    "model": lambda m, ids: m(ids).logits,
    "inner model": lambda m, ids: m.model(ids).last_hidden_state,
    "layer": lambda m, ids: m.model.layers[2](
        torch.ones(1, 3, 32) * ids[0, 0],
        position_embeddings=m.model.rotary_emb(torch.ones(1, 3, 32), torch.arange(3)[None]),
    ),
    "embedding": lambda m, ids: m.model.embed_tokens(ids),
    "head": lambda m, ids: m.lm_head(torch.ones(1, 3, 32) * ids[0, 0]),
}


def together(*works):
    """Runs them in threads of their own; what one raised is raised."""
    failed = []

    def run(work):
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failed:
        raise failed[0]


PAIRS = [("model", "model"), ("inner model", "inner model"), ("model", "inner model")]


@pytest.mark.parametrize(("calls", "glue"), each_value([*PAIRS, tuple(CALLS)], [{}, GLUE]))
def test_threads_take_turns(calls, glue, folder):
    with torch.no_grad():
        known = in_memory(folder)
        expected = {name: [CALLS[name](known, ids) for ids in TEXTS] for name in calls}
    wrong = []

    def work(name, model):
        def run():
            for _ in range(5):
                for ids, right in zip(TEXTS, expected[name]):
                    if not torch.equal(CALLS[name](model, ids), right):
                        wrong.append(name)

        return run

    with placed(folder, **glue) as streamer:
        together(*(work(name, streamer.model) for name in calls))
    assert not wrong


@pytest.mark.parametrize("call", ["model", "inner model", "layer", "head"])
@pytest.mark.parametrize("at", ["mlp", "self_attn"])
def test_a_pass_within_a_layer_is_refused_and_the_outer_one_goes_on(call, at, folder):
    ids, refused = TEXTS[3], []
    expected = in_memory(folder)(ids).logits
    with placed(folder, **GLUE) as streamer:
        model = streamer.model

        def within(*_):
            with pytest.raises(StreamError, match="called while layer 1 computes") as error:
                CALLS[call](model, TEXTS[0])
            refused.append(error)

        model.model.layers[1].get_submodule(at).register_forward_hook(within)
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
    assert len(refused) == 2


def test_a_pass_between_layers_is_right_as_is_the_outer_one(folder):
    inner, known = [], in_memory(folder)
    with placed(folder, **GLUE) as streamer:
        model = streamer.model

        def once(*_):
            if not inner:
                inner.append(None)
                inner[0] = model(TEXTS[0]).logits

        model.model.layers[1].register_forward_hook(once)
        assert torch.equal(model(TEXTS[3]).logits, known(TEXTS[3]).logits)
    assert torch.equal(inner[0], known(TEXTS[0]).logits)


def test_a_layer_that_calls_itself_has_its_weights(folder):
    def run(model):
        inner = []

        def once_more(*_):
            if not inner:
                inner.append(None)  # it comes by here again
                inner[0] = CALLS["layer"](model, TEXTS[0])

        model.model.layers[2].mlp.register_forward_hook(once_more)
        return model(TEXTS[3]).logits, inner[0]

    with placed(folder) as streamer, torch.no_grad():
        for x, y in zip(run(streamer.model), run(in_memory(folder)), strict=True):
            assert torch.equal(x, y)


def test_a_thread_that_asks_for_the_layer_that_computes_waits_as_well(folder):
    reached, go_on, order = threading.Event(), threading.Event(), []
    with placed(folder) as streamer:
        layer = streamer.model.model.layers[2]

        def slow(*_):
            if not reached.is_set():
                reached.set()
                go_on.wait(600)
                order.append("model")

        layer.mlp.register_forward_hook(slow)

        def other():
            reached.wait(600)
            threading.Timer(0.05, go_on.set).start()
            CALLS["layer"](streamer.model, TEXTS[0])
            order.append("layer")

        together(lambda: streamer.model(TEXTS[0]), other)
    assert order == ["model", "layer"]


@pytest.mark.parametrize("call", ["model", "inner model"])
def test_closing_waits_for_the_pass_that_computes(call, folder):
    ids, found = TEXTS[3], []
    with torch.no_grad():
        expected = CALLS[call](in_memory(folder), ids)
    computing, done = threading.Event(), []
    streamer = placed(folder, **GLUE)
    model = streamer.model

    def slow(*_):
        computing.set()
        time.sleep(0.05)

    model.model.layers[0].mlp.register_forward_hook(slow)

    def compute():
        found.append(CALLS[call](model, ids))
        done.append("computed")
        with pytest.raises(StreamError, match=r"closed|is streamed"):
            [CALLS[call](model, ids) for _ in count()]

    def close():
        computing.wait(600)
        streamer.close()
        done.append("closed")

    together(compute, close)
    assert torch.equal(found[0], expected)
    assert sorted(done) == ["closed", "computed"]


def test_a_streamer_that_closes_again_and_again_under_threads_gives_right_or_a_sentence(folder):
    known = in_memory(folder)
    expected = [known(ids).logits for ids in TEXTS]
    for turn in range(6):
        streamer = placed(folder, **(GLUE if turn % 2 else {}))
        started, wrong = threading.Event(), []

        def compute(model=streamer.model, started=started, wrong=wrong):
            for ids, right in cycle(zip(TEXTS, expected)):
                try:
                    logits = model(ids).logits
                except StreamError:
                    return
                if not torch.equal(logits, right):
                    wrong.append(ids)
                started.set()

        def close(streamer=streamer, started=started):
            started.wait(600)
            streamer.close()

        together(compute, compute, close)
        assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_hanging(ahead, folder):
    ids = TEXTS[0]
    with stream(folder) as streamer:
        streamer._store.reader._can_ask = not ahead
        reached, go_on = threading.Event(), threading.Event()

        def hold(*_):
            reached.set()
            go_on.wait(600)

        hook = streamer.model.model.layers[1].mlp.register_forward_hook(hold)
        thread = threading.Thread(target=lambda: streamer.model(ids))
        thread.start()
        reached.wait(600)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                streamer.model(ids)
            except StreamError as error:
                streamer.close()
                code = 0 if "before a fork" in str(error) else 2
            finally:
                os._exit(code)
        deadline = time.monotonic() + 600
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                status = child, -1
                break
            time.sleep(0.01)
        go_on.set()
        thread.join()
        hook.remove()
        assert status == (child, 0)
        assert torch.equal(streamer.model(ids).logits, in_memory(folder)(ids).logits)
