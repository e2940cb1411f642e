"""Pages on a streamed model: beams, forks, taken-back tokens, guesses, plans, as in memory."""

import pytest
import torch

from pagedkv import BatchGenerator, BudgetExceeded, LayerStreamer, PagedCache, plan_memory
from tests.effort import few
from tests.hf.modes import UNEVEN
from tests.hf.tiny import generate, named, padded, prompts, tiny
from tests.stream.models import in_memory, ragged, save, stream

SIZES = {"max_tokens": 512, "page_size": 4}


@pytest.fixture(scope="module")
def known(folder):
    return in_memory(folder)


def same(actual, expected):
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_assisted_decoding_are_as_in_memory(folder, known, options):
    batch = ragged() if "num_beams" in options else padded(prompts(9))
    options = {"max_new_tokens": 10, **options}
    expected = generate(known, batch, PagedCache(known, **SIZES), **options)
    with stream(folder) as streamer:
        same(
            generate(streamer.model, batch, PagedCache(streamer.model, **SIZES), **options),
            expected,
        )


def test_forks_and_crops_are_as_in_memory(folder, known):
    prefix, tails = prompts(12)[0], prompts(3, 3)

    def run(model):
        outs = []
        shared = PagedCache.prefill(model, prefix, **SIZES)
        with shared, shared.fork(2) as forks, torch.no_grad():
            for _ in range(2):  # the second time over tokens that were taken back
                new = torch.stack(tails)
                outs.append(model(new, **named(forks), use_cache=True).logits)
                forks.crop(-new.shape[1])
        return outs

    expected = run(known)
    with stream(folder, resident_layers=1) as streamer:
        for x, y in zip(run(streamer.model), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("width", [1, 4])
def test_samples_and_guesses_are_as_in_memory(folder, known, width):
    texts = [*prompts(5, 12), torch.tensor([7, 8, 9] * 6)]
    options = {"max_new_tokens": 12, "num_return_sequences": 2, "do_sample": True, "seed": 3}
    with BatchGenerator(known, **SIZES) as batched:
        expected = [r.tokens for r in batched.generate(texts, **options)]
    with (
        stream(folder) as streamer,
        BatchGenerator(streamer.model, verify_width=width, **SIZES) as batched,
    ):
        assert [r.tokens for r in batched.generate(texts, **options)] == expected
        assert (batched.stats.drafted > 0) == (width > 1)


def test_rows_and_guesses_of_a_step_keep_to_what_is_planned(folder, known):
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(folder, device_memory="4KiB", batch=2, length=40, device="cpu")
    plan = plan_memory(
        folder, device_memory=2 * refused.value.needed, batch=2, length=40,
        device="cpu",
    )  # fmt: skip
    texts, widest = [torch.tensor([i, 7, 8, 7, 8, 7, 8]) for i in range(12)], []
    with (
        LayerStreamer.from_pretrained(folder, plan=plan, device="cpu") as streamer,
        BatchGenerator(streamer.model, plan=plan) as batched,
    ):
        logits = batched._packed.logits

        def counting(step, rows=None, *inputs):
            found = logits(step, rows)
            widest.append(len(found))
            return found

        batched._packed.logits = counting
        got = batched.generate(texts, max_new_tokens=8, do_sample=False)
    assert max(widest) <= plan.batch * plan.verify_width
    with BatchGenerator(known, **SIZES) as batched:
        expected = batched.generate(texts, max_new_tokens=8, do_sample=False)
    assert [r.tokens for r in got] == [r.tokens for r in expected]


@pytest.mark.parametrize("family", few(sorted({*UNEVEN} - {"mistral4"}), "deepseek_v3", "gemma4"))
def test_layers_of_every_shape_stream_over_pages_as_in_memory(family, tmp_path):
    torch.manual_seed(0)
    path = save(tiny(family), tmp_path)
    whole, rows = in_memory(path), prompts(20, 5, 11)
    expected = generate(whole, padded(rows))
    with stream(path) as streamer:
        same(generate(streamer.model, padded(rows), PagedCache(streamer.model, **SIZES)), expected)
        with BatchGenerator(streamer.model, step_tokens=8, **SIZES) as batched:
            found = batched.generate(rows, max_new_tokens=6, do_sample=False)
    for row, result in zip(rows, found):
        alone = generate(whole, padded([row]), max_new_tokens=6).sequences[0, len(row) :]
        assert result.tokens == alone.tolist()


def test_code_of_others_is_tried_though_buffers_of_a_layer_stream(tmp_path):
    def double(model):
        mlp = model.model.layers[-1].mlp
        own = mlp.forward
        mlp.forward = lambda hidden: 2 * own(hidden)

    path, rows = save(tiny("deepseek_v3"), tmp_path), prompts(9, 5)
    whole = in_memory(path)
    double(whole)
    with stream(path) as streamer:
        double(streamer.model)
        with BatchGenerator(streamer.model, **SIZES) as batched:
            found = batched.generate(rows, max_new_tokens=4, do_sample=False)
    for row, result in zip(rows, found, strict=True):
        alone = generate(whole, padded([row]), max_new_tokens=4).sequences[0, len(row) :]
        assert result.tokens == alone.tolist()
