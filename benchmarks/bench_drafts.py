"""What drafts save and cost in `BatchGenerator`: by lookup, and by a smaller model.

Two models draft for two others, as no trained pair comes with a package:

- For SmolLM2-135M its first layers, with its norm and its head: cheap, and seldom right.
- For a model several times as large the same small one with noise on its weights. The large one is
  SmolLM2-135M with layers behind its own whose outputs are zero: they cost what layers cost, and
  its answers are SmolLM2's. So the share of right drafts is chosen, and the costs are measured.

Processor seconds of one thread, prompts included; every way has to give the same tokens.
"""

from copy import deepcopy
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch

from benchmarks.smollm2 import load
from pagedkv import BatchGenerator

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 4, "cut": 2, "large": 8, "rows": 2, "new": 9},
    "full": {"layers": 30, "cut": 6, "large": 100, "rows": 16, "new": 33},
}
TITLE = "Drafts: processor seconds, one thread"


def noisy(model: Any, scale: float) -> Any:
    """A copy whose matrices have noise of this share of their deviation."""
    draft, noise = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight += torch.randn(weight.shape, generator=noise) * scale * weight.std()
    return draft


def enlarged(model: Any, layers: int) -> Any:
    """A model of so many layers that says what the small one says."""
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


def compare(table: Any, model: Any, tokenizer: Any, rows: int, new: int, ways: Any) -> None:
    """Answers the same prompts in each way, and puts what it took into the table."""
    questions = (ROOT / "docs/examples/questions.txt").read_text().splitlines()[:rows]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    expected, base = None, 0.0
    for name, options in ways.items():
        with BatchGenerator(model, tokenizer, max_tokens=4096, **options) as generator:
            since = process_time()
            results = generator.generate(prompts, max_new_tokens=new, do_sample=False)
            seconds = process_time() - since
            stats = generator.stats
        found = [result.tokens for result in results]
        expected, base = expected or found, base or seconds
        assert found == expected, f"{name} changed an answer"
        table(
            TITLE,
            {
                "rows": str(rows),
                "drafts": name,
                "s": f"{seconds:.2f}",
                "of none": f"{seconds / base:.2f}x",
                "steps": str(stats.steps),
                "right": f"{stats.accepted} of {stats.drafted}" if stats.drafted else "",
                "draft steps": str(stats.draft_steps or ""),
            },
        )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 16])
def bench_a_cut_of_the_model(benchmark, table, model, smollm2_path, shape, rows):
    _, tokenizer = load(smollm2_path, torch.float32, num_hidden_layers=1)
    cut, _ = load(smollm2_path, torch.float32, num_hidden_layers=shape["cut"])
    ways = {"none": {}, "lookup": {"verify_width": 5}, f"{shape['cut']} layers": {"draft": cut}}
    rows = min(rows, shape["rows"])
    job = (table, model, tokenizer, rows, shape["new"], ways)
    benchmark.pedantic(compare, job, rounds=1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 4, 16])
def bench_a_model_several_times_as_large(benchmark, table, model, smollm2_path, shape, rows):
    _, tokenizer = load(smollm2_path, torch.float32, num_hidden_layers=1)
    large, rows = enlarged(model, shape["large"]), min(rows, shape["rows"])
    ways: dict[str, Any] = {"none": {}, "lookup": {"verify_width": 5}}
    ways |= {f"noise of {n}": {"draft": noisy(model, n)} for n in (0.03, 0.06, 0.1)}
    job = (table, large, tokenizer, rows, shape["new"], ways)
    benchmark.pedantic(compare, job, rounds=1)
