"""A small model whose losses are measured, and what it makes of the texts with everything kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers


def _load(path, tokens, read=None, **changes):
    """A model, its tokenizer, the probes in its tokens, and readings of some in the full cache."""
    from pagedkv.quality.probes import probes
    from pagedkv.quality.reading import compare
    from pagedkv.quality.variants import FULL

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    found = probes(tokenizer, tokens)
    texts = [found[name] for name in read or found]
    (full,) = compare(model.eval(), [FULL], texts)
    return SimpleNamespace(model=model, tokenizer=tokenizer, probes=found, full=full)


@pytest.fixture(scope="session")
def few_layers(smollm2_path):
    """Four layers of the small model, for what does not depend on how well it predicts."""
    return _load(smollm2_path, 256, ["needles"], num_hidden_layers=4)


@pytest.fixture(scope="session")
def quality(smollm2_path):
    """The small model; the full cache reads all probes once for all gates."""
    return _load(smollm2_path, 1024)


@pytest.fixture(scope="session")
def read(quality):
    """Readings of probes in a variant, each made once."""
    from pagedkv.quality.reading import compare

    done = {}

    def read(variant, *names):
        if missing := [name for name in names if (variant.name, name) not in done]:
            texts = [quality.probes[name] for name in missing]
            (readings,) = compare(quality.model, [variant], texts)
            done.update({(variant.name, name): reading for name, reading in readings.items()})
        return [done[variant.name, name] for name in names]

    return read


@pytest.fixture(scope="session")
def worse(quality, read):
    """By how much perplexity is worse where every budget is exhausted: in the second half."""

    def worse(variant, name):
        half = len(quality.probes[name].ids) // 2
        (reading,) = read(variant, name)
        mine, full = (each.nats[half:].mean() for each in (reading, quality.full[name]))
        return (mine - full).exp().item() - 1

    return worse
