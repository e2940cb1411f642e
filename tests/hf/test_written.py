"""Models that write attention out, with a bias by distance or without: by every door, or refused.

What these alone find: a step of such an attention that is left out, or taken for another one.
"""

import math

import pytest
import torch
from torch.nn import functional

from pagedkv import BatchGenerator, PagedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.written import slopes_of
from tests.effort import few
from tests.hf.doors import through_batch
from tests.hf.tiny import assert_close, assert_same_tokens, build, generate, named, padded, prompts

SIZES = {"page_size": 4, "max_tokens": 512}
WIDE = {"initializer_range": 0.3, "vocab_size": 180, "use_cache": True}
FALCON = {**WIDE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# Six heads have slopes that are no powers of two.
KINDS = {
    "bloom": ("Bloom", {**WIDE, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "mpt": ("Mpt", {**WIDE, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}),
    "falcon, ALiBi": ("Falcon", {**FALCON, "alibi": True, "multi_query": False, "bias": True}),
    "falcon, one KV head": ("Falcon", {**FALCON, "alibi": False}),
    "falcon, all heads": (
        "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neo": (
        "GPTNeo", {**WIDE, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "window_size": 5}
        | {"attention_types": [[["local", "global"], 1], [["local"], 1]]}
        | {"max_position_embeddings": 64}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {**WIDE, "hidden_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 6, "intermediate_multiple_size": 2}),
    "xglm": ("XGLM", {**WIDE, "d_model": 48, "ffn_dim": 48, "num_layers": 2, "attention_heads": 6}
             | {"init_std": 0.3, "max_position_embeddings": 64}),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("without_gradients")
kinds = pytest.mark.parametrize("kind", few(KINDS, "bloom", "falcon, ALiBi", "gpt_neo"))


def made(kind):
    torch.manual_seed(0)
    name, fields = KINDS[kind]
    return build(name, **fields)


def same(model, batch, cache, **options):
    found = generate(model, batch, cache, **options)
    cache.kv.check()
    with_own = {name: x for name, x in options.items() if name != "prefill_chunk_size"}
    assert_same_tokens(found, generate_alone(model, batch, **with_own))
    return found.sequences


def generate_alone(model, batch, **options):
    """By transformers' own cache, in a copy: calls without pages may be refused while attached."""
    from copy import deepcopy

    return generate(deepcopy(model), batch, **options)


@kinds
@pytest.mark.parametrize("how", ["padded", "chunks", "beams", "lookup"])
def test_generate_gives_the_same_tokens(kind, how):
    model, rows = made(kind), prompts(13, 5, 9)
    options = {"padded": {}, "chunks": {"prefill_chunk_size": 4}, "beams": {"num_beams": 3}}
    options["lookup"] = {"prompt_lookup_num_tokens": 2}
    batch = padded(rows[:1] if how == "lookup" else rows)
    with PagedCache(model, **SIZES) as cache:
        same(model, batch, cache, **options[how])


@kinds
def test_a_later_turn_and_forks_of_a_prefix_go_on(kind):
    model, (text, more, other) = made(kind), prompts(11, 4, 7)
    with PagedCache(model, **SIZES) as cache:
        whole = same(model, padded([text]), cache)[0]
        same(model, padded([torch.cat([whole, more])]), cache)
    rows = [torch.cat([text, more]), torch.cat([text, other]), torch.cat([text, more[:1]])]
    with PagedCache.prefill(model, text, **SIZES) as shared, shared.fork(3) as cache:
        same(model, padded(rows), cache)


@kinds
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_moves_no_distance(kind, side):
    model, rows = made(kind), prompts(13, 1, 6)
    alone = [model(row[None], use_cache=False).logits[0] for row in rows]
    with PagedCache(model, **SIZES) as cache:
        batch = padded(rows, side)
        if kind in ("xglm", "gpt_neo"):  # which counts columns where it is not told
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**batch, **named(cache), use_cache=True).logits
    for own, found, mask in zip(alone, logits, batch["attention_mask"].bool()):
        assert_close(found[mask], own)


@kinds
def test_packed_rows_give_the_same_in_steps_of_any_width(kind):
    model, rows = made(kind), prompts(14, 9, 12)
    through_batch(model, rows)
    with BatchGenerator(model, step_tokens=7, **SIZES) as batched:
        given = [row.tolist() for row in rows]
        found = [r.tokens for r in batched.generate(given, max_new_tokens=8, do_sample=False)]
        (score,) = batched.score([given[0]], [[given[1]]])
    for row, tokens in zip(rows, found):
        own = generate(model, padded([row]), max_new_tokens=8).sequences[0, len(row) :]
        assert tokens == own.tolist()
    text = torch.cat(rows[:2])[None]
    logits = model(text, use_cache=False).logits[0].log_softmax(-1)[len(rows[0]) - 1 : -1]
    wanted = logits.gather(1, rows[1][:, None])[:, 0]
    assert_close(torch.tensor(score[0].logprobs), wanted)


def test_a_call_without_pages_that_would_add_a_bias_twice_is_refused_until_the_cache_is_closed():
    model, (row,) = made("falcon, ALiBi"), prompts(9)
    before = model(row[None], use_cache=False).logits
    with PagedCache(model, **SIZES), pytest.raises(UnsupportedModelError, match="twice"):
        model(row[None], use_cache=False)
    assert torch.equal(model(row[None], use_cache=False).logits, before)


# ------------------------------------------------------------------ what is no such attention


def attend(change):
    """The forward of a module of Bloom, with one step of attention changed."""

    def forward(self, x, residual, alibi, attention_mask, layer_past=None, **_):
        q, k, v = self._reshape(self.query_key_value(x))
        k, v = layer_past.update(k, v, self.layer_idx)
        steps = {
            "keys": lambda k: k.transpose(-1, -2),
            "scores": lambda scores: scores * self.inv_norm_factor,
            "bias": lambda scores: scores + alibi.view(1, self.num_heads, 1, -1),
            "own": lambda scores: scores,
            "mask": lambda scores: scores + attention_mask,
            "weights": lambda scores: functional.softmax(scores, dim=-1),
            "values": lambda v: v,
        } | change
        scores = steps["bias"](steps["scores"](q @ steps["keys"](k)))
        out = steps["weights"](steps["mask"](steps["own"](scores))) @ steps["values"](v)
        return self.dense(out.transpose(1, 2).flatten(2)) + residual, None

    return forward


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()


def hidden(scores, seen, value=-math.inf):
    return torch.where(seen, scores, torch.tensor(value))


RIGHT = "nothing", "its own mask is causal"
STRANGE = {
    "nothing": {},
    "keys are changed": {"keys": lambda k: (k + 1).transpose(-1, -2)},
    "keys are not turned": {"keys": lambda k: k},
    "keys lose some": {"keys": lambda k: k[..., 1:, :].transpose(-1, -2)},
    "scores are squared": {"scores": lambda scores: scores**2},
    "scores are multiplied by head": {"scores": lambda scores: scores * torch.ones(6, 1, 1)},
    "a bias of any numbers": {"bias": lambda scores: scores + torch.randn(1, 6, 1, 9)},
    "a bias by square": {"bias": lambda s: s + torch.arange(9.0).square().view(1, 1, 1, 9)},
    "a bias by query": {"bias": lambda scores: scores + torch.eye(9).expand(1, 6, 9, 9)},
    "two biases": {"bias": lambda s: s + torch.zeros(1, 6, 1, 9) + torch.zeros(1, 6, 1, 9)},
    "its own mask is causal": {"own": lambda s: hidden(s, CAUSAL)},
    "its own mask is a window": {"own": lambda s: hidden(s, CAUSAL.triu(-4))},
    "its own mask sees ahead": {"own": lambda s: hidden(s, CAUSAL.roll(1, 1))},
    "its own mask is shorter": {"own": lambda s: hidden(s, CAUSAL[1:])},
    "its own mask is added": {"own": lambda s: hidden(s, CAUSAL.float())},
    "its own mask hides little": {"own": lambda s: hidden(s, CAUSAL, -9.0)},
    "its own mask hides what is seen": {"own": lambda s: torch.where(CAUSAL, -math.inf, s)},
    "no mask": {"mask": lambda scores: scores},
    "another mask": {"mask": lambda s: s.masked_fill(torch.zeros(9, 9).bool(), -math.inf)},
    "no softmax": {"weights": lambda scores: scores},
    "a softmax of queries": {"weights": lambda scores: scores.softmax(-2)},
    "weights are scaled": {"weights": lambda s: functional.softmax(s, dim=-1) * 2},
    "dropout": {"weights": lambda s: functional.dropout(functional.softmax(s, dim=-1), 0.1, True)},
    "values are changed": {"values": torch.tanh},
}  # fmt: skip


@pytest.mark.parametrize("how", STRANGE)
def test_attention_of_another_kind_is_refused(how, monkeypatch):
    model, (row,) = made("bloom"), prompts(9)
    own = model(row[None], use_cache=False).logits
    module = type(model.transformer.h[0].self_attention)
    monkeypatch.setattr(module, "forward", attend(STRANGE[how]))
    with PagedCache(model, **SIZES) as cache:
        if how in RIGHT:
            assert_close(model(row[None], **named(cache)).logits, own)
            return
        with pytest.raises(UnsupportedModelError):
            model(row[None], **named(cache))
        assert not any(cache.kv.length(seq) for seq in cache.rows)


def test_weights_of_attention_are_refused():
    model, (row,) = made("bloom"), prompts(9)
    with PagedCache(model, **SIZES) as cache:
        with pytest.raises(UnsupportedModelError, match=r"^output_attentions"):
            generate(model, padded([row]), cache, output_attentions=True)
        same(model, padded([row]), cache)


def test_slopes_are_read_off_a_bias_of_any_padding_and_no_other_bias_has_any():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    slopes, place = torch.tensor([0.37, 0.02, 0.5]), (padding.cumsum(1) - 1) * padding
    for dtype in (torch.float32, torch.bfloat16):
        bias = (slopes[None, :, None, None] * place[:, None, None]).to(dtype)
        found = slopes_of(bias, 3, padding)
        torch.testing.assert_close(found, slopes.to(dtype).float(), rtol=0, atol=0)
        column = torch.arange(-5, 1) * slopes[:, None, None]
        found = slopes_of(column.to(dtype), 3, None)
        torch.testing.assert_close(found, slopes.to(dtype).float(), rtol=1e-6, atol=0)
        bias[0, 1, 0, 3] += 1
        assert slopes_of(bias, 3, padding) is None
    assert slopes_of(-column, 3, None) is None, "one that falls"
    assert slopes_of(torch.zeros(3, 1, 1), 3, None).tolist() == [0, 0, 0], "a text of one token"
