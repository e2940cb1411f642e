"""Rows of a `PagedCache` leave for host memory and files, and go on as if they had stayed."""

import copy

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.errors import OffloadedError, OpenStepError, UnknownSequenceError, WrongModelError
from pagedkv.hf.fingerprint import fingerprint_of
from tests.hf.tiny import named, padded, prompts, tiny

SIZES = {"max_tokens": 512, "page_size": 4, "host_tokens": 512}


def turn(model, cache, ids, mask, new=6):
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new}
    return model.generate(ids, **named(cache), **options)


def two_turns(model, between, lengths=(9, 9)):
    """Ids after two turns of chats, with something done to their cache in between."""
    torch.manual_seed(3)
    ids, mask = padded(prompts(*lengths)).values()
    cache = PagedCache(model, **SIZES)
    out = turn(model, cache, ids, mask)
    cache = between(cache)
    more = torch.tensor([[7, 8, 9]]).repeat(len(out), 1)
    mask = torch.cat([mask, torch.ones(len(out), 6 + 3, dtype=mask.dtype)], 1)
    return turn(model, cache, torch.cat([out, more], 1), mask).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12)])
def test_a_chat_goes_on_from_a_file_as_if_it_had_never_stopped(family, lengths, tmp_path):
    model = tiny(family)
    expected = two_turns(model, lambda cache: cache, lengths)

    def through_files(cache):
        for i, seq in enumerate(cache.rows):
            cache.kv.save(seq, tmp_path / str(i))
        other = PagedCache(model, **{**SIZES, "max_tokens": 600})
        assert other.kv is not cache.kv
        seqs = [other.kv.load(tmp_path / str(i)) for i in range(2)]
        cache.close()
        return PagedCache.of(model, other.kv, seqs)

    assert two_turns(model, through_files, lengths) == expected


def test_a_file_of_other_weights_is_refused_whatever_process_wrote_it(tmp_path):
    model = tiny()
    cache = PagedCache(model, **SIZES)
    turn(model, cache, torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.long))
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


def test_a_chat_that_waits_in_host_memory_goes_on_as_well():
    model = tiny()
    expected = two_turns(model, lambda cache: cache)

    def there_and_back(cache):
        cache.kv.offload(cache.rows)
        with pytest.raises(OffloadedError, match="`restore` it first"):
            model(input_ids=torch.ones(2, 1, dtype=torch.long), **named(cache))
        assert cache.kv.stats().live == 0
        cache.kv.restore(cache.rows)
        return cache

    assert two_turns(model, there_and_back) == expected


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
