"""A whole job of very different rows in a quarter of the memory they would need at once."""

import numpy as np
import pytest

from pagedkv import BatchGenerator
from tests.batch.generating import alone, assert_same
from tests.hf.tiny import VOCAB, tiny

ROWS = 200


@pytest.mark.slow
def test_two_hundred_rows_in_a_quarter_of_their_memory_are_each_as_alone():
    source = np.random.default_rng(0)
    lengths = np.exp(source.uniform(np.log(16), np.log(1024), ROWS)).astype(int)
    new = source.integers(1, 129, ROWS)
    prompts = [source.integers(2, VOCAB, n) for n in lengths]
    model = tiny("llama", max_position_embeddings=2048)
    pool = int((lengths + new).sum()) // 4
    live = []
    with BatchGenerator(model, max_tokens=pool) as generator:
        free = generator.cache.free

        def watched(seqs):
            live.append(generator.cache.stats().live)
            free(seqs)

        generator.cache.free = watched
        results = generator.generate(prompts, max_new_tokens=new.tolist(), do_sample=False)
        generator.cache.check()
        assert generator.stats.peak.live == max(live) <= generator.stats.peak.pages
    assert [result.index for result in results] == list(range(ROWS))
    for result, prompt, count in zip(results, prompts, new.tolist(), strict=True):
        assert_same(result, alone(model, prompt, max_new_tokens=count, do_sample=False))
