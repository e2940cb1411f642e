"""A forward that asks for what pages cannot do is refused, and the cache goes on."""

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import GradModeError, UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.release import CACHE
from tests.effort import slow
from tests.hf.tiny import (
    assert_close,
    assert_same_tokens,
    attention_of,
    build,
    dense,
    generate,
    named,
    padded,
    prompts,
    tiny,
)
from tests.hf.unsupported import WIDE

BOTH = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
STRANGE = {
    "4D mask": ({"attention_mask": BOTH}, r"attention_mask: .*\[2, 1, 6, 6\]"),
    "4D float mask": ({"attention_mask": BOTH.float().log()}, "attention_mask"),
    "attention weights": ({"output_attentions": True}, "output_attentions"),
    "attention sinks": ({"s_aux": torch.zeros(4)}, "s_aux"),
    "position bias": ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias"),
    "masked heads": ({"head_mask": torch.ones(4)}, "head_mask"),
    "unheard of": ({"temperature_tuning": 0.5}, "temperature_tuning"),
    "not causal": ({"is_causal": False}, "causal"),
    "packed texts": ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "cu_seq_lens_q"),
    "another window": ({"sliding_window": 3}, "sliding_window: .* uses 3"),
}


@pytest.mark.parametrize("case", STRANGE)
@torch.no_grad()
def test_what_paged_attention_does_not_do_is_refused_and_the_cache_goes_on(case):
    options, reason = STRANGE[case]
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch, max_new_tokens=3)
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        with pytest.raises(UnsupportedModelError, match=reason):
            model(**{**batch, **options}, **named(cache))
        assert cache.get_seq_length() == 0
        assert cache.stats().live == 0
        assert_same_tokens(generate(model, batch, cache, max_new_tokens=3), expected)
        cache.kv.check()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_weights_of_attention_are_refused_whether_or_not_attention_hears_of_them(family):
    model, batch = tiny(family), padded(prompts(9))
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        with pytest.raises(UnsupportedModelError, match=r"^output_attentions"):
            generate(model, batch, cache, output_attentions=True)
        assert_same_tokens(generate(model, batch, cache), generate(model, batch))


@torch.no_grad()
def test_hidden_states_are_not_refused():
    model = tiny()
    (text,) = prompts(6)
    expected = model(text[None], output_hidden_states=True, use_cache=False).hidden_states
    with PagedCache(model, max_tokens=256) as cache:
        actual = model(text[None], **named(cache), output_hidden_states=True).hidden_states
    for a, e in zip(actual, expected):
        assert_close(a, e)


@torch.no_grad()
def test_dropout_is_refused_in_training_mode_only():
    model = tiny(attention_dropout=0.1)
    ids = torch.tensor([[5, 6, 7]])
    with PagedCache(model, max_tokens=256) as cache:
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"dropout: .* model.eval\(\)"):
            model(ids, **named(cache))
        model.eval()
        model(ids, **named(cache))
        assert cache.get_seq_length() == 3


@pytest.mark.parametrize("name", ["pagedkv", "sdpa"])
def test_gradients_are_refused_and_the_cache_goes_on(name):
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, page_size=4, max_tokens=256) as cache:
        model.set_attn_implementation(name)
        with pytest.raises(GradModeError, match="no_grad"):
            model(**batch, **named(cache))
        assert cache.get_seq_length() == 0
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


@pytest.mark.parametrize("name", ["DiffLlama", "Doge", "JetMoe"])
@torch.no_grad()
def test_model_that_attends_in_its_own_way_is_stopped_by_name(name):
    own = {"kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    fields = {**WIDE, **own} if name == "JetMoe" else WIDE
    model = build(name, **fields)
    # Not all tell by their configuration; then the first forward does.
    with pytest.raises(UnsupportedModelError), PagedCache(model, max_tokens=256) as cache:
        model(**padded(prompts(9, 5)), **named(cache))
    assert attention_of(model) == "sdpa"


def test_model_that_changes_k_after_the_cache_is_refused_by_name_every_time():
    model, sizes = build("DiffLlama", **WIDE), {"page_size": 4, "max_tokens": 256}
    cache, generator = PagedCache(model, **sizes), BatchGenerator(model, **sizes)
    assert cache.kv is generator.cache
    for _ in range(2):
        for call in (
            lambda: generate(model, padded(prompts(9, 5)), cache),
            lambda: generator.generate([[5, 6, 7]], max_new_tokens=2),
        ):
            with pytest.raises(UnsupportedModelError, match="changes them after the cache"):
                call()
            cache.kv.check()
            assert cache.stats().sequences == len(cache.rows)
    cache.close()


class OwnAttention(torch.nn.Module):
    """Attends by itself to what the cache returns."""

    def __init__(self, plain):
        super().__init__()
        self.plain, self.layer_idx = plain, plain.layer_idx

    def forward(self, hidden_states, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.plain.head_dim)
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (getattr(self.plain, n)(hidden_states).view(shape).transpose(1, 2) for n in names)
        k, v = kwargs[CACHE].update(k, v, self.layer_idx)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True
        )
        return self.plain.o_proj(out.transpose(1, 2).flatten(2)), None


def test_a_cache_of_another_model_is_refused_with_that_reason():
    mine, other, batch = tiny(), tiny(), padded(prompts(9, 5))
    with PagedCache(mine, max_tokens=256) as cache:
        with pytest.raises(UnsupportedModelError, match="made for another model"):
            generate(other, batch, cache)
        assert_same_tokens(generate(mine, batch, cache), generate(mine, batch))


@pytest.mark.parametrize("layers", [1, 3])
def test_last_layer_that_attends_by_itself_is_not_silently_wrong(layers):
    model = tiny(num_hidden_layers=layers)
    model.model.layers[-1].self_attn = OwnAttention(model.model.layers[-1].self_attn)
    reason = f"layer {layers - 1} did not reach paged attention"
    with PagedCache(model, max_tokens=256) as cache:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=reason):
                generate(model, padded(prompts(9, 5)), cache, max_new_tokens=1)
        assert cache.get_seq_length() == 0
        with pytest.raises(
            UnsupportedModelError, match=rf"packed rows fail in layer {layers - 1} "
        ):
            BatchGenerator(model, cache=cache.kv)
        cache.kv.check()


@torch.no_grad()
def test_autocast_is_refused_in_words_and_the_cache_goes_on():
    model = tiny()
    batch = padded(prompts(6, 6))
    expected = generate(model, batch)
    with PagedCache(model, max_tokens=256) as cache:
        generator = BatchGenerator(model, cache=cache.kv)
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UnsupportedModelError, match=r"expected float32, .* autocast"):
                model(**batch, **named(cache))
            with pytest.raises(UnsupportedModelError, match=r"expected float32, .* autocast"):
                generator.generate([[5, 6, 7]], max_new_tokens=2)
        assert_same_tokens(generate(model, batch, cache), expected)
        cache.kv.check()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_made_under_autocast_are_of_its_dtype_and_give_the_logits_of_its_attention(dtype):
    model, ids = tiny(), prompts(9)[0][None]
    with torch.autocast("cpu", dtype):
        expected = model(ids).logits
        with PagedCache(model, max_tokens=64) as cache:
            assert cache.kv.config.dtype == str(dtype).removeprefix("torch.")
            got = [model(part, **named(cache)).logits for part in (ids[:, :6], ids[:, 6:])]
        (result,) = BatchGenerator(model, max_tokens=64).generate(
            ids.tolist(), max_new_tokens=1, do_sample=False, logprobs=True
        )
    spacing = torch.finfo(dtype).eps * expected.abs().max()
    assert (torch.cat(got, 1) - expected).abs().max() <= 4 * spacing
    fresh = expected[0, -1].float().log_softmax(-1)[result.tokens[0]]
    assert abs(result.logprobs[0] - float(fresh)) <= 4 * spacing
    with PagedCache(model, max_tokens=64) as cache:
        assert cache.kv.config.dtype == "float32"


def test_model_wrapped_by_a_compiler_is_refused_with_the_way_that_works():
    with pytest.raises(TypeError, match=r"got OptimizedModule; `model.compile\(\)`"):
        PagedCache(torch.compile(tiny(), backend="eager"))


@pytest.mark.parametrize("way", slow("model.compile", "model.forward"))
def test_model_compiled_in_place_gives_the_same_tokens(way):
    model = tiny(num_hidden_layers=1)
    batch = padded(prompts(9, 5))
    expected = generate(model, batch, max_new_tokens=4)
    if way == "model.compile":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with PagedCache(model, max_tokens=256) as cache:
        assert_same_tokens(generate(model, batch, cache, max_new_tokens=4), expected)
        generator = BatchGenerator(model, cache=cache.kv)
        (result,) = generator.generate([batch["input_ids"][0].tolist()], max_new_tokens=4)
        assert result.tokens == expected.sequences[0, 9:].tolist()
    torch.compiler.reset()


def test_hooks_go_with_the_last_cache():
    model = tiny()
    with PagedCache(model, max_tokens=64), PagedCache(model, max_tokens=64):
        for part in (model, model.model):
            assert (len(part._forward_pre_hooks), len(part._forward_hooks)) == (1, 2)
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._forward_hooks_always_called


@torch.no_grad()
def test_sinks_of_models_nobody_has_looked_at_are_refused(monkeypatch):
    monkeypatch.setattr("pagedkv.hf.strange.of_sinks", lambda kind: "others are served")
    model = tiny("gpt_oss")
    refused = pytest.raises(UnsupportedModelError, match=r"s_aux: .* not for gpt_oss")
    with PagedCache(model, max_tokens=64) as cache, refused:
        model(torch.tensor([[5, 6, 7]]), **named(cache))


@torch.no_grad()
def test_packed_positions_mean_with_a_cache_what_they_mean_to_transformers():
    # With a cache transformers takes a row for one text, whatever its positions.
    model = tiny()
    ids, positions = torch.cat(prompts(4, 3))[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    expected = model(ids, position_ids=positions, **named(dense(model))).logits
    with PagedCache(model, max_tokens=256) as cache:
        assert_close(model(ids, position_ids=positions, **named(cache)).logits, expected)
