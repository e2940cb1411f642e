"""A checkpoint has one fingerprint, in memory and streamed, and pages know whose they are.

`test_families.py` holds the two against one another in all families.
"""

from unittest import mock

import pytest
import torch

from pagedkv import BatchGenerator, PagedCache, plan_memory
from pagedkv.errors import StreamError, WrongModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.hf.samples import SAMPLES
from pagedkv.stream.reader import FileReader
from pagedkv.stream.tensor_map import _stacked
from tests.effort import each_value
from tests.hf.tiny import generate, padded, prompts
from tests.stream.models import in_memory, make, placed, save, stream

SIZES = {"max_tokens": 512, "page_size": 4}


def other(folder, change, tmp_path):
    """The checkpoint with one tensor changed."""
    model = in_memory(folder)
    with torch.no_grad():
        change(model)
    return save(model, tmp_path / "other")


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("converted", [False, True])
def test_tensors_that_an_operation_makes_have_their_part_in_it(family, converted, tmp_path):
    folder = save(make(family), tmp_path)
    # Pieces that lie behind one another are read where they are; else the operation runs.
    options = {"return_value": None} if converted else {"side_effect": _stacked}
    with mock.patch("pagedkv.stream.tensor_map._stacked", **options), stream(folder) as streamer:
        assert bool(streamer._store.origins.conversions) == (converted and family == "mixtral")
        assert fingerprint_of(streamer.model) == fingerprint_of(in_memory(folder))


@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    each_value(["llama", "gpt2", "cohere", "gemma2"], [True, False], [True, False]),
)
def test_glue_that_streams_has_its_part_in_it(family, embedding, head, tmp_path):
    folder = save(make(family), tmp_path)
    with placed(folder, embedding=embedding, head=head, head_rows=7) as streamer:
        assert fingerprint_of(streamer.model) == fingerprint_of(in_memory(folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.layers[1].self_attn.k_proj.weight.mul_(1.5),
        lambda m: m.model.layers[2].mlp.down_proj.weight.neg_(),
        lambda m: m.model.embed_tokens.weight.mul_(2),
        lambda m: m.lm_head.weight.mul_(2),
    ],
)
def test_other_weights_have_another(change, folder, tmp_path):
    changed = other(folder, change, tmp_path)
    found = set()
    for glue in ({}, {"embedding": False, "head": False, "head_rows": 7}):
        for place in (folder, changed):
            with placed(place, **glue) as streamer:
                found.add(fingerprint_of(streamer.model))
    assert len(found) == 2
    assert fingerprint_of(in_memory(changed)) in found


def test_only_what_is_sampled_is_read_and_once(folder):
    class Counting(FileReader):
        read_bytes = 0

        def read(self, unit, run, memory):
            Counting.read_bytes += sum(part.nbytes for part in run.parts)
            super().read(unit, run, memory)

    with mock.patch("pagedkv.stream.weights.FileReader", Counting), stream(folder) as streamer:
        Counting.read_bytes = 0
        first = fingerprint_of(streamer.model)
        tensors = sum(p.is_meta for p in streamer.model.parameters())
        assert 0 < Counting.read_bytes <= tensors * SAMPLES * 4
        Counting.read_bytes = 0
        assert fingerprint_of(streamer.model) == first
        assert not Counting.read_bytes


def test_it_is_the_same_while_another_layer_computes(folder):
    """Weights that are bound now lie where the next layer's will."""
    found = []
    with stream(folder) as streamer:
        known = fingerprint_of(in_memory(folder))
        for layer in streamer.model.model.layers:
            layer.mlp.register_forward_hook(lambda *_: found.append(fingerprint_of(streamer.model)))
        streamer.model(torch.stack(prompts(5)))
    assert found == [known] * 3


def test_a_closed_streamer_reads_nothing_more(folder):
    with stream(folder) as streamer:
        pass
    with pytest.raises(StreamError, match="closed"):
        fingerprint_of(streamer.model)


# ---- whose pages a file has


def test_a_file_goes_from_the_model_in_memory_to_the_streamed_one_and_back(folder, tmp_path):
    known, batch = in_memory(folder), padded(prompts(9))
    texts = []
    with stream(folder) as streamer:
        for source, target in ((known, streamer.model), (streamer.model, known)):
            file = tmp_path / "text.safetensors"
            with PagedCache(source, **SIZES) as cache:
                generate(source, batch, cache)
                length = cache.kv.length(cache.rows[0])
                k, v = cache.kv.gather(cache.rows[0], 2)
                cache.kv.save(cache.rows[0], file)
            with PagedCache(target, **SIZES) as cache:
                loaded = cache.kv.load(file)
                assert cache.kv.length(loaded) == length
                for x, y in zip(cache.kv.gather(loaded, 2), (k, v), strict=True):
                    assert torch.equal(x, y)
                cache.kv.free(loaded)
            texts.append((k, v))
    assert torch.equal(texts[0][0], texts[1][0])


@pytest.mark.parametrize("planned", [False, True])
def test_a_file_of_other_weights_is_refused(planned, folder, tmp_path):
    changed = other(folder, lambda m: m.model.layers[1].self_attn.k_proj.weight.mul_(1.5), tmp_path)

    def pages(model, place):
        if not planned:
            return PagedCache(model, **SIZES).kv
        return BatchGenerator(
            model, plan=plan_memory(place, device_memory="1GiB", length=64, device="cpu")
        ).cache

    file = tmp_path / "text.safetensors"
    with stream(folder) as streamer:
        kv = pages(streamer.model, folder)
        text = kv.add([5, 6, 7, 8])
        kv.save(text, file)
        kv.load(file)
    for open_one in (lambda: stream(changed).model, lambda: in_memory(changed)):
        model = open_one()
        with pytest.raises(WrongModelError):
            pages(model, changed).load(file)
    kv = pages(in_memory(folder), folder)
    assert kv.config.fingerprint == fingerprint_of(in_memory(folder))
    kv.load(file)
