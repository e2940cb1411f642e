"""Streamed models with recurrent states: weights of mixers come and go, states stay."""

import pytest
import torch

from pagedkv import BatchGenerator, BudgetExceeded, LayerStreamer, PagedCache, plan_memory
from tests.contents import Boom
from tests.effort import few
from tests.hf.modes import visible
from tests.hf.tiny import generate, named, padded, prompts
from tests.hybrids import HYBRIDS, STEPWISE, tiny_hybrid
from tests.stream.models import in_memory, placed, ragged, save, stream
from tests.stream.test_pass_lock import together

SIZES = {"max_tokens": 512, "page_size": 4}
SERVED = sorted(HYBRIDS)
PACKED = sorted(set(SERVED) - STEPWISE)
# Checkpoints of inkling2_text pad the head, whose rows cannot be read alone then.
BY_ROWS = sorted({*PACKED} - {"inkling2_text"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            torch.manual_seed(0)
            model = tiny_hybrid(family)
            made[family] = save(model, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def tokens(model, texts, sizes=SIZES, **options):
    """Generates a batch, and checks the cache."""
    with BatchGenerator(model, **sizes) as batched:
        found = [r.tokens for r in batched.generate(texts, max_new_tokens=5, **options)]
        batched.cache.check()
    return found


@pytest.mark.parametrize("family", few(SERVED, "qwen3_next", "nemotron_h"))
def test_generate_gives_the_bits_of_the_model_in_memory(folders, family):
    folder, batch = folders(family), ragged()
    known = in_memory(folder)
    with PagedCache(known, **SIZES) as cache:
        expected = generate(known, batch, cache)
    with placed(folder, resident=(1,)) as streamer:
        with PagedCache(streamer.model, **SIZES) as cache:
            actual = generate(streamer.model, batch, cache)
            cache.kv.check()
        assert streamer.stats().bytes_read > 0
    assert torch.equal(actual.sequences, expected.sequences)
    for x, y in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("family", few(BY_ROWS, "falcon_h1"))
def test_samples_of_prompts_in_a_tree_are_those_in_memory(folders, family):
    first, other, *tails = prompts(12, 3, 3, 4)
    texts = [first, other, *(torch.cat([first, tail]) for tail in tails)]
    options = {"num_return_sequences": 2, "do_sample": True, "seed": 3}
    expected = tokens(in_memory(folders(family)), texts, **options)
    with placed(folders(family), embedding=False, head=False, head_rows=101) as streamer:
        assert tokens(streamer.model, texts, **options) == expected


def test_a_plan_has_room_for_states_and_is_kept_to(folders):
    folder, texts = folders("qwen3_next"), prompts(5, 12, 3)
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(folder, device_memory="4KiB", batch=3, length=20, device="cpu")
    options = {"device_memory": refused.value.needed, "batch": 3, "length": 20, "device": "cpu"}
    with LayerStreamer.from_pretrained(folder, **options) as streamer:
        plan = streamer.plan
        assert plan.streams
        assert 0 < plan.link_gbps < 1000  # as measured here
        assert plan.states == plan.cache.max_states == 4
        assert tokens(streamer.model, texts, {"plan": plan}) == tokens(in_memory(folder), texts)


@pytest.mark.parametrize("family", few(BY_ROWS, "falcon_h1"))
def test_a_pass_that_dies_anywhere_leaves_pages_and_states_as_they_were(folders, family):
    batch, token = padded(prompts(9, 5)), torch.tensor([[7], [8]])
    mask = torch.cat([batch["attention_mask"], torch.ones_like(token)], 1)
    step = {"input_ids": token, "attention_mask": mask}
    with placed(folders(family), head=False, head_rows=101) as streamer, torch.no_grad():
        model = streamer.model
        with PagedCache(model, **SIZES) as cache:
            model(**batch, **named(cache))
            expected = model(**step, **named(cache)).logits
            cache.reset()
            model(**batch, **named(cache))
            before = visible(cache)
            for module in (model.lm_head, *model.model.layers, *model.model.layers[-1].children()):
                hook = module.register_forward_hook(lambda *_: (_ for _ in ()).throw(Boom()))
                with pytest.raises(Boom):
                    model(**step, **named(cache))
                hook.remove()
                now = visible(cache)
                assert now[0] == before[0]
                assert all(map(torch.equal, now[1], before[1]))
                cache.kv.check()
            assert torch.equal(model(**step, **named(cache)).logits, expected)


def test_threads_with_pages_of_their_own_take_turns(folders):
    texts, found = prompts(5, 12), {}
    expected = tokens(in_memory(folders("qwen3_next")), texts)
    with stream(folders("qwen3_next")) as streamer:

        def work(place):
            sizes = {**SIZES, "max_tokens": 512 + 4 * place}
            return lambda: found.update({place: tokens(streamer.model, texts, sizes)})

        together(*map(work, range(3)))
    assert [found[place] for place in range(3)] == [expected] * 3
