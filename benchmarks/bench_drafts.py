"""Seconds and steps of `BatchGenerator` with drafts, by lookup and by a smaller model.

Two models draft for two others, because no trained pair comes with a package:

- The first layers of SmolLM2-135M, with its norm and head, draft for it: cheap, and seldom right.
- SmolLM2-135M with noise on its weights drafts for a model several times as large. The large model
  is SmolLM2-135M with further layers whose outputs are zero: they cost what layers cost, and leave
  its answers alone. So the noise sets the share of right drafts, and the costs are measured.

Processor seconds of one thread, prompts included; every way has to give the same tokens.
"""

from copy import deepcopy
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch

from pagedkv import BatchGenerator

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 4, "cut": 2, "large": 8, "rows": 2, "new": 9},
    "full": {"layers": 30, "cut": 6, "large": 100, "rows": 16, "new": 33},
}
NONE, LOOKUP = "no drafts", "lookup in the text"


def noisy(model: Any, scale: float) -> Any:
    """Copies a model and adds noise to its matrices, a share of their deviation."""
    draft, noise = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight += torch.randn(weight.shape, generator=noise) * scale * weight.std()
    return draft


def enlarged(model: Any, layers: int) -> Any:
    """Makes a model of `layers` layers that says what the small one says."""
    large, own = deepcopy(model), len(model.model.layers)
    for at in range(own, layers):
        layer = deepcopy(model.model.layers[at % own], {id(model.config): large.config})
        layer.self_attn.layer_idx = at
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        large.model.layers.append(layer)
    large.config.num_hidden_layers = layers
    if getattr(large.config, "layer_types", None):
        large.config.layer_types = [large.config.layer_types[0]] * layers
    return large


def compare(
    job: str, model: Any, tokenizer: Any, shape: Any, ways: Any, record: Any, claim: Any, table: Any
) -> None:
    """Answers the same prompts in each way, and puts seconds and steps into the tables."""
    questions = (ROOT / "docs/examples/questions.txt").read_text().splitlines()[: shape["rows"]]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    expected, seconds = None, {}
    for name, options in ways.items():
        with BatchGenerator(model, tokenizer, max_tokens=4096, **options) as generator:
            generator.cache.clear_prefixes()  # of the way before, whose generator is still held
            since = process_time()
            results = generator.generate(prompts, max_new_tokens=shape["new"], do_sample=False)
            seconds[name] = process_time() - since
            stats = generator.stats
        found = [result.tokens for result in results]
        expected = expected or found
        assert found == expected, f"{name} changed an answer"
        right = f"{stats.accepted} of {stats.drafted}" if stats.drafted else ""
        steps = {"steps": str(stats.steps), "draft steps": str(stats.draft_steps or "")}
        table({"job": job, "drafts": name, "right": right} | steps)
    record(job, {name: [spent] for name, spent in seconds.items()})
    none, *others = seconds
    for name in others:
        claim(job, f"{name} / {none}", seconds[name] / seconds[none])


@pytest.mark.usefixtures("one_thread")
def bench_cut_of_the_model(record, claim, table, loaded, shape):
    """The first layers of the model draft for all of them."""
    model, tokenizer = loaded(shape["layers"])
    cut, _ = loaded(shape["cut"])
    ways = {NONE: {}, LOOKUP: {"verify_width": 5}, "the first layers": {"draft": cut}}
    compare("the model's own layers draft", model, tokenizer, shape, ways, record, claim, table)


@pytest.mark.usefixtures("one_thread")
def bench_larger_model(record, claim, table, loaded, shape):
    """A model drafts for one that is several times as large."""
    model, tokenizer = loaded(shape["layers"])
    ways: dict[str, Any] = {NONE: {}, LOOKUP: {"verify_width": 5}}
    ways |= {f"small model, noise of {n}": {"draft": noisy(model, n)} for n in (0.03, 0.06, 0.1)}
    large = enlarged(model, shape["large"])
    compare("a small model drafts", large, tokenizer, shape, ways, record, claim, table)
