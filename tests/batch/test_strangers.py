"""Code of others in a model: tried before a generator is made, refused where rows would differ."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from threading import get_ident

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from pagedkv import BatchGenerator
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.release import CACHE
from tests.batch.generating import assert_like_alone, generator, ragged
from tests.batch.letters import tokens
from tests.contents import Boom
from tests.hf.images import seeing_model
from tests.hf.own import own_model, truth
from tests.hf.tiny import attention_of, generate, named, padded, prompts, tiny

SIZES = {"max_tokens": 256, "page_size": 4}
GREEDY = {"max_new_tokens": 4, "do_sample": False}
FAR = 150  # no text of a trial is as long


def of_class(model, kind):
    """A model as its user's subclass."""
    model.__class__ = type("Own", (kind, type(model)), {})
    return model


# ------------------------------------------------------------------ a forward of the model's


class PassesOn:
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class NamesIds:
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


class NeedsAllLogits:
    def forward(self, *args, logits_to_keep=0, **kwargs):
        return super().forward(*args, **kwargs)


class Hides:
    """Hides the last tokens, which nobody may choose."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits[..., 90:] = -torch.inf
        return found


@pytest.mark.parametrize("kind", [PassesOn, NamesIds, NeedsAllLogits, Hides])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_forward_that_hands_on_what_it_gets_is_served(family, kind):
    assert_like_alone(of_class(tiny(family), kind), ragged(), {"step_tokens": 8})


def test_it_is_served_within_a_class_of_adapters_as_well():
    import peft

    model = of_class(tiny(), PassesOn)  # whose adapter changes nothing yet
    rows = prompts(9, 5)
    with generator(model) as batched:
        expected = tokens(batched.generate(rows, **GREEDY))
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with generator(peft.get_peft_model(model, config).eval()) as batched:
        assert tokens(batched.generate(rows, **GREEDY)) == expected


class Rolls:
    """Rolls its logits by something that it takes from a forward's arguments."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        found = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        found.logits = found.logits.roll(self.by(attention_mask, position_ids), -1)
        return found


class ByLongest(Rolls):
    def by(self, mask, places):
        return int(places.max())


class BeyondBorder(Rolls):
    def by(self, mask, places):
        return int(places.max() > FAR)


class ByWidth(Rolls):
    """By all columns of the text, or where there is no mask by those of the forward."""

    def by(self, mask, places):
        return (places if mask is None else mask).shape[-1]


class ByWidthBesideHidden(ByWidth):
    """A size of logits that makes any other one small."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits[..., 90:] = torch.finfo(found.logits.dtype).min
        return found


class Drops:
    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("position_ids", None)
        return super().forward(input_ids=input_ids, **kwargs)


class CountsItself:
    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        kwargs["position_ids"] = (torch.arange(input_ids.shape[1]) + past)[None]
        return super().forward(input_ids=input_ids, **kwargs)


class KeepsTheLast:
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits[:, -1:]
        return found


class Raises:
    def forward(self, *args, **kwargs):
        raise Boom


class Feeds:
    """Says how far logits are rolled at each step."""

    shift = 3

    def prepare_inputs_for_generation(
        self, input_ids, cache=None, past_key_values=None, attention_mask=None, **options
    ):
        given = named(past_key_values if cache is None else cache)
        given |= {"attention_mask": attention_mask, **options}
        made = super().prepare_inputs_for_generation(input_ids, **given)
        return {**made, "shift": self.shift}

    def forward(self, *args, shift=0, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits.roll(shift, -1)
        return found


FORWARDS = {
    ByLongest: "its logits is another by .* for packed rows",
    BeyondBorder: "its logits is another by .* for a row beside one far ahead",
    ByWidth: "its logits is another by .* for packed rows",
    ByWidthBesideHidden: "its logits is another by .* for packed rows",
    Drops: r"layer \d .*is another by .* for packed rows",
    CountsItself: r"layer \d .*is another by .* for packed rows",
    KeepsTheLast: "packed rows fail in ",
    Raises: r"it fails by itself \(Boom",
    Feeds: "its logits is another by .* for packed rows",
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_by_which_rows_differ_is_refused_before_a_generator_is_there(kind):
    model = of_class(tiny(), kind)
    before = attention_of(model)
    why = rf"it runs {__name__}\.Own, which is not transformers' own, .* {FORWARDS[kind]}"
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(UnsupportedModelError, match=why):
            BatchGenerator(model, **SIZES)
    assert attention_of(model) == before


def test_what_a_class_feeds_its_forwards_may_make_no_difference():
    model, rows = of_class(tiny(), Feeds), prompts(9, 5)
    model.shift = 0
    with BatchGenerator(model, **SIZES) as batched:
        given = tokens(batched.generate(rows, **GREEDY))
    assert given == [
        generate(model, padded([row]), max_new_tokens=4).sequences[0, len(row) :].tolist()
        for row in rows
    ]


@pytest.mark.parametrize(
    "own",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "num_return_sequences": 4},
        {"guidance_scale": 1.5},
        {"stop_strings": ["a"]},
        {"prompt_lookup_num_tokens": 3},
        {"max_time": 1e-9},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_models_own_defaults_of_generate_decide_nothing(own):
    model = of_class(tiny(), PassesOn)
    model.generation_config.update(**own)
    kept = model.generation_config
    BatchGenerator(model, **SIZES).close()
    assert model.generation_config is kept
    assert own.items() <= vars(kept).items()


def test_a_model_that_needs_no_positions_is_served():
    model, (prompt,) = own_model(), prompts(9)
    nn.init.zeros_(model.places.weight)
    with BatchGenerator(model, **SIZES) as batched:
        given = tokens(batched.generate([prompt, *prompts(5, 3)], **GREEDY))
    assert given[0] == truth(model, prompt, 4)


# ------------------------------------------------------------------ another way to generate


class Penalises:
    def generate(self, *args, **options):
        return super().generate(*args, repetition_penalty=1.8, **options)


class Samples:
    @torch.no_grad()
    def _sample(self, *args, **options):
        return super()._sample(*args, **options)


@pytest.mark.parametrize("kind", [Penalises, Samples])
def test_a_class_that_generates_in_its_own_way_is_refused(kind):
    model = of_class(tiny(), kind)
    with pytest.raises(UnsupportedModelError, match=r"its own \w+\(\) may choose tokens"):
        BatchGenerator(model, **SIZES)


@pytest.mark.parametrize("way", [lambda _: lambda *_, **__: torch.zeros(1, 1), partial])
def test_a_model_that_was_given_another_generate_is_refused(way):
    model = tiny()
    model.generate = way(model.generate)
    with pytest.raises(UnsupportedModelError, match=r"its own generate\(\) may choose"):
        BatchGenerator(model, **SIZES)


# ------------------------------------------------------------------ a module within it


class Around(nn.Module):
    """Adds something to what a module gives, and notes its calls in all places that there are."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.last, self.calls = mlp, None, 0
        self.register_buffer("tokens", torch.zeros(1))
        self.register_buffer("width", None)

    def forward(self, x):
        self.calls += 1
        self.tokens += x.shape[1]
        self.width = torch.tensor(x.shape[1])
        next(self.parameters()).calls = self.calls
        return self.mlp(x) + self.more(x)

    def more(self, x):
        return 0.25


class AddsMean(Around):
    def more(self, x):
        return x.mean(1, keepdim=True)


class AddsLast(Around):
    """Adds what it got last to what it gets for single tokens; each prompt begins anew."""

    def more(self, x):
        last, self.last = self.last, x[:, -1:]
        return last if x.shape[1] == 1 else 0


class HasRoom(Around):
    """Passes on three quarters of a forward's tokens, as experts of limited capacity do."""

    def more(self, x):
        scores = x[..., 0]
        best = scores.topk(-(-3 * x.shape[1] // 4), dim=1).indices
        return x * torch.zeros_like(scores).scatter(1, best, 1.0)[..., None]


class AddsToAll(Around):
    def more(self, x):
        return x.mean()


class Draws(Around):
    def more(self, x):
        return torch.rand_like(x)


class Overflows(Around):
    def more(self, x):
        return torch.inf


def planted(kind):
    model = tiny()
    layer = model.model.layers[1]
    layer.mlp = kind(layer.mlp)
    return model


def headed(kind):
    model = tiny()
    model.lm_head = kind(model.lm_head)
    return model


def adds_mean(mlp, x):
    return type(mlp).forward(mlp, x) + x.mean(1, keepdim=True)


def patched(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(adds_mean, mlp)
    return model


MODULES = {
    "AddsMean": (lambda: planted(AddsMean), "is another by .* for packed rows"),
    "AddsLast": (lambda: planted(AddsLast), "is another by .* for packed rows"),
    "HasRoom": (lambda: planted(HasRoom), "its last hidden state is another by .* for packed rows"),
    "Draws": (lambda: planted(Draws), "for the same text again: it draws at random"),
    "adds_mean": (lambda: patched(tiny()), "is another by .* for packed rows"),
    "AddsToAll": (lambda: headed(AddsToAll), "its logits is another by .* for packed rows"),
    "Overflows": (lambda: headed(Overflows), r"not all of its logits is finite in torch\.float32"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_by_which_rows_differ_is_refused_by_its_name(name):
    make, why = MODULES[name]
    where = rf"(model\.layers\.1\.mlp|lm_head) runs {__name__}\.{name}"
    with pytest.raises(UnsupportedModelError, match=f"{where}, which is not .*{why}"):
        BatchGenerator(make(), **SIZES)


def adds_means(right):
    @wraps(right)  # under the name of what it was
    def forward(mlp, x):
        return right(mlp, x) + x.mean(1, keepdim=True)

    return forward


def stands_still(right):
    def prepare(model, *args, **kwargs):
        made = right(model, *args, **kwargs)
        return {**made, "position_ids": torch.zeros_like(made["position_ids"])}

    return prepare


@pytest.mark.parametrize(
    ("kind", "name", "other", "called"),
    [
        (LlamaMLP, "forward", adds_means, r"LlamaMLP\.forward"),
        (
            *(LlamaForCausalLM, "prepare_inputs_for_generation", stands_still),
            r"stands_still\.<locals>\.prepare",
        ),
    ],
)
def test_a_method_that_a_class_of_transformers_was_given_is_code_of_others(
    kind, name, other, called, monkeypatch
):
    monkeypatch.setattr(kind, name, other(getattr(kind, name)))
    with pytest.raises(UnsupportedModelError, match=rf"runs .*\.{called}, which is not"):
        BatchGenerator(tiny(), **SIZES)


@pytest.mark.parametrize("kind", [Around, AddsMean, Draws])
def test_a_trial_leaves_no_trace_in_what_it_tries(kind):
    model = planted(kind)
    module, drawn = model.model.layers[1].mlp, torch.get_rng_state()
    with suppress(UnsupportedModelError):
        BatchGenerator(model, **SIZES).close()
    assert (module.calls, module.last, module.tokens.tolist(), module.width) == (0, None, [0], None)
    assert not vars(next(module.parameters()))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), drawn)


class In16Bits(nn.Module):
    """Computes in bfloat16 within a model of float32, as many packed weights do."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().bfloat16())

    def forward(self, x):
        return (x.bfloat16() @ self.weight.T).to(x.dtype)


@pytest.mark.parametrize("seed", range(3))
def test_roundings_of_16_bits_within_a_model_of_32_refuse_nothing(seed):
    torch.manual_seed(seed)
    model = tiny(num_hidden_layers=16, initializer_range=0.1)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in [*part.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(part, name, In16Bits(child))
    BatchGenerator(model, **SIZES).close()


def test_dropout_of_a_model_in_training_is_no_code_of_others():
    model = of_class(tiny("gpt2"), PassesOn).train()
    BatchGenerator(model, **SIZES).close()
    assert all(module.training for module in model.modules())


def test_a_graph_under_way_keeps_the_buffers_that_it_needs():
    class Scales(Around):
        def __init__(self, mlp):
            super().__init__(mlp)
            self.register_buffer("factor", torch.full((32,), 1.5))
            with torch.inference_mode():
                self.register_buffer("inferred", torch.ones(4))
            self.register_buffer("shared", torch.ones(1).expand(1 << 60))  # no copy has room

        def more(self, x):
            return x * self.factor

    model = planted(Scales)
    loss = model(input_ids=torch.arange(3, 9)[None]).logits.sum()
    BatchGenerator(model, **SIZES).close()
    loss.backward()


def test_what_a_module_keeps_may_be_any_function():
    model = planted(Around)
    model.model.layers[0].mlp.functions = np.tanh
    model.model.layers[1].mlp.functions = torch.Tensor.relu
    BatchGenerator(model, **SIZES).close()


def test_two_threads_may_make_generators_of_a_model_at_once():
    model, threads = planted(Around), set()
    model.register_forward_pre_hook(lambda *_: threads.add(get_ident()))
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(BatchGenerator, model, **SIZES) for _ in range(2)]
    for one in made:
        one.result().close()
    assert len(threads) == 1  # the other waits for what this one finds


def test_a_trial_compiles_nothing():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model = planted(Around)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    BatchGenerator(model, **SIZES).close()
    assert not compiled


def counted(model):
    """Counts the forwards of a model by the entries of a list."""
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


def test_the_same_code_is_tried_once_and_other_code_anew():
    model = of_class(planted(Around), Feeds)
    model.shift = 0
    forwards = counted(model)
    for _ in range(2):
        BatchGenerator(model, **SIZES).close()
    assert 0 < (once := len(forwards)) < 25
    BatchGenerator(model.bfloat16(), **SIZES).close()
    assert len(forwards) > once
    with pytest.raises(UnsupportedModelError, match="adds_mean"):
        BatchGenerator(patched(tiny()), **SIZES)
    model.float().model.layers[0].mlp.act_fn.forward = lambda x: x - x.mean(1, True)
    with pytest.raises(UnsupportedModelError, match="is another by"):
        BatchGenerator(model, **SIZES)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_model_of_transformers_own_code_is_not_tried(family):
    import peft

    model = tiny(family)
    forwards = counted(model)
    BatchGenerator(model, **SIZES).close()
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    BatchGenerator(peft.get_peft_model(model, config), **SIZES).close()
    assert not forwards


def test_code_of_others_in_a_tower_is_not_tried():
    """It sees images, and no packed rows."""
    model = seeing_model("llava")
    layer = model.model.vision_tower.encoder.layers[0]
    layer.mlp = AddsMean(layer.mlp)
    forwards = counted(model)
    BatchGenerator(model, **SIZES).close()
    assert not forwards
