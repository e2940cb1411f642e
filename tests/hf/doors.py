"""Each door that a model goes through, held against transformers' own `generate`."""

import torch

from pagedkv import BatchGenerator, PagedCache, plan_memory
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.model import text_config
from pagedkv.models import facts_of
from tests.batch.generating import assert_same
from tests.hf.tiny import assert_same_tokens, generate, padded

LENGTHS = (14, 9, 12)
SIZES = {"page_size": 4, "max_tokens": 512}
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}


def rows_of_tokens():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 170, (n,), generator=generator) for n in LENGTHS]


def through_padded_cache(model, rows):
    with PagedCache(model, **SIZES) as cache:
        actual = generate(model, padded(rows), cache, **OPTIONS)
    if facts_of(text_config(model).model_type).indexer != "blocks by head":
        assert_same_tokens(actual, generate(model, padded(rows), **OPTIONS))
        return
    for row, tokens in zip(rows, actual.sequences):  # in transformers' own padding shifts blocks
        alone = generate(model, padded([row]), **OPTIONS).sequences[0]
        assert torch.equal(tokens[-len(alone) :], alone)


def through_cache(model, rows):
    batch = padded(rows[:1])  # without padding no mask is made, which some take for another case
    with PagedCache(model, **SIZES) as cache:
        actual = generate(model, batch, cache, **OPTIONS)
    assert_same_tokens(actual, generate(model, batch, **OPTIONS))


def through_batch(model, rows):
    generator = BatchGenerator(model, **SIZES)
    try:
        results = generator.generate([row.tolist() for row in rows], do_sample=False, **OPTIONS)
    finally:
        generator.close()
    for row, result in zip(rows, results):
        assert_same(result, generate(model, padded([row]), **OPTIONS))


DOORS = {"padded": through_padded_cache, "cache": through_cache, "batch": through_batch}


def reasons(model):
    """By door, why a model is refused; None where its tokens are right."""
    found = {}
    for name, door in DOORS.items():
        try:
            found[name] = door(model, rows_of_tokens())
        except UnsupportedModelError as error:
            found[name] = str(error)
    return found


def is_planned(model):
    try:
        plan_memory(model.config, device_memory="1GiB", device="cpu")
    except UnsupportedModelError:
        return False
    return True
