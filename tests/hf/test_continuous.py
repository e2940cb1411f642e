"""`generate_batch`, transformers' own continuous batching, over our attention."""

import gc
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager, model_runner

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import attach, continuous, detach, register
from pagedkv.hf.continuous import CONTINUOUS, continuous_attention
from tests.effort import each_value, few, slow
from tests.hf.test_contract import promise
from tests.hf.tiny import (
    CLOSE_CALL,
    PAD,
    WINDOW,
    assert_close,
    attention_of,
    generate,
    prompts,
    tiny,
)

# From 5.23 on the door is shut, to all attention but transformers' own.
SHUT = "not supported for continuous batching" in inspect.getsource(
    ContinuousBatchingManager.switch_to_cb_friendly_attn
)
pytestmark = pytest.mark.skipif(SHUT, reason="generate_batch takes no attention of others")

NEW = 12
# nemotron does not hand the cache of continuous batching on to its attention. That cache keeps K
# and V of one shape, so Gemma 4 in two is transformers' to refuse.
FAMILIES = [
    "llama", "mistral", "qwen2_window", "gemma2", "gemma3", "phi3", "gpt_neox", "gpt2", "opt",
    "mixtral", "starcoder2", "cohere2", "smollm3", "exaone4", "gpt_oss", "granite_swa", "gemma3n",
    "gemma4_one_shape",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    register()
    # What a failing request is told is looked at in its result.
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.disabled = True
    yield
    logger.disabled = False


def texts() -> list[Tensor]:
    """Prompts shorter and longer than a step, some with a common beginning."""
    (common,) = prompts(2 * WINDOW)
    return [*prompts(37, 5, 21, 1), *(torch.cat([common, own]) for own in prompts(3, 9, 3))]


def batched(model: PreTrainedModel, rows: list[Tensor], **options: Any) -> list[Any]:
    """What `generate_batch` returns for these prompts, in their order."""
    config = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 16, "return_logprobs": True}
    results = model.generate_batch(
        [row.tolist() for row in rows],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=PAD
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{**config, "use_cuda_graph": False, **options}
        ),
    )
    assert len(results) == len(rows)
    return list(results.values())


def expected_of(model: PreTrainedModel, rows: list[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Each row's new tokens and their logits by `generate`, one row at a time."""
    results = []
    for row in rows:
        ids = row[None].to(model.device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        result = generate(model, batch, max_new_tokens=NEW)
        results.append((result.sequences[0, len(row) :].tolist(), torch.cat(result.logits).cpu()))
    return results


def difference(results: list[Any], expected: list[tuple[list[int], Tensor]]) -> float:
    """How far log-probabilities are apart, in units of what rounding allows.

    A row counts up to a step where its two best logits lie within `CLOSE_CALL` and it took the
    other one. Any other token differs by infinity.
    """
    worst = 0.0
    for result, (tokens, logits) in zip(results, expected, strict=True):
        assert result.error is None, result.error
        assert len(result.generated_tokens) == len(tokens)
        # As in `assert_close`, and once more for the sum in the denominator.
        allowed = 2 * 4 * (64 + 64) * torch.finfo(torch.float32).eps * float(logits.abs().max())
        wanted = logits.double().log_softmax(1)
        for step, token in enumerate(result.generated_tokens):
            if token != tokens[step]:
                best = logits[step].topk(2).values
                if best[0] - best[1] > CLOSE_CALL:
                    return float("inf")
                break
            apart = abs(result.logprobs[step] - float(wanted[step, token]))
            worst = max(worst, apart / allowed)
    return worst


# ------------------------------------------------------------------ the same as generate


@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gemma2", "gpt2", "mixtral", "gpt_oss"))
def test_generate_batch_is_generate_row_by_row(family):
    model = tiny(family)
    model.set_attn_implementation("eager")  # SDPA leaves gemma2's softcap out
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("pagedkv")
    assert difference(batched(model, rows), expected) <= 1
    assert attention_of(model) == "pagedkv"


@pytest.mark.parametrize("family", ["llama", *slow("gpt2")])
def test_blocks_shared_and_not_shared(family):
    model = tiny(family)
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("pagedkv")
    computed = {True: 0, False: 0}
    for sharing in computed:

        def count(_, args, kwargs, sharing=sharing):
            computed[sharing] += kwargs["input_ids"].shape[1]

        with model.register_forward_pre_hook(count, with_kwargs=True):
            results = batched(model, rows, allow_block_sharing=sharing)
        assert difference(results, expected) <= 1
    assert computed[True] < computed[False]


def test_softcap_is_served_which_sdpa_leaves_out():
    model = tiny("gemma2")
    model.set_attn_implementation("eager")
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("sdpa")
    assert difference(batched(model, rows), expected) > 10
    model.set_attn_implementation("pagedkv")
    assert difference(batched(model, rows), expected) <= 1


@pytest.mark.parametrize(("family", "tokens"), each_value(["llama", "gemma3"], [7, 64, 256]))
def test_prompts_cut_into_steps_of_any_size(family, tokens):
    model = tiny(family)
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation(CONTINUOUS)
    assert difference(batched(model, rows, max_batch_tokens=tokens), expected) <= 1
    assert attention_of(model) == CONTINUOUS


@pytest.mark.parametrize("family", [*slow("llama"), "gemma3"])
def test_requests_wait_where_the_cache_is_full(family):
    model = tiny(family)
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("pagedkv")
    assert difference(batched(model, rows, num_blocks=40), expected) <= 1


@pytest.mark.parametrize("family", [*slow("llama", "mistral"), "gemma3"])
def test_padded_steps(family, monkeypatch):
    # What transformers does to keep shapes for a graph or a compiler, without either.
    sizes = []

    class Padding(model_runner.ModelRunner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.pad_inputs = True

    def spy(module, query, *args, **kwargs):
        out, weights = continuous_attention(module, query, *args, **kwargs)
        tokens = int(kwargs["cu_seq_lens_q"][-1])
        sizes.append((query.shape[2], tokens))
        assert not out[:, tokens:].any()
        return out, weights

    monkeypatch.setattr(
        "transformers.generation.continuous_batching.continuous_api.ModelRunner",
        Padding,
    )
    monkeypatch.setitem(AttentionInterface._global_mapping, CONTINUOUS, spy)
    model = tiny(family)
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("pagedkv")
    options = {"q_padding_interval_size": 8, "kv_padding_interval_size": 32}
    assert difference(batched(model, rows, **options), expected) <= 1
    assert any(padded > tokens for padded, tokens in sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_batch_on_the_gpu(family):
    model = tiny(family).to("cuda")
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation(CONTINUOUS)
    assert difference(batched(model, rows), expected) <= 1


@pytest.mark.slow
def test_compiled_steps():
    model = tiny("gemma3")
    rows = texts()
    expected = expected_of(model, rows)
    model.set_attn_implementation("pagedkv")
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=False)
    assert difference(batched(model, rows, varlen_compile_config=compiled), expected) <= 1


def test_two_models_take_turns():
    models = [tiny("llama"), tiny("gemma3")]
    rows = texts()
    expected = [expected_of(model, rows) for model in models]
    for model, known in list(zip(models, expected)) * 2:
        model.set_attn_implementation("pagedkv")
        assert difference(batched(model, rows), known) <= 1


# ------------------------------------------------------------------ plans and names


@pytest.mark.parametrize(("family", "plans"), [("llama", 1), ("mistral", 1), ("gemma3", 2)])
def test_step_is_planned_at_most_once_for_all_layers_of_a_kind(family, plans, monkeypatch):
    model = tiny(family, num_hidden_layers=4)
    planned, steps, plan = [], [], continuous.cut_step
    monkeypatch.setattr(continuous, "cut_step", lambda *args: (planned.append(1), plan(*args))[1])
    model.register_forward_pre_hook(lambda *args: steps.append(1))
    model.set_attn_implementation("pagedkv")
    batched(model, texts())
    # Steps with full windows alone are all alike.
    assert len(steps) / 2 < len(planned) <= plans * len(steps)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_step_in_the_buffer_of_another_is_not_taken_for_it(device):
    buffer = torch.zeros(8, dtype=torch.int32, device=device)
    view = buffer[:3]
    before = continuous._mark(view)
    assert continuous._mark(view) == before
    buffer[1] = 5
    assert continuous._mark(view) != before


class OneLayer:
    """As much of a cache as one layer without a window needs."""

    def __init__(self, device: str) -> None:
        self.sliding_windows = {0: 1}
        self.layer_index_to_group_indices = {0: (0, 0)}
        k, v = torch.randn(2, 32, 2, 8, device=device)
        self.key_cache, self.value_cache = [k], [v]

    def update(self, key, value, layer, read_index, write_index):
        self.key_cache[0][write_index[0]] = key[0].transpose(0, 1)
        self.value_cache[0][write_index[0]] = value[0].transpose(0, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_step_of_the_same_lengths_over_other_slots(device):
    cache: Any = OneLayer(device)
    lengths = {
        "cu_seq_lens_q": torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        "cu_seq_lens_k": torch.tensor([0, 3, 6], dtype=torch.int32, device=device),
    }
    read = torch.zeros(6, dtype=torch.int64, device=device)
    for slots in ([3, 9, 5, 20, 21, 22], [30, 2, 4, 9, 3, 5]):
        read.copy_(torch.tensor(slots))
        indices = {"read_index": [read], "write_index": [read[[2, 5]]]}
        q = torch.randn(1, 4, 2, 8, device=device)
        k, v = torch.randn(2, 1, 2, 2, 8, device=device)
        module: Any = SimpleNamespace(layer_idx=0)
        out, _ = continuous_attention(module, q, k, v, None, cache=cache, **lengths, **indices)
        for row in range(2):
            keys, values = (
                x[0][read[3 * row :][:3]].transpose(0, 1)
                for x in (cache.key_cache, cache.value_cache)
            )
            wanted = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, row, None], keys[None], values[None], enable_gqa=True
            )
            assert_close(out[:, row], wanted[:, :, 0])


def test_nothing_is_kept_of_a_cache_that_is_gone():
    model = tiny()
    model.set_attn_implementation("pagedkv")
    batched(model, texts())
    gc.collect()
    assert not len(continuous._STATES)


def test_registering_twice_is_registering_once_and_asks_for_no_mask():
    register()
    register()
    assert AttentionInterface()[CONTINUOUS] is continuous_attention
    # transformers makes no mask for a name it knows none for.
    assert CONTINUOUS not in AttentionMaskInterface().valid_keys()


def test_generate_batch_under_sdpa_is_as_it_was():
    model = tiny()
    rows = texts()
    before = batched(model, rows)
    attach(model)
    during = batched(model, rows)
    detach(model)
    assert attention_of(model) == "sdpa"
    after = batched(model, rows)
    said = [[(r.generated_tokens, r.logprobs) for r in results] for results in (before, after)]
    assert said[0] == said[1]
    assert [r.generated_tokens for r in during] == [r.generated_tokens for r in before]


# ------------------------------------------------------------------ what is refused


class Call:
    """The arguments of one call for two requests, of 3 new tokens and 1 after 4."""

    def __init__(self, window: int = 1) -> None:
        self.module = SimpleNamespace(layer_idx=0)
        self.cache = SimpleNamespace(
            sliding_windows={0: window}, layer_index_to_group_indices={0: (0, 0)}
        )
        self.states = [torch.zeros(1, heads, 4, 8) for heads in (4, 2, 2)]

    def __call__(self, mask: Tensor | None = None, **kwargs: Any) -> None:
        continuous_attention(self.module, *self.states, mask, **{"cache": self.cache, **kwargs})


STRANGE = {
    "no cache": ({"cache": None}, "cache: .* use pagedkv instead"),
    "a mask": ({"mask": torch.zeros(1, 1, 4, 8)}, "attention_mask"),
    "dropout": ({"dropout": 0.1}, r"dropout: .* model.eval\(\)"),
    "attention sinks": ({"s_aux": torch.zeros(4)}, "s_aux"),
    "a block table": ({"block_table": torch.zeros(1, 2, 4)}, "block_table"),
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "unheard of": ({"temperature_tuning": 0.5}, "temperature_tuning"),
    "not causal": ({"is_causal": False}, "causal"),
    "another window": ({"sliding_window": 3}, "sliding_window: layer 0 uses 3, .* keeps all"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_would_be_silently_wrong_is_refused(case):
    options, reason = STRANGE[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        Call()(**options)


def test_layer_that_is_not_causal_is_refused():
    call = Call()
    call.module.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        call()


def test_window_other_than_that_of_the_cache_is_refused():
    with pytest.raises(UnsupportedModelError, match="uses 3, its cache keeps 8"):
        Call(window=8)(sliding_window=3)


@pytest.mark.gpu
def test_recording_a_graph_is_refused():
    call = Call()
    call.states = [x.cuda() for x in call.states]
    with (
        pytest.raises(UnsupportedModelError, match="use_cuda_graph=False"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call()


def test_forward_that_is_not_of_generate_batch_is_refused():
    model = tiny()
    model.set_attn_implementation(CONTINUOUS)
    with pytest.raises(UnsupportedModelError, match="generate_batch"):
        model(torch.tensor([[5, 6, 7]]), use_cache=False)


def test_request_that_is_refused_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr("pagedkv.hf.attention.SINKS", set())
    model = tiny("gpt_oss")
    model.set_attn_implementation("pagedkv")
    (result,) = batched(model, prompts(5))
    assert "s_aux" in result.error


# ------------------------------------------------------------------ what transformers promises


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_contract_of_continuous_batching(family, monkeypatch):
    calls: list[tuple[Any, Tensor, dict[str, Any]]] = []
    views: dict[int, Any] = {}

    def spy(module, query, key, value, mask, **kwargs):
        calls.append((module, query, kwargs))
        promise(mask is None, f"leaves {CONTINUOUS} without a mask in continuous batching")
        lost = {"cache", "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k"} - {*kwargs}
        promise(not lost, f"passes {sorted(lost)} to paged attention")
        # Kept alive here, so that a new object cannot have the id of an old one.
        views.setdefault(id(kwargs["cu_seq_lens_q"]), kwargs["cu_seq_lens_q"])
        return continuous_attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, CONTINUOUS, spy)
    model, steps = tiny(family), []
    model.register_forward_pre_hook(lambda *args: steps.append(1))
    model.set_attn_implementation("pagedkv")
    results = batched(model, texts())
    promise(calls, f"puts `paged|` before the name that a model was given, for {CONTINUOUS}")
    promise(results[0].error is None, f"calls paged attention as ours expects: {results[0].error}")
    promise(len(views) == len(steps), "passes cu_seq_lens_q as one new object in each step")
    for module, query, kwargs in calls:
        cache, layer = kwargs["cache"], module.layer_idx
        windows = getattr(cache, "sliding_windows", {})
        wanted = {1, WINDOW} if family == "gemma3" else {WINDOW if family == "mistral" else 1}
        promise({*windows.values()} == wanted, "keeps each layer's window (1: none) in the cache")
        promise(query.shape[0] == 1, "packs the requests of a step into one row")
        lengths = kwargs["cu_seq_lens_k"]
        if family == "gemma3":
            kinds = {"full_attention", "sliding_attention"}
            promise(set(lengths) == kinds, "passes cu_seq_lens_k by kind of layer")
        else:
            promise(isinstance(lengths, Tensor), "passes one cu_seq_lens_k where layers are alike")
        group, index = cache.layer_index_to_group_indices[layer]
        slots = cache.key_cache[index]
        shape = (cache.num_key_value_heads, cache.head_dim)
        promise(slots.shape[1:] == shape, "keeps K as [slots, heads, dim], one tensor per layer")
        promise(slots.is_contiguous(), "keeps K in one piece")
        promise(len(kwargs["read_index"]) == cache.num_groups, "passes a read_index per group")
        if windows[layer] == 1 and kwargs["read_index"][group].numel():
            read = kwargs["read_index"][group]
            inside = int(read.max()) < len(slots) and read.dtype == torch.int64
            promise(inside, "passes slots of the cache in read_index")


def test_contract_of_the_cache_without_slots_to_read(monkeypatch):
    # We write through `update` and read for ourselves.
    seen: list[Any] = []

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((kwargs["cache"], module.layer_idx, kwargs["write_index"]))
        return continuous_attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, CONTINUOUS, spy)
    model = tiny()
    model.set_attn_implementation("pagedkv")
    batched(model, prompts(5))
    cache, layer, write = seen[-1]
    tokens = write[0].numel()
    k, v = torch.randn(2, 1, cache.num_key_value_heads, tokens, cache.head_dim)
    cache.update(k, v, layer, [write[0][:0]], write)
    group, index = cache.layer_index_to_group_indices[layer]
    for states, slots in ((k, cache.key_cache[index]), (v, cache.value_cache[index])):
        written = torch.equal(slots[write[group]], states[0].transpose(0, 1))
        promise(written, "writes K and V where write_index says, without slots to read")
