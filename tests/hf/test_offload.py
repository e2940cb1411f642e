"""Rows of a `PagedCache` leave for host memory and files, and go on as if they had stayed."""

import copy

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.errors import OffloadedError, OpenStepError, UnknownSequenceError, WrongModelError
from pagedkv.hf.fingerprint import fingerprint_of
from tests.hf.tiny import generate, named, padded, prompts, tiny

SIZES = {"max_tokens": 512, "page_size": 4, "host_tokens": 512}


def test_a_file_of_other_weights_is_refused_whatever_process_wrote_it(tmp_path):
    model = tiny()
    cache = PagedCache(model, **SIZES)
    generate(model, padded(prompts(5)), cache)
    cache.kv.save(cache.rows[0], tmp_path / "x")
    cache.close()
    again = copy.deepcopy(model)
    assert fingerprint_of(again) == fingerprint_of(model) != b""
    assert fingerprint_of(copy.deepcopy(model).bfloat16()) != fingerprint_of(model)
    assert PagedCache(again, **SIZES).kv.load(tmp_path / "x") >= 0
    with torch.no_grad():
        again.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(WrongModelError, match="expected K and V of the model"):
        PagedCache(again, **{**SIZES, "max_tokens": 600}).kv.load(tmp_path / "x")
    assert fingerprint_of(copy.deepcopy(model).to("meta")) == b""


def test_sequences_that_cannot_be_rows_are_refused_by_name():
    model = tiny()
    kv = PagedCache(model, **SIZES).kv
    seq, away = kv.add(), kv.add()
    step = kv.prepare([seq, away], num_new=5)
    with pytest.raises(OpenStepError, match="is in an open step"):
        PagedCache.of(model, kv, [seq])
    kv.commit(step, layers=())
    kv.offload(away)
    prompt = kv.add([1, 2, 3])
    with pytest.raises(ValueError, match=f"expected computed prompts, {prompt} has 3 ids left"):
        PagedCache.of(model, kv, [prompt])
    for seqs, error, message in (
        ([seq, away], OffloadedError, "restore"),
        ([seq, seq], ValueError, "distinct"),
        ([seq, 999], UnknownSequenceError, "999"),
        ([], ValueError, "seqs: expected a list"),
    ):
        with pytest.raises(error, match=message):
            PagedCache.of(model, kv, seqs)
    kv.check()
    assert kv.length(seq) == 5
    one = PagedCache.of(model, kv, [seq])
    one.close()
    kv.stats()
    with pytest.raises(UnknownSequenceError):
        kv.length(seq)


def test_rows_that_wait_in_host_memory_are_refused_until_they_are_back():
    model = tiny()
    with PagedCache(model, **SIZES) as cache:
        generate(model, padded(prompts(9, 9)), cache)
        cache.kv.offload(cache.rows)
        with pytest.raises(OffloadedError, match="`restore` it first"):
            model(input_ids=torch.ones(2, 1, dtype=torch.long), **named(cache))
        assert cache.kv.stats().live == 0
